//! The one launch path of decode.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUdeviceptr, CUstream};

use super::args::{CandidateArgs, DecodeArgs, MergeStatesArgs};
use super::cache_args::{MoveArgs, ReadArgs, WriteArgs};
use super::device::Device;
use super::driver::refused;
use super::workspace::Workspace;
use crate::plan::{DecodePlan, FEW_SPLITS, Kernel};
use crate::{Error, LseBase, PageLayout, Placement};

/// Threads of a block of `merge_many`, and value dimensions it serves.
const MERGE_MANY_THREADS: usize = 256;
const MERGE_MANY_DIMS: usize = 128;

/// Type of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum OutType {
    /// bfloat16.
    Bf16 = 0,
    /// float16.
    F16 = 1,
    /// float32.
    F32 = 2,
}

/// A packed cache in device memory.
#[derive(Debug, Clone, Copy)]
pub struct CacheOnDevice {
    /// First page; 16-byte aligned.
    pub pointer: CUdeviceptr,
    /// Number of pages.
    pub pages: usize,
    /// Their layout.
    pub layout: PageLayout,
}

impl CacheOnDevice {
    /// Slots: pages times page size.
    pub fn num_slots(&self) -> usize {
        self.pages.saturating_mul(self.layout.page_block_size())
    }
}

/// A cache with the slots that are read from it.
#[derive(Debug, Clone, Copy)]
pub struct CandidatesOnDevice {
    /// The cache.
    pub cache: CacheOnDevice,
    /// int32 `[T, K]`.
    pub indices: CUdeviceptr,
    /// Elements from row to row of `indices`.
    pub indices_stride: i64,
    /// int32 `[T]`, or 0.
    pub lengths: CUdeviceptr,
}

/// Everything a decode reads and writes, as device pointers.
#[derive(Debug, Clone, Copy)]
pub struct DecodeOnDevice {
    /// bfloat16 `[T, H, d_qk]`, contiguous, 16-byte aligned.
    pub q: CUdeviceptr,
    /// Primary cache and candidates.
    pub main: CandidatesOnDevice,
    /// Secondary cache and candidates.
    pub extra: Option<CandidatesOnDevice>,
    /// float32 `[H]`, or 0.
    pub sink: CUdeviceptr,
    /// `[T, H, d_v]`.
    pub out: CUdeviceptr,
    /// Type of `out`.
    pub out_type: OutType,
    /// Elements from token to token and from head to head of `out`.
    pub out_strides: [i64; 2],
    /// float32 `[T, H]`, or 0.
    pub lse: CUdeviceptr,
    /// Elements from token to token of `lse`.
    pub lse_stride: i64,
    /// Softmax scale.
    pub sm_scale: f32,
    /// Base of `lse`.
    pub lse_base: LseBase,
    /// What every quantised value of a glm_nsa NVFP4 cache is multiplied by; 1 elsewhere.
    pub kv_global_scale: f32,
}

impl Device {
    /// Enqueues a decode on `stream`. Allocates nothing and waits for nothing once the modules are loaded.
    ///
    /// # Errors
    /// [`Error::Value`] if the workspace is too small (the text says how many bytes are needed); [`Error::Device`] if the
    /// driver refuses, or if the stream is being captured while a module is not loaded yet.
    ///
    /// # Safety
    /// Every pointer must be valid on this device for the shapes of `plan`, until the work is done; `out`, `lse` and the
    /// workspace must not overlap each other or an input, nor be used by other work meanwhile; `stream` must belong to
    /// this device's primary context (null: its default stream).
    pub unsafe fn decode(
        &self,
        plan: &DecodePlan,
        decode: &DecodeOnDevice,
        workspace: Workspace,
        stream: CUstream,
    ) -> Result<(), Error> {
        let _context = self.enter()?;
        let mut functions = None;
        for mut launches in decode_launches(plan, decode, workspace)? {
            let functions = match functions {
                Some(functions) => functions,
                // Every module is loaded before anything is enqueued.
                None => *functions.insert(self.functions(&launches, stream)?),
            };
            // SAFETY: the caller vouches for the pointers in the parameters.
            unsafe { enqueue_each(functions, &mut launches, stream) }?;
        }
        Ok(())
    }

    /// The entry points of launches, null where there is none. Loads what is not loaded yet.
    pub(super) fn functions<const N: usize>(
        &self,
        launches: &[Option<Launch>; N],
        stream: CUstream,
    ) -> Result<[sys::CUfunction; N], Error> {
        let mut functions = [std::ptr::null_mut(); N];
        for (function, launch) in functions.iter_mut().zip(launches) {
            if let Some(launch) = launch {
                *function = self.function(launch.module, launch.entry, stream)?;
            }
        }
        Ok(functions)
    }
}

/// Enqueues launches with their entry points, in order.
///
/// # Safety
/// What the parameters point to must be as the kernels take it to be.
pub(super) unsafe fn enqueue_each<const N: usize>(
    functions: [sys::CUfunction; N],
    launches: &mut [Option<Launch>; N],
    stream: CUstream,
) -> Result<(), Error> {
    for (function, launch) in functions.into_iter().zip(launches) {
        if let Some(launch) = launch {
            // SAFETY: the function is this launch's entry point; the caller vouches for the parameters.
            unsafe { launch.enqueue(function, stream) }?;
        }
    }
    Ok(())
}

/// The launches of a pass, in their order: the decode kernel, that of a secondary cache with other records, and if there
/// are splits the kernel that joins them.
pub type Launches = [Option<Launch>; 3];

/// What [`Device::decode`] enqueues, pass by pass; the entry points are the same in each. Asks no driver.
///
/// # Errors
/// [`Error::Value`] if the workspace is too small or a grid too large.
pub fn decode_launches(
    plan: &DecodePlan,
    decode: &DecodeOnDevice,
    workspace: Workspace,
) -> Result<impl Iterator<Item = Launches>, Error> {
    let needed = plan.workspace_bytes();
    if workspace.bytes < needed {
        return Err(Error::value("workspace", format!("at least {needed} bytes"), workspace.bytes));
    }
    let grid = plan.head_tiles() * plan.tokens_per_pass * plan.all_splits();
    if grid > i32::MAX as usize {
        return Err(Error::value("q", "small enough for one launch", format!("{grid} CTAs")));
    }
    let (plan, decode) = (*plan, *decode);
    Ok((0..plan.passes()).map(move |pass| {
        let first = pass * plan.tokens_per_pass;
        let num_tokens = plan.tokens_per_pass.min(plan.num_tokens - first);
        pass_launches(&DecodePlan { num_tokens, ..plan }, &decode.without_tokens_before(&plan, first), workspace)
    }))
}

/// The launches for the tokens of one pass.
fn pass_launches(plan: &DecodePlan, decode: &DecodeOnDevice, workspace: Workspace) -> Launches {
    let args = arguments(plan, decode, workspace);
    let decode_launch = |kernel: &'static Kernel, args: DecodeArgs| Launch {
        module: kernel.module,
        entry: kernel.entry,
        grid: [(plan.head_tiles() * plan.num_tokens) as u32 * args.splits as u32, 1],
        threads: kernel.threads as u32,
        shared_bytes: kernel.shared_bytes as u32,
        after_previous: args.first_split > 0,
        parameters: Parameters::Decode(args),
    };
    let extra = plan.extra.map(|extra| {
        let splits = extra.splits as i32;
        let of_extra =
            DecodeArgs { main: args.extra, extra: CandidateArgs::NONE, splits, first_split: args.splits, ..args };
        decode_launch(extra.kernel, of_extra)
    });
    let main = if plan.extra.is_some() { DecodeArgs { extra: CandidateArgs::NONE, ..args } } else { args };
    let join = match plan.all_splits() {
        1 => None,
        few if few <= FEW_SPLITS => Some(("merge_few", 1, plan.d_v / 4)),
        _ => Some(("merge_many", plan.d_v / MERGE_MANY_DIMS, MERGE_MANY_THREADS)),
    };
    let join = join.map(|(entry, blocks, threads)| Launch {
        module: "merge",
        entry,
        grid: [(plan.num_tokens * plan.num_heads) as u32, blocks as u32],
        threads: threads as u32,
        shared_bytes: 0,
        after_previous: true,
        parameters: Parameters::Join(args, plan.d_v as i32),
    });
    match extra {
        Some(extra) => [Some(decode_launch(plan.kernel, main)), Some(extra), join],
        None => [Some(decode_launch(plan.kernel, main)), join, None],
    }
}

impl DecodeOnDevice {
    /// The same without the tokens before `first`.
    fn without_tokens_before(&self, plan: &DecodePlan, first: usize) -> Self {
        let ahead = |pointer: CUdeviceptr, bytes: u64| match pointer {
            0 => 0,
            // Strides may be negative.
            pointer => pointer.wrapping_add((first as u64).wrapping_mul(bytes)),
        };
        let candidates = |candidates: &CandidatesOnDevice| CandidatesOnDevice {
            indices: ahead(candidates.indices, 4 * candidates.indices_stride as u64),
            lengths: ahead(candidates.lengths, 4),
            ..*candidates
        };
        let out_bytes = if self.out_type == OutType::F32 { 4 } else { 2 };
        Self {
            q: ahead(self.q, (plan.num_heads * self.main.cache.layout.row().d_qk() * 2) as u64),
            main: candidates(&self.main),
            extra: self.extra.as_ref().map(candidates),
            out: ahead(self.out, out_bytes * self.out_strides[0] as u64),
            lse: ahead(self.lse, 4 * self.lse_stride as u64),
            ..*self
        }
    }
}

fn arguments(plan: &DecodePlan, decode: &DecodeOnDevice, workspace: Workspace) -> DecodeArgs {
    let [topk, extra_topk] = plan.topk;
    DecodeArgs {
        main: candidates(&decode.main, topk),
        extra: decode.extra.as_ref().map_or(CandidateArgs::NONE, |extra| candidates(extra, extra_topk)),
        q: decode.q,
        out: decode.out,
        lse: decode.lse,
        sink: decode.sink,
        partial: workspace.pointer,
        partial_state: workspace.pointer + plan.partial_bytes() as u64,
        out_token_stride: decode.out_strides[0],
        out_head_stride: decode.out_strides[1],
        lse_stride: decode.lse_stride,
        num_tokens: plan.num_tokens as i32,
        num_heads: plan.num_heads as i32,
        splits: plan.splits as i32,
        first_split: 0,
        all_splits: plan.all_splits() as i32,
        scale_log2: decode.sm_scale * std::f32::consts::LOG2_E,
        out_type: decode.out_type as i32,
        lse_natural: i32::from(decode.lse_base == LseBase::E),
        out_aligned: i32::from(out_aligned(decode)),
        kv_global_scale: decode.kv_global_scale,
    }
}

/// Whether every group of four outputs starts at a multiple of its size.
fn out_aligned(decode: &DecodeOnDevice) -> bool {
    let group = if decode.out_type == OutType::F32 { 16 } else { 8 };
    decode.out.is_multiple_of(group) && decode.out_strides.iter().all(|stride| stride % 4 == 0)
}

fn candidates(candidates: &CandidatesOnDevice, topk: usize) -> CandidateArgs {
    let CacheOnDevice { pointer, pages, layout } = candidates.cache;
    // An int32 index reaches no further than 2^31 - 1: the cut changes nothing.
    let num_slots = (pages as u128 * layout.page_block_size() as u128).min(1 << 31) as u32;
    // Pages of inline rows without gaps are one long page.
    let gapless = layout.row().placement == Placement::Inline
        && layout.page_stride() == layout.page_block_size() * layout.row_stride();
    let page_block_size = if gapless { 1 << 31 } else { layout.page_block_size().min(1 << 31) };
    CandidateArgs {
        cache: pointer,
        indices: candidates.indices,
        lengths: candidates.lengths,
        page_stride: layout.page_stride() as i64,
        indices_stride: candidates.indices_stride,
        num_slots,
        page_block_size: page_block_size as u32,
        page_shift: if page_block_size.is_power_of_two() {
            page_block_size.trailing_zeros().min(31) as i32
        } else {
            -1
        },
        row_stride: layout.row_stride() as u32,
        topk: topk as i32,
        reserved: 0,
    }
}

/// One kernel launch, all but its stream.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Module (PTX file) of the entry point.
    pub module: &'static str,
    /// Its name.
    pub entry: &'static str,
    /// Blocks in x and y.
    pub grid: [u32; 2],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Starts beside the previous kernel of the stream and waits for it inside (programmatic dependent launch).
    pub after_previous: bool,
    pub(super) parameters: Parameters,
}

/// Kernel parameters in the order of the entry point.
#[derive(Debug, Clone, Copy)]
pub(super) enum Parameters {
    Decode(DecodeArgs),
    /// And the value dimensions.
    Join(DecodeArgs, i32),
    States(MergeStatesArgs),
    Write(WriteArgs),
    Read(ReadArgs),
    Move(MoveArgs),
}

impl Launch {
    /// The bytes of the kernel's parameters in their order, without gaps (no parameter needs one).
    pub fn parameter_bytes(&self) -> Vec<u8> {
        match &self.parameters {
            Parameters::Decode(args) => args.bytes().to_vec(),
            Parameters::Join(args, d_v) => [args.bytes(), &d_v.to_ne_bytes()].concat(),
            Parameters::States(args) => args.bytes().to_vec(),
            Parameters::Write(args) => args.bytes().to_vec(),
            Parameters::Read(args) => args.bytes().to_vec(),
            Parameters::Move(args) => args.bytes().to_vec(),
        }
    }

    /// # Safety
    /// `function` must be the entry point, and what the parameters point to as long as the kernel takes it to be.
    pub(super) unsafe fn enqueue(&mut self, function: sys::CUfunction, stream: CUstream) -> Result<(), Error> {
        let mut parameters = match &mut self.parameters {
            Parameters::Decode(args) => [(&raw mut *args).cast::<c_void>(), std::ptr::null_mut()],
            Parameters::Join(args, d_v) => [(&raw mut *args).cast::<c_void>(), (&raw mut *d_v).cast::<c_void>()],
            Parameters::States(args) => [(&raw mut *args).cast::<c_void>(), std::ptr::null_mut()],
            Parameters::Write(args) => [(&raw mut *args).cast::<c_void>(), std::ptr::null_mut()],
            Parameters::Read(args) => [(&raw mut *args).cast::<c_void>(), std::ptr::null_mut()],
            Parameters::Move(args) => [(&raw mut *args).cast::<c_void>(), std::ptr::null_mut()],
        };
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.after_previous),
        };
        // SAFETY: the caller vouches for function and parameters; `config` and `attribute` outlive the call.
        unsafe { sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(refused("cuLaunchKernelEx"))
    }
}
