//! Barriers, mbarriers, fences, and the dependency between grids.

use super::{Decoded, Execute, Raw};
use crate::barrier::Reduced;
use crate::fault::Fault;
use crate::machine::{Context, Flow, LANES, Status};
use crate::operand::{Predicate, Source};

pub fn decode(raw: &Raw<'_>) -> Decoded {
    Ok(Some(match raw.parts[..] {
        ["bar", "sync"]
        | ["barrier", "sync", "aligned"]
        | ["bar" | "barrier", "cta", "sync"]
        | ["barrier", "cta", "sync", "aligned"] => wait(raw, 1, None, |_, _| {})?,
        ["bar", "red", operation, "pred"] | ["barrier", "cta", "red", operation, "aligned", "pred"] => {
            let to = raw.operand(0)?.predicate_target()?;
            let any = match operation {
                "or" => true,
                "and" => false,
                _ => return Ok(None),
            };
            let flag = raw.operand(raw.operands.len() - 1)?.predicate()?;
            wait(raw, 3, Some(flag), move |c, reduced| {
                c.set_predicate(to, if if any { reduced.any } else { reduced.all } { !0 } else { 0 });
            })?
        }
        ["bar", "red", "popc", "u32"] | ["barrier", "cta", "red", "popc", "aligned", "u32"] => {
            let to = raw.target(4)?;
            let flag = raw.operand(raw.operands.len() - 1)?.predicate()?;
            wait(raw, 3, Some(flag), move |c, reduced| c.set32(to, [reduced.count; LANES]))?
        }
        ["bar", "arrive"] | ["barrier", "cta", "arrive", "aligned"] => {
            raw.expect(2)?;
            let (id, threads) = (raw.source(0, 4)?, raw.source(1, 4)?);
            Box::new(move |c| {
                if !c.converged(!0) {
                    return Ok(Flow::Diverged);
                }
                let (id, threads) = (id.uniform(c, "the barrier")?, threads.uniform(c, "the number of threads")?);
                c.block.barriers.arrive(&mut c.block.order, c.number, id, threads, 0, false)?;
                Ok(Flow::Next)
            })
        }
        ["mbarrier", ref parts @ ..] => return mbarrier(raw, parts),
        ["fence", "mbarrier_init", "release", "cluster"] => Box::new(|c| {
            c.block.mbarriers.fence(c.number);
            Ok(Flow::Next)
        }),
        ["fence", "proxy", "async"] | ["fence", "proxy", "async", "shared::cta"] => Box::new(|c| {
            c.block.mbarriers.fence(c.number);
            c.block.order.fence_proxies(c.number);
            Ok(Flow::Next)
        }),
        // Memory is sequentially consistent here: they order nothing more, and no barrier may be replaced by them.
        ["membar", "cta" | "gl" | "sys"] | ["fence", "acq_rel" | "sc", "cta" | "gpu" | "sys"] => {
            Box::new(|_| Ok(Flow::Next))
        }
        ["griddepcontrol", "launch_dependents"] => Box::new(|_| Ok(Flow::Next)),
        ["griddepcontrol", "wait"] => Box::new(|c| {
            if !c.converged(!0) {
                return Ok(Flow::Diverged);
            }
            c.block.waited[c.number] = true;
            Ok(Flow::Next)
        }),
        _ => return Ok(None),
    }))
}

/// An instruction that waits at a barrier; `finish` gets what the barrier made of the flags. Operands: (result,) barrier,
/// (threads, all of the block if missing), (flag); `with_threads` is their number with the threads, without a result.
fn wait(
    raw: &Raw<'_>,
    least: usize,
    flag: Option<Predicate>,
    finish: impl Fn(&mut Context<'_>, Reduced) + Send + Sync + 'static,
) -> Result<Execute, String> {
    let first = usize::from(flag.is_some());
    let id = raw.source(first, 4)?;
    let threads: Option<Source> = match raw.operands.len() - least {
        0 => None,
        1 => Some(raw.source(first + 1, 4)?),
        _ => return Err("too many operands".into()),
    };
    Ok(Box::new(move |c| {
        if let Some(reduced) = c.block.barriers.fetch(c.number) {
            finish(c, reduced);
            return Ok(Flow::Next);
        }
        if !c.converged(!0) {
            return Ok(Flow::Diverged);
        }
        let id = id.uniform(c, "the barrier")?;
        let threads = match threads {
            Some(threads) => threads.uniform(c, "the number of threads")?,
            None => c.block.threads,
        };
        let flags = flag.map_or(0, |flag| flag.mask(c));
        c.block.barriers.arrive(&mut c.block.order, c.number, id, threads, flags, true)?;
        Ok(Flow::Wait)
    }))
}

fn mbarrier(raw: &Raw<'_>, parts: &[&str]) -> Decoded {
    Ok(Some(match parts {
        ["init", "shared" | "shared::cta", "b64"] => {
            raw.expect(2)?;
            let (address, count) = (raw.operand(0)?.address()?, raw.source(1, 4)?);
            Box::new(move |c| {
                let (addresses, counts) = (address.of(c), count.u32s(c));
                for lane in c.active() {
                    let by = c.by(lane);
                    c.block.shared.claim_mbarrier(&c.block.order, by, addresses[lane])?;
                    c.block.mbarriers.init(&mut c.block.order, c.number, addresses[lane], counts[lane])?;
                }
                Ok(Flow::Next)
            })
        }
        ["inval", "shared" | "shared::cta", "b64"] => {
            raw.expect(1)?;
            let address = raw.operand(0)?.address()?;
            Box::new(move |c| {
                let addresses = address.of(c);
                for lane in c.active() {
                    c.block.mbarriers.invalidate(&c.block.order, c.number, addresses[lane])?;
                    c.block.shared.free_mbarrier(addresses[lane]);
                }
                Ok(Flow::Next)
            })
        }
        ["arrive", "shared" | "shared::cta", "b64"] | ["arrive", "release", "cta", "shared" | "shared::cta", "b64"] => {
            let (state, address) = (raw.target(8)?, raw.operand(1)?.address()?);
            let count = if raw.operands.len() > 2 { raw.source(2, 4)? } else { Source::Value(1) };
            arrive(state, address, count, Source::Value(0))
        }
        ["arrive", "expect_tx", "shared" | "shared::cta", "b64"]
        | ["arrive", "expect_tx", "release", "cta", "shared" | "shared::cta", "b64"] => {
            raw.expect(3)?;
            let (state, address) = (raw.target(8)?, raw.operand(1)?.address()?);
            arrive(state, address, Source::Value(1), raw.source(2, 4)?)
        }
        ["try_wait" | "test_wait", "parity", "shared" | "shared::cta", "b64"] => {
            raw.expect(3)?;
            let (to, address) = (raw.operand(0)?.predicate_target()?, raw.operand(1)?.address()?);
            let parity = raw.source(2, 4)?;
            Box::new(move |c| {
                let (address, parity) = (address.uniform(c)?, parity.uniform(c, "the parity")?);
                if parity > 1 {
                    return Err(Fault::new(format!("parity {parity}")));
                }
                let index = c.block.mbarriers.find(&c.block.order, c.number, address)?;
                // A wait may give up at any time.
                let gives_up = matches!(c.block.elect, crate::machine::Elect::Random) && c.block.random.below(8) == 0;
                let done = !gives_up && c.block.mbarriers.test(&mut c.block.order, c.number, index, parity);
                if !done && !gives_up {
                    let phase = c.block.mbarriers.get(index).phase;
                    c.block.status[c.number] = Status::Asleep { mbarrier: index, phase };
                }
                c.set_predicate(to, if done { !0 } else { 0 });
                Ok(Flow::Next)
            })
        }
        _ => return Ok(None),
    }))
}

/// Each active lane expects `bytes`, then arrives `count` times.
fn arrive(state: crate::operand::Target, address: crate::operand::Address, count: Source, bytes: Source) -> Execute {
    Box::new(move |c| {
        let (addresses, counts, bytes) = (address.of(c), count.u32s(c), bytes.u32s(c));
        if c.active().count() == LANES && addresses.iter().all(|address| *address == addresses[0]) {
            let index = c.block.mbarriers.find(&c.block.order, c.number, addresses[0])?;
            c.block.mbarriers.whole_warp(index, c.number, c.block.order.now(c.number));
        }
        let mut known = [0; crate::order::AGENTS];
        c.block.order.release(c.number, &mut known);
        let mut states = [0; LANES];
        for lane in c.active() {
            let of_lane = |fault: Fault| fault.of_lane(lane);
            let index = c.block.mbarriers.find(&c.block.order, c.number, addresses[lane]).map_err(of_lane)?;
            states[lane] = u64::from(c.block.mbarriers.get(index).phase);
            if bytes[lane] > 0 {
                c.block.mbarriers.add_bytes(index, i64::from(bytes[lane])).map_err(of_lane)?;
            }
            c.block.mbarriers.arrive(index, &known, counts[lane]).map_err(of_lane)?;
        }
        c.set64(state, states);
        Ok(Flow::Next)
    })
}
