//! `merge_states` on host arrays.

use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::argument::{Argument, word};
use super::array::{Array, DType, ViewElement};
use crate::{Element, Error, LseBase, PartialState};

const OUT_TYPES: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

/// Joins two partial attention results over disjoint candidates.
#[pyfunction]
#[pyo3(signature = (out_a, lse_a, out_b, lse_b, *, lse_base=word("2")),
       text_signature = "(out_a, lse_a, out_b, lse_b, *, lse_base='2')")]
pub(super) fn merge_states<'py>(
    out_a: &Bound<'py, PyAny>,
    lse_a: &Bound<'py, PyAny>,
    out_b: &Bound<'py, PyAny>,
    lse_b: &Bound<'py, PyAny>,
    lse_base: Argument<String>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let lse_base: LseBase = lse_base.named("lse_base")?.parse()?;
    let out_a = Array::new("out_a", out_a, OUT_TYPES)?;
    let out_b = Array::new("out_b", out_b, &[out_a.dtype])?;
    let lse_a = Array::new("lse_a", lse_a, &[DType::F32])?;
    let lse_b = Array::new("lse_b", lse_b, &[DType::F32])?;
    let Some((_, leading)) = out_a.shape.split_last() else {
        return Err(Error::value("out_a", "of shape [..., H, d_v]", "a scalar").into());
    };
    for (array, expected) in [(&out_b, &out_a.shape[..]), (&lse_a, leading), (&lse_b, leading)] {
        if array.shape != expected {
            let accepted = format!("of shape {expected:?} like `out_a`");
            return Err(Error::value(array.name, accepted, format!("{:?}", array.shape)).into());
        }
    }
    let empty_like = |array: &Array<'py>| {
        let shape = PyTuple::new(array.object.py(), &array.shape)?;
        array.object.py().import("numpy")?.call_method1("empty", (shape, array.object.getattr("dtype")?))
    };
    let (out, lse) = (empty_like(&out_a)?, empty_like(&lse_a)?);
    let results = (Array::new("out", &out, OUT_TYPES)?, Array::new("lse", &lse, &[DType::F32])?);
    let inputs = [out_a, lse_a, out_b, lse_b];
    match inputs[0].dtype {
        DType::Bf16 => merge::<bf16>(inputs, lse_base, results)?,
        DType::F16 => merge::<f16>(inputs, lse_base, results)?,
        _ => merge::<f32>(inputs, lse_base, results)?,
    }
    Ok((out, lse))
}

fn merge<O: ViewElement + Element>(
    inputs: [Array<'_>; 4],
    lse_base: LseBase,
    (out, lse): (Array<'_>, Array<'_>),
) -> PyResult<()> {
    let py = out.object.py();
    let [out_a, lse_a, out_b, lse_b] = inputs;
    let (out_a, out_b) = (out_a.flatten_leading(1)?, out_b.flatten_leading(1)?);
    let (lse_a, lse_b) = (lse_a.flatten_leading(0)?, lse_b.flatten_leading(0)?);
    let (mut out, mut lse) = (out.flatten_leading(1)?, lse.flatten_leading(0)?);
    let a = PartialState { out: out_a.view::<O, 2>()?, lse: lse_a.view::<f32, 1>()? };
    let b = PartialState { out: out_b.view::<O, 2>()?, lse: lse_b.view::<f32, 1>()? };
    let (mut out, mut lse) = (out.view_mut::<O, 2>()?, lse.view_mut::<f32, 1>()?);
    Ok(py.detach(|| crate::merge_states(&a, &b, lse_base, &mut out, &mut lse))?)
}
