//! Asynchronous copies from global to shared memory.

use super::{Decoded, Raw};
use crate::copies::{Copy, Pending, Then};
use crate::fault::Fault;
use crate::machine::{Context, Flow};
use crate::operand::Source;
use crate::order::AGENTS;

pub fn decode(raw: &Raw<'_>) -> Decoded {
    Ok(Some(match raw.parts[..] {
        ["cp", "async", "bulk", "shared::cta" | "shared::cluster", "global", "mbarrier::complete_tx::bytes"] => {
            raw.expect(4)?;
            let (to, from) = (raw.operand(0)?.address()?, raw.operand(1)?.address()?);
            let (size, mbarrier) = (raw.source(2, 4)?, raw.operand(3)?.address()?);
            Box::new(move |c| {
                let (to, from, size, mbarrier) = (to.of(c), from.of(c), size.u32s(c), mbarrier.of(c));
                for lane in c.active() {
                    let of_lane = |fault: Fault| fault.of_lane(lane);
                    if size[lane] == 0 || size[lane] % 16 != 0 {
                        return Err(Fault::at(lane, format!("a bulk copy of {} bytes", size[lane])));
                    }
                    let copy =
                        begin(c, lane, to[lane], from[lane], size[lane] as usize, size[lane] as usize, 16, true)?;
                    let index =
                        c.block.mbarriers.find_fenced(&c.block.order, c.number, mbarrier[lane]).map_err(of_lane)?;
                    c.block.pending.push(Pending { copies: vec![copy], mbarrier: index, then: Then::CompleteBytes });
                }
                Ok(Flow::Next)
            })
        }
        ["cp", "async", cache @ ("ca" | "cg"), "shared" | "shared::cta", "global"] => {
            let (to, from) = (raw.operand(0)?.address()?, raw.operand(1)?.address()?);
            let size = raw.operand(2)?.value()? as usize;
            if !matches!((cache, size), ("ca", 4 | 8 | 16) | ("cg", 16)) {
                return Err(format!("cp.async.{cache} of {size} bytes"));
            }
            let read = if raw.operands.len() > 3 { raw.source(3, 4)? } else { Source::Value(size as u64) };
            Box::new(move |c| {
                let (to, from, read) = (to.of(c), from.of(c), read.u32s(c));
                for lane in c.active() {
                    if read[lane] as usize > size {
                        return Err(Fault::at(lane, format!("{} bytes read for a copy of {size}", read[lane])));
                    }
                    let copy = begin(c, lane, to[lane], from[lane], size, read[lane] as usize, size, false)?;
                    c.block.uncommitted[c.number].push(copy);
                }
                Ok(Flow::Next)
            })
        }
        ["cp", "async", "mbarrier", "arrive", "noinc", "shared" | "shared::cta", "b64"] => {
            raw.expect(1)?;
            let address = raw.operand(0)?.address()?;
            Box::new(move |c| {
                let addresses = address.of(c);
                let mut known = [0; AGENTS];
                c.block.order.release(c.number, &mut known);
                for lane in c.active() {
                    let index = c
                        .block
                        .mbarriers
                        .find(&c.block.order, c.number, addresses[lane])
                        .map_err(|fault| fault.of_lane(lane))?;
                    let of_lane = |copy: &mut Copy| copy.thread.lane == lane;
                    let mut copies: Vec<Copy> = c.block.uncommitted[c.number].extract_if(.., of_lane).collect();
                    for group in &mut c.block.committed[c.number] {
                        copies.extend(group.extract_if(.., of_lane));
                    }
                    c.block.pending.push(Pending { copies, mbarrier: index, then: Then::Arrive(Box::new(known)) });
                }
                Ok(Flow::Next)
            })
        }
        ["cp", "async", "commit_group"] => Box::new(|c| {
            if !c.converged(!0) {
                return Ok(Flow::Diverged);
            }
            let group = std::mem::take(&mut c.block.uncommitted[c.number]);
            c.block.committed[c.number].push(group);
            Ok(Flow::Next)
        }),
        ["cp", "async", "wait_group"] => {
            let left = raw.operand(0)?.value()? as usize;
            Box::new(move |c| land_groups(c, left))
        }
        ["cp", "async", "wait_all"] => Box::new(|c| {
            let group = std::mem::take(&mut c.block.uncommitted[c.number]);
            c.block.committed[c.number].push(group);
            land_groups(c, 0)
        }),
        _ => return Ok(None),
    }))
}

/// Checks both ends of a copy and marks its bytes as under way.
#[expect(clippy::too_many_arguments, reason = "the operands of the instruction")]
fn begin(
    c: &mut Context<'_>,
    lane: usize,
    to: u64,
    from: u64,
    size: usize,
    read: usize,
    align: usize,
    bulk: bool,
) -> Result<Copy, Fault> {
    let (by, thread) = (c.by(lane), c.thread(lane));
    if read > 0 {
        c.global.read(&thread, from, read, align, true)?;
    }
    c.block.shared.begin_copy(&c.block.order, by, to, size, align, bulk)?;
    Ok(Copy { to, from, size, read, line: c.block.line, thread })
}

/// Lands the oldest groups until `left` are left; only now are their bytes visible.
fn land_groups(c: &mut Context<'_>, left: usize) -> Result<Flow, Fault> {
    if !c.converged(!0) {
        return Ok(Flow::Diverged);
    }
    while c.block.committed[c.number].len() > left {
        for copy in c.block.committed[c.number].remove(0) {
            c.land_copies(&[copy], copy.thread.lane)?;
        }
    }
    Ok(Flow::Next)
}
