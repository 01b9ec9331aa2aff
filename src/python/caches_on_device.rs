//! Pack, append, unpack and conversions of caches on a CUDA device.
#![allow(unsafe_code)]

use pyo3::prelude::*;

use super::array::{Array, DType};
use super::caches::{RopeArrays, cache_bytes};
use super::device_array::mark_written;
use super::import::Importer;
use super::on_device::out_type;
use super::output;
use crate::cache::check_slots;
use crate::cuda::{
    CUstream, CacheOnDevice, ConvertOnDevice, Device, ReadOnDevice, RotationOnDevice, RowNumbers, Workspace,
    WriteOnDevice, convert_launch, device,
};
use crate::layout::require_aligned;
use crate::{Error, FamilySpec, PageLayout};

/// A new cache on the latent's device.
pub(super) fn pack<'py>(
    latent: &Array<'py>,
    spec: &'static FamilySpec,
    layout: &PageLayout,
    kv_global_scale: f32,
    ordinal: i32,
    importer: &Importer,
) -> PyResult<Bound<'py, PyAny>> {
    let device = open(ordinal)?;
    let stream = importer.stream() as CUstream;
    let num_rows = latent.shape[0];
    let pages = num_rows.div_ceil(layout.page_block_size());
    let (object, to) = new_cache(latent, layout, pages, importer)?;
    let write = WriteOnDevice {
        spec,
        cache: to,
        latent: aligned(latent)?,
        latent_type: out_type(latent),
        num_rows,
        slots: None,
        rotation: None,
        kv_global_scale,
    };
    // SAFETY: the latent was checked for place, shape, strides and alignment, the cache is new and as large as its layout
    // says; both outlive their work in their library's stream order; the stream is that library's or the caller's.
    unsafe { device.write_kv_cache(&write, Workspace::EMPTY, stream) }?;
    mark_written(&object, stream)?;
    Ok(object)
}

/// Writes rows into the named slots, in place.
#[allow(clippy::too_many_arguments, reason = "one checked append")]
pub(super) fn append(
    latent: &Array<'_>,
    slots: &Array<'_>,
    cache: &Array<'_>,
    rope: Option<&RopeArrays<'_>>,
    spec: &'static FamilySpec,
    kv_global_scale: f32,
    ordinal: i32,
    importer: &Importer,
) -> PyResult<()> {
    let device = open(ordinal)?;
    let stream = importer.stream() as CUstream;
    let num_rows = latent.shape[0];
    check_slots(slots.shape[0], num_rows)?;
    let rotation = |rope: &RopeArrays<'_>| {
        Ok::<_, Error>(RotationOnDevice {
            cos_sin: aligned(&rope.cos_sin)?,
            max_position: rope.cos_sin.shape[0],
            positions: row_numbers(&rope.positions),
            pairs: rope.pairs,
        })
    };
    let write = WriteOnDevice {
        spec,
        cache: cache_of(cache, spec)?,
        latent: aligned(latent)?,
        latent_type: out_type(latent),
        num_rows,
        slots: Some(row_numbers(slots)),
        rotation: rope.map(rotation).transpose()?,
        kv_global_scale,
    };
    let workspace = Workspace::of_stream(device, stream, write.workspace_bytes())?;
    // SAFETY: every array was checked for place, shape, strides, alignment and overlap, and outlives its work in its
    // library's stream order; the stream is the caller's; work of one stream shares the workspace in turn.
    unsafe { device.write_kv_cache(&write, workspace, stream) }?;
    Ok(mark_written(&cache.object, stream)?)
}

/// The values of every slot, on the cache's device.
pub(super) fn unpack<'py>(
    cache: &Array<'py>,
    spec: &'static FamilySpec,
    kv_global_scale: f32,
    ordinal: i32,
    importer: &Importer,
) -> PyResult<Bound<'py, PyAny>> {
    let device = open(ordinal)?;
    let stream = importer.stream() as CUstream;
    let from = cache_of(cache, spec)?;
    let num_slots = from.num_slots();
    let object = output::empty("out", cache, &[num_slots, spec.d_qk()], DType::F32, importer)?;
    let out = Array::import("out", &object, &[DType::F32], importer)?;
    let read = ReadOnDevice { spec, cache: from, out: out.address(), kv_global_scale };
    // SAFETY: the cache was checked for place, shape, strides and alignment, `out` is new; both outlive their work in their
    // library's stream order; the stream is that library's or the caller's.
    unsafe { device.read_kv_cache(&read, stream) }?;
    mark_written(&object, stream)?;
    Ok(object)
}

/// Records under the same slot ids in a new cache, of this layout and these lines of the family table.
pub(super) fn convert<'py>(
    cache: &Array<'py>,
    specs: [&'static FamilySpec; 2],
    kv_global_scales: [f32; 2],
    layout: &PageLayout,
    num_slots: Option<u64>,
    ordinal: i32,
    importer: &Importer,
) -> PyResult<Bound<'py, PyAny>> {
    let device = open(ordinal)?;
    let stream = importer.stream() as CUstream;
    let from = cache_of(cache, specs[0])?;
    let held = from.num_slots();
    let num_slots = num_slots.map_or(held, |count| usize::try_from(count).unwrap_or(usize::MAX));
    // More than there are is refused below, before a cache is made for them.
    let pages = num_slots.min(held).div_ceil(layout.page_block_size());
    let nowhere = CacheOnDevice { pointer: 0, pages, layout: *layout };
    let convert = ConvertOnDevice { specs, from, to: nowhere, num_slots, kv_global_scales };
    convert_launch(&convert)?;
    let (object, to) = new_cache(cache, layout, pages, importer)?;
    // SAFETY: the cache was checked for place, shape, strides and alignment, the new one is as large as its layout says; both
    // outlive their work in their library's stream order; the stream is that library's or the caller's.
    unsafe { device.convert_kv_cache(&ConvertOnDevice { to, ..convert }, stream) }?;
    mark_written(&object, stream)?;
    Ok(object)
}

/// A new cache on the device of `like`.
fn new_cache<'py>(
    like: &Array<'py>,
    layout: &PageLayout,
    pages: usize,
    importer: &Importer,
) -> PyResult<(Bound<'py, PyAny>, CacheOnDevice)> {
    let shape = [pages, layout.page_block_size(), layout.row().bytes_per_token()];
    let strides = [layout.page_stride(), layout.row_stride(), 1];
    let object = output::strided_bytes("cache", like, shape, strides, cache_bytes(layout, pages)?, importer)?;
    let pointer = Array::import("cache", &object, &[DType::U8], importer)?.address();
    Ok((object, CacheOnDevice { pointer, pages, layout: *layout }))
}

fn open(ordinal: i32) -> Result<&'static Device, Error> {
    device(usize::try_from(ordinal).unwrap_or(usize::MAX))
}

fn cache_of(cache: &Array<'_>, spec: &FamilySpec) -> Result<CacheOnDevice, Error> {
    let (pages, geometry) = cache.cache_geometry(spec)?;
    Ok(CacheOnDevice { pointer: cache.address(), pages, layout: PageLayout::new(spec, geometry, "")? })
}

fn aligned(array: &Array<'_>) -> Result<u64, Error> {
    if !array.is_empty() {
        require_aligned(array.name, array.address())?;
    }
    Ok(array.address())
}

fn row_numbers(array: &Array<'_>) -> RowNumbers {
    RowNumbers { pointer: array.address(), wide: array.dtype == DType::I64 }
}
