//! `explain_decode` and its answer.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::int::Int;
use crate::{DecodeRequest, DecodeSupport, Geometry};

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
#[pyo3(signature = (family, *, num_heads, topk, num_tokens=Int::Small(1), page_block_size=None, page_stride=None,
                    row_stride=None, extra_topk=Int::Small(0), extra_page_block_size=None, extra_page_stride=None,
                    kv_cache_format="fp8", compute_precision="auto", compute_capability=None, extra_row_stride=None,
                    extra_kv_fp4=false),
       text_signature = "(family, *, num_heads, topk, num_tokens=1, page_block_size=None, page_stride=None, \
                         row_stride=None, extra_topk=0, extra_page_block_size=None, extra_page_stride=None, \
                         kv_cache_format='fp8', compute_precision='auto', compute_capability=None, \
                         extra_row_stride=None, extra_kv_fp4=False)")]
#[expect(clippy::too_many_arguments, reason = "the documented signature")]
pub(super) fn explain_decode(
    family: &str,
    num_heads: Int,
    topk: Int,
    num_tokens: Int,
    page_block_size: Option<Int>,
    page_stride: Option<Int>,
    row_stride: Option<Int>,
    extra_topk: Int,
    extra_page_block_size: Option<Int>,
    extra_page_stride: Option<Int>,
    kv_cache_format: &str,
    compute_precision: &str,
    compute_capability: Option<(Int, Int)>,
    extra_row_stride: Option<Int>,
    extra_kv_fp4: bool,
) -> PyResult<PyDecodeSupport> {
    let extra = geometry(
        ["extra_page_block_size", "extra_page_stride", "extra_row_stride"],
        [extra_page_block_size, extra_page_stride, extra_row_stride],
    )?;
    let request = DecodeRequest {
        kv_cache_format: kv_cache_format.parse()?,
        num_tokens: num_tokens.to_i64("num_tokens")?,
        geometry: geometry(
            ["page_block_size", "page_stride", "row_stride"],
            [page_block_size, page_stride, row_stride],
        )?,
        extra_topk: extra_topk.to_i64("extra_topk")?,
        extra_geometry: (extra != Geometry::default()).then_some(extra),
        extra_kv_fp4,
        compute_precision: compute_precision.parse()?,
        compute_capability: compute_capability
            .map(|(major, minor)| {
                Ok::<_, PyErr>((major.to_i64("compute_capability")?, minor.to_i64("compute_capability")?))
            })
            .transpose()?,
        ..DecodeRequest::new(family.parse()?, num_heads.to_i64("num_heads")?, topk.to_i64("topk")?)
    };
    Ok(PyDecodeSupport(crate::explain_decode(&request)))
}

/// Page size, page stride and row stride, under the names their refusals use.
pub(super) fn geometry(names: [&str; 3], values: [Option<Int>; 3]) -> PyResult<Geometry> {
    let [page_block_size, page_stride, row_stride] = values;
    let narrow = |name, value: Option<Int>| value.map(|value| value.to_i64(name)).transpose();
    Ok(Geometry {
        page_block_size: narrow(names[0], page_block_size)?,
        page_stride: narrow(names[1], page_stride)?,
        row_stride: narrow(names[2], row_stride)?,
    })
}
