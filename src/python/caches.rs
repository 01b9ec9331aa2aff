//! `pack_kv_cache`, `append_kv_cache` and `unpack_kv_cache`: arrays in, checks, one call of the core on the host or on a device.

use half::{bf16, f16};
use numpy::{PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::argument::{Argument, Word, int, word};
use super::array::{Array, DType, Place, ViewElement};
use super::caches_on_device;
use super::decode::refuse_gpu_argument;
use super::import::{Importer, stream_handle};
use super::int::Int;
use super::support::geometry;
use crate::layout::check_global_scale;
use crate::{CacheView, CacheViewMut, Element, Error, FamilySpec, Geometry, PageLayout, RopePairs, Rotation, rope};

const NAMES: [&str; 2] = ["family", "kv_cache_format"];
const LATENT_TYPES: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

/// Calls a generic function with the element type of a latent.
macro_rules! with_latent_type {
    ($latent:expr, $function:ident($($argument:expr),*)) => {
        match $latent.dtype {
            DType::Bf16 => $function::<bf16>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}

/// Quantises latents into a new packed cache.
#[pyfunction]
#[pyo3(signature = (latent, *, family, page_block_size=int(64), kv_cache_format=word("fp8"),
                    page_stride=None, row_stride=None, kv_global_scale=Argument::Right(1.0), stream=None),
       text_signature = "(latent, *, family, page_block_size=64, kv_cache_format='fp8', page_stride=None, \
                         row_stride=None, kv_global_scale=1.0, stream=None)")]
#[allow(clippy::too_many_arguments, reason = "Python's signature")]
pub(super) fn pack_kv_cache<'py>(
    latent: &Bound<'py, PyAny>,
    family: Argument<Word>,
    page_block_size: Argument<Int>,
    kv_cache_format: Argument<Word>,
    page_stride: Option<Argument<Int>>,
    row_stride: Option<Argument<Int>>,
    kv_global_scale: Argument<f64>,
    stream: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let importer = Importer::on_stream(stream.map(stream_handle).transpose()?);
    let spec = spec_of(NAMES, family, kv_cache_format)?;
    let names = ["page_block_size", "page_stride", "row_stride"];
    let geometry = geometry(names, [Some(page_block_size), page_stride, row_stride])?;
    let layout = PageLayout::new(spec, geometry, "")?;
    let latent = latent_of(latent, spec, Some(&layout), &importer)?;
    let latent = &latent;
    let scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
    if let Place::Cuda(ordinal) = latent.place() {
        check_global_scale(spec, scale)?;
        return caches_on_device::pack(latent, spec, &layout, scale, ordinal, &importer);
    }
    refuse_gpu_argument("stream", stream)?;
    with_latent_type!(latent, pack(latent, spec, geometry, &layout, scale))
}

fn pack<'py, T: ViewElement + Element>(
    latent: &Array<'py>,
    spec: &'static FamilySpec,
    geometry: Geometry,
    layout: &PageLayout,
    scale: f32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = latent.object.py();
    let rows = latent.view::<T, 2>()?;
    let pages = rows.nrows().div_ceil(layout.page_block_size());
    let buffer = py.import("numpy")?.call_method1("zeros", (cache_bytes(layout, pages)?, "uint8"))?;
    let mut bytes = Array::new("cache", &buffer, &[DType::U8])?;
    let cache = CacheViewMut::new(spec, geometry, pages, bytes.bytes_mut()?, scale)?;
    py.detach(|| crate::pack_kv_cache_into(cache, rows))?;

    strided_view(py, buffer, pages, layout)
}

/// Bytes of numpy as uint8 `[pages, page, bytes per token]`, strided as the layout says.
pub(super) fn strided_view<'py>(
    py: Python<'py>,
    buffer: Bound<'py, PyAny>,
    pages: usize,
    layout: &PageLayout,
) -> PyResult<Bound<'py, PyAny>> {
    let view = PyDict::new(py);
    view.set_item("shape", (pages, layout.page_block_size(), layout.row().bytes_per_token()))?;
    view.set_item("strides", (layout.page_stride(), layout.row_stride(), 1))?;
    view.set_item("buffer", buffer)?;
    view.set_item("dtype", "uint8")?;
    py.import("numpy")?.getattr("ndarray")?.call((), Some(&view))
}

/// Bytes of a new cache.
pub(super) fn cache_bytes(layout: &PageLayout, pages: usize) -> Result<usize, Error> {
    let too_large = || Error::value("page_stride", "small enough for the cache to fit in memory", layout.page_stride());
    pages.checked_mul(layout.page_stride()).filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(too_large)
}

/// Quantises latents into the named slots of a packed cache, in place.
#[pyfunction]
#[pyo3(signature = (latent, slot_mapping, cache, *, family, kv_cache_format=word("fp8"),
                    kv_global_scale=Argument::Right(1.0), rope_cos_sin=None, rope_positions=None,
                    rope_interleaved=Argument::Right(true), stream=None),
       text_signature = "(latent, slot_mapping, cache, *, family, kv_cache_format='fp8', kv_global_scale=1.0, \
                         rope_cos_sin=None, rope_positions=None, rope_interleaved=True, stream=None)")]
#[allow(clippy::too_many_arguments, reason = "Python's signature")]
pub(super) fn append_kv_cache(
    latent: &Bound<'_, PyAny>,
    slot_mapping: &Bound<'_, PyAny>,
    cache: &Bound<'_, PyAny>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    kv_global_scale: Argument<f64>,
    rope_cos_sin: Option<&Bound<'_, PyAny>>,
    rope_positions: Option<&Bound<'_, PyAny>>,
    rope_interleaved: Argument<bool>,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let importer = Importer::on_stream(stream.map(stream_handle).transpose()?);
    let spec = spec_of(NAMES, family, kv_cache_format)?;
    let latent = latent_of(latent, spec, None, &importer)?;
    let slots = row_numbers("slot_mapping", slot_mapping, &importer)?;
    let cache = Array::import("cache", cache, &[DType::U8], &importer)?;
    let interleaved = rope_interleaved.named("rope_interleaved")?;
    let rope = RopeArrays::new(rope_cos_sin, rope_positions, interleaved, spec, latent.shape[0], &importer)?;
    cache.require_writeable()?;
    cache.require_no_self_overlap()?;
    for read in [&latent, &slots].into_iter().chain(rope.iter().flat_map(RopeArrays::arrays)) {
        cache.require_apart_from(read)?;
    }
    let scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
    if let Place::Cuda(ordinal) = latent.place() {
        check_global_scale(spec, scale)?;
        return caches_on_device::append(&latent, &slots, &cache, rope.as_ref(), spec, scale, ordinal, &importer);
    }
    refuse_gpu_argument("stream", stream)?;
    let slots = numbers_of(&slots)?;
    with_latent_type!(latent, append(&latent, &slots, cache, rope.as_ref(), spec, scale))
}

fn append<T: ViewElement + Element>(
    latent: &Array<'_>,
    slots: &[i64],
    mut cache: Array<'_>,
    rope: Option<&RopeArrays<'_>>,
    spec: &'static FamilySpec,
    scale: f32,
) -> PyResult<()> {
    let (pages, geometry) = cache.cache_geometry(spec)?;
    let cache = CacheViewMut::new(spec, geometry, pages, cache.bytes_mut()?, scale)?;
    let rows = latent.view::<T, 2>()?;
    let py = latent.object.py();
    let Some(rope) = rope else {
        return Ok(py.detach(|| crate::append_kv_cache(cache, rows, slots))?);
    };
    let positions = numbers_of(&rope.positions)?;
    let cos_sin = rope.cos_sin.view::<f32, 2>()?;
    let rotation = Rotation { cos_sin, positions: &positions, pairs: rope.pairs };
    Ok(py.detach(|| crate::append_kv_cache_with_rope(cache, rows, slots, &rotation))?)
}

/// The rotation of the rows of an append.
pub(super) struct RopeArrays<'py> {
    /// float32 `[max_position, rope_dims]`, contiguous.
    pub cos_sin: Array<'py>,
    /// int32 or int64 `[N]`, contiguous.
    pub positions: Array<'py>,
    pub pairs: RopePairs,
}

impl<'py> RopeArrays<'py> {
    fn new(
        cos_sin: Option<&Bound<'py, PyAny>>,
        positions: Option<&Bound<'py, PyAny>>,
        interleaved: bool,
        spec: &FamilySpec,
        num_rows: usize,
        importer: &Importer,
    ) -> PyResult<Option<Self>> {
        let (cos_sin, positions) = match (cos_sin, positions) {
            (None, None) => return Ok(None),
            (Some(cos_sin), Some(positions)) => (cos_sin, positions),
            (None, _) => {
                return Err(Error::value("rope_cos_sin", "given together with `rope_positions`", "None").into());
            }
            (_, None) => {
                return Err(Error::value("rope_positions", "given together with `rope_cos_sin`", "None").into());
            }
        };
        let cos_sin = Array::import("rope_cos_sin", cos_sin, &[DType::F32], importer)?;
        let positions = row_numbers("rope_positions", positions, importer)?;
        cos_sin.require_contiguous()?;
        let [max_position, width] = cos_sin.shape[..] else {
            let accepted = "of shape [max_position, rope_dims]";
            return Err(Error::value("rope_cos_sin", accepted, format!("{:?}", cos_sin.shape)).into());
        };
        rope::check_shapes(spec, (max_position, width), positions.shape[0], num_rows)?;
        let pairs = if interleaved { RopePairs::Interleaved } else { RopePairs::HalfSplit };
        Ok(Some(Self { cos_sin, positions, pairs }))
    }

    fn arrays(&self) -> [&Array<'py>; 2] {
        [&self.cos_sin, &self.positions]
    }
}

/// Dequantises every slot of a packed cache.
#[pyfunction]
#[pyo3(signature = (cache, *, family, kv_cache_format=word("fp8"), kv_global_scale=Argument::Right(1.0), stream=None),
       text_signature = "(cache, *, family, kv_cache_format='fp8', kv_global_scale=1.0, stream=None)")]
pub(super) fn unpack_kv_cache<'py>(
    cache: &Bound<'py, PyAny>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    kv_global_scale: Argument<f64>,
    stream: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = cache.py();
    let importer = Importer::on_stream(stream.map(stream_handle).transpose()?);
    let spec = spec_of(NAMES, family, kv_cache_format)?;
    let cache = Array::import("cache", cache, &[DType::U8], &importer)?;
    let (pages, geometry) = cache.cache_geometry(spec)?;
    let scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
    if let Place::Cuda(ordinal) = cache.place() {
        check_global_scale(spec, scale)?;
        return caches_on_device::unpack(&cache, spec, scale, ordinal, &importer);
    }
    refuse_gpu_argument("stream", stream)?;
    let cache = CacheView::new(spec, geometry, pages, cache.bytes(), scale)?;
    let out = PyArray2::<f32>::zeros(py, [cache.num_slots() as usize, spec.d_qk()], false);
    let mut values = out.readwrite();
    let values = values.as_array_mut();
    py.detach(|| crate::unpack_kv_cache(&cache, values))?;
    Ok(out.into_any())
}

/// The line of the family table that two arguments name.
pub(super) fn spec_of(
    [family_name, format_name]: [&str; 2],
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
) -> Result<&'static FamilySpec, Error> {
    let family = family.named(family_name)?.parse().map_err(|error: Error| error.about(family_name))?;
    let format = kv_cache_format.named(format_name)?.parse().map_err(|error: Error| error.about(format_name))?;
    FamilySpec::find(family, format).map_err(|error| error.about(format_name))
}

/// A latent as `[N, d_qk]`; with a `layout` also from `[pages, page, d_qk]`.
fn latent_of<'py>(
    latent: &Bound<'py, PyAny>,
    spec: &FamilySpec,
    layout: Option<&PageLayout>,
    importer: &Importer,
) -> PyResult<Array<'py>> {
    let latent = Array::import("latent", latent, LATENT_TYPES, importer)?;
    latent.require_contiguous()?;
    let page = layout.map(PageLayout::page_block_size);
    let fits = match latent.shape[..] {
        [_, width] => width == spec.d_qk(),
        [_, rows, width] => width == spec.d_qk() && page == Some(rows),
        _ => false,
    };
    if !fits {
        let paged = page.map_or(String::new(), |page| format!(" or [pages, {page}, {}]", spec.d_qk()));
        let accepted = format!("of shape [N, {}]{paged} for family {}", spec.d_qk(), spec.family);
        return Err(Error::value("latent", accepted, format!("{:?}", latent.shape)).into());
    }
    Ok(latent.flatten_leading(1)?)
}

/// One int32 or int64 per row, contiguous.
fn row_numbers<'py>(name: &'static str, object: &Bound<'py, PyAny>, importer: &Importer) -> PyResult<Array<'py>> {
    let array = Array::import(name, object, &[DType::I32, DType::I64], importer)?;
    array.require_contiguous()?;
    if array.shape.len() != 1 {
        return Err(Error::value(name, "1-dimensional", format!("shape {:?}", array.shape)).into());
    }
    Ok(array)
}

fn numbers_of(array: &Array<'_>) -> PyResult<Vec<i64>> {
    Ok(match array.dtype {
        DType::I32 => array.view::<i32, 1>()?.iter().map(|number| i64::from(*number)).collect(),
        _ => array.view::<i64, 1>()?.to_vec(),
    })
}
