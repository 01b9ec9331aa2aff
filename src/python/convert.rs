//! `convert_kv_cache` and `repage_kv_cache` on numpy arrays.

use numpy::IntoPyArray;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::argument::{Argument, Word, word};
use super::array::{Array, DType};
use super::caches::{spec_of, strided_view};
use super::int::Int;
use super::support::geometry;
use crate::{CacheView, Error, FamilySpec, Geometry, PackedCache};

const NAMES: [&str; 3] = ["page_block_size", "page_stride", "row_stride"];

/// Converts a packed cache into another family or format.
#[pyfunction]
#[pyo3(signature = (cache, *, from_family, to_family, from_format=word("fp8"), to_format=word("fp8"), page_block_size=None,
                    page_stride=None, row_stride=None, num_slots=None, from_kv_global_scale=Argument::Right(1.0),
                    to_kv_global_scale=Argument::Right(1.0), return_error=Argument::Right(false)),
       text_signature = "(cache, *, from_family, to_family, from_format='fp8', to_format='fp8', page_block_size=None, \
                         page_stride=None, row_stride=None, num_slots=None, from_kv_global_scale=1.0, \
                         to_kv_global_scale=1.0, return_error=False)")]
#[allow(clippy::too_many_arguments, reason = "Python's signature")]
pub(super) fn convert_kv_cache<'py>(
    cache: &Bound<'py, PyAny>,
    from_family: Argument<Word>,
    to_family: Argument<Word>,
    from_format: Argument<Word>,
    to_format: Argument<Word>,
    page_block_size: Option<Argument<Int>>,
    page_stride: Option<Argument<Int>>,
    row_stride: Option<Argument<Int>>,
    num_slots: Option<Argument<Int>>,
    from_kv_global_scale: Argument<f64>,
    to_kv_global_scale: Argument<f64>,
    return_error: Argument<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = cache.py();
    let from = spec_of(["from_family", "from_format"], from_family, from_format)?;
    let to = spec_of(["to_family", "to_format"], to_family, to_format)?;
    let source = Source::new(cache, from, from_kv_global_scale, num_slots)?;
    let geometry = source.geometry_or(geometry(NAMES, [page_block_size, page_stride, row_stride])?);
    let scale = to_kv_global_scale.named_finite_f32("to_kv_global_scale")?;
    let return_error = return_error.named("return_error")?;
    let view = source.view()?;
    let num_slots = source.num_slots;
    let (packed, error) = py.detach(|| crate::convert_kv_cache(&view, to, geometry, num_slots, scale))?;
    let converted = to_numpy(py, packed)?;
    match return_error {
        true => Ok(PyTuple::new(py, [converted, error.into_pyobject(py)?.into_any()])?.into_any()),
        false => Ok(converted),
    }
}

/// Moves a packed cache into pages of another size or other strides.
#[pyfunction]
#[pyo3(signature = (cache, *, family, kv_cache_format=word("fp8"), page_block_size=None, page_stride=None, row_stride=None,
                    num_slots=None),
       text_signature = "(cache, *, family, kv_cache_format='fp8', page_block_size=None, page_stride=None, \
                         row_stride=None, num_slots=None)")]
pub(super) fn repage_kv_cache<'py>(
    cache: &Bound<'py, PyAny>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    page_block_size: Option<Argument<Int>>,
    page_stride: Option<Argument<Int>>,
    row_stride: Option<Argument<Int>>,
    num_slots: Option<Argument<Int>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = cache.py();
    let spec = spec_of(["family", "kv_cache_format"], family, kv_cache_format)?;
    let source = Source::new(cache, spec, Argument::Right(1.0), num_slots)?;
    let geometry = source.geometry_or(geometry(NAMES, [page_block_size, page_stride, row_stride])?);
    let view = source.view()?;
    let num_slots = source.num_slots;
    let packed = py.detach(|| crate::repage_kv_cache(&view, geometry, num_slots))?;
    to_numpy(py, packed)
}

/// The cache that is read.
struct Source<'py> {
    array: Array<'py>,
    spec: &'static FamilySpec,
    pages: usize,
    geometry: Geometry,
    kv_global_scale: f32,
    num_slots: Option<u64>,
}

impl<'py> Source<'py> {
    fn new(
        cache: &Bound<'py, PyAny>,
        spec: &'static FamilySpec,
        kv_global_scale: Argument<f64>,
        num_slots: Option<Argument<Int>>,
    ) -> PyResult<Self> {
        let array = Array::new("cache", cache, &[DType::U8])?;
        let (pages, geometry) = array.cache_geometry(spec)?;
        let num_slots = num_slots.map(|number| number.named_i64("num_slots")).transpose()?;
        let not_negative = |number| u64::try_from(number).map_err(|_| Error::value("num_slots", "at least 0", number));
        Ok(Self {
            array,
            spec,
            pages,
            geometry,
            kv_global_scale: kv_global_scale.named_finite_f32("from_kv_global_scale")?,
            num_slots: num_slots.map(not_negative).transpose()?,
        })
    }

    /// The geometry asked for; its page size, where none was named, is that of the cache.
    fn geometry_or(&self, asked: Geometry) -> Geometry {
        Geometry { page_block_size: asked.page_block_size.or(self.geometry.page_block_size), ..asked }
    }

    fn view(&self) -> Result<CacheView<'_>, Error> {
        CacheView::new(self.spec, self.geometry, self.pages, self.array.bytes(), self.kv_global_scale)
    }
}

fn to_numpy(py: Python<'_>, packed: PackedCache) -> PyResult<Bound<'_, PyAny>> {
    strided_view(py, packed.bytes.into_pyarray(py).into_any(), packed.pages, &packed.layout)
}
