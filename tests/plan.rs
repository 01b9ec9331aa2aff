//! Plans over a large grid: nothing launched twice, nothing left out, within every limit.

use sparse_mla::plan::{DecodePlan, DeviceFacts, KERNELS, MAX_SPLITS, split_start};
use sparse_mla::{DecodeRequest, Error, FAMILY_TABLE, FamilySpec, KvCacheFormat};

const DEVICES: [DeviceFacts; 5] = [
    device(188, 101_376, (12, 0)),
    device(170, 101_376, (12, 0)),
    device(48, 101_376, (12, 1)),
    device(132, 232_448, (9, 0)),
    device(1, 101_376, (12, 0)),
];

const fn device(multiprocessors: usize, shared_memory_per_block: usize, compute_capability: (i32, i32)) -> DeviceFacts {
    DeviceFacts { multiprocessors, shared_memory_per_block, compute_capability }
}

fn gpu_specs() -> impl Iterator<Item = &'static FamilySpec> {
    FAMILY_TABLE.iter().filter(|spec| spec.registry.is_some())
}

fn request(spec: &FamilySpec, num_tokens: i64, num_heads: i64, topk: i64, extra_topk: i64) -> DecodeRequest {
    DecodeRequest {
        num_tokens,
        extra_topk,
        kv_cache_format: spec.format,
        ..DecodeRequest::new(spec.family, num_heads, topk)
    }
}

fn every_plan(mut check: impl FnMut(&FamilySpec, &DeviceFacts, bool, &DecodePlan)) {
    for spec in gpu_specs() {
        for device in &DEVICES {
            for num_tokens in [1, 3, 16, 64, 65, 257, 8192] {
                for num_heads in [1, 7, 8, 11, 16, 17, 24, 48, 64, 80, 127, 128] {
                    for topk in [1, 31, 32, 33, 128, 513, 2051, 2176] {
                        for extra_topk in [0, 1, 512] {
                            if topk < spec.min_topk as i64 || (extra_topk > 0 && spec.secondary.is_empty()) {
                                continue;
                            }
                            for invariant in [false, true] {
                                let mut request = request(spec, num_tokens, num_heads, topk, extra_topk);
                                check(spec, device, invariant, &DecodePlan::new(&request, device, invariant).unwrap());
                                if extra_topk > 0 && spec.secondary.contains(&KvCacheFormat::Fp4) {
                                    request.extra_kv_fp4 = true;
                                    let plan = DecodePlan::new(&request, device, invariant).unwrap();
                                    assert!(plan.extra.is_some());
                                    check(spec, device, invariant, &plan);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_plan_keeps_to_the_limits() {
    every_plan(|spec, device, _, plan| {
        assert_eq!(plan.kernel.module, spec.module);
        assert!(plan.kernel.shared_bytes <= device.shared_memory_per_block);
        assert!((1..=MAX_SPLITS).contains(&plan.all_splits()));
        assert!(plan.splits >= 1);
        assert!(plan.splits <= plan.chunks(), "a split without a chunk is an empty CTA: {plan:?}");
        if let Some(extra) = plan.extra {
            assert!(extra.kernel.shared_bytes <= device.shared_memory_per_block);
            assert_eq!(extra.kernel.heads, plan.kernel.heads, "both launches fill the same rows of the workspace");
            assert!((1..=plan.extra_chunks()).contains(&extra.splits), "{plan:?}");
        }
        assert!(plan.head_tiles() * plan.kernel.heads >= plan.num_heads);
        assert!((plan.head_tiles() - 1) * plan.kernel.heads < plan.num_heads, "a tile without heads: {plan:?}");
        assert_eq!(plan.grid(), plan.head_tiles() * plan.num_tokens * plan.all_splits());
        assert!(plan.grid() <= i32::MAX as usize);
        assert!(plan.tokens_per_pass >= 1 && plan.passes() * plan.tokens_per_pass >= plan.num_tokens);
        assert!((plan.passes() - 1) * plan.tokens_per_pass < plan.num_tokens, "an empty pass: {plan:?}");
        let row_bytes = plan.num_heads * plan.all_splits() * (plan.d_v * 4 + 8);
        let needed = if plan.all_splits() == 1 { 0 } else { plan.tokens_per_pass * row_bytes };
        assert_eq!(plan.workspace_bytes(), needed);
        assert!(needed <= (1 << 29).max(row_bytes), "{plan:?}");
        if let Some(window) = spec.window {
            assert!(plan.topk[0] <= window);
        }
    });
}

#[test]
fn splits_cover_every_chunk_once() {
    for chunks in (0..200).chain([1000, 65_536, 1 << 20]) {
        for splits in 1..=MAX_SPLITS {
            assert_eq!((split_start(chunks, 0, splits), split_start(chunks, splits, splits)), (0, chunks));
            for split in 0..splits {
                let (start, end) = (split_start(chunks, split, splits), split_start(chunks, split + 1, splits));
                assert!(start <= end && end - start <= chunks.div_ceil(splits));
                assert!(chunks < splits || start < end, "an empty split: {chunks} chunks, {split} of {splits}");
            }
        }
    }
}

#[test]
fn an_invariant_plan_does_not_depend_on_the_batch() {
    let mut seen = std::collections::HashMap::new();
    every_plan(|spec, device, invariant, plan| {
        if invariant {
            let extra = plan.extra.map(|extra| extra.kernel.module);
            let key = (spec.family, spec.format, device.multiprocessors, plan.num_heads, plan.topk, extra);
            let choice = (plan.kernel.entry, plan.splits, plan.extra.map(|extra| extra.splits));
            assert_eq!(*seen.entry(key).or_insert(choice), choice, "{key:?}");
        }
    });
}

#[test]
fn one_token_fills_the_device_and_many_tokens_are_not_split() {
    for spec in gpu_specs() {
        let plan = |tokens| DecodePlan::new(&request(spec, tokens, 16, 2048, 0), &DEVICES[0], false).unwrap();
        assert!(plan(1).splits >= plan(1).chunks() / 2, "{:?}", plan(1));
        assert_eq!(plan(8192).splits, 1);
    }
}

#[test]
fn what_the_predicate_refuses_has_no_plan() {
    let spec = FamilySpec::find(sparse_mla::Family::Dsv4, KvCacheFormat::Fp8).unwrap();
    let old = DeviceFacts { compute_capability: (8, 9), ..DEVICES[3] };
    let error = DecodePlan::new(&request(spec, 1, 16, 512, 0), &old, false).unwrap_err();
    assert_eq!(error.to_string(), "`compute_capability` must be at least 9.0, got 8.9");
    let small = DeviceFacts { shared_memory_per_block: 49_152, ..DEVICES[3] };
    let error = DecodePlan::new(&request(spec, 1, 16, 512, 0), &small, false).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { .. }) && error.to_string().contains("shared memory"), "{error}");
}

#[test]
fn every_module_of_the_table_has_kernels_within_the_smallest_device() {
    for spec in FAMILY_TABLE {
        assert!(KERNELS.iter().any(|kernel| kernel.module == spec.module), "{}", spec.family);
    }
    assert!(KERNELS.iter().all(|kernel| kernel.shared_bytes <= 101_376));
}
