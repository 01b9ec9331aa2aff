//! Happens-before: vector clocks of warps and of the asynchronous copies that mbarriers complete.
//!
//! An agent is a warp or an mbarrier, which stands for the copies that complete on it. A warp's own clock moves on
//! when it releases (arrives anywhere); a phase of an mbarrier is the clock of the copies that belong to it.

use crate::fault::Fault;

/// Most agents of a block.
pub const AGENTS: usize = 64;
/// Latest known moment of every agent.
pub type Clock = [u32; AGENTS];

/// Who accesses memory.
#[derive(Debug, Clone, Copy)]
pub struct By {
    pub warp: usize,
    pub lane: usize,
}

/// Last write of a byte, packed: agent, lane, and the agent's clock, which is never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write(u32);

impl Write {
    pub const NEVER: Self = Self(0);
    /// A copy is on its way.
    pub const IN_FLIGHT: Self = Self(u32::MAX);
    /// The byte belongs to an mbarrier.
    pub const MBARRIER: Self = Self(u32::MAX - 1);

    pub fn new(agent: usize, lane: usize, clock: u32) -> Self {
        assert!(clock > 0 && clock < 1 << 21, "clocks have 21 bits");
        Self((agent as u32) << 26 | (lane as u32) << 21 | clock)
    }

    fn agent(self) -> usize {
        (self.0 >> 26) as usize
    }

    fn lane(self) -> usize {
        (self.0 >> 21 & 31) as usize
    }

    fn clock(self) -> u32 {
        self.0 & ((1 << 21) - 1)
    }

    /// A write of a warp, not of a bulk copy.
    fn is_generic(self, warps: usize) -> bool {
        self != Self::NEVER && self.agent() < warps
    }
}

pub struct Order {
    warps: usize,
    known: Vec<Clock>,
    /// Own clock of a warp when all its lanes last met.
    met: Vec<u32>,
    /// What a warp knew at its last fence between generic and asynchronous proxy.
    fenced: Vec<Clock>,
    agents: usize,
}

impl Order {
    pub fn new(warps: usize) -> Self {
        let mut known = vec![[0; AGENTS]; warps];
        for (warp, clock) in known.iter_mut().enumerate() {
            clock[warp] = 1;
        }
        Self { warps, known, met: vec![1; warps], fenced: vec![[0; AGENTS]; warps], agents: warps }
    }

    /// A new agent for the copies of an mbarrier.
    pub fn agent(&mut self) -> usize {
        self.agents += 1;
        assert!(self.agents <= AGENTS, "more warps and mbarriers than the interpreter has clocks for");
        self.agents - 1
    }

    pub fn known(&self, warp: usize) -> &Clock {
        &self.known[warp]
    }

    pub fn now(&self, warp: usize) -> u32 {
        self.known[warp][warp]
    }

    /// Passes on what a warp knows, and begins its next moment.
    pub fn release(&mut self, warp: usize, into: &mut Clock) {
        join(into, &self.known[warp]);
        self.known[warp][warp] += 1;
    }

    pub fn acquire(&mut self, warp: usize, from: &Clock) {
        join(&mut self.known[warp], from);
    }

    /// The lanes of a warp met: each sees what the others did.
    pub fn lanes_met(&mut self, warp: usize) {
        self.known[warp][warp] += 1;
        self.met[warp] = self.known[warp][warp];
    }

    /// The lanes of a warp met after what they did up to `clock`.
    pub fn lanes_met_after(&mut self, warp: usize, clock: u32) {
        self.met[warp] = self.met[warp].max(clock + 1);
    }

    /// A fence between the proxies: what the warp knows may be overwritten or read by bulk copies.
    pub fn fence_proxies(&mut self, warp: usize) {
        self.fenced[warp] = self.known[warp];
        self.known[warp][warp] += 1;
    }

    /// A write that `by` may see or overwrite.
    pub fn check(&self, write: Write, by: By) -> Result<(), Fault> {
        let fault = |what: String| Err(Fault::at(by.lane, what));
        match write {
            Write::NEVER => Ok(()),
            Write::IN_FLIGHT => fault("a copy that was not waited for is on its way to these bytes".into()),
            Write::MBARRIER => fault("these bytes are an mbarrier".into()),
            _ if write.agent() == by.warp => {
                if write.lane() == by.lane || write.clock() < self.met[by.warp] {
                    return Ok(());
                }
                fault(format!("race: lane {} of the same warp wrote this, and they have not met since", write.lane()))
            }
            _ if write.clock() <= self.known[by.warp][write.agent()] => Ok(()),
            _ if write.agent() < self.warps => fault(format!(
                "race: warp {} lane {} wrote this, and nothing orders warp {} after it",
                write.agent(),
                write.lane(),
                by.warp
            )),
            _ => fault(format!("race: a copy wrote this whose mbarrier phase warp {} has not waited for", by.warp)),
        }
    }

    /// A read at `clock` by another warp, which `by` is about to overwrite.
    pub fn check_read(&self, reader: usize, clock: u32, by: By) -> Result<(), Fault> {
        if clock <= self.known[by.warp][reader] || reader == by.warp {
            return Ok(());
        }
        let what = format!("race: warp {reader} reads this, and nothing orders warp {} after it", by.warp);
        Err(Fault::at(by.lane, what))
    }

    /// A write of a warp that a bulk copy of `by` comes after needs a proxy fence, of the writer or of the copier.
    pub fn check_proxy(&self, write: Write, by: By) -> Result<(), Fault> {
        let fenced = |warp: usize| write.clock() <= self.fenced[warp][write.agent()];
        if !write.is_generic(self.warps) || fenced(write.agent()) || fenced(by.warp) {
            return Ok(());
        }
        let what = format!("warp {} wrote this by st, and no fence.proxy.async stands before the copy", write.agent());
        Err(Fault::at(by.lane, what))
    }
}

pub fn join(into: &mut Clock, from: &Clock) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = (*into).max(*from);
    }
}
