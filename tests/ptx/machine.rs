//! A block under execution: its warps, and what an instruction sees of it.

use crate::barrier::Barriers;
use crate::copies::{Copy, Pending};
use crate::fault::Fault;
use crate::global::{Global, Thread};
use crate::mbarrier::Mbarriers;
use crate::operand::{Special, Target};
use crate::order::{By, Order, Write};
use crate::schedule::Random;
use crate::shared::Shared;

pub const LANES: usize = 32;

/// Lanes of a warp that stand at the same instruction.
#[derive(Debug, Clone, Copy)]
pub struct Group {
    pub at: usize,
    pub lanes: u32,
    /// Waits for other lanes of the warp.
    pub stuck: bool,
}

/// Registers and places of a warp.
pub struct Warp {
    pub narrow: Vec<[u32; LANES]>,
    pub wide: Vec<[u64; LANES]>,
    pub predicates: Vec<u32>,
    pub groups: Vec<Group>,
}

impl Warp {
    /// Registers hold `garbage` before they are written, so that results which depend on them differ between schedules.
    pub fn new([narrow, wide, predicates]: [usize; 3], garbage: u32) -> Self {
        Self {
            narrow: vec![[garbage; LANES]; narrow],
            wide: vec![[u64::from(garbage) << 32 | u64::from(garbage); LANES]; wide],
            predicates: vec![garbage; predicates],
            groups: vec![Group { at: 0, lanes: !0, stuck: false }],
        }
    }

    pub fn lanes(&self) -> u32 {
        self.groups.iter().fold(0, |lanes, group| lanes | group.lanes)
    }
}

/// Why a warp does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ready,
    AtBarrier,
    /// A wait at this mbarrier failed in this phase.
    Asleep {
        mbarrier: usize,
        phase: u32,
    },
    Done,
}

/// Which lane `elect.sync` chooses: the hardware does not say.
#[derive(Debug, Clone, Copy)]
pub enum Elect {
    First,
    Last,
    Random,
}

/// What the warps of a block share.
pub struct Block {
    pub index: [u32; 3],
    pub grid: [u32; 3],
    pub threads: u32,
    pub parameters: Vec<u8>,
    pub shared: Shared,
    pub order: Order,
    pub barriers: Barriers,
    pub mbarriers: Mbarriers,
    pub pending: Vec<Pending>,
    /// `cp.async` of every warp and lane: not committed yet, then committed groups from the oldest.
    pub uncommitted: Vec<Vec<Copy>>,
    pub committed: Vec<Vec<Vec<Copy>>>,
    pub status: Vec<Status>,
    pub waited: Vec<bool>,
    pub elect: Elect,
    pub random: Random,
    /// Number of the launch, and the first launch that may still run when it begins.
    pub launch: u32,
    pub running_since: Option<u32>,
    /// Line of the instruction under execution.
    pub line: usize,
}

impl Block {
    /// Lands a pending copy.
    pub fn land(&mut self, index: usize, global: &Global) -> Result<(), Fault> {
        let pending = self.pending.remove(index);
        pending.land(&mut self.shared, global, &mut self.mbarriers)
    }

    pub fn linear_index(&self) -> u32 {
        (self.index[2] * self.grid[1] + self.index[1]) * self.grid[0] + self.index[0]
    }
}

/// What an instruction does next.
pub enum Flow {
    Next,
    /// The active lanes go there.
    Branch(usize),
    /// The active lanes end.
    Exit,
    /// The warp has come to a barrier; the instruction is executed again once the barrier lets it go.
    Wait,
    /// Lanes that must take part stand elsewhere.
    Diverged,
}

/// What an instruction sees: its warp, its block, the memory, and the lanes that execute it.
pub struct Context<'a> {
    pub warp: &'a mut Warp,
    /// The warp's number in the block.
    pub number: usize,
    pub block: &'a mut Block,
    pub global: &'a mut Global,
    /// Lanes that execute; never empty.
    pub mask: u32,
}

impl Context<'_> {
    /// Lanes that execute.
    pub fn active(&self) -> impl Iterator<Item = usize> + use<> {
        lanes_of(self.mask)
    }

    pub fn special(&self, special: Special) -> [u32; LANES] {
        let lane = |lane: usize| lane as u32;
        match special {
            Special::Lane => std::array::from_fn(lane),
            Special::Thread(0) => std::array::from_fn(|l| (self.number * LANES) as u32 + lane(l)),
            Special::Thread(_) => [0; LANES],
            Special::Threads(axis) => [if axis == 0 { self.block.threads } else { 1 }; LANES],
            Special::Block(axis) => [self.block.index[axis]; LANES],
            Special::Blocks(axis) => [self.block.grid[axis]; LANES],
        }
    }

    pub fn by(&self, lane: usize) -> By {
        By { warp: self.number, lane }
    }

    pub fn thread(&self, lane: usize) -> Thread {
        Thread {
            launch: self.block.launch,
            block: self.block.linear_index(),
            warp: self.number,
            lane,
            running_since: self.block.running_since.filter(|_| !self.block.waited[self.number]),
        }
    }

    /// Writes the active lanes of a register.
    pub fn set32(&mut self, target: Target, mut values: [u32; LANES]) {
        let index = match target {
            Target::Narrow(index) => index,
            Target::Narrow8(index) => {
                values = values.map(|value| value & 0xff);
                index
            }
            Target::Narrow16(index) => {
                values = values.map(|value| value & 0xffff);
                index
            }
            Target::Wide(_) => return self.set64(target, values.map(u64::from)),
            Target::Discard => return,
        };
        let register = &mut self.warp.narrow[index];
        if self.mask == !0 {
            *register = values;
        } else {
            for lane in lanes_of(self.mask) {
                register[lane] = values[lane];
            }
        }
    }

    pub fn set64(&mut self, target: Target, values: [u64; LANES]) {
        let index = match target {
            Target::Wide(index) => index,
            narrow => return self.set32(narrow, values.map(|value| value as u32)),
        };
        let register = &mut self.warp.wide[index];
        if self.mask == !0 {
            *register = values;
        } else {
            for lane in lanes_of(self.mask) {
                register[lane] = values[lane];
            }
        }
    }

    pub fn set_predicate(&mut self, target: Option<usize>, values: u32) {
        if let Some(index) = target {
            let register = &mut self.warp.predicates[index];
            *register = *register & !self.mask | values & self.mask;
        }
    }

    /// Whether all lanes that `members` names and that have not ended execute this instruction.
    pub fn converged(&self, members: u32) -> bool {
        self.warp.lanes() & members & !self.mask == 0
    }

    /// Lands copies of one lane that were not tied to an mbarrier.
    pub fn land_copies(&mut self, copies: &[Copy], lane: usize) -> Result<(), Fault> {
        let write = Write::new(self.number, lane, self.block.order.now(self.number));
        copies.iter().try_for_each(|copy| copy.land(&mut self.block.shared, self.global, write))
    }
}

pub fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        (left != 0).then(|| {
            let lane = left.trailing_zeros() as usize;
            left &= left - 1;
            lane
        })
    })
}
