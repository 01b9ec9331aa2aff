//! mbarriers: arrivals and bytes of a phase.

use crate::fault::Fault;
use crate::order::{AGENTS, Clock, Order, join};

/// Largest count and, in magnitude, largest number of outstanding bytes.
const MAX_COUNT: i64 = (1 << 20) - 1;

pub struct Mbarrier {
    /// Not invalidated.
    live: bool,
    pub address: u64,
    /// Agent of the copies that complete here.
    pub agent: usize,
    expected: u32,
    pending: u32,
    bytes: i64,
    pub phase: u32,
    /// What the arrivals of this phase knew, and what those of completed phases knew.
    arriving: Clock,
    completed: Clock,
    /// Warps of which all lanes arrived together, and their clocks then: whoever waits for the phase has met them.
    arriving_warps: Vec<(usize, u32)>,
    completed_warps: Vec<(usize, u32)>,
    /// The warp that initialised it, and its clock then.
    by: (usize, u32),
    /// The initialisation was fenced against the asynchronous proxy.
    fenced: bool,
}

#[derive(Default)]
pub struct Mbarriers {
    all: Vec<Mbarrier>,
}

impl Mbarriers {
    pub fn init(&mut self, order: &mut Order, warp: usize, address: u64, count: u32) -> Result<(), Fault> {
        if self.all.iter().any(|one| one.live && one.address == address) {
            return Err(Fault::new(format!("mbarrier {address:#x} is initialised twice")));
        }
        if count == 0 || i64::from(count) > MAX_COUNT {
            return Err(Fault::new(format!("an mbarrier for {count} arrivals")));
        }
        self.all.push(Mbarrier {
            live: true,
            address,
            agent: order.agent(),
            expected: count,
            pending: count,
            bytes: 0,
            phase: 0,
            arriving: [0; AGENTS],
            completed: [0; AGENTS],
            arriving_warps: Vec::new(),
            completed_warps: Vec::new(),
            by: (warp, order.now(warp)),
            fenced: false,
        });
        Ok(())
    }

    pub fn invalidate(&mut self, order: &Order, warp: usize, address: u64) -> Result<(), Fault> {
        let index = self.find(order, warp, address)?;
        self.all[index].live = false;
        Ok(())
    }

    /// Fences what this warp initialised.
    pub fn fence(&mut self, warp: usize) {
        for one in self.all.iter_mut().filter(|one| one.by.0 == warp) {
            one.fenced = true;
        }
    }

    /// The mbarrier at an address, whose initialisation this warp must know of.
    pub fn find(&self, order: &Order, warp: usize, address: u64) -> Result<usize, Fault> {
        let index = self.all.iter().position(|one| one.live && one.address == address);
        let index =
            index.ok_or_else(|| Fault::new(format!("no mbarrier was initialised at shared address {address:#x}")))?;
        let (by, clock) = self.all[index].by;
        if by != warp && order.known(warp)[by] < clock {
            return Err(Fault::new(format!(
                "race: warp {by} initialised this mbarrier, and nothing orders warp {warp} after it"
            )));
        }
        Ok(index)
    }

    /// As [`Self::find`], for a use by asynchronous copies.
    pub fn find_fenced(&self, order: &Order, warp: usize, address: u64) -> Result<usize, Fault> {
        let index = self.find(order, warp, address)?;
        if !self.all[index].fenced {
            return Err(Fault::new("no fence stands between mbarrier.init and the copies that complete there"));
        }
        Ok(index)
    }

    pub fn get(&self, index: usize) -> &Mbarrier {
        &self.all[index]
    }

    /// All lanes of a warp are about to arrive together.
    pub fn whole_warp(&mut self, index: usize, warp: usize, clock: u32) {
        self.all[index].arriving_warps.push((warp, clock));
    }

    /// `count` arrivals of a warp's lanes that know `known`.
    pub fn arrive(&mut self, index: usize, known: &Clock, count: u32) -> Result<(), Fault> {
        let one = &mut self.all[index];
        if one.pending < count {
            return Err(Fault::new(format!(
                "more arrivals at mbarrier {:#x} than the {} it expects",
                one.address, one.expected
            )));
        }
        one.pending -= count;
        join(&mut one.arriving, known);
        one.complete();
        Ok(())
    }

    /// Expects (positive) or completes (negative) bytes.
    pub fn add_bytes(&mut self, index: usize, bytes: i64) -> Result<(), Fault> {
        let one = &mut self.all[index];
        one.bytes += bytes;
        if one.bytes.abs() > MAX_COUNT {
            return Err(Fault::new(format!("{} bytes outstanding at mbarrier {:#x}", one.bytes, one.address)));
        }
        one.complete();
        Ok(())
    }

    /// Whether the phase of this parity is complete; if so the warp knows what its arrivals knew.
    pub fn test(&self, order: &mut Order, warp: usize, index: usize, parity: u32) -> bool {
        let one = &self.all[index];
        let done = one.phase & 1 != parity;
        if done {
            order.acquire(warp, &one.completed);
            for (_, clock) in one.completed_warps.iter().filter(|(other, _)| *other == warp) {
                order.lanes_met_after(warp, *clock);
            }
        }
        done
    }
}

impl Mbarrier {
    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            let arriving = std::mem::replace(&mut self.arriving, [0; AGENTS]);
            join(&mut self.completed, &arriving);
            self.completed_warps = std::mem::take(&mut self.arriving_warps);
            self.phase += 1;
            self.completed[self.agent] = self.phase;
            self.pending = self.expected;
        }
    }

    /// What is missing to the end of the phase.
    pub fn missing(&self) -> String {
        format!("{} of {} arrivals and {} bytes missing", self.pending, self.expected, self.bytes)
    }
}
