//! `explain_decode` and its answer.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::argument::{Argument, Word, int, type_name, word};
use super::int::Int;
use crate::{DecodeRequest, DecodeSupport, Error, Geometry, KvCacheFormat};

/// Answer of `explain_decode`; truthy if and only if `supported`.
#[pyclass(frozen, eq, name = "DecodeSupport", module = "sparse_mla")]
#[derive(PartialEq)]
pub(super) struct PyDecodeSupport(DecodeSupport);

#[pymethods]
impl PyDecodeSupport {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str, &'static str) {
        ("supported", "reasons", "kernel")
    }

    /// The answer with given reasons; supported if and only if there is a kernel.
    #[new]
    fn new(reasons: Vec<String>, kernel: Option<String>) -> Self {
        Self(DecodeSupport { reasons, kernel })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Vec<String>, Option<String>)) {
        let DecodeSupport { reasons, kernel } = &slf.get().0;
        (slf.get_type(), (reasons.clone(), kernel.clone()))
    }

    /// Whether `decode` serves the shape.
    #[getter]
    fn supported(&self) -> bool {
        self.0.supported()
    }

    /// Every reason for a refusal; empty when supported.
    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.reasons)
    }

    /// Name of the code that serves the shape, None when refused.
    #[getter]
    fn kernel(&self) -> Option<&str> {
        self.0.kernel.as_deref()
    }

    fn __bool__(&self) -> bool {
        self.0.supported()
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let supported = if self.0.supported() { "True" } else { "False" };
        let kernel = self.kernel().map_or("None".into(), |kernel| format!("'{kernel}'"));
        Ok(format!("DecodeSupport(supported={supported}, reasons={}, kernel={kernel})", self.reasons(py)?.repr()?))
    }
}

/// Whether `decode` serves a shape, and if not, every reason why. Needs no GPU.
#[pyfunction]
#[pyo3(signature = (family, *, num_heads, topk, num_tokens=int(1), page_block_size=None, page_stride=None,
                    row_stride=None, extra_topk=int(0), extra_page_block_size=None, extra_page_stride=None,
                    kv_cache_format=word("fp8"), compute_precision=word("auto"), compute_capability=None,
                    extra_row_stride=None, extra_kv_fp4=Argument::Right(false)),
       text_signature = "(family, *, num_heads, topk, num_tokens=1, page_block_size=None, page_stride=None, \
                         row_stride=None, extra_topk=0, extra_page_block_size=None, extra_page_stride=None, \
                         kv_cache_format='fp8', compute_precision='auto', compute_capability=None, \
                         extra_row_stride=None, extra_kv_fp4=False)")]
#[expect(clippy::too_many_arguments, reason = "the documented signature")]
pub(super) fn explain_decode(
    family: Argument<Word>,
    num_heads: Argument<Int>,
    topk: Argument<Int>,
    num_tokens: Argument<Int>,
    page_block_size: Option<Argument<Int>>,
    page_stride: Option<Argument<Int>>,
    row_stride: Option<Argument<Int>>,
    extra_topk: Argument<Int>,
    extra_page_block_size: Option<Argument<Int>>,
    extra_page_stride: Option<Argument<Int>>,
    kv_cache_format: Argument<Word>,
    compute_precision: Argument<Word>,
    compute_capability: Option<&Bound<'_, PyAny>>,
    extra_row_stride: Option<Argument<Int>>,
    extra_kv_fp4: Argument<bool>,
) -> PyResult<PyDecodeSupport> {
    let extra = geometry(
        ["extra_page_block_size", "extra_page_stride", "extra_row_stride"],
        [extra_page_block_size, extra_page_stride, extra_row_stride],
    )?;
    let family = family.named("family")?.parse()?;
    let request = DecodeRequest {
        kv_cache_format: KvCacheFormat::primary(&kv_cache_format.named("kv_cache_format")?)?,
        num_tokens: num_tokens.named_i64("num_tokens")?,
        geometry: geometry(
            ["page_block_size", "page_stride", "row_stride"],
            [page_block_size, page_stride, row_stride],
        )?,
        extra_topk: extra_topk.named_i64("extra_topk")?,
        extra_geometry: (extra != Geometry::default()).then_some(extra),
        extra_kv_fp4: extra_kv_fp4.named("extra_kv_fp4")?,
        compute_precision: compute_precision.named("compute_precision")?.parse()?,
        compute_capability: compute_capability.map(capability).transpose()?,
        ..DecodeRequest::new(family, num_heads.named_i64("num_heads")?, topk.named_i64("topk")?)
    };
    Ok(PyDecodeSupport(crate::explain_decode(&request)))
}

pub(super) fn capability(value: &Bound<'_, PyAny>) -> PyResult<(i64, i64)> {
    const NAME: &str = "compute_capability";
    let (major, minor): (Argument<Int>, Argument<Int>) =
        value.extract().map_err(|_| Error::wrong_type(NAME, "a tuple (major, minor)", type_name(value)))?;
    Ok((major.named_i64(NAME)?, minor.named_i64(NAME)?))
}

/// Page size, page stride and row stride, under the names their refusals use.
pub(super) fn geometry(names: [&str; 3], values: [Option<Argument<Int>>; 3]) -> PyResult<Geometry> {
    let [page_block_size, page_stride, row_stride] = values;
    let narrow = |name, value: Option<Argument<Int>>| value.map(|value| value.named_i64(name)).transpose();
    Ok(Geometry {
        page_block_size: narrow(names[0], page_block_size)?,
        page_stride: narrow(names[1], page_stride)?,
        row_stride: narrow(names[2], row_stride)?,
    })
}
