//! The instruction set: one file per kind of instruction. Each turns an instruction's text into what executes it, once.
//!
//! An opcode is matched with all its modifiers, in the order in which compilers write them: what is not written here is
//! refused, never ignored.

mod async_copy;
mod control;
mod convert;
mod float;
mod formats;
mod half_pair;
mod integer;
mod load_store;
mod matrix;
mod mma;
mod move_data;
mod sync;
mod warp;

use std::sync::atomic::AtomicBool;

use crate::fault::Fault;
use crate::machine::{Context, Flow};
use crate::operand::{Operand, Predicate, Source, Target};

/// Executes an instruction for the active lanes of a warp.
pub type Execute = Box<dyn Fn(&mut Context<'_>) -> Result<Flow, Fault> + Send + Sync>;

/// A decoded instruction.
pub struct Instruction {
    pub guard: Option<Predicate>,
    pub execute: Execute,
    pub line: usize,
    pub text: String,
    /// Some lane has executed it.
    pub reached: AtomicBool,
}

/// An instruction with its names resolved.
pub struct Raw<'a> {
    /// The opcode at its dots.
    pub parts: Vec<&'a str>,
    pub operands: Vec<Operand>,
}

impl<'a> Raw<'a> {
    pub fn new(opcode: &'a str, operands: Vec<Operand>) -> Self {
        Self { parts: opcode.split('.').collect(), operands }
    }

    pub fn operand(&self, index: usize) -> Result<&Operand, String> {
        self.operands.get(index).ok_or_else(|| format!("no operand {index}"))
    }

    pub fn source(&self, index: usize, width: usize) -> Result<Source, String> {
        self.operand(index)?.source(width)
    }

    pub fn target(&self, width: usize) -> Result<Target, String> {
        self.operand(0)?.target(width)
    }

    /// The number of operands must be this.
    pub fn expect(&self, count: usize) -> Result<(), String> {
        if self.operands.len() == count {
            return Ok(());
        }
        Err(format!("{} operands where {count} are expected", self.operands.len()))
    }
}

/// What executes an instruction; an error names what is not known.
pub fn decode(raw: &Raw<'_>) -> Result<Execute, String> {
    let kinds = [
        control::decode,
        move_data::decode,
        integer::decode,
        float::decode,
        half_pair::decode,
        convert::decode,
        load_store::decode,
        matrix::decode,
        mma::decode,
        warp::decode,
        sync::decode,
        async_copy::decode,
    ];
    for kind in kinds {
        if let Some(execute) = kind(raw)? {
            return Ok(execute);
        }
    }
    Err(format!("the interpreter does not know `{}`", raw.parts.join(".")))
}

/// Decoders say `None` to what is another's.
pub type Decoded = Result<Option<Execute>, String>;

/// An instruction that computes a register lane by lane from 32-bit sources.
pub fn lanes1(to: Target, a: Source, f: impl Fn(u32) -> u32 + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let a = a.u32s(c);
        c.set32(to, a.map(&f));
        Ok(Flow::Next)
    })
}

pub fn lanes2(to: Target, a: Source, b: Source, f: impl Fn(u32, u32) -> u32 + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let (a, b) = (a.u32s(c), b.u32s(c));
        c.set32(to, std::array::from_fn(|lane| f(a[lane], b[lane])));
        Ok(Flow::Next)
    })
}

pub fn lanes3(to: Target, [a, b, d]: [Source; 3], f: impl Fn(u32, u32, u32) -> u32 + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let (a, b, d) = (a.u32s(c), b.u32s(c), d.u32s(c));
        c.set32(to, std::array::from_fn(|lane| f(a[lane], b[lane], d[lane])));
        Ok(Flow::Next)
    })
}

/// The same from 64-bit sources.
pub fn wide1(to: Target, a: Source, f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let a = a.u64s(c);
        c.set64(to, a.map(&f));
        Ok(Flow::Next)
    })
}

pub fn wide2(to: Target, a: Source, b: Source, f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let (a, b) = (a.u64s(c), b.u64s(c));
        c.set64(to, std::array::from_fn(|lane| f(a[lane], b[lane])));
        Ok(Flow::Next)
    })
}

pub fn wide3(to: Target, [a, b, d]: [Source; 3], f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Execute {
    Box::new(move |c| {
        let (a, b, d) = (a.u64s(c), b.u64s(c), d.u64s(c));
        c.set64(to, std::array::from_fn(|lane| f(a[lane], b[lane], d[lane])));
        Ok(Flow::Next)
    })
}
