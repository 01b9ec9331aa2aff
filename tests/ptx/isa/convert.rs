//! `cvt`: between integers, floats, and packed pairs of narrow floats.

use sparse_mla::half::{bf16, f16};

use super::formats::{Format, ue8m0};
use super::half_pair::{bf16_of, f16_of};
use super::{Decoded, Execute, Raw, lanes1, lanes2, wide1};
use crate::module::width;

pub fn decode(raw: &Raw<'_>) -> Decoded {
    let [first, ref rest @ ..] = raw.parts[..] else { return Ok(None) };
    if first != "cvt" {
        return Ok(None);
    }
    Ok(Some(match *rest {
        [to, from] if is_integer(to) && is_integer(from) => between_integers(raw, to, from)?,
        ["f64", "f32"] => wide1(raw.target(8)?, raw.source(1, 4)?, |a| f64::from(f32::from_bits(a as u32)).to_bits()),
        ["rn", "f32", "f64"] => {
            wide1(raw.target(4)?, raw.source(1, 8)?, |a| u64::from((f64::from_bits(a) as f32).to_bits()))
        }
        ["f32", "f16"] => lanes1(raw.target(4)?, raw.source(1, 2)?, |a| f16::from_bits(a as u16).to_f32().to_bits()),
        ["f32", "bf16"] => lanes1(raw.target(4)?, raw.source(1, 2)?, |a| bf16::from_bits(a as u16).to_f32().to_bits()),
        ["rn", "f16", "f32"] => lanes1(raw.target(2)?, raw.source(1, 4)?, f16_bits),
        ["rn", "bf16", "f32"] => lanes1(raw.target(2)?, raw.source(1, 4)?, bf16_bits),
        // The first source becomes the upper half.
        ["rn", "f16x2", "f32"] => {
            lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, |a, b| f16_bits(a) << 16 | f16_bits(b))
        }
        ["rn", "bf16x2", "f32"] => {
            lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, |a, b| bf16_bits(a) << 16 | bf16_bits(b))
        }
        ["rn", "f32", from @ ("s32" | "u32" | "s64" | "u64")] => from_integer(raw, from)?,
        [rounding @ ("rni" | "rzi" | "rmi" | "rpi"), to @ ("s32" | "u32"), "f32"] => to_integer(raw, rounding, to)?,
        ["rn", "f16x2", pair @ ("e4m3x2" | "e5m2x2")] => widen(raw, pair, 2)?,
        ["rn", "f16x2", "e2m1x2"] => widen(raw, "e2m1x2", 1)?,
        ["rn", "bf16x2", "ue8m0x2"] => {
            let format = Format::named("ue8m0").ok_or("ue8m0")?;
            lanes1(raw.target(4)?, raw.source(1, 2)?, |a| {
                let half = |code: u32| u32::from(bf16_of(f64::from(format.values[code as usize & 255])));
                half(a >> 8) << 16 | half(a)
            })
        }
        ["rn", "satfinite", pair @ ("e4m3x2" | "e5m2x2" | "e2m1x2"), "f32"] => {
            let format = Format::named(&pair[..4]).ok_or("a format")?;
            let bits = format.bits;
            lanes2(raw.target(bits as usize / 4)?, raw.source(1, 4)?, raw.source(2, 4)?, move |a, b| {
                format.nearest(f32::from_bits(a)) << bits | format.nearest(f32::from_bits(b))
            })
        }
        ["rn", "satfinite", pair @ ("e4m3x2" | "e5m2x2"), "f16x2"] => {
            let format = Format::named(&pair[..4]).ok_or("a format")?;
            lanes1(raw.target(2)?, raw.source(1, 4)?, move |a| {
                let code = |bits: u32| format.nearest(f16::from_bits(bits as u16).to_f32());
                code(a >> 16) << 8 | code(a & 0xffff)
            })
        }
        [rounding @ ("rp" | "rz"), "satfinite", "ue8m0x2", "f32"] => {
            let up = rounding == "rp";
            lanes2(raw.target(2)?, raw.source(1, 4)?, raw.source(2, 4)?, move |a, b| {
                ue8m0(f32::from_bits(a), up) << 8 | ue8m0(f32::from_bits(b), up)
            })
        }
        _ => return Ok(None),
    }))
}

fn f16_bits(a: u32) -> u32 {
    u32::from(f16_of(f64::from(f32::from_bits(a))))
}

fn bf16_bits(a: u32) -> u32 {
    u32::from(bf16_of(f64::from(f32::from_bits(a))))
}

fn is_integer(kind: &str) -> bool {
    matches!(kind, "u8" | "s8" | "u16" | "s16" | "u32" | "s32" | "u64" | "s64")
}

/// Cuts to the narrower of the two and extends as the source's sign says.
fn between_integers(raw: &Raw<'_>, to: &str, from: &str) -> Result<Execute, String> {
    let bits = |kind: &str| width(kind).map(|bytes| 8 * bytes as u32).ok_or("a type");
    let (kept, signed) = (bits(to)?.min(bits(from)?), from.starts_with('s') && bits(to)? > bits(from)?);
    let (target, source) = (raw.operand(0)?.any_target()?, raw.operand(1)?.any_source()?);
    Ok(wide1(target, source, move |a| {
        let unused = 64 - kept;
        if signed { ((a << unused) as i64 >> unused) as u64 } else { a << unused >> unused }
    }))
}

fn from_integer(raw: &Raw<'_>, from: &str) -> Result<Execute, String> {
    let convert: fn(u64) -> f32 = match from {
        "s32" => |a| a as i32 as f32,
        "u32" => |a| a as u32 as f32,
        "s64" => |a| a as i64 as f32,
        _ => |a| a as f32,
    };
    let source = raw.source(1, width(from).ok_or("a type")?)?;
    Ok(wide1(raw.target(4)?, source, move |a| u64::from(convert(a).to_bits())))
}

/// Rounded, then clamped to the type; NaN is 0.
fn to_integer(raw: &Raw<'_>, rounding: &str, to: &str) -> Result<Execute, String> {
    let round: fn(f32) -> f32 = match rounding {
        "rni" => f32::round_ties_even,
        "rzi" => f32::trunc,
        "rmi" => f32::floor,
        _ => f32::ceil,
    };
    let signed = to == "s32";
    Ok(lanes1(raw.target(4)?, raw.source(1, 4)?, move |a| {
        let x = round(f32::from_bits(a));
        if signed { x as i32 as u32 } else { x as u32 }
    }))
}

/// Two codes to two f16, exactly.
fn widen(raw: &Raw<'_>, pair: &str, bytes: usize) -> Result<Execute, String> {
    let format = Format::named(&pair[..4]).ok_or("a format")?;
    let halves: Vec<u32> = format.values.iter().map(|value| u32::from(f16_of(f64::from(*value)))).collect();
    let (bits, last) = (format.bits, halves.len() - 1);
    Ok(lanes1(raw.target(4)?, raw.source(1, bytes)?, move |a| {
        halves[(a >> bits) as usize & last] << 16 | halves[a as usize & last]
    }))
}
