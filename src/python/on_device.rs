//! `decode` and `merge_states` on a CUDA device.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::argument::{Argument, Word, int, word};
use super::array::{Array, DType};
use super::decode::{Call, Candidates};
use super::device_array::mark_written;
use super::import::Importer;
use super::int::Int;
use super::merge::{Merge, State};
use crate::cuda::{
    CUstream, CacheOnDevice, CandidatesOnDevice, DecodeOnDevice, Device, MergeOnDevice, OutType, StateOnDevice,
    Workspace, device,
};
use crate::layout::require_aligned;
use crate::plan::DecodePlan;
use crate::{DecodeRequest, Error, FamilySpec, KvCacheFormat, PageLayout};

/// Enqueues a checked call on the importer's stream.
pub(super) fn run(
    call: &Call<'_>,
    out: &Array<'_>,
    lse: Option<&Array<'_>>,
    ordinal: i32,
    workspace: Option<&Bound<'_, PyAny>>,
    importer: &Importer,
) -> PyResult<()> {
    let device = device(usize::try_from(ordinal).unwrap_or(usize::MAX))?;
    let plan = plan(&call.request, device, call.batch_invariant)?;
    let stream = importer.stream() as CUstream;
    require_aligned("q", call.q.flat.address())?;
    let lengths = [&call.main].into_iter().chain(&call.extra).flat_map(|candidates| &candidates.lengths);
    for array in lengths.chain(&call.sink) {
        array.require_contiguous()?; // kernels step over numbers, not strides
    }
    let given = workspace.map(|object| Array::import("workspace", object, &[DType::U8], importer)).transpose()?;
    let workspace = match &given {
        Some(array) => workspace_of(array)?,
        None => Workspace::of_stream(device, stream, plan.workspace_bytes())?,
    };
    let decode = DecodeOnDevice {
        q: call.q.flat.address(),
        main: candidates(&call.main, call.request.family, call.request.kv_cache_format)?,
        extra: call
            .extra
            .as_ref()
            .map(|extra| candidates(extra, call.request.family, call.request.extra_format()))
            .transpose()?,
        sink: address(call.sink.as_ref()),
        out: out.address(),
        out_type: out_type(out),
        out_strides: [out.element_stride(0), out.element_stride(1)],
        lse: address(lse),
        lse_stride: lse.map_or(0, |lse| lse.element_stride(0)),
        sm_scale: call.sm_scale,
        lse_base: call.lse_base,
        kv_global_scale: call.kv_global_scale,
    };
    // SAFETY: every array was checked for place, shape, strides, alignment and overlap, and outlives its work in its
    // library's stream order; the stream is the caller's.
    unsafe { device.decode(&plan, &decode, workspace, stream) }?;
    for array in std::iter::once(out).chain(lse) {
        mark_written(&array.object, stream)?;
    }
    Ok(())
}

/// Enqueues a checked merge on the importer's stream.
pub(super) fn merge(merge: &Merge<'_>, ordinal: i32, importer: &Importer) -> PyResult<()> {
    let device = device(usize::try_from(ordinal).unwrap_or(usize::MAX))?;
    let stream = importer.stream() as CUstream;
    let on_device = MergeOnDevice {
        a: state(&merge.a)?,
        b: state(&merge.b)?,
        merged: state(&merge.merged)?,
        num_rows: merge.merged.out.shape[0],
        d_v: merge.merged.out.shape[1],
        out_type: out_type(&merge.merged.out),
        lse_base: merge.lse_base,
    };
    // SAFETY: every array was checked for place, shape, strides and alignment; the join is in new arrays; all outlive their
    // work in their library's stream order; the stream is that library's.
    unsafe { device.merge_states(&on_device, stream) }?;
    mark_written(&merge.merged.out.object, stream)?;
    Ok(mark_written(&merge.merged.lse.object, stream)?)
}

fn state(state: &State<'_>) -> Result<StateOnDevice, Error> {
    for array in [&state.out, &state.lse] {
        array.require_non_negative_strides()?;
    }
    Ok(StateOnDevice {
        out: state.out.address(),
        out_strides: [state.out.element_stride(0), state.out.element_stride(1)],
        lse: state.lse.address(),
        lse_stride: state.lse.element_stride(0),
    })
}

pub(super) fn out_type(out: &Array<'_>) -> OutType {
    match out.dtype {
        DType::F16 => OutType::F16,
        DType::F32 => OutType::F32,
        _ => OutType::Bf16,
    }
}

fn address(array: Option<&Array<'_>>) -> u64 {
    array.map_or(0, Array::address)
}

fn candidates(
    candidates: &Candidates<'_>,
    family: crate::Family,
    format: KvCacheFormat,
) -> Result<CandidatesOnDevice, Error> {
    let spec = FamilySpec::find(family, format)?;
    Ok(CandidatesOnDevice {
        cache: CacheOnDevice {
            pointer: candidates.cache.address(),
            pages: candidates.pages,
            layout: PageLayout::new(spec, candidates.geometry, "")?,
        },
        indices: candidates.indices.address(),
        indices_stride: candidates.indices.element_stride(0),
        lengths: address(candidates.lengths.as_ref()),
    })
}

fn workspace_of(array: &Array<'_>) -> Result<Workspace, Error> {
    array.require_writeable()?;
    array.require_contiguous()?;
    require_aligned("workspace", array.address())?;
    Ok(Workspace { pointer: array.address(), bytes: array.shape.iter().product() })
}

/// Plans by request: choosing one costs more than launching it.
static PLANS: Mutex<FxHashMap<PlanKey, DecodePlan>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));
/// Request, ordinal of the device, whether the plan is batch invariant.
type PlanKey = (DecodeRequest, usize, bool);
/// Plans kept before the table is emptied.
const MAX_PLANS: usize = 4096;

pub(super) fn plan(request: &DecodeRequest, device: &Device, batch_invariant: bool) -> Result<DecodePlan, Error> {
    let key = (*request, device.ordinal(), batch_invariant);
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(plan) = plans.get(&key) {
        return Ok(*plan);
    }
    let plan = DecodePlan::new(request, device.facts(), batch_invariant)?;
    if plans.len() >= MAX_PLANS {
        plans.clear();
    }
    plans.insert(key, plan);
    Ok(plan)
}

/// Loads the kernels of a family on a device, so that later calls, captured ones included, load nothing.
#[pyfunction]
#[pyo3(signature = (family, *, kv_cache_format=word("fp8"), device=int(0)),
       text_signature = "(family, *, kv_cache_format='fp8', device=0)")]
pub(super) fn warmup(
    py: Python<'_>,
    family: Argument<Word>,
    kv_cache_format: Argument<Word>,
    device: Argument<Int>,
) -> PyResult<()> {
    let format = KvCacheFormat::primary(&kv_cache_format.named("kv_cache_format")?)?;
    let spec = FamilySpec::find_primary(family.named("family")?.parse()?, format)?;
    let ordinal = device.named_i64("device")?;
    let ordinal = usize::try_from(ordinal).map_err(|_| Error::value("device", "a device's ordinal", ordinal))?;
    Ok(py.detach(|| crate::cuda::device(ordinal)?.warm_up(spec))?)
}
