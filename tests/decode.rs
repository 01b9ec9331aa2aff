//! The CPU decode against the crate's float64 reference.

mod common;

use common::{Lcg, packed, primary_specs, queries, relative_l2};
use ndarray::{Array1, Array2, Array3, Axis, s};
use sparse_mla::half::{bf16, f16};
use sparse_mla::{
    CacheView, DecodeInputs, DecodeOutputs, Element, Error, ExtraCandidates, Family, FamilySpec, Geometry,
    KvCacheFormat, LseBase, PartialState, decode, merge_states, reference,
};

const PAGE_48: Geometry = Geometry { page_block_size: Some(48), page_stride: None, row_stride: None };

fn indices(num_tokens: usize, topk: usize, num_slots: u64, seed: u64) -> Array2<i32> {
    let mut random = Lcg(seed);
    // About one in eight is absent: negative or past the end.
    Array2::from_shape_fn((num_tokens, topk), |_| match random.below(16) {
        0 => -1,
        1 => (num_slots + random.below(1 << 20)) as i32,
        _ => random.below(num_slots) as i32,
    })
}

/// Decodes into f32, checks output and log-sum-exp against float64, and returns both.
fn check(inputs: &DecodeInputs<'_>, what: &str) -> (Array3<f32>, Array2<f32>) {
    let (num_tokens, num_heads, _) = inputs.q.dim();
    let mut out = Array3::<f32>::from_elem((num_tokens, num_heads, inputs.kv_cache.spec().d_v), f32::NAN);
    let mut lse = Array2::<f32>::from_elem((num_tokens, num_heads), f32::NAN);
    decode(inputs, DecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) }).unwrap();
    let (want_out, want_lse) = reference::decode(inputs).unwrap();
    let error = relative_l2(out.iter().map(|x| f64::from(*x)), want_out.iter().copied());
    assert!(error <= 2e-5, "{what}: relative error {error:e}");
    for (got, want) in lse.iter().zip(&want_lse) {
        assert!((f64::from(*got) - want).abs() <= 1e-4 || f64::from(*got) == *want, "{what}: lse {got} against {want}");
    }
    (out, lse)
}

#[test]
fn every_family_matches_float64() {
    for (seed, spec) in primary_specs().enumerate() {
        let seed = seed as u64;
        let cache = packed(spec, 700, PAGE_48, seed);
        let view = CacheView::new(spec, PAGE_48, cache.pages, &cache.bytes, 1.0).unwrap();
        for (num_tokens, num_heads, topk) in [(1, 1, 700), (3, 11, 513), (2, 128, 1100)] {
            let q = queries(num_tokens, num_heads, spec.d_qk(), seed + 10);
            let ids = indices(num_tokens, topk, view.num_slots(), seed + 20);
            let sink = Array1::from_shape_fn(num_heads, |head| head as f32 - 3.0);
            let lengths = Array1::from_shape_fn(num_tokens, |token| [i32::MAX, 200, 0][token]);
            let mut inputs = DecodeInputs::new(q.view(), view, ids.view(), 0.07);
            check(&inputs, &format!("{} {}", spec.family, spec.format));
            inputs.attn_sink = Some(sink.view());
            inputs.topk_length = Some(lengths.view());
            inputs.lse_base = LseBase::E;
            check(&inputs, &format!("{} {} with sinks and lengths", spec.family, spec.format));
        }
    }
}

#[test]
fn a_secondary_cache_joins_the_same_softmax() {
    for (family, format, extra_format) in [
        (Family::Dsv4, KvCacheFormat::Fp8, KvCacheFormat::Fp8),
        (Family::Dsv4, KvCacheFormat::Nvfp4, KvCacheFormat::Nvfp4),
        (Family::Dsv4_1, KvCacheFormat::Fp8, KvCacheFormat::Fp8),
        (Family::Dsv4_1, KvCacheFormat::Fp8, KvCacheFormat::Fp4),
        (Family::Dsv4_1Inline, KvCacheFormat::Fp8, KvCacheFormat::Fp4),
    ] {
        let (spec, extra_spec) =
            (FamilySpec::find(family, format).unwrap(), FamilySpec::find(family, extra_format).unwrap());
        let (cache, extra) = (packed(spec, 200, PAGE_48, 1), packed(extra_spec, 300, Geometry::default(), 2));
        let view = CacheView::new(spec, PAGE_48, cache.pages, &cache.bytes, 1.0).unwrap();
        let extra_view = CacheView::new(extra_spec, Geometry::default(), extra.pages, &extra.bytes, 1.0).unwrap();
        let q = queries(2, 8, spec.d_qk(), 3);
        let (ids, extra_ids) = (indices(2, 128, 200, 4), indices(2, 77, 300, 5));
        let mut inputs = DecodeInputs::new(q.view(), view, ids.view(), 0.05);
        let (alone, _) = check(&inputs, "single");
        let extra_candidates = ExtraCandidates { kv_cache: extra_view, indices: extra_ids.view(), topk_length: None };
        inputs.extra = Some(extra_candidates);
        let (joint, _) = check(&inputs, "dual");
        assert!(relative_l2(alone.iter().map(|x| f64::from(*x)), joint.iter().map(|x| f64::from(*x))) > 0.05);
    }
}

#[test]
fn absent_candidates_leave_no_trace() {
    let spec = FamilySpec::find(Family::Dsv3_2, KvCacheFormat::Fp8).unwrap();
    let cache = packed(spec, 128, Geometry::default(), 1);
    let view = CacheView::new(spec, Geometry::default(), cache.pages, &cache.bytes, 1.0).unwrap();
    let q = queries(1, 16, spec.d_qk(), 2);
    let dense = Array2::from_shape_fn((1, 100), |(_, k)| k as i32);
    let mut holes = Array2::from_elem((1, 700), -1);
    for k in 0..100 {
        holes[[0, 7 * k]] = k as i32;
        holes[[0, 7 * k + 3]] = 128 + k as i32 * 7919; // past the end
    }
    let (dense_out, dense_lse) = check(&DecodeInputs::new(q.view(), view, dense.view(), 0.1), "dense");
    let (holes_out, holes_lse) = check(&DecodeInputs::new(q.view(), view, holes.view(), 0.1), "holes");
    assert_eq!((dense_out, dense_lse), (holes_out, holes_lse));
}

#[test]
fn empty_rows_are_exact() {
    let spec = FamilySpec::find(Family::Dsv4, KvCacheFormat::Fp8).unwrap();
    let view = CacheView::new(spec, Geometry::default(), 0, &[], 1.0).unwrap();
    let q = queries(1, 3, 512, 1);
    let ids = Array2::from_elem((1, 5), 0);
    let sink = Array1::from_vec(vec![1.5, -2.0, f32::NEG_INFINITY]);
    let mut inputs = DecodeInputs::new(q.view(), view, ids.view(), 0.1);
    let (mut out, mut lse) = (Array3::from_elem((1, 3, 512), f32::NAN), Array2::from_elem((1, 3), f32::NAN));
    decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) }).unwrap();
    assert!(out.iter().all(|x| x.to_bits() == 0) && lse.iter().all(|x| *x == f32::NEG_INFINITY));
    inputs.attn_sink = Some(sink.view());
    inputs.lse_base = LseBase::E;
    decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) }).unwrap();
    assert!(out.iter().all(|x| x.to_bits() == 0));
    assert_eq!(lse.row(0).to_vec(), sink.to_vec());
}

#[test]
fn rows_do_not_depend_on_their_neighbours() {
    let spec = FamilySpec::find(Family::GlmNsa, KvCacheFormat::Fp8).unwrap();
    let cache = packed(spec, 2048, Geometry::default(), 1);
    let view = CacheView::new(spec, Geometry::default(), cache.pages, &cache.bytes, 1.0).unwrap();
    let q = queries(70, 8, spec.d_qk(), 2);
    let ids = indices(70, 1200, 2048, 3);
    let (all, all_lse) = check(&DecodeInputs::new(q.view(), view, ids.view(), 0.1), "all rows");
    for row in [0, 33, 69] {
        let inputs = DecodeInputs::new(q.slice(s![row..=row, .., ..]), view, ids.slice(s![row..=row, ..]), 0.1);
        let (one, one_lse) = check(&inputs, "one row");
        assert_eq!(one.index_axis(Axis(0), 0), all.index_axis(Axis(0), row));
        assert_eq!(one_lse.row(0), all_lse.row(row));
    }
}

#[test]
fn strided_outputs_of_every_type_leave_their_gaps_alone() {
    fn run<O: Element + PartialEq + std::fmt::Debug>(guard: f32) {
        let spec = FamilySpec::find(Family::Glm53Nope, KvCacheFormat::Fp8).unwrap();
        let cache = packed(spec, 64, Geometry::default(), 1);
        let view = CacheView::new(spec, Geometry::default(), cache.pages, &cache.bytes, 1.0).unwrap();
        let (q, ids) = (queries(2, 4, 512, 2), indices(2, 9, 64, 3));
        let inputs = DecodeInputs::new(q.view(), view, ids.view(), 0.1);
        let mut wide = Array3::from_elem((2, 7, 512), O::from_f32(guard));
        let mut lse = Array2::from_elem((2, 9), guard);
        let outputs = DecodeOutputs { out: wide.slice_mut(s![.., ..4, ..]), lse: Some(lse.slice_mut(s![.., ..4])) };
        decode(&inputs, outputs).unwrap();
        let (want, _) = check(&inputs, "dense");
        for (got, want) in wide.slice(s![.., ..4, ..]).iter().zip(&want) {
            assert_eq!(*got, O::from_f32(*want));
        }
        assert!(wide.slice(s![.., 4.., ..]).iter().all(|x| *x == O::from_f32(guard)));
        assert!(lse.slice(s![.., 4..]).iter().all(|x| *x == guard));
    }
    run::<f32>(1234.5);
    run::<bf16>(1234.5);
    run::<f16>(1234.5);
}

#[test]
fn merged_halves_equal_the_whole() {
    let spec = FamilySpec::find(Family::Dsv4, KvCacheFormat::Fp8).unwrap();
    let cache = packed(spec, 512, Geometry::default(), 1);
    let view = CacheView::new(spec, Geometry::default(), cache.pages, &cache.bytes, 1.0).unwrap();
    let (q, ids) = (queries(2, 8, 512, 2), indices(2, 300, 512, 3));
    let half = |range: std::ops::Range<usize>| {
        let ids = ids.slice(s![.., range]);
        let (out, lse) = check(&DecodeInputs::new(q.view(), view, ids, 0.1), "half");
        (out.into_shape_with_order((16, 512)).unwrap(), lse.into_shape_with_order(16).unwrap())
    };
    let ((out_a, lse_a), (out_b, lse_b)) = (half(0..120), half(120..300));
    let (mut out, mut lse) = (Array2::zeros((16, 512)), Array1::zeros(16));
    let a = PartialState { out: out_a.view(), lse: lse_a.view() };
    let b = PartialState { out: out_b.view(), lse: lse_b.view() };
    merge_states(&a, &b, LseBase::Two, &mut out.view_mut(), &mut lse.view_mut()).unwrap();
    let (whole, whole_lse) = check(&DecodeInputs::new(q.view(), view, ids.view(), 0.1), "whole");
    assert!(relative_l2(out.iter().map(|x| f64::from(*x)), whole.iter().map(|x| f64::from(*x))) < 1e-6);
    assert!(lse.iter().zip(&whole_lse).all(|(got, want)| (got - want).abs() < 1e-5));
}

#[test]
fn an_ignored_side_may_hold_anything() {
    let (a, nan) = (Array2::from_elem((2, 4), 3f32), Array2::from_elem((2, 4), f32::NAN));
    let (lse_a, lse_b) = (Array1::from_vec(vec![7.0, f32::NEG_INFINITY]), Array1::from_elem(2, f32::NEG_INFINITY));
    let (mut out, mut lse) = (Array2::from_elem((2, 4), 9f32), Array1::from_elem(2, 9f32));
    let states =
        (PartialState { out: a.view(), lse: lse_a.view() }, PartialState { out: nan.view(), lse: lse_b.view() });
    merge_states(&states.0, &states.1, LseBase::E, &mut out.view_mut(), &mut lse.view_mut()).unwrap();
    assert_eq!(out, ndarray::array![[3.0; 4], [0.0; 4]]);
    assert_eq!(lse.to_vec(), [7.0, f32::NEG_INFINITY]);
}

#[test]
fn mismatches_are_refused_by_name_and_write_nothing() {
    let spec = FamilySpec::find(Family::Dsv4, KvCacheFormat::Fp8).unwrap();
    let cache = packed(spec, 64, Geometry::default(), 1);
    let view = CacheView::new(spec, Geometry::default(), cache.pages, &cache.bytes, 1.0).unwrap();
    let (q, ids) = (queries(2, 4, 512, 2), indices(2, 9, 64, 3));
    let (wide_q, short_ids, sink) = (queries(2, 4, 576, 2), indices(1, 9, 64, 3), Array1::zeros(3));
    let good = DecodeInputs::new(q.view(), view, ids.view(), 0.1);
    for (inputs, argument) in [
        (DecodeInputs { q: wide_q.view(), ..good.clone() }, "q"),
        (DecodeInputs { indices: short_ids.view(), ..good.clone() }, "indices"),
        (DecodeInputs { attn_sink: Some(sink.view()), ..good.clone() }, "attn_sink"),
        (DecodeInputs { sm_scale: f32::NAN, ..good.clone() }, "sm_scale"),
    ] {
        let mut out = Array3::from_elem((2, 4, 512), 5f32);
        let error = decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: None }).unwrap_err();
        assert!(matches!(&error, Error::Value { argument: named, .. } if named == argument), "{error}");
        assert!(out.iter().all(|x| *x == 5.0));
    }
}
