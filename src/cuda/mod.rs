//! The GPU backend: embedded PTX launched through the CUDA driver. Nothing is opened before the first use.
//!
//! [`probe`] says what is there, [`device`] opens a device, [`Device::decode`], [`Device::merge_states`],
//! [`Device::write_kv_cache`] and [`Device::read_kv_cache`] launch device pointers, [`PreparedDecode`] safely over cudarc's slices;
//! [`crate::plan`] decides how.
#![allow(unsafe_code)]

mod args;
mod cache_args;
mod caches;
mod device;
mod driver;
mod launch;
#[cfg(feature = "python")]
mod memory;
mod merge;
mod slices;
mod workspace;

pub use caches::{
    MoveOnDevice, ReadOnDevice, RotationOnDevice, RowNumbers, WriteOnDevice, move_launch, read_launch, record_module,
    write_launches,
};
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
