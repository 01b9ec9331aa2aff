//! Arrays that a call writes: the caller's, or new ones of the kind the queries are.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::array::{Array, DType, Place};
use super::decode::Queries;
use super::device_array::DeviceArray;
use super::import::Importer;
use crate::Error;
use crate::cuda::CUstream;

/// `out` (with its last dimension d_v) or `lse` (without): `[T, H, d_v]`, or `[B, Q, H, d_v]` for 4-D queries; the caller's
/// or a new one. Returns its object, and it as `[T, H, d_v]`.
pub(super) fn array<'py>(
    q: &Queries<'py>,
    name: &'static str,
    given: Option<&Bound<'py, PyAny>>,
    d_v: Option<usize>,
    importer: &Importer,
) -> PyResult<(Bound<'py, PyAny>, Array<'py>)> {
    let accepted: &[DType] = if d_v.is_some() { &[DType::Bf16, DType::F16, DType::F32] } else { &[DType::F32] };
    let shape_after = |leading: &[usize]| [leading, &[q.num_heads()], d_v.as_slice()].concat();
    let own = shape_after(q.leading());
    let object = match given {
        Some(object) => object.clone(),
        None => empty(name, &q.original, &own, if d_v.is_some() { DType::Bf16 } else { DType::F32 }, importer)?,
    };
    let array = Array::import(name, &object, accepted, importer)?;
    if array.shape != own && array.shape != shape_after(&[q.num_tokens()]) {
        return Err(Error::value(name, format!("of shape {own:?}"), format!("{:?}", array.shape)).into());
    }
    array.require_dense_rows()?;
    Ok((object, array.flatten_leading(own.len() - q.leading().len())?))
}

/// A new array on the device of `like`, of its type or another: of its library if that is one of those that can be asked,
/// else numpy's or our own.
pub(super) fn empty<'py>(
    name: &str,
    like: &Array<'py>,
    shape: &[usize],
    dtype: DType,
    importer: &Importer,
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.object.py();
    let lengths = shape;
    let shape = PyTuple::new(py, lengths)?;
    let module = like.object.get_type().module()?.to_string();
    match module.split('.').next().unwrap_or_default() {
        "torch" => {
            let options = PyDict::new(py);
            if dtype != like.dtype {
                options.set_item("dtype", py.import("torch")?.getattr(dtype.numpy_name())?)?;
            }
            like.object.call_method("new_empty", (shape,), Some(&options))
        }
        library @ ("numpy" | "cupy") => {
            let dtype = match dtype == like.dtype {
                true => like.object.getattr("dtype")?,
                false => dtype.numpy_name().into_pyobject(py)?.into_any(),
            };
            py.import(library)?.call_method1("empty", (shape, dtype))
        }
        _ => match like.place() {
            Place::Host => py.import("numpy")?.call_method1("empty", (shape, dtype.numpy_name())),
            Place::Cuda(ordinal) => {
                let device = crate::cuda::device(ordinal as usize)?;
                let array = DeviceArray::empty(name, device, importer.stream() as CUstream, lengths, dtype)?;
                Ok(Bound::new(py, array)?.into_any())
            }
        },
    }
}

/// New bytes under `strides` in an allocation of `bytes` bytes, on the device of `like`.
pub(super) fn strided_bytes<'py>(
    name: &str,
    like: &Array<'py>,
    shape: [usize; 3],
    strides: [usize; 3],
    bytes: usize,
    importer: &Importer,
) -> PyResult<Bound<'py, PyAny>> {
    if shape.iter().product::<usize>() == bytes {
        return empty(name, like, &shape, DType::U8, importer);
    }
    let module = like.object.get_type().module()?.to_string();
    let library = module.split('.').next().unwrap_or_default();
    if !matches!(library, "torch" | "cupy") {
        let accepted =
            "dense pages (a `page_stride` of whole rows) where the library of the latent is neither torch nor cupy";
        return Err(Error::value("page_block_size", accepted, format!("pages of {} bytes", strides[0])).into());
    }
    let flat = empty(name, like, &[bytes], DType::U8, importer)?;
    match library {
        "torch" => flat.call_method1("as_strided", (shape, strides)),
        _ => {
            let (py, stride_tricks) = (flat.py(), flat.py().import("cupy.lib.stride_tricks")?);
            stride_tricks.call_method1("as_strided", (flat, PyTuple::new(py, shape)?, PyTuple::new(py, strides)?))
        }
    }
}
