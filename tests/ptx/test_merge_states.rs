//! `merge_states` against the CPU, through the launch that the driver gets.

use ndarray::{Array1, Array2};
use sparse_mla::cuda::{MergeOnDevice, OutType, StateOnDevice, merge_launch};
use sparse_mla::half::{bf16, f16};
use sparse_mla::{Element, LseBase, PartialState, merge_states};

use crate::common::Lcg;
use crate::global::Global;
use crate::placed::Memory;
use crate::stand_in::{COMMITTED, run_launches};

const ROWS: usize = 9;

/// Log-sum-exps with every combination of a side that is absent, infinite or NaN.
fn lse(side: usize) -> Array1<f32> {
    let special = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
    Array1::from_shape_fn(ROWS, |row| match (row % 4, side) {
        (1, 0) | (2, 1) => special[row / 4],
        (3, _) => special[row / 4 % 2],
        _ => 3.0 * row as f32 - if side == 0 { 5.0 } else { 17.0 },
    })
}

fn same(got: f32, want: f32, bound: f32) -> bool {
    got == want || got.is_nan() && want.is_nan() || (got - want).abs() <= bound * want.abs().max(1e-3)
}

/// `gap` elements between rows, `step` from value to value.
fn check<T: Element>(
    out_type: OutType,
    bytes_of: fn(T) -> Vec<u8>,
    value: fn(&[u8]) -> f32,
    d_v: usize,
    gap: usize,
    step: usize,
) {
    for lse_base in [LseBase::Two, LseBase::E] {
        let mut random = Lcg(7);
        let mut side = |index| {
            let out = Array2::from_shape_fn((ROWS, d_v), |_| T::from_f32(random.normal()));
            (out, lse(index))
        };
        let (a, b) = (side(0), side(1));
        let (mut out, mut lse) = (Array2::from_elem((ROWS, d_v), T::from_f32(0.0)), Array1::zeros(ROWS));
        let states = [&a, &b].map(|(out, lse)| PartialState { out: out.view(), lse: lse.view() });
        merge_states(&states[0], &states[1], lse_base, &mut out.view_mut(), &mut lse.view_mut()).unwrap();
        let stride = d_v * step + gap;
        let size = bytes_of(T::from_f32(0.0)).len();
        let length = ((ROWS - 1) * stride + (d_v - 1) * step + 1) * size;
        let outputs = crate::SCHEDULES.map(|schedule| {
            let mut global = Global::default();
            let mut input = |(out, lse): &(Array2<T>, Array1<f32>)| {
                let mut bytes = vec![0xa5; length];
                for ((row, dim), x) in out.indexed_iter() {
                    bytes[(row * stride + dim * step) * size..][..size].copy_from_slice(&bytes_of(*x));
                }
                let is_value = |at: usize| (at / size % stride).is_multiple_of(step) && at / size % stride < d_v * step;
                let lse = lse.iter().flat_map(|x| x.to_le_bytes()).collect();
                StateOnDevice {
                    out: global.place("out", bytes, &is_value, 0),
                    out_strides: [stride as i64, step as i64],
                    lse: global.place("lse", lse, &|_| true, 4),
                    lse_stride: 1,
                }
            };
            let (a, b) = (input(&a), input(&b));
            let merged = StateOnDevice {
                out: global.place_output("out", length, 0),
                lse: global.place_output("lse", ROWS * 4, 4),
                ..a
            };
            let merge = MergeOnDevice { a, b, merged, num_rows: ROWS, d_v, out_type, lse_base };
            let launch = merge_launch(&merge).unwrap();
            run_launches(&COMMITTED, std::iter::once(launch), &mut global, schedule)
                .unwrap_or_else(|why| panic!("{why}"));
            (global.fetch(merged.out, length), global.fetch(merged.lse, ROWS * 4))
        });
        assert!(outputs.iter().all(|output| *output == outputs[0]), "schedules differ");
        let ((got, written), (got_lse, _)) = &outputs[0];
        assert_eq!(written.iter().filter(|written| **written).count(), ROWS * d_v * size, "bytes in gaps, or not all");
        let rounding = match out_type {
            OutType::F32 => 2e-6,
            OutType::F16 => 2f32.powi(-10),
            OutType::Bf16 => 2f32.powi(-7),
        };
        for ((row, dim), want) in out.indexed_iter() {
            let got = value(&got[(row * stride + dim * step) * size..][..size]);
            assert!(same(got, want.to_f32(), rounding), "[{row}, {dim}]: {got} {}", want.to_f32());
        }
        for (row, want) in lse.iter().enumerate() {
            let got = f32::from_le_bytes(got_lse[4 * row..][..4].try_into().unwrap());
            assert!(same(got, *want, 1e-6), "lse [{row}]: {got} {want}");
        }
    }
}

#[test]
fn every_type_and_stride() {
    let f32_of = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let f16_of = |bytes: &[u8]| f16::from_le_bytes(bytes.try_into().unwrap()).to_f32();
    let bf16_of = |bytes: &[u8]| bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32();
    for (d_v, gap, step) in [(512, 0, 1), (64, 4, 1), (6, 1, 1), (5, 3, 2)] {
        check::<f32>(OutType::F32, |x| x.to_le_bytes().to_vec(), f32_of, d_v, gap, step);
        check::<f16>(OutType::F16, |x| x.to_le_bytes().to_vec(), f16_of, d_v, gap, step);
        check::<bf16>(OutType::Bf16, |x| x.to_le_bytes().to_vec(), bf16_of, d_v, gap, step);
    }
}
