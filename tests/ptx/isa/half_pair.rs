//! Arithmetic on pairs of f16 or bf16, each result rounded once.

use sparse_mla::half::{bf16, f16};

use super::{Decoded, Raw, lanes2};

pub fn decode(raw: &Raw<'_>) -> Decoded {
    let (operation, kind) = match raw.parts[..] {
        [operation @ ("add" | "sub" | "mul"), kind @ ("f16x2" | "bf16x2")] => (operation, kind),
        [operation @ ("add" | "sub" | "mul"), "rn", kind @ ("f16x2" | "bf16x2")] => (operation, kind),
        [operation @ ("min" | "max"), kind @ ("f16x2" | "bf16x2")] => (operation, kind),
        _ => return Ok(None),
    };
    raw.expect(3)?;
    // Sums and products of two of these are exact in f64.
    let compute: fn(f64, f64) -> f64 = match operation {
        "add" => |a, b| a + b,
        "sub" => |a, b| a - b,
        "mul" => |a, b| a * b,
        "min" => |a, b| -f64::from(super::float::maximum(-a as f32, -b as f32)),
        _ => |a, b| f64::from(super::float::maximum(a as f32, b as f32)),
    };
    let is_f16 = kind == "f16x2";
    let read = move |bits: u32| {
        if is_f16 { f16::from_bits(bits as u16).to_f64() } else { bf16::from_bits(bits as u16).to_f64() }
    };
    let round = move |x: f64| u32::from(if is_f16 { f16_of(x) } else { bf16_of(x) });
    Ok(Some(lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, move |a, b| {
        let low = round(compute(read(a & 0xffff), read(b & 0xffff)));
        let high = round(compute(read(a >> 16), read(b >> 16)));
        high << 16 | low
    })))
}

/// Bits of the nearest f16; NaN is the canonical one.
pub fn f16_of(x: f64) -> u16 {
    if x.is_nan() { 0x7fff } else { f16::from_f64(x).to_bits() }
}

/// Bits of the nearest bf16; NaN is the canonical one.
pub fn bf16_of(x: f64) -> u16 {
    if x.is_nan() { 0x7fff } else { bf16::from_f64(x).to_bits() }
}
