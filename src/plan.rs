//! How a GPU decode is cut into CTAs: request and device facts in, kernel, splits, grid and workspace out.
//!
//! Pure arithmetic: no device is asked. A CTA serves one token, a tile of heads and one split of the token's candidates,
//! in chunks; splits of a token are joined by a second kernel.

use crate::support::{DecodeRequest, explain_decode};
use crate::{Error, FamilySpec};

/// What a plan depends on of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Shared memory that a block may opt in to, in bytes.
    pub shared_memory_per_block: usize,
    /// (major, minor).
    pub compute_capability: (i32, i32),
}

/// An entry point of the embedded PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Module (PTX file) it lives in.
    pub module: &'static str,
    /// Its name.
    pub entry: &'static str,
    /// Heads of a CTA.
    pub heads: usize,
    /// Candidates of a chunk.
    pub chunk: usize,
    /// Threads of a CTA.
    pub threads: usize,
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: usize,
}

/// Every decode kernel.
pub static KERNELS: &[Kernel] = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx/kernels.rs"));

/// Most splits that the joining kernels take.
pub const MAX_SPLITS: usize = 64;
/// Most splits that the joining kernel for few splits takes.
pub const FEW_SPLITS: usize = 8;
/// Chunks of a split when the plan may not depend on other rows.
const INVARIANT_CHUNKS: usize = 16;
/// Largest workspace that a choice of splits may ask for, in bytes.
const MAX_WORKSPACE: usize = 1 << 29;

/// Microseconds, measured on an H200: a CTA's start and end, a chunk of 16 and of 32 heads, a joining kernel.
const CTA_COST: f64 = 4.0;
const CHUNK_COST_16: f64 = 1.1;
const CHUNK_COST_32: f64 = 1.3;
const MERGE_COST: f64 = 2.0;
/// Bytes per microsecond that partial results are written and read with.
const PARTIAL_RATE: f64 = 2.5e6;

/// How one decode is launched. Made once per shape, reused over calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodePlan {
    /// The decode kernel.
    pub kernel: &'static Kernel,
    /// Query tokens.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Positions of the primary and of the secondary indices row that are read.
    pub topk: [usize; 2],
    /// Value dimensions.
    pub d_v: usize,
    /// CTAs per token and head tile.
    pub splits: usize,
}

impl DecodePlan {
    /// Chooses head tile and splits. Refuses what [`explain_decode`] refuses for the device, with the same text.
    ///
    /// With `batch_invariant` the choice depends on heads and widths only, so that a row's bits depend on its own work.
    pub fn new(request: &DecodeRequest, device: &DeviceFacts, batch_invariant: bool) -> Result<Self, Error> {
        let (major, minor) = device.compute_capability;
        let request = DecodeRequest { compute_capability: Some((i64::from(major), i64::from(minor))), ..*request };
        explain_decode(&request).into_result()?;
        let spec = FamilySpec::find_primary(request.family, request.kv_cache_format)?;
        let plan = |kernel, splits| Self {
            kernel,
            num_tokens: request.num_tokens as usize,
            num_heads: request.num_heads as usize,
            topk: [(request.topk as usize).min(spec.window.unwrap_or(usize::MAX)), request.extra_topk as usize],
            d_v: spec.d_v,
            splits,
        };
        let kernels = || {
            KERNELS.iter().filter(|kernel| {
                Some(kernel.module) == spec.module && kernel.shared_bytes <= device.shared_memory_per_block
            })
        };
        let no_kernel = || {
            let needed =
                KERNELS.iter().filter(|kernel| Some(kernel.module) == spec.module).map(|k| k.shared_bytes).min();
            Error::unsupported(format!(
                "`device` must have {} bytes of shared memory per block, got {}",
                needed.unwrap_or_default(),
                device.shared_memory_per_block
            ))
        };
        if batch_invariant {
            // The largest tile that the heads fill more than half; else the smallest.
            let kernel = kernels()
                .filter(|kernel| kernel.heads < 2 * request.num_heads as usize)
                .max_by_key(|kernel| kernel.heads)
                .or_else(|| kernels().min_by_key(|kernel| kernel.heads))
                .ok_or_else(no_kernel)?;
            let chunks = plan(kernel, 1).chunks();
            return Ok(plan(kernel, chunks.div_ceil(INVARIANT_CHUNKS).clamp(1, MAX_SPLITS)));
        }
        let candidates = kernels().flat_map(|kernel| {
            let chunks = plan(kernel, 1).chunks().max(1);
            (1..=chunks.min(MAX_SPLITS)).map(move |splits| plan(kernel, splits))
        });
        candidates
            .filter(|plan| plan.splits == 1 || plan.workspace_bytes() <= MAX_WORKSPACE)
            .map(|plan| (plan.cost(device), plan))
            .min_by(|(a, _), (b, _)| a.total_cmp(b))
            .map(|(_, plan)| plan)
            .ok_or_else(no_kernel)
    }

    /// Tiles of heads of a token.
    pub fn head_tiles(&self) -> usize {
        self.num_heads.div_ceil(self.kernel.heads)
    }

    /// Chunks of a row of full length.
    pub fn chunks(&self) -> usize {
        self.topk.iter().map(|topk| topk.div_ceil(self.kernel.chunk)).sum()
    }

    /// CTAs of the decode kernel.
    pub fn grid(&self) -> usize {
        self.head_tiles() * self.num_tokens * self.splits
    }

    /// Bytes of partial values: float32 `[T, H, splits, d_v]`.
    pub fn partial_bytes(&self) -> usize {
        if self.splits == 1 { 0 } else { self.num_tokens * self.num_heads * self.splits * self.d_v * 4 }
    }

    /// Bytes of workspace: partial values, then their (reference, sum) pairs.
    pub fn workspace_bytes(&self) -> usize {
        if self.splits == 1 { 0 } else { self.partial_bytes() + self.num_tokens * self.num_heads * self.splits * 8 }
    }

    /// Expected microseconds.
    fn cost(&self, device: &DeviceFacts) -> f64 {
        let waves = self.grid().div_ceil(device.multiprocessors.max(1)).max(1) as f64;
        let chunk = if self.kernel.heads > 16 { CHUNK_COST_32 } else { CHUNK_COST_16 };
        let decode = waves * (CTA_COST + self.chunks().div_ceil(self.splits) as f64 * chunk);
        let merge = if self.splits == 1 { 0.0 } else { MERGE_COST + 2.0 * self.partial_bytes() as f64 / PARTIAL_RATE };
        decode + merge
    }
}

/// First chunk of a split, as the kernel computes it: split `s` of `splits` covers chunks `[start(s), start(s + 1))`.
pub fn split_start(chunks: usize, split: usize, splits: usize) -> usize {
    (chunks as u64 * split as u64 / splits as u64) as usize
}
