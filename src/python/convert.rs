//! `convert_kv_cache` and `repage_kv_cache`: arrays in, checks, one call of the core on the host or on a device.

use numpy::IntoPyArray;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::argument::{Argument, Word, word};
use super::array::{Array, DType, Place};
use super::caches::{spec_of, strided_view};
use super::caches_on_device;
use super::decode::refuse_gpu_argument;
use super::import::{Importer, stream_handle};
use super::int::Int;
use super::support::geometry;
use crate::{CacheView, Conversion, Error, FamilySpec, Geometry, PackedCache, PageLayout};

const NAMES: [&str; 3] = ["page_block_size", "page_stride", "row_stride"];

/// Converts a packed cache into another family or format.
#[pyfunction]
#[pyo3(signature = (cache, *, from_family, to_family, from_format=word("fp8"), to_format=word("fp8"), page_block_size=None,
                    page_stride=None, row_stride=None, num_slots=None, from_kv_global_scale=Argument::Right(1.0),
                    to_kv_global_scale=Argument::Right(1.0), return_error=Argument::Right(false), stream=None),
       text_signature = "(cache, *, from_family, to_family, from_format='fp8', to_format='fp8', page_block_size=None, \
                         page_stride=None, row_stride=None, num_slots=None, from_kv_global_scale=1.0, \
                         to_kv_global_scale=1.0, return_error=False, stream=None)")]
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
    stream: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = cache.py();
    let importer = Importer::on_stream(stream.map(stream_handle).transpose()?);
    let from = spec_of(["from_family", "from_format"], from_family, from_format)?;
    let to = spec_of(["to_family", "to_format"], to_family, to_format)?;
    let source = Source::new(cache, from, from_kv_global_scale, num_slots, &importer)?;
    let geometry = source.geometry_or(geometry(NAMES, [page_block_size, page_stride, row_stride])?);
    let scale = to_kv_global_scale.named_finite_f32("to_kv_global_scale")?;
    let return_error = return_error.named("return_error")?;
    let (converted, error) = match source.array.place() {
        Place::Cuda(ordinal) => {
            if return_error && Conversion::between(from, to)? == Conversion::Lossy {
                let accepted = "False for a lossy conversion on a GPU (compare `unpack_kv_cache` of both caches)";
                return Err(Error::value("return_error", accepted, "True").into());
            }
            (source.convert_on_device(to, scale, geometry, ordinal, &importer)?, 0.0)
        }
        Place::Host => {
            refuse_gpu_argument("stream", stream)?;
            let (view, num_slots) = (source.view()?, source.num_slots);
            let (packed, error) = py.detach(|| crate::convert_kv_cache(&view, to, geometry, num_slots, scale))?;
            (to_numpy(py, packed)?, error)
        }
    };
    match return_error {
        true => Ok(PyTuple::new(py, [converted, error.into_pyobject(py)?.into_any()])?.into_any()),
        false => Ok(converted),
    }
}

/// Moves a packed cache into pages of another size or other strides.
#[pyfunction]
#[pyo3(signature = (cache, *, family, kv_cache_format=word("fp8"), page_block_size=None, page_stride=None, row_stride=None,
                    num_slots=None, stream=None),
       text_signature = "(cache, *, family, kv_cache_format='fp8', page_block_size=None, page_stride=None, \
                         row_stride=None, num_slots=None, stream=None)")]
#[allow(clippy::too_many_arguments, reason = "Python's signature")]
pub(super) fn repage_kv_cache<'py>(
    cache: &Bound<'py, PyAny>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    page_block_size: Option<Argument<Int>>,
    page_stride: Option<Argument<Int>>,
    row_stride: Option<Argument<Int>>,
    num_slots: Option<Argument<Int>>,
    stream: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = cache.py();
    let importer = Importer::on_stream(stream.map(stream_handle).transpose()?);
    let spec = spec_of(["family", "kv_cache_format"], family, kv_cache_format)?;
    let source = Source::new(cache, spec, Argument::Right(1.0), num_slots, &importer)?;
    let geometry = source.geometry_or(geometry(NAMES, [page_block_size, page_stride, row_stride])?);
    if let Place::Cuda(ordinal) = source.array.place() {
        return source.convert_on_device(spec, source.kv_global_scale, geometry, ordinal, &importer);
    }
    refuse_gpu_argument("stream", stream)?;
    let (view, num_slots) = (source.view()?, source.num_slots);
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
        importer: &Importer,
    ) -> PyResult<Self> {
        let array = Array::import("cache", cache, &[DType::U8], importer)?;
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

    fn convert_on_device(
        &self,
        to: &'static FamilySpec,
        kv_global_scale: f32,
        geometry: Geometry,
        ordinal: i32,
        importer: &Importer,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (layout, specs) = (PageLayout::new(to, geometry, "")?, [self.spec, to]);
        let scales = [self.kv_global_scale, kv_global_scale];
        caches_on_device::convert(&self.array, specs, scales, &layout, self.num_slots, ordinal, importer)
    }

    fn view(&self) -> Result<CacheView<'_>, Error> {
        CacheView::new(self.spec, self.geometry, self.pages, self.array.bytes(), self.kv_global_scale)
    }
}

fn to_numpy(py: Python<'_>, packed: PackedCache) -> PyResult<Bound<'_, PyAny>> {
    strided_view(py, packed.bytes.into_pyarray(py).into_any(), packed.pages, &packed.layout)
}
