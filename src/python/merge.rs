//! `merge_states`: arrays in, checks, one call of the core on the host or on a device, arrays out.

use half::{bf16, f16};
use pyo3::prelude::*;

use super::argument::{Argument, Word, word};
use super::array::{Array, DType, Place, ViewElement};
use super::import::Importer;
use super::output;
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
    lse_base: Argument<Word>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let importer = Importer::on_stream(None);
    let lse_base: LseBase = lse_base.named("lse_base")?.parse()?;
    let out_a = Array::import("out_a", out_a, OUT_TYPES, &importer)?;
    let out_b = Array::import("out_b", out_b, &[out_a.dtype], &importer)?;
    let lse_a = Array::import("lse_a", lse_a, &[DType::F32], &importer)?;
    let lse_b = Array::import("lse_b", lse_b, &[DType::F32], &importer)?;
    let Some((_, leading)) = out_a.shape.split_last() else {
        return Err(Error::value("out_a", "of shape [..., H, d_v]", "a scalar").into());
    };
    for (array, expected) in [(&out_b, &out_a.shape[..]), (&lse_a, leading), (&lse_b, leading)] {
        if array.shape != expected {
            let accepted = format!("of shape {expected:?} like `out_a`");
            return Err(Error::value(array.name, accepted, format!("{:?}", array.shape)).into());
        }
    }
    let out = output::empty("out", &out_a, &out_a.shape, out_a.dtype, &importer)?;
    let lse = output::empty("lse", &out_a, leading, DType::F32, &importer)?;
    let (place, dtype) = (out_a.place(), out_a.dtype);
    let merge = Merge {
        a: State::new(out_a, lse_a)?,
        b: State::new(out_b, lse_b)?,
        merged: State::new(
            Array::import("out", &out, &[dtype], &importer)?,
            Array::import("lse", &lse, &[DType::F32], &importer)?,
        )?,
        lse_base,
    };
    match (place, dtype) {
        (Place::Cuda(ordinal), _) => super::on_device::merge(&merge, ordinal, &importer)?,
        (Place::Host, DType::Bf16) => merge.run_on_host::<bf16>()?,
        (Place::Host, DType::F16) => merge.run_on_host::<f16>()?,
        (Place::Host, _) => merge.run_on_host::<f32>()?,
    }
    Ok((out, lse))
}

/// Rows of values `[N, d_v]` with a log-sum-exp each, `[N]`.
pub(super) struct State<'py> {
    pub out: Array<'py>,
    pub lse: Array<'py>,
}

impl<'py> State<'py> {
    fn new(out: Array<'py>, lse: Array<'py>) -> Result<Self, Error> {
        Ok(Self { out: out.flatten_leading(1)?, lse: lse.flatten_leading(0)? })
    }
}

/// Two partial results and where their join goes.
pub(super) struct Merge<'py> {
    pub a: State<'py>,
    pub b: State<'py>,
    pub merged: State<'py>,
    pub lse_base: LseBase,
}

impl Merge<'_> {
    fn run_on_host<O: ViewElement + Element>(mut self) -> PyResult<()> {
        let py = self.merged.out.object.py();
        let a = PartialState { out: self.a.out.view::<O, 2>()?, lse: self.a.lse.view::<f32, 1>()? };
        let b = PartialState { out: self.b.out.view::<O, 2>()?, lse: self.b.lse.view::<f32, 1>()? };
        let (mut out, mut lse) = (self.merged.out.view_mut::<O, 2>()?, self.merged.lse.view_mut::<f32, 1>()?);
        Ok(py.detach(|| crate::merge_states(&a, &b, self.lse_base, &mut out, &mut lse))?)
    }
}
