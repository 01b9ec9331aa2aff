//! The GPU backend: embedded PTX launched through the CUDA driver. Nothing is opened before the first use.
//!
//! [`probe`] says what is there, [`device`] opens a device, [`Device::decode`], [`Device::merge_states`],
//! [`Device::write_kv_cache`], [`Device::read_kv_cache`] and [`Device::convert_kv_cache`] launch device pointers, [`PreparedDecode`], [`PreparedCache`] and [`PreparedConversion`] safely over cudarc's slices;
//! [`crate::plan`] decides how.
#![allow(unsafe_code)]

mod args;
mod cache_args;
mod cache_slices;
mod caches;
mod conversions;
mod device;
mod driver;
mod launch;
#[cfg(feature = "python")]
mod memory;
mod merge;
mod slice_checks;
mod slices;
mod workspace;

pub use cache_slices::{AppendSlices, PreparedCache, PreparedConversion, RotationSlices, RowNumberSlice};
pub use caches::{
    ReadOnDevice, RotationOnDevice, RowNumbers, WriteOnDevice, read_launch, record_module, write_launches,
};
pub use conversions::{ConvertOnDevice, conversion_kernel, convert_launch};
pub use device::{Device, MODULES, device};
pub use driver::{DeviceDescription, Driver, DriverVersion, probe};
pub use launch::{CacheOnDevice, CandidatesOnDevice, DecodeOnDevice, Launch, Launches, OutType, decode_launches};
#[cfg(feature = "python")]
pub(crate) use memory::DeviceMemory;
pub use merge::{MergeOnDevice, StateOnDevice, merge_launch};
pub use slices::{CandidateSlices, DecodeSlices, OutElement, PreparedDecode, QueryElement};
pub use workspace::Workspace;

/// The driver API whose slices, streams and handles stand in these signatures.
pub use cudarc;

pub use cudarc::driver::sys::{CUdeviceptr, CUstream};

/// The handles `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` of the default streams.
#[cfg(feature = "python")]
pub(crate) const LEGACY_STREAM: CUstream = 1 as CUstream;
#[cfg(feature = "python")]
pub(crate) const PER_THREAD_STREAM: CUstream = 2 as CUstream;
