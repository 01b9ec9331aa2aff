//! Barriers of a block by number, which whole warps reach.

use crate::fault::Fault;
use crate::order::{AGENTS, Clock, Order};

/// What `bar.red` makes of the threads' predicates.
#[derive(Debug, Clone, Copy)]
pub struct Reduced {
    pub any: bool,
    pub all: bool,
    pub count: u32,
}

/// One barrier between two completions.
#[derive(Clone)]
struct Meeting {
    /// Threads that must come; none before the first comes.
    expected: Option<u32>,
    arrived: u32,
    waiting: Vec<usize>,
    known: Clock,
    reduced: Reduced,
}

const EMPTY: Meeting = Meeting {
    expected: None,
    arrived: 0,
    waiting: Vec::new(),
    known: [0; AGENTS],
    reduced: Reduced { any: false, all: true, count: 0 },
};

pub struct Barriers {
    meetings: [Meeting; 16],
    /// Result that a released warp has not fetched yet.
    released: Vec<Option<Reduced>>,
}

impl Barriers {
    pub fn new(warps: usize) -> Self {
        Self { meetings: [const { EMPTY }; 16], released: vec![None; warps] }
    }

    /// The result of the barrier that released this warp.
    pub fn fetch(&mut self, warp: usize) -> Option<Reduced> {
        self.released[warp].take()
    }

    pub fn is_released(&self, warp: usize) -> bool {
        self.released[warp].is_some()
    }

    /// A warp comes, to wait or (`bar.arrive`) not.
    pub fn arrive(
        &mut self,
        order: &mut Order,
        warp: usize,
        id: u32,
        threads: u32,
        flags: u32,
        waits: bool,
    ) -> Result<(), Fault> {
        let meeting = self.meetings.get_mut(id as usize).ok_or_else(|| Fault::new(format!("barrier {id} of 16")))?;
        if threads == 0 || !threads.is_multiple_of(32) {
            return Err(Fault::new(format!("barrier {id} for {threads} threads, which are no whole warps")));
        }
        if *meeting.expected.get_or_insert(threads) != threads {
            let first = meeting.expected.unwrap_or_default();
            return Err(Fault::new(format!("barrier {id} for {threads} threads, where others wait for {first}")));
        }
        order.release(warp, &mut meeting.known);
        meeting.arrived += 32;
        meeting.reduced.any |= flags != 0;
        meeting.reduced.all &= flags == !0;
        meeting.reduced.count += flags.count_ones();
        if waits {
            meeting.waiting.push(warp);
        }
        if meeting.arrived == threads {
            let done = std::mem::replace(meeting, EMPTY);
            for warp in done.waiting {
                order.acquire(warp, &done.known);
                order.lanes_met(warp);
                self.released[warp] = Some(done.reduced);
            }
        }
        Ok(())
    }

    /// Barriers that somebody still waits at.
    pub fn unfinished(&self) -> impl Iterator<Item = usize> {
        self.meetings.iter().enumerate().filter(|(_, meeting)| meeting.arrived > 0).map(|(id, _)| id)
    }
}
