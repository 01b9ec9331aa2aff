//! Packed bytes against the published goldens, and the writers against one another.

mod common;

use common::{Lcg, latents, packed};
use ndarray::{Array2, s};
use proptest::prelude::*;
use sparse_mla::half::bf16;
use sparse_mla::{
    CacheView, CacheViewMut, FAMILY_TABLE, Family, FamilySpec, Geometry, KvCacheFormat, Placement, append_kv_cache,
    pack_kv_cache, unpack_kv_cache,
};

fn unpacked(spec: &'static FamilySpec, geometry: Geometry, pages: usize, bytes: &[u8]) -> Array2<f32> {
    let view = CacheView::new(spec, geometry, pages, bytes, 1.0).unwrap();
    let mut values = Array2::zeros((view.num_slots() as usize, spec.d_qk()));
    unpack_kv_cache(&view, values.view_mut()).unwrap();
    values
}

/// x_i = ((37 i + 11) mod 64 - 32) / 16, repeated.
fn golden_row(d_qk: usize) -> Array2<f32> {
    Array2::from_shape_fn((1, d_qk), |(_, i)| (((37 * i + 11) % 64) as f32 - 32.0) / 16.0)
}

#[test]
fn golden_power_of_two_scale() {
    let spec = FamilySpec::find(Family::Dsv4, KvCacheFormat::Fp8).unwrap();
    let cache = pack_kv_cache(spec, golden_row(512).view(), Geometry::default(), 1.0).unwrap();
    let codes = [0xf2, 0x70, 0xeb, 0x75, 0xd0, 0xf6, 0x69, 0xf1, 0x72, 0xe8, 0x76, 0x58, 0xf4, 0x6c, 0xef, 0x73];
    assert_eq!(cache.bytes[..16], codes);
    assert_eq!(cache.bytes[64 * 576..][..8], [120, 120, 120, 120, 120, 120, 120, 0]);
}

#[test]
fn golden_arbitrary_scale() {
    let spec = FamilySpec::find(Family::GlmNsa, KvCacheFormat::Fp8).unwrap();
    let cache = pack_kv_cache(spec, golden_row(576).view(), Geometry::default(), 1.0).unwrap();
    let codes = [0xf9, 0x76, 0xf2, 0x7b, 0xd6, 0xfc, 0x70, 0xf8, 0x78, 0xee, 0x7d, 0x5e, 0xfb, 0x72, 0xf5, 0x7a];
    assert_eq!(cache.bytes[..16], codes);
    assert_eq!(cache.bytes[512..516], [0x25, 0x49, 0x92, 0x3b]);
}

#[test]
fn golden_four_bit_groups() {
    let groups = [
        (0x2a, [0x5e, 0x7c, 0xf8, 0xe4, 0xb6, 0x17, 0x4e, 0x6d]),
        (0x2b, [0xfa, 0xe2, 0xc5, 0x96, 0x3f, 0x5d, 0x7b, 0xe0]),
        (0x2a, [0xd4, 0xa6, 0x27, 0x5e, 0x6d, 0xf9, 0xe3, 0xc5]),
        (0x2a, [0x07, 0x4f, 0x6d, 0x7b, 0xe1, 0xd5, 0xa6, 0x2f]),
    ];
    let cases = [
        (Family::Dsv4_1, KvCacheFormat::Fp4, 256 * 64),
        (Family::Dsv4_1Inline, KvCacheFormat::Fp4, 256),
        (Family::Dsv4, KvCacheFormat::Nvfp4, 352 * 64),
        (Family::GlmNsa, KvCacheFormat::Nvfp4, 256),
    ];
    for (family, format, scales) in cases {
        let spec = FamilySpec::find(family, format).unwrap();
        let cache = pack_kv_cache(spec, golden_row(spec.d_qk()).view(), Geometry::default(), 1.0).unwrap();
        for (group, (scale, codes)) in groups.iter().enumerate() {
            assert_eq!(cache.bytes[8 * group..][..8], codes[..], "{family} {format} group {group}");
            assert_eq!(cache.bytes[scales + group], *scale, "{family} {format} group {group}");
        }
    }
}

#[test]
fn record_sizes_are_the_published_ones() {
    let sizes: Vec<_> = FAMILY_TABLE.iter().map(|spec| spec.row.bytes_per_token()).collect();
    assert_eq!(sizes, [584, 656, 656, 528, 1160, 528, 528, 384, 416, 288, 288]);
}

#[test]
fn a_global_scale_divides_and_multiplies() {
    let spec = FamilySpec::find(Family::GlmNsa, KvCacheFormat::Nvfp4).unwrap();
    let latent = golden_row(576);
    let scaled = latent.mapv(|x| x * 8.0);
    let plain = pack_kv_cache(spec, latent.view(), Geometry::default(), 1.0).unwrap();
    let global = pack_kv_cache(spec, scaled.view(), Geometry::default(), 8.0).unwrap();
    assert_eq!(plain.bytes[..288], global.bytes[..288]);
    let view = CacheView::new(spec, Geometry::default(), 1, &global.bytes, 8.0).unwrap();
    let mut values = Array2::zeros((64, 576));
    unpack_kv_cache(&view, values.view_mut()).unwrap();
    let want = unpacked(spec, Geometry::default(), 1, &plain.bytes).mapv(|x| x * 8.0);
    assert_eq!(values.slice(s![..1, ..512]), want.slice(s![..1, ..512]));
    assert!(CacheView::new(spec, Geometry::default(), 1, &global.bytes, f32::NAN).is_err());
}

fn any_spec() -> impl Strategy<Value = &'static FamilySpec> {
    (0..FAMILY_TABLE.len()).prop_map(|index| &FAMILY_TABLE[index])
}

/// A page size with gaps in rows (inline families) and pages.
fn padded(spec: &FamilySpec, page: i64, row_gap: i64, page_gap: i64) -> Geometry {
    let record = spec.row.bytes_per_token() as i64;
    let row = if spec.row.placement == Placement::Inline { record + 16 * row_gap } else { record };
    let dense = (page * row + 15) / 16 * 16;
    Geometry { page_block_size: Some(page), page_stride: Some(dense + 16 * page_gap), row_stride: Some(row) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pack_then_unpack_is_close(
        spec in any_spec(), rows in 0usize..40, page in 1i64..9, row_gap in 0i64..3, page_gap in 0i64..3, seed: u64,
    ) {
        let geometry = padded(spec, page, row_gap, page_gap);
        let latent = latents(spec, rows, seed);
        let cache = pack_kv_cache(spec, latent.view(), geometry, 1.0).unwrap();
        let values = unpacked(spec, geometry, cache.pages, &cache.bytes);
        for (got, want) in values.outer_iter().zip(latent.outer_iter()) {
            let amax = want.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
            for (dim, (got, want)) in got.iter().zip(want).enumerate() {
                // Half a step: 2^-4 of the value for E4M3; E2M1 steps reach a third of the group's largest value.
                let error = (got - want.to_f32()).abs();
                let bound = if spec.row.scale.is_fp4() { amax / 5.0 } else { want.to_f32().abs() / 16.0 + amax / 2e4 };
                let bound = if dim < spec.row.quantised_dims { bound } else { 0.0 };
                prop_assert!(error <= bound, "dimension {}: {} for {}", dim, got, want);
            }
        }
    }

    #[test]
    fn append_in_any_order_writes_what_pack_writes(
        spec in any_spec(), rows in 1usize..30, page in 1i64..9, row_gap in 0i64..3, page_gap in 0i64..3, seed: u64,
    ) {
        let geometry = padded(spec, page, row_gap, page_gap);
        let latent = latents(spec, rows, seed);
        let want = pack_kv_cache(spec, latent.view(), geometry, 1.0).unwrap();
        let mut random = Lcg(seed);
        let mut order: Vec<usize> = (0..rows).collect();
        order.sort_by_cached_key(|_| random.next());
        // The right row first, then a wrong one for the same slot, then slots that do not exist.
        let mut slots: Vec<i64> = order.iter().map(|slot| *slot as i64).collect();
        let mut source = order.clone();
        slots.extend([order[0] as i64, -1, i64::MIN, i64::MAX, want.pages as i64 * page]);
        source.extend([order[rows - 1]; 5]);
        let shuffled = Array2::from_shape_fn((source.len(), spec.d_qk()), |(row, dim)| latent[[source[row], dim]]);
        let mut bytes = vec![0; want.bytes.len()];
        let cache = CacheViewMut::new(spec, geometry, want.pages, &mut bytes, 1.0).unwrap();
        append_kv_cache(cache, shuffled.view(), &slots).unwrap();
        prop_assert_eq!(bytes, want.bytes);
    }

    #[test]
    fn append_touches_only_addressed_bytes(spec in any_spec(), page in 1i64..9, page_gap in 0i64..3, seed: u64) {
        let geometry = padded(spec, page, 1, page_gap);
        let before = packed(spec, 3 * page as usize, geometry, seed);
        let slot = Lcg(seed).below(3 * page as u64) as i64;
        let mut zeros = vec![0u8; before.bytes.len()];
        let mut ones = vec![0xffu8; before.bytes.len()];
        for bytes in [&mut zeros, &mut ones] {
            let cache = CacheViewMut::new(spec, geometry, 3, bytes, 1.0).unwrap();
            append_kv_cache(cache, latents(spec, 1, seed).view(), &[slot]).unwrap();
        }
        let written = zeros.iter().zip(&ones).filter(|(zero, one)| zero == one).count();
        let untouched = zeros.iter().zip(&ones).filter(|(zero, one)| **zero == 0 && **one == 0xff).count();
        prop_assert_eq!(written, spec.row.bytes_per_token());
        prop_assert_eq!(untouched, zeros.len() - written);
    }

    #[test]
    fn any_page_size_holds_the_same_values(spec in any_spec(), page in 1i64..70, seed: u64) {
        let geometry = Geometry { page_block_size: Some(page), ..Geometry::default() };
        let (want, got) = (packed(spec, 70, Geometry::default(), seed), packed(spec, 70, geometry, seed));
        let want = unpacked(spec, Geometry::default(), want.pages, &want.bytes);
        let got = unpacked(spec, geometry, got.pages, &got.bytes);
        prop_assert_eq!(want.slice(s![..70, ..]), got.slice(s![..70, ..]));
    }

    #[test]
    fn rope_lanes_keep_their_bits(bits in prop::collection::vec(any::<u16>(), 64)) {
        let spec = FamilySpec::find(Family::Dsv3_2, KvCacheFormat::Fp8).unwrap();
        let latent = Array2::from_shape_fn((1, 576), |(_, dim)| match dim.checked_sub(512) {
            Some(lane) => bf16::from_bits(bits[lane]),
            None => bf16::from_f32(1.0),
        });
        let cache = pack_kv_cache(spec, latent.view(), Geometry::default(), 1.0).unwrap();
        let stored: Vec<u16> =
            cache.bytes[528..656].chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        prop_assert_eq!(stored, bits);
    }
}
