//! The Rust half of the Python class `SparseMLASm120DecodeConfig`: checks its fields and answers its queries.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PyTuple};

use super::argument::{Argument, Scalar, Word, int, type_name};
use super::int::Int;
use crate::{DecodeConfig, Error, KvCacheFormat};

/// Longest tuple of head counts that is built.
const MAX_LISTED_HEADS: i64 = 1 << 24;

/// Base of the Python dataclass. The config is made from the instance's fields at first use, so that unpickled and
/// copied instances, which run no constructor, answer too.
#[pyclass(subclass, frozen, module = "sparse_mla._core")]
pub(super) struct ConfigQueries {
    config: OnceLock<DecodeConfig<Int>>,
}

impl ConfigQueries {
    fn config<'a>(slf: &'a Bound<'_, Self>) -> PyResult<&'a DecodeConfig<Int>> {
        let cell = &slf.get().config;
        match cell.get() {
            Some(config) => Ok(config),
            None => {
                let config = config_of_fields(slf)?;
                Ok(cell.get_or_init(|| config))
            }
        }
    }
}

#[pymethods]
impl ConfigQueries {
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self { config: OnceLock::new() }
    }

    /// Head counts the decode form serves: `head_counts` sorted, or every count from 1 to `max_num_heads`.
    fn supported_num_heads<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let config = Self::config(slf)?;
        match &config.head_counts {
            Some(counts) => PyTuple::new(slf.py(), counts.iter().cloned()),
            None => match config.max_num_heads {
                Int::Small(most) if most <= MAX_LISTED_HEADS => PyTuple::new(slf.py(), 1..most.max(0) as u32 + 1),
                ref most if *most < Int::Small(0) => Ok(PyTuple::empty(slf.py())),
                ref most => Err(PyOverflowError::new_err(format!("`max_num_heads` is too large to list, got {most}"))),
            },
        }
    }

    /// Calibrated widths of the indices row, sorted; `()` when `num_heads` lies outside the head envelope.
    #[pyo3(signature = (num_heads=None))]
    fn supported_topk<'py>(slf: &Bound<'py, Self>, num_heads: Option<Argument<Int>>) -> PyResult<Bound<'py, PyTuple>> {
        let num_heads = num_heads.map(|heads| heads.named("num_heads")).transpose()?;
        PyTuple::new(slf.py(), Self::config(slf)?.supported_topk(num_heads))
    }

    /// Whether the decode form serves a shape. Never raises on ints, however large.
    #[pyo3(signature = (num_heads, topk, *, num_tokens=int(1), page_block_size=None),
           text_signature = "($self, num_heads, topk, *, num_tokens=1, page_block_size=None)")]
    fn supports_decode(
        slf: &Bound<'_, Self>,
        num_heads: Argument<Int>,
        topk: Argument<Int>,
        num_tokens: Argument<Int>,
        page_block_size: Option<Argument<Int>>,
    ) -> PyResult<bool> {
        Ok(Self::config(slf)?.supports_decode(
            num_heads.named("num_heads")?,
            topk.named("topk")?,
            num_tokens.named("num_tokens")?,
            page_block_size.map(|page| page.named("page_block_size")).transpose()?,
        ))
    }

    /// Checks the instance's fields; returns them in canonical types, by name, in order.
    fn _normalised<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        fields_of_config(slf.py(), &config_of_fields(slf)?)
    }

    /// Copying and unpickling construct without arguments and then restore the instance's `__dict__`.
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>, Bound<'py, PyAny>)> {
        let construct = slf.py().import("copyreg")?.getattr("__newobj__")?;
        Ok((construct, PyTuple::new(slf.py(), [slf.get_type()])?, slf.getattr("__dict__")?))
    }
}

fn config_of_fields(instance: &Bound<'_, ConfigQueries>) -> PyResult<DecodeConfig<Int>> {
    let field = |name: &str| instance.getattr(name);
    Ok(DecodeConfig {
        d_qk: scalar_field("d_qk", &field("d_qk")?)?,
        page_block_size: scalar_field("page_block_size", &field("page_block_size")?)?,
        max_num_tokens: scalar_field("max_num_tokens", &field("max_num_tokens")?)?,
        topks: set_field("topks", &field("topks")?)?,
        min_topk: scalar_field("min_topk", &field("min_topk")?)?,
        max_num_heads: scalar_field("max_num_heads", &field("max_num_heads")?)?,
        kv_cache_format: KvCacheFormat::primary(&scalar_field::<Word>("kv_cache_format", &field("kv_cache_format")?)?)?,
        bytes_per_token: scalar_field("bytes_per_token", &field("bytes_per_token")?)?,
        head_counts: match field("head_counts")? {
            counts if counts.is_none() => None,
            counts => Some(set_field("head_counts", &counts)?),
        },
        topk_is_runtime: scalar_field("topk_is_runtime", &field("topk_is_runtime")?)?,
        extra_page_block_sizes: set_field("extra_page_block_sizes", &field("extra_page_block_sizes")?)?,
        page_block_sizes: set_field("page_block_sizes", &field("page_block_sizes")?)?,
        page_block_size_is_runtime: scalar_field("page_block_size_is_runtime", &field("page_block_size_is_runtime")?)?,
    })
}

/// A config's fields as the constructor's arguments.
pub(super) fn fields_of_config<'py, I>(py: Python<'py>, config: &DecodeConfig<I>) -> PyResult<Bound<'py, PyDict>>
where
    I: IntoPyObject<'py> + Clone,
{
    let set = |values: &BTreeSet<I>| PyFrozenSet::new(py, values.iter().cloned());
    let fields = PyDict::new(py);
    fields.set_item("d_qk", config.d_qk.clone())?;
    fields.set_item("page_block_size", config.page_block_size.clone())?;
    fields.set_item("max_num_tokens", config.max_num_tokens.clone())?;
    fields.set_item("topks", set(&config.topks)?)?;
    fields.set_item("min_topk", config.min_topk.clone())?;
    fields.set_item("max_num_heads", config.max_num_heads.clone())?;
    fields.set_item("kv_cache_format", config.kv_cache_format.as_str())?;
    fields.set_item("bytes_per_token", config.bytes_per_token.clone())?;
    fields.set_item("head_counts", config.head_counts.as_ref().map(set).transpose()?)?;
    fields.set_item("topk_is_runtime", config.topk_is_runtime)?;
    fields.set_item("extra_page_block_sizes", set(&config.extra_page_block_sizes)?)?;
    fields.set_item("page_block_sizes", set(&config.page_block_sizes)?)?;
    fields.set_item("page_block_size_is_runtime", config.page_block_size_is_runtime)?;
    Ok(fields)
}

fn scalar_field<T: Scalar>(name: &str, value: &Bound<'_, PyAny>) -> Result<T, Error> {
    T::of(value).ok_or_else(|| Error::wrong_type(name, T::EXPECTED, type_name(value)))
}

fn set_field(name: &str, values: &Bound<'_, PyAny>) -> PyResult<BTreeSet<Int>> {
    let refuse = |got: String| PyErr::from(Error::wrong_type(name, "an iterable of ints", got));
    let iterator = values.try_iter().map_err(|error| {
        if error.is_instance_of::<PyTypeError>(values.py()) { refuse(type_name(values)) } else { error }
    })?;
    iterator
        .map(|value| {
            let value = value?;
            Int::of(&value).ok_or_else(|| refuse(format!("one with a {}", type_name(&value))))
        })
        .collect()
}
