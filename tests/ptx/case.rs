//! Cases: small ragged decodes, their inputs, and what the CPU backend makes of them.

use ndarray::{Array1, Array2, Array3};
use sparse_mla::cuda::OutType;
use sparse_mla::half::bf16;
use sparse_mla::plan::{DecodePlan, DeviceFacts, ExtraLaunch, FEW_SPLITS, KERNELS};
use sparse_mla::{
    CacheView, DecodeInputs, DecodeOutputs, DecodeRequest, ExtraCandidates, Family, FamilySpec, Geometry,
    KvCacheFormat, LseBase, PackedCache, Placement, ScaleRule, decode, pack_kv_cache,
};

use crate::common::{Lcg, queries};

/// One decode.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub family: Family,
    pub format: KvCacheFormat,
    /// Heads of a CTA of the kernel.
    pub tile: usize,
    pub tokens: usize,
    pub heads: usize,
    pub topk: usize,
    pub splits: usize,
    /// Rows in the cache.
    pub slots: usize,
    pub page: Page,
    pub extra: Option<Extra>,
    /// Lengths of the rows by token, repeated; none: all of `topk`.
    pub lengths: &'static [i32],
    pub holes: Holes,
    pub values: Values,
    pub sink: Sink,
    pub lse_base: LseBase,
    /// Whether the log-sum-exp is written.
    pub lse: bool,
    pub out_type: OutType,
    /// Elements between and before the rows of every array that may have them.
    pub gaps: usize,
    /// None: all tokens in one pass.
    pub tokens_per_pass: Option<usize>,
    /// The plan that is made for this device, batch-invariant or not, instead of `tile`, `splits` and passes.
    pub planned: Option<(DeviceFacts, bool)>,
}

/// The secondary cache.
#[derive(Debug, Clone, Copy)]
pub struct Extra {
    pub format: KvCacheFormat,
    /// Splits of its own launch, if its records differ from the primary's.
    pub splits: usize,
    pub topk: usize,
    pub slots: usize,
    pub page: Page,
    pub lengths: &'static [i32],
}

/// How pages lie.
#[derive(Debug, Clone, Copy)]
pub enum Page {
    /// As our writers choose, this many rows.
    Dense(usize),
    /// Pages, and where the family has inline rows rows too, with gaps between them.
    Padded(usize),
}

/// Which candidates are absent.
#[derive(Debug, Clone, Copy)]
pub enum Holes {
    None,
    /// A fifth are negative, past the cache, or the first past it.
    Some,
    All,
}

/// The sinks of the heads.
#[derive(Debug, Clone, Copy)]
pub enum Sink {
    None,
    Normal,
    /// Every other head's is so large that no candidate counts beside it.
    Above,
}

/// The range of the values.
#[derive(Debug, Clone, Copy)]
pub enum Values {
    /// Normal, with outlier channels.
    Plain,
    /// Rows whose scales differ by up to 2^20, so that units and references move from chunk to chunk; outliers in Q.
    Wild,
}

/// The inputs of a case.
pub struct Inputs {
    pub spec: &'static FamilySpec,
    pub q: Array3<bf16>,
    pub cache: Cache,
    pub indices: Array2<i32>,
    pub lengths: Option<Array1<i32>>,
    pub sink: Option<Array1<f32>>,
    pub extra: Option<ExtraInputs>,
    pub sm_scale: f32,
    pub kv_global_scale: f32,
}

pub struct Cache {
    pub spec: &'static FamilySpec,
    pub packed: PackedCache,
    pub geometry: Geometry,
}

pub struct ExtraInputs {
    pub cache: Cache,
    pub indices: Array2<i32>,
    pub lengths: Option<Array1<i32>>,
}

/// Results as f32.
pub struct Outputs {
    pub out: Array3<f32>,
    pub lse: Option<Array2<f32>>,
}

impl Outputs {
    pub fn same_bits(&self, other: &Self) -> bool {
        let bits = |outputs: &Self| {
            let lse = outputs.lse.iter().flatten().map(|x| x.to_bits());
            outputs.out.iter().map(|x| x.to_bits()).chain(lse).collect::<Vec<_>>()
        };
        bits(self) == bits(other)
    }
}

impl Case {
    pub fn spec(&self) -> &'static FamilySpec {
        FamilySpec::find(self.family, self.format).expect("the case names a line of the table")
    }

    pub fn plan(&self) -> DecodePlan {
        if let Some((device, batch_invariant)) = &self.planned {
            let request = DecodeRequest {
                kv_cache_format: self.format,
                num_tokens: self.tokens as i64,
                extra_topk: self.extra.map_or(0, |extra| extra.topk as i64),
                extra_kv_fp4: self.extra.is_some_and(|extra| extra.format == KvCacheFormat::Fp4),
                ..DecodeRequest::new(self.family, self.heads as i64, self.topk as i64)
            };
            return DecodePlan::new(&request, device, *batch_invariant).expect("a case that is served");
        }
        let spec = self.spec();
        let kernel = |module| {
            let found = KERNELS.iter().find(|kernel| kernel.module == module && kernel.heads == self.tile);
            found.expect("the case names a kernel")
        };
        let extra = self.extra.filter(|extra| self.extra_spec(*extra).module != spec.module);
        DecodePlan {
            kernel: kernel(spec.module),
            num_tokens: self.tokens,
            num_heads: self.heads,
            topk: [self.topk.min(spec.window.unwrap_or(usize::MAX)), self.extra.map_or(0, |extra| extra.topk)],
            d_v: spec.d_v,
            splits: self.splits,
            extra: extra
                .map(|extra| ExtraLaunch { kernel: kernel(self.extra_spec(extra).module), splits: extra.splits }),
            tokens_per_pass: self.tokens_per_pass.unwrap_or(self.tokens),
        }
    }

    fn extra_spec(&self, extra: Extra) -> &'static FamilySpec {
        FamilySpec::find(self.family, extra.format).expect("the case names a secondary cache of the table")
    }

    /// Whether it launches an entry point.
    pub fn launches(&self, module: &str, entry: &str) -> bool {
        let plan = self.plan();
        let kernels = [Some(plan.kernel), plan.extra.map(|extra| extra.kernel)];
        match (module, entry) {
            ("merge", "merge_few") => (2..=FEW_SPLITS).contains(&plan.all_splits()),
            ("merge", "merge_many") => plan.all_splits() > FEW_SPLITS,
            _ => kernels.into_iter().flatten().any(|kernel| kernel.module == module && kernel.entry == entry),
        }
    }

    /// Family, formats, entry point and name.
    pub fn title(&self) -> String {
        let extra = self.extra.map_or(String::new(), |extra| format!("+{}", extra.format));
        let entry = self.plan().kernel.entry;
        format!("{} {}{extra} {entry}, {}", self.family, self.format, self.name)
    }

    /// Inputs that depend on the title only, not on the case's place in the table.
    pub fn inputs(&self) -> Inputs {
        let spec = self.spec();
        let seed = self.title().bytes().fold(17, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let extra = self.extra.map(|extra| {
            let cache = self.cache(self.extra_spec(extra), extra.slots, extra.page, seed ^ 1);
            let indices = self.indices(extra.topk, extra.slots, &cache, seed ^ 2);
            ExtraInputs { cache, indices, lengths: self.lengths(extra.lengths) }
        });
        let cache = self.cache(spec, self.slots, self.page, seed ^ 5);
        let mut random = Lcg(seed ^ 3);
        Inputs {
            spec,
            q: self.queries(spec.d_qk(), seed ^ 4),
            indices: self.indices(self.topk, self.slots, &cache, seed ^ 6),
            cache,
            lengths: self.lengths(self.lengths),
            sink: match self.sink {
                Sink::None => None,
                Sink::Normal => Some(Array1::from_shape_fn(self.heads, |_| random.normal())),
                Sink::Above => Some(Array1::from_shape_fn(self.heads, |head| if head % 2 == 0 { 300.0 } else { 1.0 })),
            },
            extra,
            sm_scale: 0.05,
            kv_global_scale: global_scale(spec),
        }
    }

    fn queries(&self, d_qk: usize, seed: u64) -> Array3<bf16> {
        let mut q = queries(self.tokens, self.heads, d_qk, seed);
        if matches!(self.values, Values::Wild) {
            // A few dimensions far above the rest, so that a maximum over too few lanes overflows.
            q.slice_mut(ndarray::s![.., .., 11..;61]).mapv_inplace(|x| bf16::from_f32(x.to_f32() * 32.0));
        }
        q
    }

    fn lengths(&self, lengths: &[i32]) -> Option<Array1<i32>> {
        let of_token = |token: usize| lengths[token % lengths.len()];
        (!lengths.is_empty()).then(|| Array1::from_shape_fn(self.tokens, of_token))
    }

    fn indices(&self, topk: usize, rows: usize, cache: &Cache, seed: u64) -> Array2<i32> {
        let mut random = Lcg(seed);
        let slots = cache.view().num_slots();
        Array2::from_shape_fn((self.tokens, topk), |_| match (self.holes, random.below(16)) {
            (Holes::All, _) | (Holes::Some, 0) => -1 - random.below(1 << 20) as i32,
            (Holes::Some, 1) => slots as i32,
            (Holes::Some, 2) => (slots + random.below(1 << 30)) as i32,
            _ => random.below(rows as u64) as i32,
        })
    }

    fn cache(&self, spec: &'static FamilySpec, rows: usize, page: Page, seed: u64) -> Cache {
        let mut random = Lcg(seed);
        let mut latents = Array2::from_shape_fn((rows, spec.d_qk()), |(_, dim)| {
            random.normal() * if dim % 97 == 5 { 20.0 } else { 1.0 }
        });
        if matches!(self.values, Values::Wild) {
            for mut row in latents.rows_mut() {
                let factor = 2f32.powi(random.below(21) as i32 - 16);
                row.mapv_inplace(|x| x * factor);
            }
        }
        let latents = latents.mapv(bf16::from_f32);
        let geometry = page.geometry(spec);
        let packed =
            pack_kv_cache(spec, latents.view(), geometry, global_scale(spec)).expect("a geometry that is accepted");
        Cache { spec, packed, geometry }
    }
}

/// No power of two, where there is one.
fn global_scale(spec: &FamilySpec) -> f32 {
    if spec.row.scale == (ScaleRule::E4m3Nvfp4 { global: true }) { 0.37 } else { 1.0 }
}

impl Page {
    fn geometry(self, spec: &FamilySpec) -> Geometry {
        let record = spec.row.bytes_per_token() as i64;
        match self {
            Self::Dense(rows) => Geometry { page_block_size: Some(rows as i64), ..Geometry::default() },
            Self::Padded(rows) => {
                let row = if spec.row.placement == Placement::Inline { record + 128 } else { record };
                Geometry {
                    page_block_size: Some(rows as i64),
                    page_stride: Some((rows as i64 * row + 576) / 576 * 576),
                    row_stride: (spec.row.placement == Placement::Inline).then_some(row),
                }
            }
        }
    }
}

impl Cache {
    pub fn view(&self) -> CacheView<'_> {
        CacheView::new(self.spec, self.geometry, self.packed.pages, &self.packed.bytes, global_scale(self.spec))
            .expect("a packed cache")
    }

    /// Bytes from the first to the last of a record.
    pub fn extent(&self) -> usize {
        self.packed.layout.extent(self.packed.pages).expect("a small cache")
    }

    /// Whether a byte belongs to a record.
    pub fn is_payload(&self, byte: usize) -> bool {
        let layout = &self.packed.layout;
        let (in_page, record) = (byte % layout.page_stride(), layout.row().bytes_per_token());
        match layout.row().placement {
            Placement::Footer => in_page < layout.page_block_size() * record,
            Placement::Inline => {
                in_page / layout.row_stride() < layout.page_block_size() && in_page % layout.row_stride() < record
            }
        }
    }
}

impl Inputs {
    /// Whether any candidate of a token is present.
    pub fn is_present(&self, token: usize) -> bool {
        let any = |cache: &Cache, indices: &Array2<i32>, lengths: &Option<Array1<i32>>| {
            let length = lengths.as_ref().map_or(usize::MAX, |lengths| lengths[token].max(0) as usize);
            let length = length.min(self.spec.window.unwrap_or(usize::MAX));
            let slots = 0..cache.view().num_slots() as i64;
            indices.row(token).iter().take(length).any(|slot| slots.contains(&i64::from(*slot)))
        };
        any(&self.cache, &self.indices, &self.lengths)
            || self.extra.as_ref().is_some_and(|extra| any(&extra.cache, &extra.indices, &extra.lengths))
    }

    pub fn reference(&self, case: &Case) -> Outputs {
        let mut inputs = DecodeInputs::new(self.q.view(), self.cache.view(), self.indices.view(), self.sm_scale);
        inputs.topk_length = self.lengths.as_ref().map(|lengths| lengths.view());
        inputs.attn_sink = self.sink.as_ref().map(|sink| sink.view());
        inputs.lse_base = case.lse_base;
        inputs.extra = self.extra.as_ref().map(|extra| ExtraCandidates {
            kv_cache: extra.cache.view(),
            indices: extra.indices.view(),
            topk_length: extra.lengths.as_ref().map(|lengths| lengths.view()),
        });
        let mut out = Array3::zeros((case.tokens, case.heads, self.spec.d_v));
        let mut lse = Array2::zeros((case.tokens, case.heads));
        decode(&inputs, DecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) })
            .expect("a case that is served");
        Outputs { out, lse: case.lse.then_some(lse) }
    }
}
