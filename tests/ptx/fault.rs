//! What the interpreter refuses, and where it happened.

use std::fmt;

/// A broken rule, as the instruction that broke it sees it.
#[derive(Debug)]
pub struct Fault {
    pub what: String,
    /// Lane of the warp, where one lane is to blame.
    pub lane: Option<usize>,
}

impl Fault {
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), lane: None }
    }

    pub fn at(lane: usize, what: impl Into<String>) -> Self {
        Self { what: what.into(), lane: Some(lane) }
    }

    /// The same fault with a lane, where the place that found it knew none.
    pub fn of_lane(self, lane: usize) -> Self {
        Self { lane: self.lane.or(Some(lane)), ..self }
    }
}

/// A fault with its place in the program and in the grid.
#[derive(Debug)]
pub struct Report {
    pub kernel: String,
    pub line: usize,
    pub text: String,
    pub block: [u32; 3],
    pub thread: Option<usize>,
    pub what: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "{}: {}, line {} `{}`, block ({x}, {y}, {z})", self.what, self.kernel, self.line, self.text)?;
        self.thread.map_or(Ok(()), |thread| write!(f, ", thread {thread}"))
    }
}
