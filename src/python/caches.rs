//! Pack, append and unpack on numpy arrays.

use half::{bf16, f16};
use numpy::{PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::argument::{Argument, Word, int, word};
use super::array::{Array, DType, ViewElement};
use super::int::Int;
use super::support::geometry;
use crate::{CacheView, CacheViewMut, Element, Error, FamilySpec, Geometry, PageLayout};

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
                    page_stride=None, row_stride=None, kv_global_scale=Argument::Right(1.0)),
       text_signature = "(latent, *, family, page_block_size=64, kv_cache_format='fp8', page_stride=None, \
                         row_stride=None, kv_global_scale=1.0)")]
pub(super) fn pack_kv_cache<'py>(
    latent: &Bound<'py, PyAny>,
    family: Argument<Word>,
    page_block_size: Argument<Int>,
    kv_cache_format: Argument<Word>,
    page_stride: Option<Argument<Int>>,
    row_stride: Option<Argument<Int>>,
    kv_global_scale: Argument<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let spec = spec_of(family, kv_cache_format)?;
    let names = ["page_block_size", "page_stride", "row_stride"];
    let geometry = geometry(names, [Some(page_block_size), page_stride, row_stride])?;
    let layout = PageLayout::new(spec, geometry, "")?;
    let latent = latent_of(latent, spec, Some(&layout))?;
    let latent = &latent;
    let scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
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
    let len = pages.checked_mul(layout.page_stride());
    let too_large = || Error::value("page_stride", "small enough for the cache to fit in memory", layout.page_stride());
    let buffer = py.import("numpy")?.call_method1("zeros", (len.ok_or_else(too_large)?, "uint8"))?;
    let mut bytes = Array::new("cache", &buffer, &[DType::U8])?;
    let cache = CacheViewMut::new(spec, geometry, pages, bytes.bytes_mut()?, scale)?;
    py.detach(|| crate::pack_kv_cache_into(cache, rows))?;

    let view = PyDict::new(py);
    view.set_item("shape", (pages, layout.page_block_size(), spec.row.bytes_per_token()))?;
    view.set_item("strides", (layout.page_stride(), layout.row_stride(), 1))?;
    view.set_item("buffer", buffer)?;
    view.set_item("dtype", "uint8")?;
    py.import("numpy")?.getattr("ndarray")?.call((), Some(&view))
}

/// Quantises latents into the named slots of a packed cache, in place.
#[pyfunction]
#[pyo3(signature = (latent, slot_mapping, cache, *, family, kv_cache_format=word("fp8"),
                    kv_global_scale=Argument::Right(1.0)),
       text_signature = "(latent, slot_mapping, cache, *, family, kv_cache_format='fp8', kv_global_scale=1.0)")]
pub(super) fn append_kv_cache(
    latent: &Bound<'_, PyAny>,
    slot_mapping: &Bound<'_, PyAny>,
    cache: &Bound<'_, PyAny>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    kv_global_scale: Argument<f64>,
) -> PyResult<()> {
    let spec = spec_of(family, kv_cache_format)?;
    let latent = latent_of(latent, spec, None)?;
    let slot_mapping = Array::new("slot_mapping", slot_mapping, &[DType::I32, DType::I64])?;
    let slots = slots_of(&slot_mapping)?;
    let cache = Array::new("cache", cache, &[DType::U8])?;
    cache.require_writeable()?;
    cache.require_no_self_overlap()?;
    cache.require_apart_from(&latent)?;
    cache.require_apart_from(&slot_mapping)?;
    let scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
    with_latent_type!(latent, append(&latent, &slots, cache, spec, scale))
}

fn append<T: ViewElement + Element>(
    latent: &Array<'_>,
    slots: &[i64],
    mut cache: Array<'_>,
    spec: &'static FamilySpec,
    scale: f32,
) -> PyResult<()> {
    let (pages, geometry) = cache.cache_geometry(spec)?;
    let cache = CacheViewMut::new(spec, geometry, pages, cache.bytes_mut()?, scale)?;
    let rows = latent.view::<T, 2>()?;
    Ok(latent.object.py().detach(|| crate::append_kv_cache(cache, rows, slots))?)
}

/// Dequantises every slot of a packed cache.
#[pyfunction]
#[pyo3(signature = (cache, *, family, kv_cache_format=word("fp8"), kv_global_scale=Argument::Right(1.0)),
       text_signature = "(cache, *, family, kv_cache_format='fp8', kv_global_scale=1.0)")]
pub(super) fn unpack_kv_cache<'py>(
    cache: &Bound<'py, PyAny>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    kv_global_scale: Argument<f64>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let py = cache.py();
    let spec = spec_of(family, kv_cache_format)?;
    let cache = Array::new("cache", cache, &[DType::U8])?;
    let (pages, geometry) = cache.cache_geometry(spec)?;
    let scale = kv_global_scale.named_finite_f32("kv_global_scale")?;
    let cache = CacheView::new(spec, geometry, pages, cache.bytes(), scale)?;
    let out = PyArray2::<f32>::zeros(py, [cache.num_slots() as usize, spec.d_qk()], false);
    let mut values = out.readwrite();
    let values = values.as_array_mut();
    py.detach(|| crate::unpack_kv_cache(&cache, values))?;
    Ok(out)
}

fn spec_of(family: Argument<Word>, kv_cache_format: Argument<Word>) -> Result<&'static FamilySpec, Error> {
    FamilySpec::find(family.named("family")?.parse()?, kv_cache_format.named("kv_cache_format")?.parse()?)
}

/// A latent as `[N, d_qk]`; with a `layout` also from `[pages, page, d_qk]`.
fn latent_of<'py>(latent: &Bound<'py, PyAny>, spec: &FamilySpec, layout: Option<&PageLayout>) -> PyResult<Array<'py>> {
    let latent = Array::new("latent", latent, LATENT_TYPES)?;
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

fn slots_of(slot_mapping: &Array<'_>) -> PyResult<Vec<i64>> {
    slot_mapping.require_contiguous()?;
    Ok(match slot_mapping.dtype {
        DType::I32 => slot_mapping.view::<i32, 1>()?.iter().map(|slot| i64::from(*slot)).collect(),
        _ => slot_mapping.view::<i64, 1>()?.to_vec(),
    })
}
