//! Quantisation and dequantisation of one token's record, one file per kind of code.

mod e2m1;
mod e4m3;
mod tables;

use half::bf16;

use crate::Element;
use crate::family::{RowFormat, ScaleRule};
use crate::layout::Record;
use crate::rope::RowRotation;

/// Buffers of a row's quantisation, reused from row to row.
#[derive(Debug, Clone, Default)]
pub(crate) struct RowWriter {
    values: Vec<f32>,
    pub record: Record<Vec<u8>>,
}

impl RowWriter {
    pub fn new(row: &RowFormat) -> Self {
        Self {
            values: vec![0.0; row.quantised_dims],
            record: Record {
                codes: vec![0; row.code_bytes()],
                scales: vec![0; row.scale_bytes()], // pad bytes stay zero
                rope: vec![0; row.rope_bytes()],
            },
        }
    }

    /// Quantises one latent of `d_qk` elements into `record`.
    pub fn quantise<T: Element>(
        &mut self,
        row: &RowFormat,
        latent: &[T],
        rotation: Option<RowRotation<'_>>,
        kv_global_scale: f32,
    ) {
        let (quantised, rope) = latent.split_at(row.quantised_dims);
        for (value, element) in self.values.iter_mut().zip(quantised) {
            *value = element.to_f32();
        }
        match rotation {
            Some(rotation) => rotation.apply(|lane| rope[lane].to_f32(), &mut self.record.rope),
            None => {
                for (bytes, element) in self.record.rope.chunks_exact_mut(2).zip(rope) {
                    bytes.copy_from_slice(&element.to_bf16_bits().to_le_bytes());
                }
            }
        }
        self.quantise_values(row, kv_global_scale);
    }

    /// Quantises values into `record`, beside the bits of RoPE lanes.
    pub fn requantise(&mut self, row: &RowFormat, values: &[f32], rope: &[u8], kv_global_scale: f32) {
        self.values.copy_from_slice(values);
        self.record.rope.copy_from_slice(rope);
        self.quantise_values(row, kv_global_scale);
    }

    /// Quantises `values` into the codes and scales of `record`.
    fn quantise_values(&mut self, row: &RowFormat, kv_global_scale: f32) {
        if let ScaleRule::E4m3Nvfp4 { global: true } = row.scale {
            self.values.iter_mut().for_each(|value| *value /= kv_global_scale);
        }
        let codes_per_group = row.code_bytes() / row.num_scales();
        let groups = self.values.chunks_exact_mut(row.group);
        let codes = self.record.codes.chunks_exact_mut(codes_per_group);
        let scales = self.record.scales.chunks_exact_mut(row.scale.bytes());
        for ((group, codes), scale) in groups.zip(codes).zip(scales) {
            match row.scale {
                ScaleRule::Ue8m0 => scale[0] = e4m3::quantise_pow2(group, codes),
                ScaleRule::Pow2Fp32 => {
                    let exponent = e4m3::quantise_pow2(group, codes);
                    scale.copy_from_slice(&e4m3::fp32_of_ue8m0(exponent).to_le_bytes());
                }
                ScaleRule::ArbitraryFp32 => {
                    scale.copy_from_slice(&e4m3::quantise_arbitrary(group, codes).to_le_bytes());
                }
                ScaleRule::E4m3Floored => scale[0] = e2m1::quantise_floored(group, codes),
                ScaleRule::E4m3Nvfp4 { .. } => scale[0] = e2m1::quantise_nvfp4(group, codes),
            }
        }
    }
}

/// Dequantises one record into `out[..d_qk]`.
pub(crate) fn dequantise(row: &RowFormat, record: &Record<&[u8]>, kv_global_scale: f32, out: &mut [f32]) {
    let (quantised, rope) = out.split_at_mut(row.quantised_dims);
    let codes_per_group = row.code_bytes() / row.num_scales();
    let groups = quantised.chunks_exact_mut(row.group);
    let codes = record.codes.chunks_exact(codes_per_group);
    let scales = record.scales.chunks_exact(row.scale.bytes());
    for ((group, codes), scale) in groups.zip(codes).zip(scales) {
        match row.scale {
            ScaleRule::Ue8m0 => e4m3::dequantise(codes, e4m3::value_of_ue8m0(scale[0]), group),
            ScaleRule::Pow2Fp32 | ScaleRule::ArbitraryFp32 => {
                e4m3::dequantise(codes, f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]), group);
            }
            ScaleRule::E4m3Floored | ScaleRule::E4m3Nvfp4 { global: false } => {
                e2m1::dequantise(codes, tables::E4M3.value(scale[0]), group);
            }
            ScaleRule::E4m3Nvfp4 { global: true } => {
                e2m1::dequantise(codes, tables::E4M3.value(scale[0]), group);
                group.iter_mut().for_each(|value| *value *= kv_global_scale);
            }
        }
    }
    for (value, bytes) in rope.iter_mut().zip(record.rope.chunks_exact(2)) {
        *value = Element::to_f32(bf16::from_le_bytes([bytes[0], bytes[1]]));
    }
}
