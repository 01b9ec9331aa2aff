//! Moves, packing, selection and byte permutation.

use super::{Decoded, Execute, Raw, lanes3, wide1, wide2};
use crate::machine::{Flow, LANES};
use crate::module::width;
use crate::operand::{Operand, Source, Target};

pub fn decode(raw: &Raw<'_>) -> Decoded {
    Ok(Some(match raw.parts[..] {
        ["mov", "pred"] => {
            let (to, from) = (raw.operand(0)?.predicate_target()?, raw.operand(1)?.predicate()?);
            Box::new(move |c| {
                let mask = from.mask(c);
                c.set_predicate(to, mask);
                Ok(Flow::Next)
            })
        }
        ["mov", kind] => {
            raw.expect(2)?;
            let bytes = width(kind).ok_or("a type that is not known")?;
            match (raw.operand(0)?, raw.operand(1)?) {
                (Operand::Vector(parts), from) => unpack(parts, from.source(bytes)?, bytes)?,
                (to, Operand::Vector(parts)) => pack(to.target(bytes)?, parts, bytes)?,
                (to, from) if bytes == 8 => wide1(to.target(8)?, from.source(8)?, |a| a),
                (to, from) => {
                    let (to, from) = (to.target(bytes)?, special_or(from, bytes)?);
                    Box::new(move |c| {
                        let values = from.u32s(c);
                        c.set32(to, values);
                        Ok(Flow::Next)
                    })
                }
            }
        }
        // Addresses of parameters, global and shared variables are what the interpreter makes of them.
        ["cvta", "global", "u64"] | ["cvta", "to", "global", "u64"] => wide1(raw.target(8)?, raw.source(1, 8)?, |a| a),
        ["selp", kind] => {
            raw.expect(4)?;
            let bytes = width(kind).ok_or("a type that is not known")?;
            let (to, a, b) = (raw.target(bytes)?, raw.source(1, bytes)?, raw.source(2, bytes)?);
            let which = raw.operand(3)?.predicate()?;
            Box::new(move |c| {
                let mask = which.mask(c);
                let chosen = |lane: usize| mask >> lane & 1 == 1;
                if bytes == 8 {
                    let (a, b) = (a.u64s(c), b.u64s(c));
                    c.set64(to, std::array::from_fn(|lane| if chosen(lane) { a[lane] } else { b[lane] }));
                } else {
                    let (a, b) = (a.u32s(c), b.u32s(c));
                    c.set32(to, std::array::from_fn(|lane| if chosen(lane) { a[lane] } else { b[lane] }));
                }
                Ok(Flow::Next)
            })
        }
        ["prmt", "b32"] => {
            raw.expect(4)?;
            lanes3(raw.target(4)?, [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?], permute)
        }
        ["bfi", "b32"] => {
            let (position, length) = (raw.operand(3)?.value()?, raw.operand(4)?.value()?);
            let mask = field(position, length) as u32;
            let [to, a, b] = [raw.operand(0)?, raw.operand(1)?, raw.operand(2)?];
            let (a, b) = (a.source(4)?, b.source(4)?);
            super::lanes2(to.target(4)?, a, b, move |a, b| {
                a.checked_shl(position as u32).unwrap_or(0) & mask | b & !mask
            })
        }
        ["bfi", "b64"] => {
            let (position, length) = (raw.operand(3)?.value()?, raw.operand(4)?.value()?);
            let mask = field(position, length);
            wide2(raw.target(8)?, raw.source(1, 8)?, raw.source(2, 8)?, move |a, b| {
                a.checked_shl(position as u32).unwrap_or(0) & mask | b & !mask
            })
        }
        ["bfe", kind @ ("u32" | "s32")] => {
            let signed = kind == "s32";
            lanes3(
                raw.target(4)?,
                [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?],
                move |a, position, length| extract(a, position & 255, length & 255, signed),
            )
        }
        _ => return Ok(None),
    }))
}

fn special_or(from: &Operand, bytes: usize) -> Result<Source, String> {
    if matches!(from, Operand::Special(_)) { from.any_source() } else { from.source(bytes) }
}

/// The low part goes to the first register.
fn unpack(parts: &[Operand], from: Source, bytes: usize) -> Result<Execute, String> {
    let each = bytes / parts.len();
    let targets = parts.iter().map(|part| part.target(each)).collect::<Result<Vec<Target>, _>>()?;
    Ok(Box::new(move |c| {
        let values = from.u64s(c);
        for (index, to) in targets.iter().enumerate() {
            let part = |value: u64| value >> (8 * each * index) & field(0, 8 * each as u64);
            c.set64(*to, values.map(part));
        }
        Ok(Flow::Next)
    }))
}

fn pack(to: Target, parts: &[Operand], bytes: usize) -> Result<Execute, String> {
    let each = bytes / parts.len();
    let sources = parts.iter().map(|part| part.source(each)).collect::<Result<Vec<Source>, _>>()?;
    Ok(Box::new(move |c| {
        let mut values = [0u64; LANES];
        for (index, from) in sources.iter().enumerate() {
            for (value, part) in values.iter_mut().zip(from.u64s(c)) {
                *value |= (part & field(0, 8 * each as u64)) << (8 * each * index);
            }
        }
        c.set64(to, values);
        Ok(Flow::Next)
    }))
}

/// `length` ones from bit `position`.
fn field(position: u64, length: u64) -> u64 {
    let ones = if length >= 64 { !0 } else { (1 << length) - 1 };
    if position >= 64 { 0 } else { ones << position }
}

/// `prmt.b32` in its general mode.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|index| {
        let choice = selector >> (4 * index) & 15;
        let byte = bytes[choice as usize & 7];
        if choice & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 }
    }))
}

fn extract(a: u32, position: u32, length: u32, signed: bool) -> u32 {
    let last = (position + length).saturating_sub(1).min(31);
    let sign = if signed && length > 0 && a >> last & 1 == 1 { !0 } else { 0 };
    (0..32).fold(0, |result, bit| {
        let from = position + bit;
        let value = if bit < length && from < 32 { a >> from & 1 } else { sign & 1 };
        result | value << bit
    })
}
