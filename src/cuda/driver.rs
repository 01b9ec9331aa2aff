//! What the CUDA driver says of itself and its devices.

use std::fmt;

use cudarc::driver::{result, sys};

use crate::Error;

/// The oldest driver that takes the embedded PTX (ISA 8.6).
const MIN_VERSION: DriverVersion = DriverVersion(12_070);

/// A CUDA driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// The CUDA version the driver implements.
    pub version: DriverVersion,
    /// Devices in the driver's order.
    pub devices: Vec<DeviceDescription>,
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
pub struct DeviceDescription {
    /// Product name.
    pub name: String,
    /// (major, minor).
    pub compute_capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: i32,
    /// Shared memory that a block may opt in to, in bytes.
    pub shared_memory_per_block: i32,
}

/// Opens the driver and lists its devices. Creates no context.
pub fn probe() -> Result<Driver, Error> {
    let version = open()?;
    let count = result::device::get_count().map_err(refused("cuDeviceGetCount"))?;
    let devices = (0..count).map(describe).collect::<Result<_, _>>()?;
    Ok(Driver { version, devices })
}

/// Opens the driver, checks its version and returns it.
pub(super) fn open() -> Result<DriverVersion, Error> {
    // SAFETY: the call only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        let needed = "a CUDA GPU needs NVIDIA's driver for CUDA";
        return Err(Error::Device(format!(
            "no CUDA driver was found (libcuda.so.1 and libcuda.so are not on the library path); {needed} {MIN_VERSION} \
             or newer"
        )));
    }
    require_symbols(FIRST_SYMBOLS)?;
    result::init().map_err(refused("cuInit"))?;
    let mut version = 0;
    // SAFETY: `version` is a valid place for one int.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(refused("cuDriverGetVersion"))?;
    let version = DriverVersion(version);
    if version < MIN_VERSION {
        let text = format!("the CUDA driver must support CUDA {MIN_VERSION} or newer, found one for CUDA {version}");
        return Err(Error::Device(text));
    }
    require_symbols(SYMBOLS)?;
    Ok(version)
}

/// What is called before the version is known: any driver has it.
const FIRST_SYMBOLS: &[&str] = &["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];
/// Everything else that is called. cudarc panics when it calls what a library lacks; here it is an error.
const SYMBOLS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

fn require_symbols(symbols: &[&str]) -> Result<(), Error> {
    for symbol in symbols {
        // SAFETY: the library is present; the symbol is looked up, not called.
        if unsafe { sys::culib().get::<*const ()>(symbol.as_bytes()) }.is_err() {
            let found = "the library found as libcuda is not NVIDIA's driver, or a damaged one";
            return Err(Error::Device(format!("{found}: it has no {symbol}")));
        }
    }
    Ok(())
}

/// Describes one device.
pub(super) fn describe(ordinal: i32) -> Result<DeviceDescription, Error> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal).map_err(refused("cuDeviceGet"))?;
    // SAFETY: `device` was handed out by the driver just now.
    let attribute =
        |which| unsafe { result::device::get_attribute(device, which) }.map_err(refused("cuDeviceGetAttribute"));
    Ok(DeviceDescription {
        name: result::device::get_name(device).map_err(refused("cuDeviceGetName"))?,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_memory_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}

/// The driver's refusal of a call, as an error.
pub(super) fn refused(call: &'static str) -> impl Fn(result::DriverError) -> Error {
    move |error| Error::Device(format!("the CUDA driver refused {call}: {error}"))
}
