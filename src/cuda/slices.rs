//! Decode over cudarc's slices: everything that the unsafe launch asks of its caller is checked here or held by borrows.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, SyncOnDrop};
use half::{bf16, f16};

use super::device::Device;
use super::launch::{CacheOnDevice, CandidatesOnDevice, DecodeOnDevice, OutType};
use super::slice_checks::SliceChecks;
use super::workspace::Workspace;
use crate::layout::{check_global_scale, require_aligned};
use crate::plan::DecodePlan;
use crate::{DecodeRequest, Error, FamilySpec, LseBase, PageLayout};

/// Element types of queries: bf16, or its bits as u16, which cudarc copies without its feature `f16`.
pub trait QueryElement: sealed::Sealed {}

impl QueryElement for bf16 {}
impl QueryElement for u16 {}

/// Element types of an output and of latents: bf16 or its bits as u16, f16 and f32.
pub trait OutElement: sealed::Sealed {
    /// The type as the kernels know it.
    const TYPE: OutType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! out_elements {
    ($($element:ty => $out_type:ident),+) => {
        $(
            impl sealed::Sealed for $element {}
            impl OutElement for $element {
                const TYPE: OutType = OutType::$out_type;
            }
        )+
    };
}
out_elements!(bf16 => Bf16, u16 => Bf16, f16 => F16, f32 => F32);

/// A cache in device memory and the slots that are read from it.
#[derive(Debug)]
pub struct CandidateSlices<'a> {
    /// Packed pages in the request's geometry, from the first byte of the first page on; 16-byte aligned.
    pub cache: CudaView<'a, u8>,
    /// Number of pages.
    pub pages: usize,
    /// Slot ids `[T, K]`.
    pub indices: CudaView<'a, i32>,
    /// Length of every row, `[T]`.
    pub lengths: Option<CudaView<'a, i32>>,
}

/// Everything that a decode reads and writes; every array dense and row-major.
#[derive(Debug)]
pub struct DecodeSlices<'a, Q, O> {
    /// Queries `[T, H, d_qk]`, 16-byte aligned.
    pub q: CudaView<'a, Q>,
    /// Primary cache and candidates.
    pub main: CandidateSlices<'a>,
    /// Secondary cache and candidates.
    pub extra: Option<CandidateSlices<'a>>,
    /// Natural-log sinks `[H]`.
    pub sink: Option<CudaView<'a, f32>>,
    /// Softmax scale.
    pub sm_scale: f32,
    /// Base of `lse`.
    pub lse_base: LseBase,
    /// What every quantised value of a glm_nsa NVFP4 cache is multiplied by; 1 elsewhere.
    pub kv_global_scale: f32,
    /// Output `[T, H, d_v]`.
    pub out: CudaViewMut<'a, O>,
    /// Log-sum-exp `[T, H]`.
    pub lse: Option<CudaViewMut<'a, f32>>,
    /// At least [`DecodePlan::workspace_bytes`] of the plan, 16-byte aligned.
    pub workspace: CudaViewMut<'a, u8>,
}

/// A decode of one shape on one device: checked and planned once, enqueued any number of times.
#[derive(Debug, Clone, Copy)]
pub struct PreparedDecode {
    device: &'static Device,
    plan: DecodePlan,
    request: DecodeRequest,
    spec: &'static FamilySpec,
    main: PageLayout,
    extra: Option<PageLayout>,
}

impl PreparedDecode {
    /// Plans a request and loads its kernels. Refuses what [`crate::explain_decode`] refuses for the device.
    pub fn new(device: &'static Device, request: &DecodeRequest, batch_invariant: bool) -> Result<Self, Error> {
        let plan = DecodePlan::new(request, device.facts(), batch_invariant)?;
        let spec = FamilySpec::find_primary(request.family, request.kv_cache_format)?;
        let extra = match request.extra_geometry {
            None if request.extra_topk == 0 => None,
            geometry => {
                let spec = FamilySpec::find(request.family, request.extra_format())?;
                Some(PageLayout::new(spec, geometry.unwrap_or_default(), "extra_")?)
            }
        };
        device.warm_up(spec)?;
        Ok(Self { device, plan, request: *request, spec, main: PageLayout::new(spec, request.geometry, "")?, extra })
    }

    /// How it is launched, and how much workspace that takes.
    pub fn plan(&self) -> &DecodePlan {
        &self.plan
    }

    /// Enqueues the decode on `stream`. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// [`Error::Value`] if a slice has the wrong length, alignment or context, or a partner is missing: nothing was enqueued
    /// then. [`Error::Device`] if the driver refuses.
    pub fn enqueue<Q: QueryElement, O: OutElement>(
        &self,
        stream: &CudaStream,
        slices: &mut DecodeSlices<'_, Q, O>,
    ) -> Result<(), Error> {
        self.check(stream, slices)?;
        // The second of each pair tells cudarc of the use when it is dropped, after the launch.
        let (q, _q) = slices.q.device_ptr(stream);
        let (main, _main) = candidates(&slices.main, self.main, self.request.topk, stream);
        let extra = slices.extra.as_ref().zip(self.extra);
        let (extra, _extra) =
            extra.map(|(extra, layout)| candidates(extra, layout, self.request.extra_topk, stream)).unzip();
        let (sink, _sink) = slices.sink.as_ref().map(|slice| slice.device_ptr(stream)).unzip();
        let (out, _out) = slices.out.device_ptr_mut(stream);
        let (lse, _lse) = slices.lse.as_mut().map(|slice| slice.device_ptr_mut(stream)).unzip();
        let workspace_bytes = slices.workspace.len();
        let (workspace, _workspace) = slices.workspace.device_ptr_mut(stream);

        require_aligned("q", q)?;
        require_aligned("kv_cache", main.cache.pointer)?;
        require_aligned("extra_kv_cache", extra.map_or(0, |extra| extra.cache.pointer))?;
        require_aligned("workspace", if workspace_bytes == 0 { 0 } else { workspace })?;
        let (num_heads, d_v) = (self.plan.num_heads as i64, self.plan.d_v as i64);
        let decode = DecodeOnDevice {
            q,
            main,
            extra,
            sink: sink.unwrap_or_default(),
            out,
            out_type: O::TYPE,
            out_strides: [num_heads * d_v, d_v],
            lse: lse.unwrap_or_default(),
            lse_stride: num_heads,
            sm_scale: slices.sm_scale,
            lse_base: slices.lse_base,
            kv_global_scale: slices.kv_global_scale,
        };
        let workspace = Workspace { pointer: workspace, bytes: workspace_bytes };
        // SAFETY: every length, alignment and context was compared with the plan; what is written is borrowed exclusively, so
        // it overlaps nothing; cudarc orders other uses of the slices before and after this one.
        unsafe { self.device.decode(&self.plan, &decode, workspace, stream.cu_stream()) }
    }

    /// Lengths and contexts; addresses come later, since cudarc hands them out for a use.
    fn check<Q: QueryElement, O: OutElement>(
        &self,
        stream: &CudaStream,
        slices: &DecodeSlices<'_, Q, O>,
    ) -> Result<(), Error> {
        let checks = SliceChecks { device: self.device, stream };
        checks.stream()?;
        if !slices.sm_scale.is_finite() {
            return Err(Error::value("sm_scale", "a finite FP32 number", slices.sm_scale));
        }
        check_global_scale(self.spec, slices.kv_global_scale)?;
        let DecodePlan { num_tokens, num_heads, d_v, .. } = self.plan;
        checks.slice("q", &slices.q, num_tokens * num_heads * self.spec.d_qk())?;
        self.check_candidates(
            ["kv_cache", "indices", "topk_length"],
            &slices.main,
            &self.main,
            self.request.topk,
            checks,
        )?;
        match (&slices.extra, &self.extra) {
            (None, None) => {}
            (Some(extra), Some(layout)) => {
                let names = ["extra_kv_cache", "extra_indices", "extra_topk_length"];
                self.check_candidates(names, extra, layout, self.request.extra_topk, checks)?;
            }
            (Some(_), None) => return Err(Error::value("extra", "None, as in the request", "a secondary cache")),
            (None, Some(_)) => return Err(Error::value("extra", "given, as in the request", "None")),
        }
        if let Some(sink) = &slices.sink {
            checks.slice("attn_sink", sink, num_heads)?;
        }
        checks.slice("out", &slices.out, num_tokens * num_heads * d_v)?;
        if let Some(lse) = &slices.lse {
            checks.slice("lse", lse, num_tokens * num_heads)?;
        }
        let needed = self.plan.workspace_bytes();
        if slices.workspace.len() < needed {
            return Err(Error::value("workspace", format!("at least {needed} bytes"), slices.workspace.len()));
        }
        checks.slice("workspace", &slices.workspace, slices.workspace.len())
    }

    fn check_candidates(
        &self,
        [cache, indices, lengths]: [&str; 3],
        candidates: &CandidateSlices<'_>,
        layout: &PageLayout,
        topk: i64,
        checks: SliceChecks<'_>,
    ) -> Result<(), Error> {
        checks.pages(cache, &candidates.cache, layout, candidates.pages)?;
        checks.slice(indices, &candidates.indices, self.plan.num_tokens * topk as usize)?;
        match &candidates.lengths {
            Some(slice) => checks.slice(lengths, slice, self.plan.num_tokens),
            None => Ok(()),
        }
    }
}

fn candidates<'a>(
    slices: &'a CandidateSlices<'_>,
    layout: PageLayout,
    topk: i64,
    stream: &'a CudaStream,
) -> (CandidatesOnDevice, [Option<SyncOnDrop<'a>>; 3]) {
    let (cache, cache_read) = slices.cache.device_ptr(stream);
    let (indices, indices_read) = slices.indices.device_ptr(stream);
    let (lengths, lengths_read) = slices.lengths.as_ref().map(|slice| slice.device_ptr(stream)).unzip();
    let candidates = CandidatesOnDevice {
        cache: CacheOnDevice { pointer: cache, pages: slices.pages, layout },
        indices,
        indices_stride: topk,
        lengths: lengths.unwrap_or_default(),
    };
    (candidates, [Some(cache_read), Some(indices_read), lengths_read])
}
