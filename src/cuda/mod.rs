//! The GPU backend: embedded PTX launched through the CUDA driver. Nothing is opened before the first use.
//!
//! [`probe`] says what is there, [`device`] opens a device, [`Device::decode`] and [`Device::merge_states`]
//! launch; [`crate::plan`] decides how.
#![allow(unsafe_code)]

mod args;
mod device;
mod driver;
mod launch;
mod merge;
mod workspace;

pub use device::{Device, device};
pub use driver::{DeviceDescription, Driver, DriverVersion, probe};
pub use launch::{CacheOnDevice, CandidatesOnDevice, DecodeOnDevice, OutType};
pub use merge::{MergeOnDevice, StateOnDevice};
pub use workspace::Workspace;

pub use cudarc::driver::sys::{CUdeviceptr, CUstream};
