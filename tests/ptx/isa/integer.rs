//! Integer and logical arithmetic, comparisons.

use std::cmp::Ordering;

use super::{Decoded, Execute, Raw, lanes1, lanes2, lanes3, wide1, wide2, wide3};
use crate::fault::Fault;
use crate::machine::{Context, Flow, LANES};
use crate::module::width;
use crate::operand::Source;

pub fn decode(raw: &Raw<'_>) -> Decoded {
    match raw.parts[..] {
        ["setp", comparison, kind] => return compare(raw, comparison, None, kind),
        ["setp", comparison, join @ ("and" | "or" | "xor"), kind] => return compare(raw, comparison, Some(join), kind),
        _ => {}
    }
    if let Some(execute) = predicate_logic(raw)? {
        return Ok(Some(execute));
    }
    Ok(Some(match raw.parts[..] {
        ["add", kind] if is_integer(kind) => binary(raw, kind, u64::wrapping_add)?,
        ["sub", kind] if is_integer(kind) => binary(raw, kind, u64::wrapping_sub)?,
        ["mul", "lo", kind] if is_integer(kind) => binary(raw, kind, u64::wrapping_mul)?,
        ["and", kind @ ("b16" | "b32" | "b64")] => binary(raw, kind, |a, b| a & b)?,
        ["or", kind @ ("b16" | "b32" | "b64")] => binary(raw, kind, |a, b| a | b)?,
        ["xor", kind @ ("b16" | "b32" | "b64")] => binary(raw, kind, |a, b| a ^ b)?,
        ["not", kind @ ("b16" | "b32")] => {
            lanes1(raw.target(width_of(kind)?)?, raw.source(1, width_of(kind)?)?, |a| !a)
        }
        ["not", "b64"] => wide1(raw.target(8)?, raw.source(1, 8)?, |a| !a),
        ["neg", "s32"] => lanes1(raw.target(4)?, raw.source(1, 4)?, u32::wrapping_neg),
        ["neg", "s64"] => wide1(raw.target(8)?, raw.source(1, 8)?, u64::wrapping_neg),
        ["abs", "s32"] => lanes1(raw.target(4)?, raw.source(1, 4)?, |a| (a as i32).wrapping_abs() as u32),
        ["mul", "hi", "u32"] => lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, |a, b| {
            ((u64::from(a) * u64::from(b)) >> 32) as u32
        }),
        ["mul", "hi", "s32"] => lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, |a, b| {
            ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
        }),
        ["mul", "wide", kind] => {
            let from = width_of(kind)?;
            let extend = extension(kind)?;
            wide2(raw.target(2 * from)?, raw.source(1, from)?, raw.source(2, from)?, move |a, b| {
                extend(a).wrapping_mul(extend(b))
            })
        }
        ["mad", "lo", "s32" | "u32"] => {
            lanes3(raw.target(4)?, [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?], |a, b, d| {
                a.wrapping_mul(b).wrapping_add(d)
            })
        }
        ["mad", "lo", "s64" | "u64"] => {
            wide3(raw.target(8)?, [raw.source(1, 8)?, raw.source(2, 8)?, raw.source(3, 8)?], |a, b, d| {
                a.wrapping_mul(b).wrapping_add(d)
            })
        }
        ["mad", "wide", kind @ ("s32" | "u32")] => {
            let extend = extension(kind)?;
            wide3(raw.target(8)?, [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 8)?], move |a, b, d| {
                extend(a).wrapping_mul(extend(b)).wrapping_add(d)
            })
        }
        ["div" | "rem", kind] if is_integer(kind) => divide(raw, raw.parts[0] == "rem", kind)?,
        ["min", kind] if is_integer(kind) => ordered(raw, kind, Ordering::Less)?,
        ["max", kind] if is_integer(kind) => ordered(raw, kind, Ordering::Greater)?,
        ["max", "u16x2"] => lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, |a, b| {
            (a & 0xffff).max(b & 0xffff) | (a >> 16).max(b >> 16) << 16
        }),
        ["min", "u16x2"] => lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, |a, b| {
            (a & 0xffff).min(b & 0xffff) | (a >> 16).min(b >> 16) << 16
        }),
        ["shl", kind @ ("b16" | "b32" | "b64")] => {
            shift(raw, kind, |a, by, bits| if by >= bits { 0 } else { a << by })?
        }
        ["shr", kind @ ("b16" | "b32" | "b64" | "u16" | "u32" | "u64")] => {
            shift(raw, kind, |a, by, bits| if by >= bits { 0 } else { a >> by })?
        }
        ["shr", kind @ ("s16" | "s32" | "s64")] => {
            let extend = extension(kind)?;
            shift(raw, kind, move |a, by, _| (extend(a) as i64 >> by.min(63)) as u64)?
        }
        ["shf", direction @ ("l" | "r"), mode @ ("wrap" | "clamp"), "b32"] => {
            let (left, wraps) = (direction == "l", mode == "wrap");
            lanes3(raw.target(4)?, [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?], move |low, high, by| {
                let (both, by) = (u64::from(high) << 32 | u64::from(low), if wraps { by & 31 } else { by.min(32) });
                if left { (both << by >> 32) as u32 } else { (both >> by) as u32 }
            })
        }
        ["lop3", "b32"] => {
            raw.expect(5)?;
            let table = raw.operand(4)?.value()?;
            lanes3(raw.target(4)?, [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?], move |a, b, d| {
                (0..8u32).filter(|row| table >> row & 1 == 1).fold(0, |result, row| {
                    let side = |x: u32, bit: u32| if row >> bit & 1 == 1 { x } else { !x };
                    result | side(a, 2) & side(b, 1) & side(d, 0)
                })
            })
        }
        ["popc", "b32"] => lanes1(raw.target(4)?, raw.source(1, 4)?, u32::count_ones),
        ["clz", "b32"] => lanes1(raw.target(4)?, raw.source(1, 4)?, u32::leading_zeros),
        ["brev", "b32"] => lanes1(raw.target(4)?, raw.source(1, 4)?, u32::reverse_bits),
        _ => return Ok(None),
    }))
}

fn is_integer(kind: &str) -> bool {
    matches!(kind, "u16" | "s16" | "u32" | "s32" | "u64" | "s64")
}

fn width_of(kind: &str) -> Result<usize, String> {
    width(kind).ok_or_else(|| format!("{kind} is not a type"))
}

/// Widens a value of a type to 64 bits.
fn extension(kind: &str) -> Result<fn(u64) -> u64, String> {
    Ok(match kind {
        "s16" => |a| a as i16 as u64,
        "s32" => |a| a as i32 as u64,
        "u16" | "b16" => |a| a & 0xffff,
        "u32" | "b32" => |a| a & 0xffff_ffff,
        "s64" | "u64" | "b64" => |a| a,
        _ => return Err(format!("{kind} is not an integer")),
    })
}

/// An operation whose low bits depend on low bits only.
fn binary(raw: &Raw<'_>, kind: &str, f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Result<Execute, String> {
    raw.expect(3)?;
    let bytes = width_of(kind)?;
    let (to, a, b) = (raw.target(bytes)?, raw.source(1, bytes)?, raw.source(2, bytes)?);
    Ok(match bytes {
        8 => wide2(to, a, b, f),
        _ => lanes2(to, a, b, move |a, b| f(u64::from(a), u64::from(b)) as u32),
    })
}

/// Minimum or maximum.
fn ordered(raw: &Raw<'_>, kind: &str, wanted: Ordering) -> Result<Execute, String> {
    raw.expect(3)?;
    let (bytes, extend, signed) = (width_of(kind)?, extension(kind)?, kind.starts_with('s'));
    Ok(wide2(raw.target(bytes)?, raw.source(1, bytes)?, raw.source(2, bytes)?, move |a, b| {
        if order(extend(a), extend(b), signed) == wanted { a } else { b }
    }))
}

fn order(a: u64, b: u64, signed: bool) -> Ordering {
    if signed { (a as i64).cmp(&(b as i64)) } else { a.cmp(&b) }
}

/// A shift by a 32-bit amount.
fn shift(
    raw: &Raw<'_>,
    kind: &str,
    f: impl Fn(u64, u32, u32) -> u64 + Send + Sync + 'static,
) -> Result<Execute, String> {
    raw.expect(3)?;
    let bytes = width_of(kind)?;
    let bits = 8 * bytes as u32;
    let (to, a, by) = (raw.target(bytes)?, raw.source(1, bytes)?, raw.source(2, 4)?);
    Ok(wide2(to, a, by, move |a, by| f(a, by as u32, bits)))
}

fn divide(raw: &Raw<'_>, remainder: bool, kind: &str) -> Result<Execute, String> {
    raw.expect(3)?;
    let (bytes, extend, signed) = (width_of(kind)?, extension(kind)?, kind.starts_with('s'));
    let (to, a, b) = (raw.target(bytes)?, raw.source(1, bytes)?, raw.source(2, bytes)?);
    Ok(Box::new(move |c| {
        let (a, b) = (a.u64s(c).map(extend), b.u64s(c).map(extend));
        if let Some(lane) = c.active().find(|lane| b[*lane] == 0) {
            return Err(Fault::at(lane, "division by zero"));
        }
        let mut values = [0; LANES];
        for lane in c.active() {
            let (a, b) = (a[lane], b[lane]);
            values[lane] = match (signed, remainder) {
                (true, false) => (a as i64).wrapping_div(b as i64) as u64,
                (true, true) => (a as i64).wrapping_rem(b as i64) as u64,
                (false, false) => a / b,
                (false, true) => a % b,
            };
        }
        c.set64(to, values);
        Ok(Flow::Next)
    }))
}

/// `and.pred` and its like.
fn predicate_logic(raw: &Raw<'_>) -> Decoded {
    let f: fn(u32, u32) -> u32 = match raw.parts[..] {
        ["and", "pred"] => |a, b| a & b,
        ["or", "pred"] => |a, b| a | b,
        ["xor", "pred"] => |a, b| a ^ b,
        ["not", "pred"] => |a, _| !a,
        _ => return Ok(None),
    };
    let (to, a) = (raw.operand(0)?.predicate_target()?, raw.operand(1)?.predicate()?);
    let b = raw.operand(raw.operands.len() - 1)?.predicate()?;
    Ok(Some(Box::new(move |c| {
        let mask = f(a.mask(c), b.mask(c));
        c.set_predicate(to, mask);
        Ok(Flow::Next)
    })))
}

/// `setp`: the mask of lanes for which the comparison holds.
fn compare(raw: &Raw<'_>, comparison: &str, join: Option<&str>, kind: &str) -> Decoded {
    raw.expect(if join.is_some() { 4 } else { 3 })?;
    let to = raw.operand(0)?.predicate_target()?;
    let holds = comparer(raw, comparison, kind)?;
    let with = join.map(|join| Ok::<_, String>((join.to_owned(), raw.operand(3)?.predicate()?))).transpose()?;
    Ok(Some(Box::new(move |c| {
        let mut mask = holds(c);
        match &with {
            None => {}
            Some((join, other)) => {
                let other = other.mask(c);
                mask = match join.as_str() {
                    "and" => mask & other,
                    "or" => mask | other,
                    _ => mask ^ other,
                };
            }
        }
        c.set_predicate(to, mask);
        Ok(Flow::Next)
    })))
}

type Compare = Box<dyn Fn(&Context<'_>) -> u32 + Send + Sync>;

fn comparer(raw: &Raw<'_>, comparison: &str, kind: &str) -> Result<Compare, String> {
    if kind == "f32" {
        let (a, b) = (raw.source(1, 4)?, raw.source(2, 4)?);
        let test = float_test(comparison)?;
        return Ok(Box::new(move |c| {
            let (a, b) = (a.f32s(c), b.f32s(c));
            mask(|lane| test(a[lane].partial_cmp(&b[lane])))
        }));
    }
    let (bytes, extend, signed) = (width_of(kind)?, extension(kind)?, kind.starts_with('s'));
    let (a, b): (Source, Source) = (raw.source(1, bytes)?, raw.source(2, bytes)?);
    let test: fn(Ordering) -> bool = match comparison {
        "eq" => Ordering::is_eq,
        "ne" => Ordering::is_ne,
        "lt" | "lo" => Ordering::is_lt,
        "le" | "ls" => Ordering::is_le,
        "gt" | "hi" => Ordering::is_gt,
        "ge" | "hs" => Ordering::is_ge,
        _ => return Err(format!("comparison {comparison}")),
    };
    Ok(Box::new(move |c| {
        let (a, b) = (a.u64s(c), b.u64s(c));
        mask(|lane| test(order(extend(a[lane]), extend(b[lane]), signed)))
    }))
}

fn float_test(comparison: &str) -> Result<fn(Option<Ordering>) -> bool, String> {
    Ok(match comparison {
        "eq" => |order| order.is_some_and(Ordering::is_eq),
        "ne" => |order| order.is_some_and(Ordering::is_ne),
        "lt" => |order| order.is_some_and(Ordering::is_lt),
        "le" => |order| order.is_some_and(Ordering::is_le),
        "gt" => |order| order.is_some_and(Ordering::is_gt),
        "ge" => |order| order.is_some_and(Ordering::is_ge),
        "equ" => |order| order.is_none_or(Ordering::is_eq),
        "neu" => |order| order.is_none_or(Ordering::is_ne),
        "ltu" => |order| order.is_none_or(Ordering::is_lt),
        "leu" => |order| order.is_none_or(Ordering::is_le),
        "gtu" => |order| order.is_none_or(Ordering::is_gt),
        "geu" => |order| order.is_none_or(Ordering::is_ge),
        "num" => |order| order.is_some(),
        "nan" => |order| order.is_none(),
        _ => return Err(format!("comparison {comparison}")),
    })
}

fn mask(holds: impl Fn(usize) -> bool) -> u32 {
    (0..LANES).fold(0, |mask, lane| mask | u32::from(holds(lane)) << lane)
}
