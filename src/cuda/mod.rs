//! What the CUDA driver says of itself and its devices. Nothing is opened before [`probe`] is called.
#![allow(unsafe_code)]

use std::fmt;

use cudarc::driver::{result, sys};

/// A CUDA driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// The CUDA version the driver implements.
    pub version: DriverVersion,
    /// Devices in the driver's order.
    pub devices: Vec<Device>,
}

/// A CUDA version as the driver encodes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(pub i32);

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// One CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Product name.
    pub name: String,
    /// (major, minor).
    pub compute_capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: i32,
}

/// Why no driver or device can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The library is not there.
    #[error("no CUDA driver was found (libcuda.so.1 is not on the library path); a CUDA GPU needs NVIDIA's driver")]
    NoDriver,
    /// The driver answered a call with an error.
    #[error("the CUDA driver refused {call}: {error}")]
    Refused {
        /// The call.
        call: &'static str,
        /// The driver's name for the error.
        error: String,
    },
}

/// Opens the driver and lists its devices. Creates no context.
pub fn probe() -> Result<Driver, DriverError> {
    // SAFETY: the call only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::NoDriver);
    }
    let refused = |call| move |error: result::DriverError| DriverError::Refused { call, error: error.to_string() };
    result::init().map_err(refused("cuInit"))?;
    let mut version = 0;
    // SAFETY: `version` is a valid place for one int.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(refused("cuDriverGetVersion"))?;
    let count = result::device::get_count().map_err(refused("cuDeviceGetCount"))?;
    let devices =
        (0..count).map(|ordinal| device(ordinal).map_err(refused("cuDeviceGet"))).collect::<Result<_, _>>()?;
    Ok(Driver { version: DriverVersion(version), devices })
}

fn device(ordinal: i32) -> Result<Device, result::DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal)?;
    // SAFETY: `device` was handed out by the driver just now.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    Ok(Device {
        name: result::device::get_name(device)?,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}
