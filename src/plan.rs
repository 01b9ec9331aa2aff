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
/// Largest workspace, in bytes, unless one token needs more.
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
    /// CTAs of the decode kernel per token and head tile.
    pub splits: usize,
    /// The secondary cache's own launch, where its records differ from the primary's.
    pub extra: Option<ExtraLaunch>,
    /// Tokens that are served before the workspace is used again.
    pub tokens_per_pass: usize,
}

/// A launch over the secondary cache alone; its splits follow those of the primary cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExtraLaunch {
    /// The decode kernel, with as many heads per CTA as the primary cache's.
    pub kernel: &'static Kernel,
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
        let extra_module = match request.extra_topk {
            0 => None,
            _ => Some(FamilySpec::find(request.family, request.extra_format())?.module),
        };
        let fits = |kernel: &&'static Kernel| kernel.shared_bytes <= device.shared_memory_per_block;
        let of_module = |module| KERNELS.iter().filter(move |kernel| kernel.module == module);
        // Unsplit plans, one for every head tile.
        let plans = || {
            of_module(spec.module).filter(fits).filter_map(|kernel| {
                let extra = match extra_module {
                    Some(module) if module != spec.module => {
                        let kernel = of_module(module).filter(fits).find(|extra| extra.heads == kernel.heads)?;
                        Some(ExtraLaunch { kernel, splits: 1 })
                    }
                    _ => None,
                };
                let num_tokens = request.num_tokens as usize;
                Some(Self {
                    kernel,
                    num_tokens,
                    num_heads: request.num_heads as usize,
                    topk: [(request.topk as usize).min(spec.window.unwrap_or(usize::MAX)), request.extra_topk as usize],
                    d_v: spec.d_v,
                    splits: 1,
                    extra,
                    tokens_per_pass: num_tokens,
                })
            })
        };
        let no_kernel = || {
            let modules = [Some(spec.module), extra_module];
            let needed = modules
                .into_iter()
                .flatten()
                .filter_map(|module| of_module(module).map(|kernel| kernel.shared_bytes).min());
            Error::unsupported(format!(
                "`device` must have {} bytes of shared memory per block, got {}",
                needed.max().unwrap_or_default(),
                device.shared_memory_per_block
            ))
        };
        if batch_invariant {
            // The largest tile that the heads fill more than half; else the smallest.
            let plan = plans()
                .filter(|plan| plan.kernel.heads < 2 * plan.num_heads)
                .max_by_key(|plan| plan.kernel.heads)
                .or_else(|| plans().min_by_key(|plan| plan.kernel.heads))
                .ok_or_else(no_kernel)?;
            return Ok(plan.split_for(INVARIANT_CHUNKS).in_passes());
        }
        plans()
            .flat_map(|plan| (1..=plan.chunks().clamp(1, MAX_SPLITS)).map(move |splits| (plan, splits)))
            .map(|(plan, splits)| plan.split_for(plan.chunks().div_ceil(splits).max(1)).in_passes())
            .map(|plan| (plan.cost(device), plan))
            .min_by(|(a, _), (b, _)| a.total_cmp(b))
            .map(|(_, plan)| plan)
            .ok_or_else(no_kernel)
    }

    /// The same with about `chunks` chunks for every CTA.
    fn split_for(self, chunks: usize) -> Self {
        let most = if self.extra.is_some() { MAX_SPLITS / 2 } else { MAX_SPLITS };
        let splits = |all: usize| all.div_ceil(chunks).clamp(1, most);
        let extra = self.extra.map(|extra| ExtraLaunch { splits: splits(self.extra_chunks()), ..extra });
        Self { splits: splits(self.chunks()), extra, ..self }
    }

    /// The same in as many passes over the tokens as the workspace's bound asks for.
    fn in_passes(self) -> Self {
        let one_token = Self { num_tokens: 1, tokens_per_pass: 1, ..self }.workspace_bytes().max(1);
        Self { tokens_per_pass: self.num_tokens.min((MAX_WORKSPACE / one_token).max(1)), ..self }
    }

    /// Tiles of heads of a token.
    pub fn head_tiles(&self) -> usize {
        self.num_heads.div_ceil(self.kernel.heads)
    }

    /// Chunks of a row of full length, in the decode kernel.
    pub fn chunks(&self) -> usize {
        let [main, extra] = self.topk.map(|topk| topk.div_ceil(self.kernel.chunk));
        if self.extra.is_some() { main } else { main + extra }
    }

    /// Chunks of a row of full length, in the secondary cache's own launch.
    pub fn extra_chunks(&self) -> usize {
        self.extra.map_or(0, |extra| self.topk[1].div_ceil(extra.kernel.chunk))
    }

    /// Splits of a token and head tile, over both launches.
    pub fn all_splits(&self) -> usize {
        self.splits + self.extra.map_or(0, |extra| extra.splits)
    }

    /// CTAs over all passes and both launches.
    pub fn grid(&self) -> usize {
        self.head_tiles() * self.num_tokens * self.all_splits()
    }

    /// Passes over the tokens.
    pub fn passes(&self) -> usize {
        self.num_tokens.div_ceil(self.tokens_per_pass.max(1))
    }

    /// Bytes of partial values: float32 `[tokens_per_pass, H, all_splits, d_v]`.
    pub fn partial_bytes(&self) -> usize {
        self.partial_rows() * self.d_v * 4
    }

    /// Bytes of workspace: partial values, then their (reference, sum) pairs.
    pub fn workspace_bytes(&self) -> usize {
        self.partial_bytes() + self.partial_rows() * 8
    }

    fn partial_rows(&self) -> usize {
        match self.all_splits() {
            1 => 0,
            splits => self.tokens_per_pass * self.num_heads * splits,
        }
    }

    /// Expected microseconds.
    fn cost(&self, device: &DeviceFacts) -> f64 {
        let ctas = self.head_tiles() * self.tokens_per_pass * self.all_splits();
        let waves = ctas.div_ceil(device.multiprocessors.max(1)).max(1) as f64;
        let chunk = if self.kernel.heads > 16 { CHUNK_COST_32 } else { CHUNK_COST_16 };
        let extra = self.extra.map_or(0, |extra| self.extra_chunks().div_ceil(extra.splits));
        let chunks = self.chunks().div_ceil(self.splits).max(extra);
        let decode = waves * (CTA_COST + chunks as f64 * chunk);
        let merge = match self.all_splits() {
            1 => 0.0,
            _ => MERGE_COST + 2.0 * self.partial_bytes() as f64 / PARTIAL_RATE,
        };
        self.passes() as f64 * (decode + merge)
    }
}

/// First chunk of a split, as the kernel computes it: split `s` of `splits` covers chunks `[start(s), start(s + 1))`.
pub fn split_start(chunks: usize, split: usize, splits: usize) -> usize {
    (chunks as u64 * split as u64 / splits as u64) as usize
}
