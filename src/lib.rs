//! Sparse-MLA decode for DeepSeek-V3.2/V4, GLM-5.x and dots models.
//!
//! * What is supported, and why not: [`SparseMlaSm120DecodeConfig`], [`supported_sparse_mla_sm120_configs`],
//!   [`explain_decode`].
//! * Packed KV caches: [`pack_kv_cache`], [`append_kv_cache`], [`unpack_kv_cache`] over [`CacheView`];
//!   [`convert_kv_cache`] and [`repage_kv_cache`] between formats, page sizes and strides.
//! * Attention on the CPU, exact to float32: [`decode`], [`merge_states`]; its float64 yardstick is [`mod@reference`].
//! * Attention on CUDA devices: [`plan`] decides how, for [`known_devices`] without one, `cuda` (feature `cuda`) launches embedded PTX.
#![deny(missing_docs, unsafe_code)]

mod attention;
mod cache;
mod codec;
mod config;
mod convert;
#[cfg(feature = "cuda")]
pub mod cuda;
mod element;
mod error;
mod family;
pub mod known_devices;
mod layout;
mod merge;
pub mod plan;
#[cfg(feature = "python")]
mod python;
pub mod reference;
mod rope;
mod support;
mod threads;

pub use attention::{DecodeInputs, DecodeOutputs, ExtraCandidates, LseBase, decode};
pub use cache::{
    PackedCache, append_kv_cache, append_kv_cache_with_rope, pack_kv_cache, pack_kv_cache_into, unpack_kv_cache,
};
pub use config::{DecodeConfig, SparseMlaSm120DecodeConfig};
pub use convert::{Conversion, convert_kv_cache, repage_kv_cache};
pub use element::Element;
pub use error::Error;
pub use family::{
    DEFAULT_PAGE_BLOCK_SIZE, FAMILY_TABLE, Family, FamilySpec, KvCacheFormat, MAX_DECODE_TOKENS, MAX_NUM_HEADS,
    Placement, RowFormat, ScaleRule, supported_sparse_mla_sm120_configs,
};
pub use layout::{CacheView, CacheViewMut, Geometry, PageLayout, geometry_of_shape};
pub use merge::{PartialState, merge_states};
pub use rope::{RopePairs, Rotation};
pub use support::{ComputePrecision, DecodeRequest, DecodeSupport, explain_decode};
pub use threads::{NUM_THREADS_VARIABLE, num_threads};

/// A hash of the sources this build was made from; ranks of a job can compare theirs.
pub const BUILD_ID: &str = env!("SPARSE_MLA_BUILD_ID");

/// Items of the crates in this crate's signatures.
pub use {half, ndarray};
