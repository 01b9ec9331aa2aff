//! Operands: where an instruction reads and writes.

use crate::fault::Fault;
use crate::machine::{Context, LANES};

/// Registers by class; 8-bit and 16-bit ones live among the 32-bit ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    Predicate(usize),
    Bits8(usize),
    Bits16(usize),
    Bits32(usize),
    Bits64(usize),
}

impl Register {
    /// Width in bytes; 0 for a predicate.
    pub fn width(self) -> usize {
        match self {
            Self::Predicate(_) => 0,
            Self::Bits8(_) => 1,
            Self::Bits16(_) => 2,
            Self::Bits32(_) => 4,
            Self::Bits64(_) => 8,
        }
    }
}

/// Registers that the hardware fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
}

impl Special {
    pub fn named(name: &str) -> Option<Self> {
        let axis = |name: &str| "xyz".find(name).filter(|_| name.len() == 1);
        match name.split_once('.') {
            Some(("%tid", of)) => axis(of).map(Self::Thread),
            Some(("%ntid", of)) => axis(of).map(Self::Threads),
            Some(("%ctaid", of)) => axis(of).map(Self::Block),
            Some(("%nctaid", of)) => axis(of).map(Self::Blocks),
            None if name == "%laneid" => Some(Self::Lane),
            _ => None,
        }
    }
}

/// One operand, every name resolved.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    Register(Register),
    /// `!p`.
    Not(Register),
    /// `a|b`: a result and a predicate beside it.
    Beside(Box<Self>, Box<Self>),
    Vector(Vec<Self>),
    /// `[base + offset]`.
    Address(Box<Self>, i64),
    /// Integer, bits of a float, or the address of a variable.
    Value(u64),
    Special(Special),
    Discard,
    /// Index of an instruction.
    Label(usize),
}

/// A value that every lane reads.
#[derive(Debug, Clone, Copy)]
pub enum Source {
    Narrow(usize),
    Wide(usize),
    Value(u64),
    Special(Special),
}

impl Source {
    /// Low 32 bits of every lane.
    pub fn u32s(&self, c: &Context<'_>) -> [u32; LANES] {
        match *self {
            Self::Narrow(register) => c.warp.narrow[register],
            Self::Wide(register) => c.warp.wide[register].map(|value| value as u32),
            Self::Value(value) => [value as u32; LANES],
            Self::Special(special) => c.special(special),
        }
    }

    pub fn u64s(&self, c: &Context<'_>) -> [u64; LANES] {
        match *self {
            Self::Wide(register) => c.warp.wide[register],
            Self::Value(value) => [value; LANES],
            Self::Narrow(_) | Self::Special(_) => self.u32s(c).map(u64::from),
        }
    }

    pub fn f32s(&self, c: &Context<'_>) -> [f32; LANES] {
        self.u32s(c).map(f32::from_bits)
    }

    /// The value that all active lanes hold.
    pub fn uniform(&self, c: &Context<'_>, what: &str) -> Result<u32, Fault> {
        let values = self.u32s(c);
        let first = values[c.mask.trailing_zeros() as usize];
        match c.active().find(|lane| values[*lane] != first) {
            Some(lane) => Err(Fault::at(lane, format!("{what} differs between the lanes of a warp"))),
            None => Ok(first),
        }
    }
}

/// A predicate that every lane reads, as a bit mask.
#[derive(Debug, Clone, Copy)]
pub enum Predicate {
    Register(usize),
    Not(usize),
    Value(bool),
}

impl Predicate {
    pub fn mask(&self, c: &Context<'_>) -> u32 {
        match *self {
            Self::Register(register) => c.warp.predicates[register],
            Self::Not(register) => !c.warp.predicates[register],
            Self::Value(true) => !0,
            Self::Value(false) => 0,
        }
    }
}

/// A register that lanes write.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    Narrow8(usize),
    Narrow16(usize),
    Narrow(usize),
    Wide(usize),
    Discard,
}

/// `[base + offset]`, per lane.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    base: Source,
    offset: i64,
}

impl Address {
    pub fn of(&self, c: &Context<'_>) -> [u64; LANES] {
        self.base.u64s(c).map(|base| base.wrapping_add_signed(self.offset))
    }

    /// The value that all active lanes hold.
    pub fn uniform(&self, c: &Context<'_>) -> Result<u64, Fault> {
        let values = self.of(c);
        let first = values[c.mask.trailing_zeros() as usize];
        match c.active().find(|lane| values[*lane] != first) {
            Some(lane) => Err(Fault::at(lane, "addresses differ between the lanes of a warp")),
            None => Ok(first),
        }
    }
}

/// Wrong operands, at decoding.
pub type Result_<T> = Result<T, String>;

impl Operand {
    /// A source of `width` bytes; registers must have just that width.
    pub fn source(&self, width: usize) -> Result_<Source> {
        match self.any_source()? {
            source @ (Source::Narrow(_) | Source::Wide(_)) if self.width() != Some(width) => {
                Err(format!("a register of {:?} bytes where {width} are read: {source:?}", self.width()))
            }
            source => Ok(source),
        }
    }

    /// A source of any width, for instructions that widen or narrow.
    pub fn any_source(&self) -> Result_<Source> {
        match self {
            Self::Register(Register::Bits8(index) | Register::Bits16(index) | Register::Bits32(index)) => {
                Ok(Source::Narrow(*index))
            }
            Self::Register(Register::Bits64(index)) => Ok(Source::Wide(*index)),
            Self::Value(value) => Ok(Source::Value(*value)),
            Self::Special(special) => Ok(Source::Special(*special)),
            other => Err(format!("not a value: {other:?}")),
        }
    }

    /// A register to write `width` bytes to.
    pub fn target(&self, width: usize) -> Result_<Target> {
        match self.any_target()? {
            Target::Discard => Ok(Target::Discard),
            target if self.width() == Some(width) => Ok(target),
            target => Err(format!("a register of {:?} bytes where {width} are written: {target:?}", self.width())),
        }
    }

    /// A register of any width, for instructions that widen.
    pub fn any_target(&self) -> Result_<Target> {
        match self {
            Self::Register(Register::Bits8(index)) => Ok(Target::Narrow8(*index)),
            Self::Register(Register::Bits16(index)) => Ok(Target::Narrow16(*index)),
            Self::Register(Register::Bits32(index)) => Ok(Target::Narrow(*index)),
            Self::Register(Register::Bits64(index)) => Ok(Target::Wide(*index)),
            Self::Discard => Ok(Target::Discard),
            other => Err(format!("not a register: {other:?}")),
        }
    }

    /// Width in bytes of a register.
    pub fn width(&self) -> Option<usize> {
        match self {
            Self::Register(register) => Some(register.width()),
            _ => None,
        }
    }

    pub fn predicate(&self) -> Result_<Predicate> {
        match self {
            Self::Register(Register::Predicate(index)) => Ok(Predicate::Register(*index)),
            Self::Not(Register::Predicate(index)) => Ok(Predicate::Not(*index)),
            Self::Value(value) => Ok(Predicate::Value(*value != 0)),
            other => Err(format!("not a predicate: {other:?}")),
        }
    }

    /// A predicate to write; none for `_`.
    pub fn predicate_target(&self) -> Result_<Option<usize>> {
        match self {
            Self::Register(Register::Predicate(index)) => Ok(Some(*index)),
            Self::Discard => Ok(None),
            other => Err(format!("not a predicate to write: {other:?}")),
        }
    }

    pub fn address(&self) -> Result_<Address> {
        match self {
            Self::Address(base, offset) => Ok(Address { base: base.any_source()?, offset: *offset }),
            other => Err(format!("not an address: {other:?}")),
        }
    }

    /// The parts of `{...}`, or the one operand.
    pub fn parts(&self) -> &[Self] {
        match self {
            Self::Vector(parts) => parts,
            one => std::slice::from_ref(one),
        }
    }

    pub fn value(&self) -> Result_<u64> {
        match self {
            Self::Value(value) => Ok(*value),
            other => Err(format!("not a constant: {other:?}")),
        }
    }
}
