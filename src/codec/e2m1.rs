//! E2M1 codes, two per byte with the even element in the low nibble, under E4M3 scales.

use super::e4m3::finite_amax;
use super::tables::{E2M1, E4M3};

/// Largest E2M1 value.
const LARGEST: f32 = 6.0;
/// E4M3 NaN: the scale of a group with an infinite or NaN value.
const NAN_SCALE: u8 = 0x7f;
/// Smallest positive E4M3 value, 2^-9.
const SMALLEST_SCALE: f32 = 1.0 / 512.0;

/// Scale at least 2^-9; values are divided by it. Returns the scale's code.
pub(super) fn quantise_floored(group: &[f32], codes: &mut [u8]) -> u8 {
    quantise(group, codes, |amax| (amax / LARGEST).max(SMALLEST_SCALE), |x, scale| x / scale)
}

/// Scale possibly zero; values are multiplied by its reciprocal, or by zero. Returns the scale's code.
pub(super) fn quantise_nvfp4(group: &[f32], codes: &mut [u8]) -> u8 {
    let reciprocal = |scale: f32| if scale == 0.0 { 0.0 } else { 1.0 / scale };
    quantise(group, codes, |amax| amax / LARGEST, |x, scale| x * reciprocal(scale))
}

fn quantise(group: &[f32], codes: &mut [u8], scale_of: impl Fn(f32) -> f32, scaled: impl Fn(f32, f32) -> f32) -> u8 {
    let Some(amax) = finite_amax(group) else {
        codes.fill(0);
        return NAN_SCALE;
    };
    let scale_code = E4M3.code(scale_of(amax));
    let scale = E4M3.value(scale_code);
    let table = &*E2M1;
    for (byte, pair) in codes.iter_mut().zip(group.chunks_exact(2)) {
        *byte = table.code(scaled(pair[0], scale)) | table.code(scaled(pair[1], scale)) << 4;
    }
    scale_code
}

/// Codes times scale.
pub(super) fn dequantise(codes: &[u8], scale: f32, out: &mut [f32]) {
    let table = &*E2M1;
    for (pair, byte) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = table.value(byte & 0xf) * scale;
        pair[1] = table.value(byte >> 4) * scale;
    }
}
