//! E2M1 codes, two per byte with the even element in the low nibble, under E4M3 scales.

use super::e4m3::finite_amax;
use super::tables::{E2M1, E4M3};

/// Largest E2M1 value.
const LARGEST: f32 = 6.0;
/// E4M3 NaN: the scale of a group with an infinite or NaN value.
const NAN_SCALE: u8 = 0x7f;
/// Smallest positive E4M3 value, 2^-9.
const SMALLEST_SCALE: f32 = 1.0 / 512.0;

/// Scale at least 2^-9; values are divided by it. Returns the scale's code; the group is left scaled.
pub(super) fn quantise_floored(group: &mut [f32], codes: &mut [u8]) -> u8 {
    quantise(
        group,
        codes,
        |amax| (amax / LARGEST).max(SMALLEST_SCALE),
        |group, scale| {
            group.iter_mut().for_each(|x| *x /= scale);
        },
    )
}

/// Scale possibly zero; values are multiplied by its reciprocal, or by zero. Returns the scale's code; the group is
/// left scaled.
pub(super) fn quantise_nvfp4(group: &mut [f32], codes: &mut [u8]) -> u8 {
    quantise(
        group,
        codes,
        |amax| amax / LARGEST,
        |group, scale| {
            let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            group.iter_mut().for_each(|x| *x *= reciprocal);
        },
    )
}

fn quantise(group: &mut [f32], codes: &mut [u8], scale_of: impl Fn(f32) -> f32, apply: impl Fn(&mut [f32], f32)) -> u8 {
    let Some(amax) = finite_amax(group) else {
        codes.fill(0);
        return NAN_SCALE;
    };
    let scale = E4M3.code(scale_of(amax));
    apply(group, E4M3.value(scale));
    let table = &*E2M1;
    for (byte, pair) in codes.iter_mut().zip(group.chunks_exact(2)) {
        *byte = table.code(pair[0]) | table.code(pair[1]) << 4;
    }
    scale
}

/// Codes times scale.
pub(super) fn dequantise(codes: &[u8], scale: f32, out: &mut [f32]) {
    let table = &*E2M1;
    for (pair, byte) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = table.value(byte & 0xf) * scale;
        pair[1] = table.value(byte >> 4) * scale;
    }
}
