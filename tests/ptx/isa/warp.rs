//! Exchange between the lanes of a warp. Lanes that the member mask names must all come.

use super::{Decoded, Execute, Raw};
use crate::fault::Fault;
use crate::machine::{Context, Elect, Flow, LANES};
use crate::operand::{Operand, Source};

pub fn decode(raw: &Raw<'_>) -> Decoded {
    Ok(Some(match raw.parts[..] {
        ["shfl", "sync", mode @ ("idx" | "bfly" | "up" | "down"), "b32"] => shuffle(raw, mode)?,
        ["vote", "sync", mode @ ("all" | "any" | "uni"), "pred"] => {
            let (to, from) = (raw.operand(0)?.predicate_target()?, raw.operand(1)?.predicate()?);
            let mode = mode.to_owned();
            meeting(raw.source(2, 4)?, move |c, members| {
                let votes = from.mask(c) & members;
                let result = match mode.as_str() {
                    "all" => votes == members,
                    "any" => votes != 0,
                    _ => votes == members || votes == 0,
                };
                c.set_predicate(to, if result { !0 } else { 0 });
                Ok(())
            })
        }
        ["vote", "sync", "ballot", "b32"] => {
            let (to, from) = (raw.target(4)?, raw.operand(1)?.predicate()?);
            meeting(raw.source(2, 4)?, move |c, members| {
                let votes = from.mask(c) & members;
                c.set32(to, [votes; LANES]);
                Ok(())
            })
        }
        ["redux", "sync", operation, kind @ ("u32" | "s32" | "b32")] => {
            let (to, from) = (raw.target(4)?, raw.source(1, 4)?);
            let f: fn(u32, u32) -> u32 = match (operation, kind) {
                ("add", "u32" | "s32") => u32::wrapping_add,
                ("max", "u32") => u32::max,
                ("min", "u32") => u32::min,
                ("max", "s32") => |a, b| (a as i32).max(b as i32) as u32,
                ("min", "s32") => |a, b| (a as i32).min(b as i32) as u32,
                ("and", "b32") => |a, b| a & b,
                ("or", "b32") => |a, b| a | b,
                ("xor", "b32") => |a, b| a ^ b,
                _ => return Ok(None),
            };
            meeting(raw.source(2, 4)?, move |c, _| {
                let values = from.u32s(c);
                let joined = c.active().map(|lane| values[lane]).reduce(f).unwrap_or(0);
                c.set32(to, [joined; LANES]);
                Ok(())
            })
        }
        ["elect", "sync"] => {
            let Operand::Beside(lane, chosen) = raw.operand(0)? else { return Err("no pair of results".into()) };
            let (lane, chosen) = (lane.any_target()?, chosen.predicate_target()?);
            meeting(raw.source(1, 4)?, move |c, members| {
                let count = members.count_ones() as usize;
                let which = match c.block.elect {
                    Elect::First => 0,
                    Elect::Last => count - 1,
                    Elect::Random => c.block.random.below(count),
                };
                let leader = c.active().nth(which).unwrap_or(0);
                c.set32(lane, [leader as u32; LANES]);
                c.set_predicate(chosen, 1 << leader);
                Ok(())
            })
        }
        ["activemask", "b32"] => {
            let to = raw.target(4)?;
            Box::new(move |c| {
                let mask = c.mask;
                c.set32(to, [mask; LANES]);
                Ok(Flow::Next)
            })
        }
        ["bar", "warp", "sync"] => meeting(raw.source(0, 4)?, |c, members| {
            if members == !0 {
                c.block.order.lanes_met(c.number);
            }
            Ok(())
        }),
        _ => return Ok(None),
    }))
}

/// Executes once all members are here; the mask is what `f` gets.
fn meeting(members: Source, f: impl Fn(&mut Context<'_>, u32) -> Result<(), Fault> + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let members = members.uniform(c, "the member mask")?;
        if c.mask & !members != 0 {
            let lane = (c.mask & !members).trailing_zeros() as usize;
            return Err(Fault::at(lane, format!("the member mask {members:#010x} does not name this lane")));
        }
        if !c.converged(members) {
            return Ok(Flow::Diverged);
        }
        if c.mask != members {
            return Err(Fault::new(format!("lanes {:#010x} of the member mask have ended", members & !c.mask)));
        }
        f(c, members)?;
        Ok(Flow::Next)
    })
}

fn shuffle(raw: &Raw<'_>, mode: &str) -> Result<Execute, String> {
    raw.expect(5)?;
    let (value, inside) = match raw.operand(0)? {
        Operand::Beside(value, inside) => (value.target(4)?, inside.predicate_target()?),
        value => (value.target(4)?, None),
    };
    let (a, b, clamp) = (raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?);
    let mode = mode.to_owned();
    Ok(meeting(raw.source(4, 4)?, move |c, members| {
        let (a, b, clamp) = (a.u32s(c), b.u32s(c), clamp.u32s(c));
        let mut values = [0; LANES];
        let mut valid = 0;
        for lane in c.active() {
            let (by, own) = (b[lane] as i32 & 31, lane as i32);
            let (limit, segment) = (clamp[lane] as i32 & 31, (clamp[lane] >> 8) as i32 & 31);
            let last = own & segment | limit & !segment;
            let (from, ok) = match mode.as_str() {
                "up" => (own - by, own - by >= last),
                "down" => (own + by, own + by <= last),
                "bfly" => (own ^ by, own ^ by <= last),
                _ => {
                    let from = own & segment | by & !segment;
                    (from, from <= last)
                }
            };
            let from = if ok { from as usize } else { lane };
            if members >> from & 1 == 0 {
                return Err(Fault::at(lane, format!("the value of lane {from}, which takes no part")));
            }
            values[lane] = a[from];
            valid |= u32::from(ok) << lane;
        }
        c.set32(value, values);
        c.set_predicate(inside, valid);
        Ok(())
    }))
}
