//! Asynchronous copies that are under way. They land as late as a schedule lets them.

use crate::fault::Fault;
use crate::global::{Global, Thread};
use crate::mbarrier::Mbarriers;
use crate::order::{Clock, Write};
use crate::shared::Shared;

/// A copy to shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    pub to: u64,
    pub from: u64,
    pub size: usize,
    /// Bytes that are read; the rest is zero.
    pub read: usize,
    /// Line of the instruction that began it.
    pub line: usize,
    pub thread: Thread,
}

/// What an mbarrier is told when copies have landed.
#[derive(Debug, Clone)]
pub enum Then {
    CompleteBytes,
    Arrive(Box<Clock>),
}

/// Copies that land together.
#[derive(Debug, Clone)]
pub struct Pending {
    pub copies: Vec<Copy>,
    pub mbarrier: usize,
    pub then: Then,
}

impl Copy {
    /// The bytes that it brings.
    fn bytes(&self, global: &Global) -> Result<Vec<u8>, Fault> {
        let mut bytes = vec![0; self.size];
        if self.read > 0 {
            bytes[..self.read].copy_from_slice(global.read(&self.thread, self.from, self.read, 1, true)?);
        }
        Ok(bytes)
    }

    pub fn land(&self, shared: &mut Shared, global: &Global, write: Write) -> Result<(), Fault> {
        shared.land(self.to, &self.bytes(global)?, write);
        Ok(())
    }
}

impl Pending {
    pub fn land(&self, shared: &mut Shared, global: &Global, mbarriers: &mut Mbarriers) -> Result<(), Fault> {
        let mbarrier = mbarriers.get(self.mbarrier);
        let write = Write::new(mbarrier.agent, 0, mbarrier.phase + 1);
        for copy in &self.copies {
            copy.land(shared, global, write)?;
        }
        match &self.then {
            Then::CompleteBytes => {
                mbarriers.add_bytes(self.mbarrier, -self.copies.iter().map(|copy| copy.size as i64).sum::<i64>())
            }
            Then::Arrive(known) => mbarriers.arrive(self.mbarrier, known, 1),
        }
    }
}
