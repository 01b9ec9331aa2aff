//! The GPU backend: embedded PTX launched through the CUDA driver. Nothing is opened before the first use.
//!
//! [`probe`] says what is there, [`device`] opens a device, [`Device::decode`] launches; [`crate::plan`] decides how.
#![allow(unsafe_code)]

mod args;
mod device;
mod driver;
mod launch;
mod workspace;

pub use device::{Device, MODULES, device};
pub use driver::{DeviceDescription, Driver, DriverVersion, probe};
pub use launch::{CacheOnDevice, CandidatesOnDevice, DecodeOnDevice, Launch, OutType, decode_launches};
pub use workspace::Workspace;

pub use cudarc::driver::sys::{CUdeviceptr, CUstream};
