//! Sparse-MLA attention on the CPU in float32.
//!
//! A row's present candidates are listed first, so that absent ones leave no trace. The list is cut into splits of a
//! fixed size; a split keeps a running maximum, sum and accumulator per head over tiles that are dequantised once for
//! all heads; the splits are joined in order. Nothing depends on other rows: the result is batch invariant.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, Axis, s};
use rayon::prelude::*;

use crate::codec::dequantise;
use crate::layout::{CacheView, Geometry};
use crate::support::{ComputePrecision, DecodeRequest, explain_decode};
use crate::{Element, Error, FamilySpec, threads};
use half::bf16;

/// Candidates that are dequantised at a time: a tile of the widest family stays within a core's L2 cache.
const TILE: usize = 128;
/// Candidates that one task works through.
const SPLIT: usize = 4 * TILE;

/// Base of the log-sum-exp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LseBase {
    /// log2 of the sum of powers of two.
    #[default]
    Two,
    /// Natural logarithm.
    E,
}

impl LseBase {
    /// A natural logarithm in this base.
    pub fn of_natural(self, natural: f64) -> f64 {
        match self {
            Self::Two => natural * std::f64::consts::LOG2_E,
            Self::E => natural,
        }
    }

    /// The inverse of [`LseBase::of_natural`].
    pub fn to_natural(self, value: f64) -> f64 {
        match self {
            Self::Two => value * std::f64::consts::LN_2,
            Self::E => value,
        }
    }
}

impl std::str::FromStr for LseBase {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self, Error> {
        match word {
            "2" => Ok(Self::Two),
            "e" => Ok(Self::E),
            _ => Err(Error::value("lse_base", "'2' or 'e'", format!("'{word}'"))),
        }
    }
}

/// The secondary cache and its candidates.
#[derive(Debug, Clone)]
pub struct ExtraCandidates<'a> {
    /// The packed cache.
    pub kv_cache: CacheView<'a>,
    /// Slot ids `[T, E]`.
    pub indices: ArrayView2<'a, i32>,
    /// Length of every row, `[T]`.
    pub topk_length: Option<ArrayView1<'a, i32>>,
}

/// Everything that [`decode`] reads.
#[derive(Debug, Clone)]
pub struct DecodeInputs<'a> {
    /// Queries `[T, H, d_qk]`.
    pub q: ArrayView3<'a, bf16>,
    /// The primary packed cache.
    pub kv_cache: CacheView<'a>,
    /// Slot ids `[T, K]`.
    pub indices: ArrayView2<'a, i32>,
    /// Length of every row, `[T]`; clamped to `[0, K]`.
    pub topk_length: Option<ArrayView1<'a, i32>>,
    /// Natural-log sinks `[H]`.
    pub attn_sink: Option<ArrayView1<'a, f32>>,
    /// Secondary cache and candidates, joined in the same softmax.
    pub extra: Option<ExtraCandidates<'a>>,
    /// Softmax scale.
    pub sm_scale: f32,
    /// Base of the log-sum-exp that is written.
    pub lse_base: LseBase,
    /// Arithmetic.
    pub compute_precision: ComputePrecision,
}

impl<'a> DecodeInputs<'a> {
    /// The required inputs; every optional one absent or at its default.
    pub fn new(q: ArrayView3<'a, bf16>, kv_cache: CacheView<'a>, indices: ArrayView2<'a, i32>, sm_scale: f32) -> Self {
        Self {
            q,
            kv_cache,
            indices,
            topk_length: None,
            attn_sink: None,
            extra: None,
            sm_scale,
            lse_base: LseBase::Two,
            compute_precision: ComputePrecision::Auto,
        }
    }

    /// The request as [`explain_decode`] sees it.
    pub fn request(&self) -> DecodeRequest {
        let spec = self.kv_cache.spec();
        DecodeRequest {
            kv_cache_format: spec.format,
            num_tokens: self.q.len_of(Axis(0)) as i64,
            geometry: geometry_of(&self.kv_cache),
            extra_topk: self.extra.as_ref().map_or(0, |extra| extra.indices.ncols() as i64),
            extra_geometry: self.extra.as_ref().map(|extra| geometry_of(&extra.kv_cache)),
            extra_kv_fp4: self
                .extra
                .as_ref()
                .is_some_and(|extra| extra.kv_cache.spec().format == crate::KvCacheFormat::Fp4),
            compute_precision: self.compute_precision,
            ..DecodeRequest::new(spec.family, self.q.len_of(Axis(1)) as i64, self.indices.ncols() as i64)
        }
    }

    /// Checks everything that is not a question of support.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let (num_tokens, num_heads, width) = self.q.dim();
        check_shapes(self.kv_cache.spec(), width, num_heads, self.attn_sink.map(|sink| sink.len()))?;
        let per_token = |name: &str, length: Option<usize>| match length {
            Some(length) if length != num_tokens => {
                Err(Error::value(name, format!("{num_tokens} rows long, one per query token"), length))
            }
            _ => Ok(()),
        };
        per_token("indices", Some(self.indices.nrows()))?;
        per_token("topk_length", self.topk_length.map(|length| length.len()))?;
        if let Some(extra) = &self.extra {
            per_token("extra_indices", Some(extra.indices.nrows()))?;
            per_token("extra_topk_length", extra.topk_length.map(|length| length.len()))?;
            let (main, other) = (self.kv_cache.spec().family, extra.kv_cache.spec().family);
            if main != other {
                return Err(Error::value("extra_kv_cache", format!("a cache of family {main}"), other));
            }
        }
        if !self.sm_scale.is_finite() {
            return Err(Error::value("sm_scale", "a finite FP32 number", self.sm_scale));
        }
        Ok(())
    }

    /// The present candidates of a row, in order.
    pub(crate) fn candidates(&self, token: usize) -> Vec<Candidate<'_>> {
        let mut present = Vec::new();
        let mut collect = |kv_cache, indices: ArrayView1<'_, i32>, length: Option<i32>, window: usize| {
            let length = length.map_or(indices.len(), |length| length.max(0) as usize);
            let slots = indices.into_iter().take(length.min(window)).filter_map(|index| u64::try_from(*index).ok());
            present.extend(slots.map(|slot| Candidate { kv_cache, slot }).filter(Candidate::exists));
        };
        let length = self.topk_length.map(|lengths| lengths[token]);
        let window = self.kv_cache.spec().window.unwrap_or(usize::MAX);
        collect(&self.kv_cache, self.indices.row(token), length, window);
        if let Some(extra) = &self.extra {
            let length = extra.topk_length.map(|lengths| lengths[token]);
            collect(&extra.kv_cache, extra.indices.row(token), length, usize::MAX);
        }
        present
    }
}

/// Widths that the family and the queries decide.
pub(crate) fn check_shapes(
    spec: &FamilySpec,
    q_width: usize,
    num_heads: usize,
    sink_length: Option<usize>,
) -> Result<(), Error> {
    let d_qk = spec.d_qk();
    if q_width != d_qk {
        return Err(Error::value("q", format!("{d_qk} wide for family {}", spec.family), q_width));
    }
    match sink_length {
        Some(length) if length != num_heads => {
            Err(Error::value("attn_sink", format!("{num_heads} long, one per head"), length))
        }
        _ => Ok(()),
    }
}

fn geometry_of(cache: &CacheView<'_>) -> Geometry {
    let layout = cache.layout();
    Geometry {
        page_block_size: Some(layout.page_block_size() as i64),
        page_stride: Some(layout.page_stride() as i64),
        row_stride: Some(layout.row_stride() as i64),
    }
}

/// A slot of one of the two caches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate<'a> {
    kv_cache: &'a CacheView<'a>,
    slot: u64,
}

impl Candidate<'_> {
    fn exists(&self) -> bool {
        self.slot < self.kv_cache.num_slots()
    }

    /// Dequantises the row into `out[..d_qk]`.
    pub fn dequantise(&self, out: &mut [f32]) {
        let record = self.kv_cache.record(self.slot);
        dequantise(self.kv_cache.layout().row(), &record, self.kv_cache.kv_global_scale, out);
    }
}

/// Everything that [`decode`] writes. Views may be strided.
#[derive(Debug)]
pub struct DecodeOutputs<'a, O> {
    /// `[T, H, d_v]`.
    pub out: ArrayViewMut3<'a, O>,
    /// `[T, H]`, in the inputs' base.
    pub lse: Option<ArrayViewMut2<'a, f32>>,
}

/// Attention of every query token over the cache rows its indices name; see the crate documentation for the rules.
///
/// Refuses what [`explain_decode`] refuses, with the same text, and mismatched shapes, before anything is written.
pub fn decode<O: Element>(inputs: &DecodeInputs<'_>, outputs: DecodeOutputs<'_, O>) -> Result<(), Error> {
    explain_decode(&inputs.request()).into_result()?;
    inputs.check()?;
    let DecodeOutputs { mut out, mut lse } = outputs;
    let (num_tokens, num_heads, _) = inputs.q.dim();
    let expected = (num_tokens, num_heads, inputs.kv_cache.spec().d_v);
    if out.dim() != expected {
        return Err(Error::value("out", format!("of shape {expected:?}"), format!("{:?}", out.dim())));
    }
    let mut lse_rows: Vec<Option<ArrayViewMut1<'_, f32>>> = Vec::new();
    match &mut lse {
        Some(lse) if lse.dim() != (num_tokens, num_heads) => {
            let accepted = format!("of shape ({num_tokens}, {num_heads})");
            return Err(Error::value("lse", accepted, format!("{:?}", lse.dim())));
        }
        Some(lse) => lse_rows.extend(lse.outer_iter_mut().map(Some)),
        None => lse_rows.resize_with(num_tokens, || None),
    }
    if num_tokens == 0 {
        return Ok(());
    }
    threads::install(|| {
        out.axis_iter_mut(Axis(0)).into_par_iter().zip(lse_rows).enumerate().for_each(|(token, (out, lse))| {
            decode_row(inputs, token, out, lse);
        });
    });
    Ok(())
}

fn decode_row<O: Element>(
    inputs: &DecodeInputs<'_>,
    token: usize,
    mut out: ArrayViewMut2<'_, O>,
    mut lse: Option<ArrayViewMut1<'_, f32>>,
) {
    let q = inputs.q.index_axis(Axis(0), token).mapv(Element::to_f32);
    let d_v = out.ncols();
    let candidates = inputs.candidates(token);
    let splits: Vec<Split> =
        candidates.par_chunks(SPLIT).map(|chunk| Split::over(chunk, &q, inputs.sm_scale, d_v)).collect();

    let mut sum_of_values = vec![0f32; d_v];
    for (head, mut out) in out.outer_iter_mut().enumerate() {
        let sink = inputs.attn_sink.map_or(f32::NEG_INFINITY, |sink| sink[head]);
        let max = splits.iter().fold(sink, |max, split| max.max(split.max[head]));
        let mut sum = weight(sink, max);
        sum_of_values.fill(0.0);
        for split in &splits {
            let weight = weight(split.max[head], max);
            sum += split.sum[head] * weight;
            for (total, value) in sum_of_values.iter_mut().zip(split.values.row(head)) {
                *total += value * weight;
            }
        }
        // Nothing at all has the weight 0 and gives exactly 0.
        let normaliser = if sum == 0.0 { 1.0 } else { sum };
        for (out, value) in out.iter_mut().zip(&sum_of_values) {
            *out = O::from_f32(value / normaliser);
        }
        if let Some(lse) = &mut lse {
            lse[head] = inputs.lse_base.of_natural(f64::from(max) + f64::from(sum).ln()) as f32;
        }
    }
}

/// exp(x - max) where -inf minus itself counts as nothing and +inf minus itself as everything.
fn weight(x: f32, max: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        0.0
    } else if x == max {
        1.0
    } else {
        (x - max).exp()
    }
}

/// Softmax state of all heads over a part of a row's candidates.
struct Split {
    /// Largest score per head.
    max: Vec<f32>,
    /// Sum of exp(score - max) per head.
    sum: Vec<f32>,
    /// Sum of exp(score - max) * V, `[H, d_v]`.
    values: Array2<f32>,
}

impl Split {
    fn over(candidates: &[Candidate<'_>], q: &Array2<f32>, sm_scale: f32, d_v: usize) -> Self {
        let (num_heads, d_qk) = q.dim();
        let mut state = Self {
            max: vec![f32::NEG_INFINITY; num_heads],
            sum: vec![0.0; num_heads],
            values: Array2::zeros((num_heads, d_v)),
        };
        let mut tile = Array2::<f32>::zeros((TILE, d_qk));
        let mut scores = Array2::<f32>::zeros((num_heads, TILE));
        for chunk in candidates.chunks(TILE) {
            for (candidate, mut row) in chunk.iter().zip(tile.outer_iter_mut()) {
                if let Some(row) = row.as_slice_mut() {
                    candidate.dequantise(row);
                }
            }
            let keys = tile.slice(s![..chunk.len(), ..]);
            let mut weights = scores.slice_mut(s![.., ..chunk.len()]);
            general_mat_mul(1.0, q, &keys.t(), 0.0, &mut weights);
            for (head, mut scores) in weights.outer_iter_mut().enumerate() {
                let rescale = state.absorb(head, &mut scores, sm_scale);
                if rescale != 1.0 {
                    state.values.row_mut(head).mapv_inplace(|value| value * rescale);
                }
            }
            general_mat_mul(1.0, &weights, &keys.slice(s![.., ..d_v]), 1.0, &mut state.values);
        }
        state
    }

    /// Turns a head's products into weights under the new maximum; returns the factor of what was summed before.
    fn absorb(&mut self, head: usize, scores: &mut ArrayViewMut1<'_, f32>, sm_scale: f32) -> f32 {
        // Scaling rounds before the maximum is taken from it, so that the largest weight is exactly 1.
        scores.mapv_inplace(|score| score * sm_scale);
        let max = scores.iter().copied().fold(self.max[head], f32::max);
        let rescale = weight(self.max[head], max);
        let mut sum = 0.0;
        scores.mapv_inplace(|score| {
            let weight = weight(score, max);
            sum += weight;
            weight
        });
        self.sum[head] = self.sum[head] * rescale + sum;
        self.max[head] = max;
        rescale
    }
}
