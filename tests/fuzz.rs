//! Arbitrary shapes, strides, bytes and indices: every call answers or refuses, none panics or reads out of bounds.

use ndarray::{Array1, Array2, Array3};
use proptest::prelude::*;
use sparse_mla::half::bf16;
use sparse_mla::{
    CacheView, CacheViewMut, DecodeInputs, DecodeOutputs, DecodeRequest, FAMILY_TABLE, FamilySpec, Geometry,
    append_kv_cache, decode, explain_decode, geometry_of_shape, unpack_kv_cache,
};

fn any_spec() -> impl Strategy<Value = &'static FamilySpec> {
    (0..FAMILY_TABLE.len()).prop_map(|index| &FAMILY_TABLE[index])
}

/// Sizes near the sensible ones, and absurd ones.
fn any_size() -> impl Strategy<Value = i64> {
    prop_oneof![4 => 0i64..5000, 2 => (0i64..300).prop_map(|n| n * 16), 1 => any::<i64>(), 1 => Just(i64::MAX)]
}

fn any_geometry() -> impl Strategy<Value = Geometry> {
    (prop::option::of(prop_oneof![1i64..5, any_size()]), prop::option::of(any_size()), prop::option::of(any_size()))
        .prop_map(|(page_block_size, page_stride, row_stride)| Geometry { page_block_size, page_stride, row_stride })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
    ))]

    #[test]
    fn shapes(spec in any_spec(), shape in prop::collection::vec(0usize..1300, 0..6), dense: bool,
              strides in prop::collection::vec(any_size(), 6)) {
        let mut strides: Vec<isize> = strides.iter().map(|stride| *stride as isize).take(shape.len()).collect();
        if dense {
            let mut step = 1;
            for (stride, length) in strides.iter_mut().zip(&shape).rev() {
                *stride = step;
                step *= *length as isize;
            }
        }
        if let Ok((pages, geometry)) = geometry_of_shape(spec, "kv_cache", &shape, &strides) {
            prop_assert!(CacheView::new(spec, geometry, pages, &[0; 64], 1.0).is_err() || pages == 0);
        }
    }

    #[test]
    fn caches(spec in any_spec(), geometry in any_geometry(), pages in prop_oneof![0usize..4, any::<usize>()],
              mut bytes in prop::collection::vec(any::<u8>(), 0..20_000), indices in prop::collection::vec(any::<i32>(), 0..8),
              near in prop::collection::vec(-2i32..12, 0..8), length: i32, sink: f32, scale: f32) {
        let row: Vec<i32> = indices.into_iter().chain(near).collect();
        if let Ok(view) = CacheView::new(spec, geometry, pages, &bytes, 1.0) {
            prop_assert!(view.num_slots() < 20_000);
            let mut values = Array2::zeros((view.num_slots() as usize, spec.d_qk()));
            unpack_kv_cache(&view, values.view_mut()).unwrap();
            let q = Array3::from_elem((1, 2, spec.d_qk()), bf16::from_f32(0.5));
            let ids = Array2::from_shape_vec((1, row.len()), row.clone()).unwrap();
            let (lengths, sinks) = (Array1::from_elem(1, length), Array1::from_elem(2, sink));
            let mut inputs = DecodeInputs::new(q.view(), view, ids.view(), scale);
            inputs.topk_length = Some(lengths.view());
            inputs.attn_sink = Some(sinks.view());
            let mut out = Array3::<f32>::zeros((1, 2, spec.d_v));
            let supported = explain_decode(&inputs.request()).supported() && scale.is_finite();
            let result = decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: None });
            prop_assert_eq!(result.is_ok(), supported);
        }
        let num_slots = row.len();
        if let Ok(view) = CacheViewMut::new(spec, geometry, pages, &mut bytes, 1.0) {
            let latent = Array2::from_elem((num_slots, spec.d_qk()), f32::from_bits(length as u32));
            let slots: Vec<i64> = row.iter().map(|slot| i64::from(*slot)).collect();
            append_kv_cache(view, latent.view(), &slots).unwrap();
        }
    }

    #[test]
    fn requests(spec in any_spec(), num_heads in any_size(), topk in any_size(), num_tokens in any_size(),
                geometry in any_geometry(), extra_topk in any_size(), extra in prop::option::of(any_geometry()),
                extra_kv_fp4: bool, capability in prop::option::of((any_size(), any_size()))) {
        let request = DecodeRequest {
            kv_cache_format: spec.format, num_tokens, geometry, extra_topk, extra_geometry: extra, extra_kv_fp4,
            compute_capability: capability,
            ..DecodeRequest::new(spec.family, num_heads, topk)
        };
        let answer = explain_decode(&request);
        prop_assert_eq!(answer.supported(), answer.reasons.is_empty());
        prop_assert_eq!(answer.kernel.is_some(), answer.supported());
    }
}
