//! Every fact of the families and cache formats, in one table. Everything else derives from it.

use std::fmt;
use std::str::FromStr;

use crate::{Error, SparseMlaSm120DecodeConfig};

/// Largest head count of every kernel.
pub const MAX_NUM_HEADS: usize = 128;
/// Largest number of query tokens that `supports_decode` calls decode.
pub const MAX_DECODE_TOKENS: usize = 64;
/// Page size where the caller names none.
pub const DEFAULT_PAGE_BLOCK_SIZE: usize = 64;

/// Defines an enum whose variants have words, with parsing and printing.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident, $argument:literal { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub enum $name {
            $($(#[$doc])* #[cfg_attr(feature = "serde", serde(rename = $word))] $variant,)+
        }

        impl $name {
            /// Every value, in table order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The word that stands for the value in every interface.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(word: &str) -> Result<Self, Error> {
                Self::ALL.iter().copied().find(|value| value.as_str() == word).ok_or_else(|| {
                    Error::value($argument, accepted_words(Self::ALL), format!("'{word}'"))
                })
            }
        }
    };
}

words! {
    /// A model family: its dimensions, scale rule and packed layout.
    Family, "family" {
        /// DeepSeek-V4: 448 quantised + 64 RoPE dimensions, page footers.
        Dsv4 = "dsv4",
        /// DeepSeek-V3.2: 512 quantised + 64 RoPE dimensions, inline power-of-two FP32 scales.
        Dsv3_2 = "dsv3_2",
        /// GLM with sparse attention: the bytes of dsv3_2 with arbitrary FP32 scales.
        GlmNsa = "glm_nsa",
        /// GLM-5.3 without RoPE lanes.
        Glm53Nope = "glm53_nope",
        /// dots3 sliding window: 1024 quantised + 64 RoPE dimensions, page footers.
        Dots3Swa = "dots3_swa",
        /// DeepSeek-V4.1: 512 quantised dimensions in groups of 32, page footers.
        Dsv4_1 = "dsv4_1",
        /// DeepSeek-V4.1 with the scales inside the row.
        Dsv4_1Inline = "dsv4_1_inline",
    }
}

words! {
    /// Number format of a packed cache.
    KvCacheFormat, "kv_cache_format" {
        /// E4M3 codes.
        Fp8 = "fp8",
        /// E2M1 codes with E4M3 scales over 16 values.
        Nvfp4 = "nvfp4",
        /// The 288-byte E2M1 record of DeepSeek-V4.1's secondary cache.
        Fp4 = "fp4",
    }
}

/// `'a', 'b' or 'c'`.
pub fn accepted_words<T: fmt::Display>(values: &[T]) -> String {
    let words: Vec<String> = values.iter().map(|value| format!("'{value}'")).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        Some((last, _)) => last.clone(),
        None => String::new(),
    }
}

/// How the scale of a group is chosen and stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleRule {
    /// Power of two at least 2^-13, stored as its biased exponent in one byte (UE8M0).
    Ue8m0,
    /// The same power of two, stored as an FP32 number. Readers take the number as it is.
    Pow2Fp32,
    /// `amax / 448` as an FP32 number.
    ArbitraryFp32,
    /// E4M3 of `amax / 6`, at least 2^-9; values are divided by it.
    E4m3Floored,
    /// E4M3 of `amax / 6`, possibly zero; values are multiplied by its reciprocal.
    E4m3Nvfp4 {
        /// Whether an FP32 `kv_global_scale` per cache multiplies every value.
        global: bool,
    },
}

impl ScaleRule {
    /// The word of the family table.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ue8m0 => "ue8m0",
            Self::Pow2Fp32 => "pow2_fp32",
            Self::ArbitraryFp32 => "arbitrary_fp32",
            Self::E4m3Floored => "e4m3_floored",
            Self::E4m3Nvfp4 { global: false } => "e4m3_nvfp4",
            Self::E4m3Nvfp4 { global: true } => "e4m3_nvfp4_global",
        }
    }

    /// Bytes of one stored scale.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Pow2Fp32 | Self::ArbitraryFp32 => 4,
            _ => 1,
        }
    }

    /// Whether the codes are E2M1 (two per byte) instead of E4M3.
    pub const fn is_fp4(self) -> bool {
        matches!(self, Self::E4m3Floored | Self::E4m3Nvfp4 { .. })
    }
}

/// Where the scales of a token stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// In the token's own row: codes, scales, RoPE lanes. Rows may be padded.
    Inline,
    /// After all data rows (codes, RoPE lanes) of the page. Rows are tight.
    Footer,
}

/// The packed record of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowFormat {
    /// Quantised dimensions, which come first.
    pub quantised_dims: usize,
    /// BF16 RoPE dimensions, which follow.
    pub rope_dims: usize,
    /// Quantised values per scale.
    pub group: usize,
    /// Scale rule, which also decides the codes.
    pub scale: ScaleRule,
    /// Zero bytes after the scales.
    pub scale_pad: usize,
    /// Where the scales stand.
    pub placement: Placement,
}

impl RowFormat {
    /// Dimensions of a dequantised row.
    pub const fn d_qk(&self) -> usize {
        self.quantised_dims + self.rope_dims
    }

    /// Scales per token.
    pub const fn num_scales(&self) -> usize {
        self.quantised_dims / self.group
    }

    /// Bytes of a token's codes.
    pub const fn code_bytes(&self) -> usize {
        if self.scale.is_fp4() { self.quantised_dims / 2 } else { self.quantised_dims }
    }

    /// Bytes of a token's scales, pad included.
    pub const fn scale_bytes(&self) -> usize {
        self.num_scales() * self.scale.bytes() + self.scale_pad
    }

    /// Bytes of a token's RoPE lanes.
    pub const fn rope_bytes(&self) -> usize {
        self.rope_dims * 2
    }

    /// Bytes of a token, everything included.
    pub const fn bytes_per_token(&self) -> usize {
        self.code_bytes() + self.scale_bytes() + self.rope_bytes()
    }
}

/// One line of the family table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilySpec {
    /// The family.
    pub family: Family,
    /// The cache format.
    pub format: KvCacheFormat,
    /// The packed record.
    pub row: RowFormat,
    /// Value dimensions: V is the first `d_v` dimensions of K.
    pub d_v: usize,
    /// Calibrated widths of the indices row.
    pub topks: &'static [i64],
    /// Smallest width of the indices row.
    pub min_topk: usize,
    /// Positions of a row that are read at most.
    pub window: Option<usize>,
    /// Formats that a secondary cache may have; none = the family has no secondary cache.
    pub secondary: &'static [KvCacheFormat],
    /// Whether the line is an entry of the registry, and the family whose config object it shares.
    pub registry: Option<Option<Family>>,
    /// The PTX module that reads the record.
    pub module: &'static str,
}

const fn row(
    quantised_dims: usize,
    rope_dims: usize,
    group: usize,
    scale: ScaleRule,
    scale_pad: usize,
    placement: Placement,
) -> RowFormat {
    RowFormat { quantised_dims, rope_dims, group, scale, scale_pad, placement }
}

const DSV3_2: FamilySpec = FamilySpec {
    family: Family::Dsv3_2,
    format: KvCacheFormat::Fp8,
    row: row(512, 64, 128, ScaleRule::Pow2Fp32, 0, Placement::Inline),
    d_v: 512,
    topks: &[128, 512, 1024, 2048],
    min_topk: 1,
    window: None,
    secondary: &[],
    registry: Some(None),
    module: "dsv3_2",
};

const DSV4: FamilySpec = FamilySpec {
    family: Family::Dsv4,
    row: row(448, 64, 64, ScaleRule::Ue8m0, 1, Placement::Footer),
    topks: &[128, 192, 256, 512, 1024],
    secondary: &[KvCacheFormat::Fp8],
    module: "dsv4",
    ..DSV3_2
};

const DSV4_1: FamilySpec = FamilySpec {
    family: Family::Dsv4_1,
    row: row(512, 0, 32, ScaleRule::Ue8m0, 0, Placement::Footer),
    topks: &[512],
    secondary: &[KvCacheFormat::Fp8, KvCacheFormat::Fp4],
    module: "dsv4_1",
    ..DSV3_2
};

const DSV4_1_FP4: FamilySpec = FamilySpec {
    format: KvCacheFormat::Fp4,
    row: row(512, 0, 16, ScaleRule::E4m3Floored, 0, Placement::Footer),
    secondary: &[],
    registry: None,
    module: "dsv4_1_fp4",
    ..DSV4_1
};

/// The family table, in the order of the registry.
pub static FAMILY_TABLE: &[FamilySpec] = &[
    DSV4,
    DSV3_2,
    FamilySpec {
        family: Family::GlmNsa,
        row: row(512, 64, 128, ScaleRule::ArbitraryFp32, 0, Placement::Inline),
        registry: Some(Some(Family::Dsv3_2)),
        ..DSV3_2
    },
    FamilySpec {
        family: Family::Glm53Nope,
        row: row(512, 0, 128, ScaleRule::ArbitraryFp32, 0, Placement::Inline),
        topks: &[2176],
        module: "glm53_nope",
        ..DSV3_2
    },
    FamilySpec {
        family: Family::Dots3Swa,
        row: row(1024, 64, 128, ScaleRule::Ue8m0, 0, Placement::Footer),
        d_v: 1024,
        topks: &[576],
        min_topk: 513,
        window: Some(513),
        module: "dots3_swa",
        ..DSV3_2
    },
    DSV4_1,
    FamilySpec {
        family: Family::Dsv4_1Inline,
        row: row(512, 0, 32, ScaleRule::Ue8m0, 0, Placement::Inline),
        module: "dsv4_1_inline",
        ..DSV4_1
    },
    FamilySpec {
        format: KvCacheFormat::Nvfp4,
        row: row(448, 64, 16, ScaleRule::E4m3Nvfp4 { global: false }, 4, Placement::Footer),
        topks: &[128, 512],
        secondary: &[KvCacheFormat::Nvfp4],
        module: "dsv4_nvfp4",
        ..DSV4
    },
    FamilySpec {
        family: Family::GlmNsa,
        format: KvCacheFormat::Nvfp4,
        row: row(512, 64, 16, ScaleRule::E4m3Nvfp4 { global: true }, 0, Placement::Inline),
        module: "glm_nsa_nvfp4",
        ..DSV3_2
    },
    DSV4_1_FP4,
    FamilySpec {
        family: Family::Dsv4_1Inline,
        row: row(512, 0, 16, ScaleRule::E4m3Floored, 0, Placement::Inline),
        module: "dsv4_1_inline_fp4",
        ..DSV4_1_FP4
    },
];

impl FamilySpec {
    /// The table's line for a family and any cache format; a family without the format is refused by name.
    pub fn find(family: Family, format: KvCacheFormat) -> Result<&'static Self, Error> {
        Self::find_among(family, format, |_| true)
    }

    /// The same among the primary caches of decode, which are the registry's entries.
    pub fn find_primary(family: Family, format: KvCacheFormat) -> Result<&'static Self, Error> {
        Self::find_among(family, format, |spec| spec.registry.is_some())
    }

    fn find_among(
        family: Family,
        format: KvCacheFormat,
        eligible: impl Fn(&Self) -> bool,
    ) -> Result<&'static Self, Error> {
        let lines = || FAMILY_TABLE.iter().filter(|spec| spec.family == family && eligible(spec));
        lines().find(|spec| spec.format == format).ok_or_else(|| {
            let formats: Vec<_> = lines().map(|spec| spec.format).collect();
            Error::unsupported(format!(
                "`kv_cache_format` must be {} for family {family}, got '{format}'",
                accepted_words(&formats)
            ))
        })
    }

    /// Query/key dimensions.
    pub const fn d_qk(&self) -> usize {
        self.row.d_qk()
    }

    /// The registry's config of this line.
    pub fn config(&self) -> SparseMlaSm120DecodeConfig {
        SparseMlaSm120DecodeConfig {
            kv_cache_format: self.format,
            bytes_per_token: self.row.bytes_per_token() as i64,
            page_block_size_is_runtime: true,
            ..SparseMlaSm120DecodeConfig::new(
                self.d_qk() as i64,
                DEFAULT_PAGE_BLOCK_SIZE as i64,
                MAX_DECODE_TOKENS as i64,
                self.topks.iter().copied(),
                self.min_topk as i64,
                MAX_NUM_HEADS as i64,
            )
        }
    }
}

impl KvCacheFormat {
    /// Formats of the registry, which a primary cache may have.
    pub const PRIMARY: &'static [Self] = &[Self::Fp8, Self::Nvfp4];

    /// Parses the format of a primary cache.
    pub fn primary(word: &str) -> Result<Self, Error> {
        Self::PRIMARY
            .iter()
            .copied()
            .find(|format| format.as_str() == word)
            .ok_or_else(|| Error::value("kv_cache_format", accepted_words(Self::PRIMARY), format!("'{word}'")))
    }
}

/// The configs of every family that serves a primary cache format, in table order; needs no GPU and touches no file.
///
/// `fp4` names only a secondary cache and has none.
///
/// ```
/// use sparse_mla::{Family, KvCacheFormat, supported_sparse_mla_sm120_configs};
/// let configs = supported_sparse_mla_sm120_configs(KvCacheFormat::Fp8);
/// let (family, dsv4) = &configs[0];
/// assert_eq!(*family, Family::Dsv4);
/// assert!(dsv4.supports_decode(64, 1152, 1, None));
/// ```
pub fn supported_sparse_mla_sm120_configs(format: KvCacheFormat) -> Vec<(Family, SparseMlaSm120DecodeConfig)> {
    registry_lines(format).map(|spec| (spec.family, spec.config())).collect()
}

/// The table's lines that are registry entries of `format`.
pub(crate) fn registry_lines(format: KvCacheFormat) -> impl Iterator<Item = &'static FamilySpec> {
    FAMILY_TABLE.iter().filter(move |spec| spec.registry.is_some() && spec.format == format)
}
