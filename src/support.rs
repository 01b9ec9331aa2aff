//! The one predicate: what `decode` serves, and every reason why it does not.

use crate::family::{FamilySpec, KvCacheFormat, MAX_DECODE_TOKENS, MAX_NUM_HEADS, Placement};
use crate::layout::{Geometry, PageLayout};
use crate::{Error, Family};

/// Arithmetic of the attention products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum ComputePrecision {
    /// The library's choice; at least as accurate as [`ComputePrecision::F16`].
    #[default]
    Auto,
    /// Relative error at most 2e-3 before the rounding of the output.
    F16,
    /// FP8 products, relative error at most 3e-2. No kernel has it yet.
    Fp8,
}

impl std::str::FromStr for ComputePrecision {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self, Error> {
        match word {
            "auto" => Ok(Self::Auto),
            "f16" => Ok(Self::F16),
            "fp8" => Ok(Self::Fp8),
            _ => Err(Error::value("compute_precision", "'auto', 'f16' or 'fp8'", format!("'{word}'"))),
        }
    }
}

/// A decode request as far as support depends on it. Strides are in bytes; `None` = what our writers choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodeRequest {
    /// The family.
    pub family: Family,
    /// Format of the primary cache.
    pub kv_cache_format: KvCacheFormat,
    /// Query heads.
    pub num_heads: i64,
    /// Width of the indices row.
    pub topk: i64,
    /// Query tokens.
    pub num_tokens: i64,
    /// Primary cache.
    pub geometry: Geometry,
    /// Width of the secondary cache's indices row.
    pub extra_topk: i64,
    /// Secondary cache; `None` = there is none, unless `extra_topk` is positive.
    pub extra_geometry: Option<Geometry>,
    /// Whether the secondary cache holds FP4 records.
    pub extra_kv_fp4: bool,
    /// Arithmetic.
    pub compute_precision: ComputePrecision,
    /// (major, minor) of the GPU; `None` = CPU.
    pub compute_capability: Option<(i64, i64)>,
}

impl DecodeRequest {
    /// One token against an FP8 primary cache in the default geometry, on the CPU.
    pub fn new(family: Family, num_heads: i64, topk: i64) -> Self {
        Self {
            family,
            kv_cache_format: KvCacheFormat::Fp8,
            num_heads,
            topk,
            num_tokens: 1,
            geometry: Geometry::default(),
            extra_topk: 0,
            extra_geometry: None,
            extra_kv_fp4: false,
            compute_precision: ComputePrecision::Auto,
            compute_capability: None,
        }
    }

    /// Format of the secondary cache.
    pub fn extra_format(&self) -> KvCacheFormat {
        if self.extra_kv_fp4 { KvCacheFormat::Fp4 } else { self.kv_cache_format }
    }

    fn has_extra(&self) -> bool {
        self.extra_topk != 0 || self.extra_geometry.is_some() || self.extra_kv_fp4
    }
}

/// Answer of [`explain_decode`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct DecodeSupport {
    /// Every reason for a refusal; empty when supported.
    pub reasons: Vec<String>,
    /// Name of the code that serves the request; `None` when refused.
    pub kernel: Option<String>,
}

impl DecodeSupport {
    /// Whether `decode` serves the request.
    pub fn supported(&self) -> bool {
        self.kernel.is_some()
    }

    /// The refusal as an error.
    pub(crate) fn into_result(self) -> Result<(), Error> {
        if self.supported() { Ok(()) } else { Err(Error::Unsupported { reasons: self.reasons }) }
    }
}

/// Whether [`crate::decode`] serves a request, and if not, every reason why. Needs no GPU.
///
/// `decode` asks this very function, so a request accepted here runs and a refused one fails with the same text.
///
/// ```
/// use sparse_mla::{DecodeRequest, Family, explain_decode};
/// assert!(explain_decode(&DecodeRequest::new(Family::Dsv4, 11, 1152)).supported());
/// let refused = explain_decode(&DecodeRequest::new(Family::Dots3Swa, 64, 512));
/// assert!(refused.reasons[0].starts_with("`topk` must be >= 513"));
/// ```
pub fn explain_decode(request: &DecodeRequest) -> DecodeSupport {
    let mut reasons = Vec::new();
    let spec = FamilySpec::find_primary(request.family, request.kv_cache_format)
        .map_err(|error| push_reasons(&mut reasons, error))
        .ok();

    if !(1..=MAX_NUM_HEADS as i64).contains(&request.num_heads) {
        reasons.push(format!("`num_heads` must be in [1, {MAX_NUM_HEADS}], got {}", request.num_heads));
    }
    if let Some(spec) = spec
        && request.topk < spec.min_topk as i64
    {
        let why = match spec.window {
            Some(window) => format!(" for family {} (the {window}-wide window must fit)", request.family),
            None => String::new(),
        };
        reasons.push(format!("`topk` must be >= {}{why}, got {}", spec.min_topk, request.topk));
    }
    if request.num_tokens < 0 {
        reasons.push(format!("`num_tokens` must be >= 0, got {}", request.num_tokens));
    }
    if let Some(spec) = spec {
        if let Err(error) = PageLayout::new(spec, request.geometry, "") {
            push_reasons(&mut reasons, error);
        }
        if request.has_extra() {
            explain_extra(request, spec, &mut reasons);
        }
    }
    if request.compute_precision == ComputePrecision::Fp8 {
        reasons.push("`compute_precision` must be 'auto' or 'f16' (no FP8 arithmetic is built), got 'fp8'".into());
    }
    if let Some((major, minor)) = request.compute_capability {
        explain_gpu(request, spec, (major, minor), &mut reasons);
    }

    let kernel = reasons.is_empty().then(|| kernel_name(request));
    DecodeSupport { reasons, kernel }
}

/// Oldest compute capability that the PTX runs on.
pub const MIN_COMPUTE_CAPABILITY: (i64, i64) = (9, 0);

/// Why a GPU runs no kernel at all.
pub(crate) fn explain_capability((major, minor): (i64, i64)) -> Option<String> {
    let (least_major, least_minor) = MIN_COMPUTE_CAPABILITY;
    ((major, minor) < MIN_COMPUTE_CAPABILITY)
        .then(|| format!("`compute_capability` must be at least {least_major}.{least_minor}, got {major}.{minor}"))
}

fn explain_gpu(request: &DecodeRequest, spec: Option<&FamilySpec>, capability: (i64, i64), reasons: &mut Vec<String>) {
    reasons.extend(explain_capability(capability));
    push_above("num_tokens", request.num_tokens, i32::MAX.into(), reasons);
    if let Some(spec) = spec {
        explain_gpu_cache(spec, request.topk, request.geometry, "", reasons);
    }
    if request.has_extra()
        && spec.is_some_and(|spec| !spec.secondary.is_empty())
        && let Ok(extra) = FamilySpec::find(request.family, request.extra_format())
    {
        let geometry = request.extra_geometry.unwrap_or_default();
        explain_gpu_cache(extra, request.extra_topk, geometry, "extra_", reasons);
    }
}

/// What exceeds the kernels' 32-bit arguments. A wrong layout has its reasons already.
fn explain_gpu_cache(spec: &FamilySpec, topk: i64, geometry: Geometry, prefix: &str, reasons: &mut Vec<String>) {
    push_above(&format!("{prefix}topk"), topk, i32::MAX.into(), reasons);
    let Ok(layout) = PageLayout::new(spec, geometry, prefix) else { return };
    push_above(&format!("{prefix}row_stride"), layout.row_stride() as i64, u32::MAX.into(), reasons);
    if layout.row().placement == Placement::Footer {
        let largest = i64::from(u32::MAX) / layout.row_stride() as i64;
        push_above(&format!("{prefix}page_block_size"), layout.page_block_size() as i64, largest, reasons);
    }
}

fn push_above(argument: &str, got: i64, largest: i64, reasons: &mut Vec<String>) {
    if got > largest {
        reasons.push(format!("`{argument}` must be at most {largest} on a GPU, got {got}"));
    }
}

fn explain_extra(request: &DecodeRequest, spec: &FamilySpec, reasons: &mut Vec<String>) {
    let family = request.family;
    if spec.secondary.is_empty() {
        let geometry = request.extra_geometry.unwrap_or_default();
        let size = |value: Option<i64>| value.map(|value| value.to_string());
        let given = [
            ("extra_topk", "0", (request.extra_topk != 0).then(|| request.extra_topk.to_string())),
            ("extra_page_block_size", "None", size(geometry.page_block_size)),
            ("extra_page_stride", "None", size(geometry.page_stride)),
            ("extra_row_stride", "None", size(geometry.row_stride)),
            ("extra_kv_fp4", "False", request.extra_kv_fp4.then(|| "True".into())),
            ("extra_kv_cache", "None", Some("a secondary cache".into())),
        ];
        // The first says it all: there is no secondary cache.
        if let Some((argument, accepted, Some(got))) = given.into_iter().find(|(_, _, got)| got.is_some()) {
            reasons.push(format!(
                "`{argument}` must be {accepted} for family {family} ({}), which has no secondary cache, got {got}",
                request.kv_cache_format
            ));
        }
        return;
    }
    if request.extra_topk < 0 {
        reasons.push(format!("`extra_topk` must be >= 0, got {}", request.extra_topk));
    }
    if !spec.secondary.contains(&request.extra_format()) {
        let with_fp4 = "dsv4_1 and dsv4_1_inline with an fp8 primary cache have FP4 records";
        reasons.push(format!("`extra_kv_fp4` must be False for family {family} (only {with_fp4}), got True"));
        return;
    }
    match FamilySpec::find(family, request.extra_format()) {
        Ok(extra) => {
            if let Err(error) = PageLayout::new(extra, request.extra_geometry.unwrap_or_default(), "extra_") {
                push_reasons(reasons, error);
            }
        }
        Err(error) => push_reasons(reasons, error),
    }
}

fn push_reasons(reasons: &mut Vec<String>, error: Error) {
    match error {
        Error::Unsupported { reasons: more } => reasons.extend(more),
        other => reasons.push(other.to_string()),
    }
}

fn kernel_name(request: &DecodeRequest) -> String {
    let extra = if request.has_extra() { format!("+{}", request.extra_format()) } else { String::new() };
    let form = if request.num_tokens <= MAX_DECODE_TOKENS as i64 { "decode" } else { "prefill" };
    let backend = if request.compute_capability.is_some() { "sm_90" } else { "cpu" };
    format!("{backend}/{}/{}{extra}/{form}", request.family, request.kv_cache_format)
}
