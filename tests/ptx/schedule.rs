//! Runs launches block by block, under one of several orders of warps, blocks and landing copies.

use std::ops::AddAssign;
use std::sync::atomic::Ordering::Relaxed;

use crate::barrier::Barriers;
use crate::fault::{Fault, Report};
use crate::global::Global;
use crate::machine::{Block, Context, Elect, Flow, Group, LANES, Status, Warp};
use crate::mbarrier::Mbarriers;
use crate::module::Entry;
use crate::order::Order;
use crate::shared::Shared;

/// Instructions of one block beyond which it is taken to run for ever.
const MAX_INSTRUCTIONS: u64 = 50_000_000;

/// In what order warps run, blocks run, and copies land.
#[derive(Debug, Clone, Copy)]
pub enum Schedule {
    /// Each warp as far as it goes, from the first; copies land only when nobody can go on, oldest first.
    Forward,
    /// From the last warp and block; the newest copy lands first.
    Backward,
    /// A few instructions of any warp at a time; any copy may land at any time.
    Random(u64),
}

impl Schedule {
    /// What memory and registers hold that nothing has written: a NaN, or a number that differs between schedules.
    pub fn garbage(self) -> u32 {
        match self {
            Self::Forward => 0x7fa5_5a01,
            Self::Backward => 0x4b00_3c01,
            Self::Random(seed) => 0x0101_0101u32.wrapping_mul(seed as u32 | 1),
        }
    }

    fn elect(self) -> Elect {
        match self {
            Self::Forward => Elect::First,
            Self::Backward => Elect::Last,
            Self::Random(_) => Elect::Random,
        }
    }
}

/// A small generator: schedules need reproducible variety, not quality.
pub struct Random(u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

/// A launch as the driver gets it.
pub struct Launch<'a> {
    pub entry: &'a Entry,
    pub grid: [u32; 3],
    pub threads: u32,
    pub dynamic_shared: u32,
    pub parameters: Vec<u8>,
    /// It may begin before the launch before it has ended: the first launch that may still run then.
    pub running_since: Option<u32>,
    /// Number among the launches of a case.
    pub number: u32,
}

/// What was executed.
#[derive(Debug, Default, Clone, Copy)]
pub struct Executed {
    pub launches: u64,
    pub blocks: u64,
    /// Warp instructions.
    pub instructions: u64,
}

impl AddAssign for Executed {
    fn add_assign(&mut self, other: Self) {
        self.launches += other.launches;
        self.blocks += other.blocks;
        self.instructions += other.instructions;
    }
}

pub fn run(launch: &Launch<'_>, global: &mut Global, schedule: Schedule) -> Result<Executed, Report> {
    let refuse = |what: String| Report {
        kernel: launch.entry.name.clone(),
        line: 0,
        text: String::new(),
        block: [0; 3],
        thread: None,
        what,
    };
    if launch.threads > launch.entry.max_threads || !launch.threads.is_multiple_of(LANES as u32) {
        return Err(refuse(format!("{} threads, of {} at most", launch.threads, launch.entry.max_threads)));
    }
    if launch.entry.static_shared > 0 && launch.dynamic_shared > 0 {
        return Err(refuse("static and dynamic shared memory in one kernel".into()));
    }
    let end = launch.entry.parameters.last().map_or(0, |(offset, size)| offset + size);
    if launch.parameters.len() != end {
        return Err(refuse(format!("{} bytes of parameters where {end} are declared", launch.parameters.len())));
    }
    let count = launch.grid.iter().product::<u32>();
    let mut blocks: Vec<u32> = (0..count).collect();
    let mut random = Random(1);
    match schedule {
        Schedule::Forward => {}
        Schedule::Backward => blocks.reverse(),
        Schedule::Random(seed) => {
            random = Random(seed);
            for at in (1..blocks.len()).rev() {
                blocks.swap(at, random.below(at + 1));
            }
        }
    }
    let mut executed = Executed { launches: 1, blocks: u64::from(count), instructions: 0 };
    for linear in blocks {
        let [x, y, _] = launch.grid;
        let index = [linear % x, linear / x % y, linear / x / y];
        let mut runner = Runner::new(launch, global, schedule, index, random.below(1 << 30) as u64);
        runner.run()?;
        executed.instructions += runner.instructions;
    }
    Ok(executed)
}

/// One block.
struct Runner<'a> {
    entry: &'a Entry,
    warps: Vec<Warp>,
    block: Block,
    global: &'a mut Global,
    schedule: Schedule,
    instructions: u64,
}

/// How a warp stopped running.
enum Stop {
    /// It waits or has ended.
    Waiting,
    /// Its share is used up.
    Share,
}

impl<'a> Runner<'a> {
    fn new(launch: &Launch<'a>, global: &'a mut Global, schedule: Schedule, index: [u32; 3], seed: u64) -> Self {
        let count = launch.threads as usize / LANES;
        let shared = launch.entry.static_shared + launch.dynamic_shared as usize;
        let block = Block {
            index,
            grid: launch.grid,
            threads: launch.threads,
            parameters: launch.parameters.clone(),
            shared: Shared::new(shared, count),
            order: Order::new(count),
            barriers: Barriers::new(count),
            mbarriers: Mbarriers::default(),
            pending: Vec::new(),
            uncommitted: vec![Vec::new(); count],
            committed: vec![Vec::new(); count],
            status: vec![Status::Ready; count],
            waited: vec![false; count],
            elect: schedule.elect(),
            random: Random(seed),
            launch: launch.number,
            running_since: launch.running_since,
            line: 0,
        };
        let warps = (0..count).map(|_| Warp::new(launch.entry.registers, schedule.garbage())).collect();
        Self { entry: launch.entry, warps, block, global, schedule, instructions: 0 }
    }

    fn run(&mut self) -> Result<(), Report> {
        let count = self.warps.len();
        while self.block.status.iter().any(|status| *status != Status::Done) {
            let ready: Vec<usize> = (0..count).filter(|warp| self.is_ready(*warp)).collect();
            if ready.is_empty() {
                self.land_one()?;
                continue;
            }
            match self.schedule {
                Schedule::Forward => ready.into_iter().try_for_each(|warp| self.run_warp(warp, u64::MAX).map(drop))?,
                Schedule::Backward => {
                    ready.into_iter().rev().try_for_each(|warp| self.run_warp(warp, u64::MAX).map(drop))?;
                }
                Schedule::Random(_) => {
                    if !self.block.pending.is_empty() && self.block.random.below(4) == 0 {
                        self.land_one()?;
                    }
                    let warp = ready[self.block.random.below(ready.len())];
                    let share = 1 + self.block.random.below(400) as u64;
                    self.run_warp(warp, share)?;
                }
            }
        }
        self.check_end()
    }

    /// Nothing that was begun may be left when the last warp ends.
    fn check_end(&self) -> Result<(), Report> {
        if let Some(pending) = self.block.pending.first() {
            let line = pending.copies.first().map_or(0, |copy| copy.line);
            return Err(self.report(None, Fault::new(format!("the block ended before the copy of line {line} landed"))));
        }
        if let Some(id) = self.block.barriers.unfinished().next() {
            return Err(self.report(None, Fault::new(format!("the block ended while warps waited at barrier {id}"))));
        }
        // Or whoever waits for this launch would not have waited for those before it.
        if self.block.running_since.is_some() && !self.block.waited.contains(&true) {
            return Err(self.report(None, Fault::new("the block ended without griddepcontrol.wait")));
        }
        Ok(())
    }

    fn is_ready(&self, warp: usize) -> bool {
        match self.block.status[warp] {
            Status::Ready => true,
            Status::AtBarrier => self.block.barriers.is_released(warp),
            Status::Asleep { mbarrier, phase } => self.block.mbarriers.get(mbarrier).phase != phase,
            Status::Done => false,
        }
    }

    /// Nobody can go on: a copy lands, or this is a deadlock.
    fn land_one(&mut self) -> Result<(), Report> {
        let count = self.block.pending.len();
        if count == 0 {
            let waits = (0..self.warps.len()).filter(|warp| self.block.status[*warp] != Status::Done);
            let waits: Vec<String> = waits.map(|warp| self.describe(warp)).collect();
            let first = (0..self.warps.len()).find(|warp| self.block.status[*warp] != Status::Done);
            return Err(self.report(first, Fault::new(format!("deadlock: {}", waits.join("; ")))));
        }
        let index = match self.schedule {
            Schedule::Forward => 0,
            Schedule::Backward => count - 1,
            Schedule::Random(_) => self.block.random.below(count),
        };
        let line = self.block.pending[index].copies.first().map_or(0, |copy| copy.line);
        self.block.land(index, self.global).map_err(|fault| {
            let fault = Fault { what: format!("{} (as the copy of line {line} landed)", fault.what), lane: fault.lane };
            self.report(None, fault)
        })
    }

    fn describe(&self, warp: usize) -> String {
        let line = self.warps[warp].groups.first().map_or(0, |group| self.entry.code[group.at].line);
        match self.block.status[warp] {
            Status::Asleep { mbarrier, .. } => {
                let mbarrier = self.block.mbarriers.get(mbarrier);
                format!("warp {warp} at line {line} for mbarrier {:#x} ({})", mbarrier.address, mbarrier.missing())
            }
            _ => format!("warp {warp} at line {line}"),
        }
    }

    fn report(&self, warp: Option<usize>, fault: Fault) -> Report {
        let at = warp.and_then(|warp| self.warps[warp].groups.first()).map(|group| &self.entry.code[group.at]);
        Report {
            kernel: self.entry.name.clone(),
            line: at.map_or(0, |instruction| instruction.line),
            text: at.map_or_else(String::new, |instruction| instruction.text.clone()),
            block: self.block.index,
            thread: warp.zip(fault.lane).map(|(warp, lane)| warp * LANES + lane),
            what: fault.what,
        }
    }

    /// Runs a warp until it waits, ends or has used its share. The lanes at the lowest instruction run first, so that
    /// diverged lanes meet again.
    fn run_warp(&mut self, number: usize, mut share: u64) -> Result<Stop, Report> {
        self.block.status[number] = Status::Ready;
        loop {
            let Some(index) = next_group(&self.warps[number].groups) else {
                if self.warps[number].groups.is_empty() {
                    self.block.status[number] = Status::Done;
                    return Ok(Stop::Waiting);
                }
                let groups = self.warps[number].groups.iter();
                let lines: Vec<String> = groups
                    .map(|group| format!("{:#010x} at line {}", group.lanes, self.entry.code[group.at].line))
                    .collect();
                let fault = Fault::new(format!("lanes of the warp diverged and cannot meet: {}", lines.join(", ")));
                return Err(self.report(Some(number), fault));
            };
            if share == 0 {
                return Ok(Stop::Share);
            }
            share -= 1;
            self.instructions += 1;
            let group = self.warps[number].groups[index];
            // First in the list, so that reports name it.
            self.warps[number].groups.swap(0, index);
            let flow = self.execute(number, group).map_err(|fault| self.report(Some(number), fault))?;
            if self.instructions > MAX_INSTRUCTIONS {
                return Err(self.report(Some(number), Fault::new("the block does not end")));
            }
            match flow {
                (Flow::Next, _) => self.advance(number, group.at + 1),
                (Flow::Branch(to), lanes) => self.branch(number, lanes, to),
                (Flow::Exit, lanes) => self.exit(number, lanes),
                (Flow::Diverged, _) => self.warps[number].groups[0].stuck = true,
                (Flow::Wait, _) => {
                    if self.block.barriers.is_released(number) {
                        continue;
                    }
                    self.block.status[number] = Status::AtBarrier;
                    return Ok(Stop::Waiting);
                }
            }
            if let Status::Asleep { .. } = self.block.status[number] {
                return Ok(Stop::Waiting);
            }
        }
    }

    /// Executes the instruction of a group; says what follows, and for which lanes.
    fn execute(&mut self, number: usize, group: Group) -> Result<(Flow, u32), Fault> {
        let instruction = self.entry.code.get(group.at).ok_or_else(|| Fault::new("the program runs past its end"))?;
        let warp = &mut self.warps[number];
        self.block.line = instruction.line;
        let mut context = Context { warp, number, block: &mut self.block, global: self.global, mask: group.lanes };
        if let Some(guard) = &instruction.guard {
            context.mask &= guard.mask(&context);
            if context.mask == 0 {
                return Ok((Flow::Next, 0));
            }
        }
        instruction.reached.store(true, Relaxed);
        let lanes = context.mask;
        Ok(((instruction.execute)(&mut context)?, lanes))
    }

    fn advance(&mut self, number: usize, to: usize) {
        let groups = &mut self.warps[number].groups;
        groups[0].at = to;
        if groups.len() > 1 {
            merge(groups);
        }
    }

    fn branch(&mut self, number: usize, lanes: u32, to: usize) {
        let groups = &mut self.warps[number].groups;
        let stay = groups[0].lanes & !lanes;
        if stay == 0 {
            return self.advance(number, to);
        }
        groups[0] = Group { at: groups[0].at + 1, lanes: stay, stuck: false };
        groups.push(Group { at: to, lanes, stuck: false });
        merge(groups);
    }

    fn exit(&mut self, number: usize, lanes: u32) {
        let groups = &mut self.warps[number].groups;
        groups[0].lanes &= !lanes;
        groups[0].at += 1;
        if groups[0].lanes == 0 {
            groups.remove(0);
        }
        // Fewer lanes to wait for.
        groups.iter_mut().for_each(|group| group.stuck = false);
        merge(groups);
    }
}

/// The group to run: of those that are not stuck, the one at the lowest instruction.
fn next_group(groups: &[Group]) -> Option<usize> {
    if let [only] = groups {
        return (!only.stuck).then_some(0);
    }
    let free = groups.iter().enumerate().filter(|(_, group)| !group.stuck);
    free.min_by_key(|(_, group)| group.at).map(|(index, _)| index)
}

/// Joins groups that stand at the same instruction; who was stuck may try again.
fn merge(groups: &mut Vec<Group>) {
    groups.sort_by_key(|group| group.at);
    groups.dedup_by(|later, earlier| {
        let same = later.at == earlier.at;
        if same {
            earlier.lanes |= later.lanes;
            earlier.stuck = false;
        }
        same
    });
    if let [only] = &mut groups[..] {
        only.stuck = false;
    }
}
