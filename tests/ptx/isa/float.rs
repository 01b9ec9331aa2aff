//! f32 and f64 arithmetic.
//!
//! Rounded instructions are exact. Approximate ones are computed in f64 and rounded once; hardware's errors, from the
//! PTX manual: ex2 2^-22 relative, lg2 2^-22 absolute (2^-22 relative outside [0.5, 2]), rcp and div.approx 2^-23
//! and 2 ulp, rsqrt 2^-22.9, sqrt.approx 2^-23, tanh 2^-11 relative.

use super::{Decoded, Execute, Raw, lanes1, lanes2, lanes3, wide1, wide2};

pub fn decode(raw: &Raw<'_>) -> Decoded {
    Ok(Some(match raw.parts[..] {
        ["add", "f32"] | ["add", "rn", "f32"] => binary(raw, |a, b| a + b)?,
        ["sub", "f32"] | ["sub", "rn", "f32"] => binary(raw, |a, b| a - b)?,
        ["mul", "f32"] | ["mul", "rn", "f32"] => binary(raw, |a, b| a * b)?,
        ["add", "ftz", "f32"] | ["add", "rn", "ftz", "f32"] => binary(raw, |a, b| flush(flush(a) + flush(b)))?,
        ["sub", "ftz", "f32"] | ["sub", "rn", "ftz", "f32"] => binary(raw, |a, b| flush(flush(a) - flush(b)))?,
        ["mul", "ftz", "f32"] | ["mul", "rn", "ftz", "f32"] => binary(raw, |a, b| flush(flush(a) * flush(b)))?,
        ["fma", "rn", "f32"] => ternary(raw, f32::mul_add)?,
        ["fma", "rn", "ftz", "f32"] => ternary(raw, |a, b, c| flush(flush(a).mul_add(flush(b), flush(c))))?,
        ["div", "rn", "f32"] => binary(raw, |a, b| a / b)?,
        ["div", "full" | "approx", "f32"] => binary(raw, |a, b| (f64::from(a) / f64::from(b)) as f32)?,
        ["rcp", "rn", "f32"] => unary(raw, |a| 1.0 / a)?,
        ["rcp", "approx", "ftz", "f32"] => unary(raw, |a| flush((1.0 / f64::from(flush(a))) as f32))?,
        ["sqrt", "rn", "f32"] => unary(raw, f32::sqrt)?,
        ["rsqrt", "approx", "ftz", "f32"] => unary(raw, |a| flush((1.0 / f64::from(flush(a)).sqrt()) as f32))?,
        ["ex2", "approx", "ftz", "f32"] => unary(raw, |a| flush(f64::from(flush(a)).exp2() as f32))?,
        ["ex2", "approx", "f32"] => unary(raw, |a| f64::from(a).exp2() as f32)?,
        ["lg2", "approx", "f32"] => unary(raw, |a| f64::from(a).log2() as f32)?,
        ["lg2", "approx", "ftz", "f32"] => unary(raw, |a| flush(f64::from(flush(a)).log2() as f32))?,
        ["tanh", "approx", "f32"] => unary(raw, |a| f64::from(a).tanh() as f32)?,
        ["neg", "f32"] => unary(raw, |a| -a)?,
        ["abs", "f32"] => unary(raw, f32::abs)?,
        // The sign of the first operand on the second.
        ["copysign", "f32"] => binary(raw, |a, b| b.copysign(a))?,
        ["max", "f32"] => binary(raw, maximum)?,
        ["min", "f32"] => binary(raw, |a, b| -maximum(-a, -b))?,
        ["max", "NaN", "f32"] => binary(raw, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { maximum(a, b) })?,
        ["add", "f64"] | ["add", "rn", "f64"] => double(raw, |a, b| a + b)?,
        ["sub", "f64"] | ["sub", "rn", "f64"] => double(raw, |a, b| a - b)?,
        ["mul", "f64"] | ["mul", "rn", "f64"] => double(raw, |a, b| a * b)?,
        ["div", "rn", "f64"] => double(raw, |a, b| a / b)?,
        ["neg", "f64"] => wide1(raw.target(8)?, raw.source(1, 8)?, |a| (-f64::from_bits(a)).to_bits()),
        _ => return Ok(None),
    }))
}

/// A subnormal becomes a zero of its sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// The other operand beside a NaN; +0 above -0.
pub fn maximum(a: f32, b: f32) -> f32 {
    if a == b && a == 0.0 { f32::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
}

fn unary(raw: &Raw<'_>, f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Result<Execute, String> {
    raw.expect(2)?;
    Ok(lanes1(raw.target(4)?, raw.source(1, 4)?, move |a| f(f32::from_bits(a)).to_bits()))
}

fn binary(raw: &Raw<'_>, f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static) -> Result<Execute, String> {
    raw.expect(3)?;
    Ok(lanes2(raw.target(4)?, raw.source(1, 4)?, raw.source(2, 4)?, move |a, b| {
        f(f32::from_bits(a), f32::from_bits(b)).to_bits()
    }))
}

fn ternary(raw: &Raw<'_>, f: impl Fn(f32, f32, f32) -> f32 + Send + Sync + 'static) -> Result<Execute, String> {
    raw.expect(4)?;
    Ok(lanes3(raw.target(4)?, [raw.source(1, 4)?, raw.source(2, 4)?, raw.source(3, 4)?], move |a, b, c| {
        f(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)).to_bits()
    }))
}

fn double(raw: &Raw<'_>, f: impl Fn(f64, f64) -> f64 + Send + Sync + 'static) -> Result<Execute, String> {
    raw.expect(3)?;
    Ok(wide2(raw.target(8)?, raw.source(1, 8)?, raw.source(2, 8)?, move |a, b| {
        f(f64::from_bits(a), f64::from_bits(b)).to_bits()
    }))
}
