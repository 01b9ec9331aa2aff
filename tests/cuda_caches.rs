//! Caches on the GPU through cudarc's slices: the CPU's bytes, refusals by name. Without a driver every test says so and
//! passes.

mod common;

use std::sync::Arc;

use common::{Lcg, latents};
use ndarray::Array2;
use sparse_mla::cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use sparse_mla::cuda::{
    AppendSlices, Device, PreparedCache, PreparedConversion, RotationSlices, RowNumberSlice, device, probe,
};
use sparse_mla::half::slice::HalfFloatSliceExt;
use sparse_mla::{
    CacheView, CacheViewMut, Conversion, Error, FAMILY_TABLE, FamilySpec, Geometry, PackedCache, RopePairs, Rotation,
    ScaleRule, append_kv_cache, append_kv_cache_with_rope, convert_kv_cache, pack_kv_cache, unpack_kv_cache,
};

const PAGES: usize = 7;
const UNTOUCHED: u8 = 0xab;

fn open() -> Option<(&'static Device, Arc<CudaStream>)> {
    match probe() {
        Ok(_) => Some((device(0).unwrap(), CudaContext::new(0).unwrap().new_stream().unwrap())),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn geometry(page_block_size: i64) -> Geometry {
    Geometry { page_block_size: Some(page_block_size), ..Geometry::default() }
}

fn scale(spec: &FamilySpec) -> f32 {
    if spec.row.scale == (ScaleRule::E4m3Nvfp4 { global: true }) { 0.37 } else { 1.0 }
}

#[test]
fn rows_are_packed_and_unpacked_as_on_the_cpu() {
    let Some((device, stream)) = open() else { return };
    for spec in FAMILY_TABLE {
        let latent = latents(spec, PAGES * 6 - 2, 3);
        let want = pack_kv_cache(spec, latent.view(), geometry(6), scale(spec)).unwrap();
        let prepared = PreparedCache::new(device, spec, geometry(6), scale(spec)).unwrap();
        let rows = stream.clone_htod(latent.as_slice().unwrap().reinterpret_cast()).unwrap();
        let mut cache = stream.clone_htod(&vec![UNTOUCHED; want.bytes.len()]).unwrap();
        prepared.pack::<u16>(&stream, &rows.as_view(), &mut cache.as_view_mut(), PAGES).unwrap();
        assert!(stream.clone_dtoh(&cache).unwrap() == want.bytes, "{} {}", spec.family, spec.format);

        let mut values = Array2::<f32>::zeros((PAGES * 6, spec.d_qk()));
        let view = CacheView::new(spec, geometry(6), PAGES, &want.bytes, scale(spec)).unwrap();
        unpack_kv_cache(&view, values.view_mut()).unwrap();
        let mut out = stream.alloc_zeros::<f32>(values.len()).unwrap();
        prepared.unpack(&stream, &cache.as_view(), PAGES, &mut out.as_view_mut()).unwrap();
        assert!(stream.clone_dtoh(&out).unwrap() == values.as_slice().unwrap(), "{} {}", spec.family, spec.format);
    }
}

#[test]
fn rows_are_appended_as_on_the_cpu() {
    let Some((device, stream)) = open() else { return };
    for spec in FAMILY_TABLE {
        for num_rows in [30, 9000] {
            let mut random = Lcg(5);
            let latent = latents(spec, num_rows, 3);
            let slots: Vec<i64> = (0..num_rows).map(|_| random.below(60) as i64 - 9).collect();
            let positions: Vec<i32> = (0..num_rows).map(|_| random.below(12) as i32 - 1).collect();
            let table = Array2::from_shape_fn((10, spec.row.rope_dims), |_| random.normal());
            let prepared = PreparedCache::new(device, spec, geometry(6), scale(spec)).unwrap();
            let mut want = vec![UNTOUCHED; PAGES * prepared.layout().page_stride()];
            let view = CacheViewMut::new(spec, geometry(6), PAGES, &mut want, scale(spec)).unwrap();
            let rotates = spec.row.rope_dims > 0;
            if rotates {
                let positions: Vec<i64> = positions.iter().map(|position| i64::from(*position)).collect();
                let rotation = Rotation { cos_sin: table.view(), positions: &positions, pairs: RopePairs::Interleaved };
                append_kv_cache_with_rope(view, latent.view(), &slots, &rotation).unwrap();
            } else {
                append_kv_cache(view, latent.view(), &slots).unwrap();
            }
            let rows = stream.clone_htod(latent.as_slice().unwrap().reinterpret_cast()).unwrap();
            let mut cache = stream.clone_htod(&vec![UNTOUCHED; want.len()]).unwrap();
            let (slots, positions) = (stream.clone_htod(&slots).unwrap(), stream.clone_htod(&positions).unwrap());
            let table = rotates.then(|| stream.clone_htod(table.as_slice().unwrap()).unwrap());
            let workspace_bytes = PreparedCache::append_workspace_bytes(num_rows);
            assert_eq!(workspace_bytes > 0, num_rows == 9000);
            let mut workspace = stream.alloc_zeros::<u8>(workspace_bytes.max(1)).unwrap();
            let mut slices = AppendSlices::<u16> {
                latent: rows.as_view(),
                slots: RowNumberSlice::I64(slots.as_view()),
                rotation: table.as_ref().map(|table| RotationSlices {
                    cos_sin: table.as_view(),
                    positions: RowNumberSlice::I32(positions.as_view()),
                    pairs: RopePairs::Interleaved,
                }),
                cache: cache.as_view_mut(),
                pages: PAGES,
                workspace: workspace.as_view_mut(),
            };
            prepared.append(&stream, &mut slices).unwrap();
            assert!(stream.clone_dtoh(&cache).unwrap() == want, "{} {}, {num_rows} rows", spec.family, spec.format);
        }
    }
}

#[test]
fn caches_are_converted_as_on_the_cpu() {
    let Some((device, stream)) = open() else { return };
    for (from, to) in FAMILY_TABLE.iter().flat_map(|from| FAMILY_TABLE.iter().map(move |to| (from, to))) {
        let Ok(conversion) = Conversion::between(from, to) else { continue };
        let to_scale = if conversion == Conversion::Exact { scale(from) } else { scale(to) };
        let packed = pack_kv_cache(from, latents(from, 40, 3).view(), geometry(6), scale(from)).unwrap();
        let view = CacheView::new(from, geometry(6), packed.pages, &packed.bytes, scale(from)).unwrap();
        let (want, _) = convert_kv_cache(&view, to, geometry(9), Some(38), to_scale).unwrap();
        let old = PreparedCache::new(device, from, geometry(6), scale(from)).unwrap();
        let new = PreparedCache::new(device, to, geometry(9), to_scale).unwrap();
        let source = stream.clone_htod(&packed.bytes).unwrap();
        let mut target = stream.clone_htod(&vec![UNTOUCHED; want.bytes.len()]).unwrap();
        let conversion = PreparedConversion::new(&old, &new).unwrap();
        let (source, pages) = (source.as_view(), packed.pages);
        conversion.convert(&stream, (&source, pages), (&mut target.as_view_mut(), want.pages), 38).unwrap();
        assert!(stream.clone_dtoh(&target).unwrap() == want.bytes, "{} {} to {}", from.family, from.format, to.format);
    }
}

/// What the wrong arguments are made of.
struct Spare {
    latent: CudaSlice<u16>,
    slots: CudaSlice<i64>,
    positions: CudaSlice<i32>,
    table: CudaSlice<f32>,
    foreign: CudaSlice<i64>,
}

/// Makes one argument of an append wrong; returns its name, or None past the last way.
fn spoil<'a>(way: usize, slices: &mut AppendSlices<'a, u16>, spare: &'a Spare) -> Option<&'static str> {
    let rotation = |cos_sin, positions| {
        Some(RotationSlices { cos_sin, positions: RowNumberSlice::I32(positions), pairs: RopePairs::HalfSplit })
    };
    let (table, positions) = (&spare.table, &spare.positions);
    Some(match way {
        0 => (slices.latent = spare.latent.slice(..575), "`latent`").1,
        1 => (slices.latent = spare.latent.slice(1..1 + 8 * 576), "`latent`").1,
        2 => (slices.slots = RowNumberSlice::I64(spare.slots.slice(..7)), "`latent`").1,
        3 => (slices.slots = RowNumberSlice::I64(spare.foreign.as_view()), "`slot_mapping`").1,
        4 => (slices.rotation = rotation(table.slice(..100), positions.as_view()), "`rope_cos_sin`").1,
        5 => (slices.rotation = rotation(table.slice(1..65), positions.as_view()), "`rope_cos_sin`").1,
        6 => (slices.rotation = rotation(table.as_view(), positions.slice(..7)), "`rope_positions`").1,
        7 => (slices.pages = PAGES + 1, "`cache`").1,
        8 => (slices.pages = usize::MAX, "`cache`").1,
        _ => return None,
    })
}

#[test]
fn wrong_slices_are_refused_by_name_and_nothing_sticks() {
    let Some((device, stream)) = open() else { return };
    let spec = FAMILY_TABLE.iter().find(|spec| spec.row.bytes_per_token() == 656).unwrap();
    let foreign = CudaContext::new_non_primary(0, 0).unwrap().new_stream().unwrap();
    let prepared = PreparedCache::new(device, spec, geometry(8), 1.0).unwrap();
    let bytes = PAGES * prepared.layout().page_stride();
    let spare = Spare {
        latent: stream.alloc_zeros(8 * 576 + 8).unwrap(),
        slots: stream.clone_htod(&[0, 1, 2, 3, 4, 5, 6, 7]).unwrap(),
        positions: stream.alloc_zeros(8).unwrap(),
        table: stream.alloc_zeros(3 * 64).unwrap(),
        foreign: foreign.clone_htod(&[0; 8]).unwrap(),
    };
    let mut cache = stream.clone_htod(&vec![UNTOUCHED; bytes]).unwrap();
    let mut workspace = stream.alloc_zeros::<u8>(16).unwrap();
    for way in 0.. {
        let mut slices = AppendSlices {
            latent: spare.latent.slice(..8 * 576),
            slots: RowNumberSlice::I64(spare.slots.as_view()),
            rotation: None,
            cache: cache.as_view_mut(),
            pages: PAGES,
            workspace: workspace.as_view_mut(),
        };
        let Some(name) = spoil(way, &mut slices, &spare) else { break };
        let error = prepared.append(&stream, &mut slices).unwrap_err();
        assert!(matches!(&error, Error::Value { .. }) && error.to_string().starts_with(name), "{way} {name}: {error}");
    }
    let refused = |error: Result<(), Error>, name: &str| {
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with(name), "{name}: {text}");
    };
    let latent = spare.latent.slice(..8 * 576);
    refused(prepared.pack::<u16>(&foreign, &latent, &mut cache.as_view_mut(), PAGES), "`stream`");
    refused(prepared.pack::<u16>(&stream, &latent, &mut cache.slice_mut(..bytes - 1), PAGES), "`cache`");
    refused(prepared.pack::<u16>(&stream, &spare.latent.slice(..577), &mut cache.as_view_mut(), PAGES), "`latent`");
    refused(prepared.pack::<u16>(&stream, &latent, &mut cache.as_view_mut(), 0), "`latent`");
    let mut out = stream.alloc_zeros::<f32>(PAGES * 8 * 576 - 1).unwrap();
    refused(prepared.unpack(&stream, &cache.as_view(), PAGES, &mut out.as_view_mut()), "`out`");
    let conversion = PreparedConversion::new(&prepared, &prepared).unwrap();
    let mut other = stream.clone_htod(&vec![UNTOUCHED; bytes]).unwrap();
    let from = (&cache.as_view(), PAGES);
    refused(conversion.convert(&stream, from, (&mut other.as_view_mut(), PAGES + 1), 8), "`to`");
    refused(conversion.convert(&stream, from, (&mut other.slice_mut(8..), PAGES - 1), 8), "`to`");
    refused(conversion.convert(&stream, (from.0, PAGES + 1), (&mut other.as_view_mut(), PAGES), 8), "`from`");
    refused(conversion.convert(&stream, from, (&mut other.as_view_mut(), PAGES), 8 * PAGES + 1), "`num_slots`");
    for spec in FAMILY_TABLE.iter().filter(|other| Conversion::between(spec, other).is_err()) {
        let other = PreparedCache::new(device, spec, geometry(8), 1.0).unwrap();
        refused(PreparedConversion::new(&prepared, &other).map(drop), "`to_family`");
    }
    for cache in [&cache, &other] {
        assert!(stream.clone_dtoh(cache).unwrap().iter().all(|byte| *byte == UNTOUCHED));
    }
    let PackedCache { bytes, pages, .. } =
        pack_kv_cache(spec, Array2::<f32>::zeros((8, 576)).view(), geometry(8), 1.0).unwrap();
    prepared.pack::<u16>(&stream, &latent, &mut cache.as_view_mut(), pages).unwrap();
    assert!(stream.clone_dtoh(&cache).unwrap()[..bytes.len()] == bytes);
}
