//! E4M3 codes under a power-of-two or an arbitrary FP32 scale.

use super::tables::E4M3;

/// Largest E4M3 value.
const LARGEST: f32 = 448.0;
/// Smallest maximum, and smallest ratio, that a scale is made from.
const FLOOR: f32 = 1e-4;
/// E4M3 NaN, which also stands for every infinity.
const NAN_CODE: u8 = 0x7f;
/// UE8M0 NaN.
const NAN_EXPONENT: u8 = 0xff;

/// Quantises a group, which is left scaled, under the smallest power of two that holds it; returns the scale as UE8M0.
pub(super) fn quantise_pow2(group: &mut [f32], codes: &mut [u8]) -> u8 {
    let Some(amax) = finite_amax(group) else {
        write_non_finite(group, codes);
        return NAN_EXPONENT;
    };
    let bits = (amax.max(FLOOR) / LARGEST).max(FLOOR).to_bits();
    // ceil(log2) from the bits: any mantissa bit bumps the exponent.
    let exponent = (bits >> 23) + u32::from(bits << 9 != 0);
    // 2^-(exponent - 127); the exponent lies in [114, 247], so its mirror is a normal number too.
    let inverse = f32::from_bits((254 - exponent) << 23);
    group.iter_mut().for_each(|x| *x *= inverse);
    write(group, codes);
    exponent as u8
}

/// Quantises a group, which is left scaled, under `amax / 448`; returns the scale.
pub(super) fn quantise_arbitrary(group: &mut [f32], codes: &mut [u8]) -> f32 {
    let Some(amax) = finite_amax(group) else {
        write_non_finite(group, codes);
        return f32::from_bits(0x7fc0_0000);
    };
    let scale = amax.max(FLOOR) / LARGEST;
    group.iter_mut().for_each(|x| *x /= scale);
    write(group, codes);
    scale
}

/// The FP32 number a writer stores for a UE8M0 scale.
pub(super) fn fp32_of_ue8m0(exponent: u8) -> f32 {
    if exponent == NAN_EXPONENT { f32::from_bits(0x7fc0_0000) } else { value_of_ue8m0(exponent) }
}

/// 2^(b - 127); 255 is NaN.
pub(super) fn value_of_ue8m0(exponent: u8) -> f32 {
    microfloat::f8e8m0fnu::from_bits(exponent).to_f32()
}

/// Codes times scale.
pub(super) fn dequantise(codes: &[u8], scale: f32, out: &mut [f32]) {
    let table = &*E4M3;
    for (value, code) in out.iter_mut().zip(codes) {
        *value = table.value(*code) * scale;
    }
}

/// Largest magnitude, or `None` if a value is infinite or NaN.
pub(super) fn finite_amax(group: &[f32]) -> Option<f32> {
    // Magnitudes of finite numbers order as their bits, and everything else lies above: one integer maximum.
    let bits = group.iter().map(|x| x.to_bits() & 0x7fff_ffff).fold(0, u32::max);
    (bits < f32::INFINITY.to_bits()).then(|| f32::from_bits(bits))
}

fn write(scaled: &[f32], codes: &mut [u8]) {
    let table = &*E4M3;
    for (code, x) in codes.iter_mut().zip(scaled) {
        *code = table.code(*x);
    }
}

/// A NaN makes every code NaN; infinities alone become NaN codes and leave signed zeros beside them.
fn write_non_finite(group: &[f32], codes: &mut [u8]) {
    let any_nan = group.iter().any(|x| x.is_nan());
    for (code, x) in codes.iter_mut().zip(group) {
        *code = if any_nan || x.is_infinite() { NAN_CODE } else { u8::from(x.is_sign_negative()) << 7 };
    }
}
