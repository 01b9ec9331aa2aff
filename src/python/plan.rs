//! `plan_decode` and the devices it can be asked for without one.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::argument::{Argument, Word, int, word};
use super::int::Int;
use super::support::capability;
use crate::known_devices::{KNOWN_DEVICES, LEAST_SHARED_MEMORY_PER_BLOCK};
use crate::plan::{DecodePlan, DeviceFacts, Kernel};
use crate::{DecodeRequest, Error, KvCacheFormat};

/// How `decode` would be launched on a GPU. Needs none.
#[pyfunction]
#[pyo3(signature = (family, *, num_heads, topk, compute_capability, multiprocessors, num_tokens=int(1),
                    extra_topk=int(0), extra_kv_fp4=Argument::Right(false), kv_cache_format=word("fp8"),
                    batch_invariant=Argument::Right(false)),
       text_signature = "(family, *, num_heads, topk, compute_capability, multiprocessors, num_tokens=1, \
                         extra_topk=0, extra_kv_fp4=False, kv_cache_format='fp8', batch_invariant=False)")]
#[expect(clippy::too_many_arguments, reason = "the documented signature")]
pub(super) fn plan_decode<'py>(
    py: Python<'py>,
    family: Argument<Word>,
    num_heads: Argument<Int>,
    topk: Argument<Int>,
    compute_capability: &Bound<'py, PyAny>,
    multiprocessors: Argument<Int>,
    num_tokens: Argument<Int>,
    extra_topk: Argument<Int>,
    extra_kv_fp4: Argument<bool>,
    kv_cache_format: Argument<Word>,
    batch_invariant: Argument<bool>,
) -> PyResult<Bound<'py, PyDict>> {
    let (num_heads, topk) = (num_heads.named_i64("num_heads")?, topk.named_i64("topk")?);
    let request = DecodeRequest {
        kv_cache_format: KvCacheFormat::primary(&kv_cache_format.named("kv_cache_format")?)?,
        num_tokens: num_tokens.named_i64("num_tokens")?,
        extra_topk: extra_topk.named_i64("extra_topk")?,
        extra_kv_fp4: extra_kv_fp4.named("extra_kv_fp4")?,
        ..DecodeRequest::new(family.named("family")?.parse()?, num_heads, topk)
    };
    let device = facts(capability(compute_capability)?, multiprocessors.named_i64("multiprocessors")?)?;
    let plan = DecodePlan::new(&request, &device, batch_invariant.named("batch_invariant")?)?;
    let answer = PyDict::new(py);
    let name = |kernel: &Kernel| format!("{}/{}", kernel.module, kernel.entry);
    answer.set_item("kernel", name(plan.kernel))?;
    answer.set_item("extra_kernel", plan.extra.map(|extra| name(extra.kernel)))?;
    answer.set_item("head_tile", plan.kernel.heads)?;
    answer.set_item("head_tiles", plan.head_tiles())?;
    answer.set_item("chunk", plan.kernel.chunk)?;
    answer.set_item("chunks", plan.chunks())?;
    answer.set_item("splits", plan.splits)?;
    answer.set_item("extra_splits", plan.extra.map(|extra| extra.splits))?;
    answer.set_item("passes", plan.passes())?;
    answer.set_item("grid", plan.grid())?;
    answer.set_item("threads", plan.kernel.threads)?;
    answer.set_item("shared_bytes", plan.kernel.shared_bytes)?;
    answer.set_item("workspace_bytes", plan.workspace_bytes())?;
    Ok(answer)
}

/// Every kernel keeps to the least shared memory, so more of it changes no plan.
fn facts((major, minor): (i64, i64), multiprocessors: i64) -> Result<DeviceFacts, Error> {
    let narrow = |number: i64| {
        i32::try_from(number).map_err(|_| Error::value("compute_capability", "a GPU's", format!("{major}.{minor}")))
    };
    let accepted = || Error::value("multiprocessors", "at least 1", multiprocessors);
    Ok(DeviceFacts {
        multiprocessors: usize::try_from(multiprocessors).ok().filter(|count| *count > 0).ok_or_else(accepted)?,
        shared_memory_per_block: LEAST_SHARED_MEMORY_PER_BLOCK,
        compute_capability: (narrow(major)?, narrow(minor)?),
    })
}

/// Products whose facts `plan_decode` takes.
#[pyfunction]
pub(super) fn known_devices(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let table = PyDict::new(py);
    for device in KNOWN_DEVICES {
        let line = PyDict::new(py);
        line.set_item("name", device.name)?;
        line.set_item("compute_capability", device.facts.compute_capability)?;
        line.set_item("multiprocessors", device.facts.multiprocessors)?;
        table.set_item(device.word, line)?;
    }
    Ok(table)
}
