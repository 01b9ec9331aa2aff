//! The documented config class and its three queries.

use std::collections::BTreeSet;
use std::fmt;

use crate::KvCacheFormat;

/// Decode envelope of one family; the Rust face of Python's `SparseMLASm120DecodeConfig`.
pub type SparseMlaSm120DecodeConfig = DecodeConfig<i64>;

/// Decode envelope of one family, over integers of type `I`.
///
/// Use the alias [`SparseMlaSm120DecodeConfig`]; the Python class uses integers of any size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(bound(deserialize = "I: serde::Deserialize<'de> + Ord")))]
pub struct DecodeConfig<I> {
    /// Query/key head dimension.
    pub d_qk: I,
    /// Default KV page size in tokens; the only one unless one of the last two fields widens it.
    pub page_block_size: I,
    /// Largest number of query tokens that counts as decode, inclusive.
    pub max_num_tokens: I,
    /// Calibrated widths of the indices row; the exact legal set only when `topk_is_runtime` is false.
    pub topks: BTreeSet<I>,
    /// Smallest legal width.
    pub min_topk: I,
    /// Upper bound of the head envelope.
    pub max_num_heads: I,
    /// Number format of the packed cache.
    pub kv_cache_format: KvCacheFormat,
    /// Logical packed bytes per token; 0 = unspecified.
    pub bytes_per_token: I,
    /// Exact head counts; `None` = every count in `1..=max_num_heads`.
    pub head_counts: Option<BTreeSet<I>>,
    /// Whether every width from `min_topk` up is legal.
    pub topk_is_runtime: bool,
    /// Page sizes of the secondary cache; empty = unspecified (not "none").
    pub extra_page_block_sizes: BTreeSet<I>,
    /// Page sizes accepted beside the default; empty = only `page_block_size`.
    pub page_block_sizes: BTreeSet<I>,
    /// Whether every positive page size is accepted.
    pub page_block_size_is_runtime: bool,
}

impl<I: Ord + Clone + From<i64>> DecodeConfig<I> {
    /// The required fields in the documented order, the others at their documented defaults.
    ///
    /// ```
    /// use sparse_mla::SparseMlaSm120DecodeConfig;
    /// let config = SparseMlaSm120DecodeConfig {
    ///     topk_is_runtime: false,
    ///     ..SparseMlaSm120DecodeConfig::new(512, 64, 64, [128, 512], 1, 128)
    /// };
    /// assert!(config.supports_decode(64, 512, 1, None));
    /// assert!(!config.supports_decode(64, 384, 1, None));
    /// ```
    pub fn new(
        d_qk: I,
        page_block_size: I,
        max_num_tokens: I,
        topks: impl IntoIterator<Item = I>,
        min_topk: I,
        max_num_heads: I,
    ) -> Self {
        Self {
            d_qk,
            page_block_size,
            max_num_tokens,
            topks: topks.into_iter().collect(),
            min_topk,
            max_num_heads,
            kv_cache_format: KvCacheFormat::Fp8,
            bytes_per_token: I::from(0),
            head_counts: None,
            topk_is_runtime: true,
            extra_page_block_sizes: BTreeSet::new(),
            page_block_sizes: BTreeSet::new(),
            page_block_size_is_runtime: false,
        }
    }

    /// Whether a head count lies in the envelope.
    pub fn supports_num_heads(&self, num_heads: &I) -> bool {
        match &self.head_counts {
            Some(counts) => counts.contains(num_heads),
            None => *num_heads >= I::from(1) && *num_heads <= self.max_num_heads,
        }
    }

    /// Calibrated widths, sorted; empty when `num_heads` is given and lies outside the head envelope.
    pub fn supported_topk(&self, num_heads: Option<I>) -> Vec<I> {
        match num_heads {
            Some(heads) if !self.supports_num_heads(&heads) => Vec::new(),
            _ => self.topks.iter().cloned().collect(),
        }
    }

    /// Whether the decode form serves a shape; `page_block_size: None` means the config's own.
    ///
    /// There is no lower bound on `num_tokens`. Strides, secondary caches and reasons: [`crate::explain_decode`].
    pub fn supports_decode(&self, num_heads: I, topk: I, num_tokens: I, page_block_size: Option<I>) -> bool {
        num_tokens <= self.max_num_tokens
            && self.supports_page(page_block_size.as_ref().unwrap_or(&self.page_block_size))
            && self.supports_num_heads(&num_heads)
            && if self.topk_is_runtime { topk >= self.min_topk } else { self.topks.contains(&topk) }
    }

    fn supports_page(&self, page_block_size: &I) -> bool {
        if self.page_block_size_is_runtime {
            *page_block_size > I::from(0)
        } else if self.page_block_sizes.is_empty() {
            *page_block_size == self.page_block_size
        } else {
            self.page_block_sizes.contains(page_block_size)
        }
    }
}

impl SparseMlaSm120DecodeConfig {
    /// Head counts the decode form serves, ascending.
    pub fn supported_num_heads(&self) -> Vec<i64> {
        match &self.head_counts {
            Some(counts) => counts.iter().copied().collect(),
            None => (1..=self.max_num_heads).collect(),
        }
    }
}

impl<I: fmt::Display> fmt::Display for DecodeConfig<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = |values: &BTreeSet<I>| {
            let words: Vec<String> = values.iter().map(ToString::to_string).collect();
            format!("{{{}}}", words.join(", "))
        };
        write!(
            f,
            "SparseMlaSm120DecodeConfig(d_qk={}, page_block_size={}, max_num_tokens={}, topks={}, min_topk={}, \
             max_num_heads={}, kv_cache_format={}, bytes_per_token={}, head_counts={}, topk_is_runtime={}, \
             extra_page_block_sizes={}, page_block_sizes={}, page_block_size_is_runtime={})",
            self.d_qk,
            self.page_block_size,
            self.max_num_tokens,
            set(&self.topks),
            self.min_topk,
            self.max_num_heads,
            self.kv_cache_format,
            self.bytes_per_token,
            self.head_counts.as_ref().map_or("None".into(), set),
            self.topk_is_runtime,
            set(&self.extra_page_block_sizes),
            set(&self.page_block_sizes),
            self.page_block_size_is_runtime,
        )
    }
}
