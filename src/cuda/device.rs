//! Devices: their primary context and the modules loaded into it.

use std::ffi::{CString, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::{result, sys};

use super::caches::{RECORD_ENTRIES, WINNERS_ENTRIES, WINNERS_MODULE, record_module};
use super::conversions::{MOVE_ENTRIES, MOVE_MODULE, conversion_entries};
use super::driver::{describe, open, refused};
use crate::plan::{DeviceFacts, KERNELS, Kernel};
use crate::{Error, FamilySpec};

/// Most devices of a process.
const MAX_DEVICES: usize = 64;

/// The embedded PTX: name and text of every module.
pub static MODULES: &[(&str, &str)] = &[
    ("cache_dots3_swa", include_str!("../../kernels/ptx/cache_dots3_swa.ptx")),
    ("cache_dsv3_2", include_str!("../../kernels/ptx/cache_dsv3_2.ptx")),
    ("cache_dsv4", include_str!("../../kernels/ptx/cache_dsv4.ptx")),
    ("cache_dsv4_1", include_str!("../../kernels/ptx/cache_dsv4_1.ptx")),
    ("cache_dsv4_nvfp4", include_str!("../../kernels/ptx/cache_dsv4_nvfp4.ptx")),
    ("cache_fp4", include_str!("../../kernels/ptx/cache_fp4.ptx")),
    ("cache_glm", include_str!("../../kernels/ptx/cache_glm.ptx")),
    ("cache_glm_nvfp4", include_str!("../../kernels/ptx/cache_glm_nvfp4.ptx")),
    ("convert_dsv4", include_str!("../../kernels/ptx/convert_dsv4.ptx")),
    ("convert_dsv4_1", include_str!("../../kernels/ptx/convert_dsv4_1.ptx")),
    ("convert_glm", include_str!("../../kernels/ptx/convert_glm.ptx")),
    ("dots3_swa", include_str!("../../kernels/ptx/dots3_swa.ptx")),
    ("dsv3_2", include_str!("../../kernels/ptx/dsv3_2.ptx")),
    ("dsv4", include_str!("../../kernels/ptx/dsv4.ptx")),
    ("dsv4_1", include_str!("../../kernels/ptx/dsv4_1.ptx")),
    ("dsv4_1_fp4", include_str!("../../kernels/ptx/dsv4_1_fp4.ptx")),
    ("dsv4_1_inline", include_str!("../../kernels/ptx/dsv4_1_inline.ptx")),
    ("dsv4_1_inline_fp4", include_str!("../../kernels/ptx/dsv4_1_inline_fp4.ptx")),
    ("dsv4_nvfp4", include_str!("../../kernels/ptx/dsv4_nvfp4.ptx")),
    ("glm53_nope", include_str!("../../kernels/ptx/glm53_nope.ptx")),
    ("glm_nsa_nvfp4", include_str!("../../kernels/ptx/glm_nsa_nvfp4.ptx")),
    ("move", include_str!("../../kernels/ptx/move.ptx")),
    ("winners", include_str!("../../kernels/ptx/winners.ptx")),
    ("merge", include_str!("../../kernels/ptx/merge.ptx")),
];

/// Entry points of the module that joins splits and partial results.
pub(super) const MERGE_ENTRIES: [&str; 3] = ["merge_few", "merge_many", "merge_states"];

static DEVICES: [OnceLock<Device>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
/// Held while a device or module is opened, never across a launch.
static OPENING: Mutex<()> = Mutex::new(());

/// Entry points of a loaded module, by name.
type Functions = Vec<(&'static str, Handle<sys::CUfunc_st>)>;

/// An opened device. Lives as long as the process, as its modules do.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    facts: DeviceFacts,
    context: Handle<sys::CUctx_st>,
    functions: [OnceLock<Functions>; MODULES.len()],
}

/// A driver handle, which every thread may use.
#[derive(Debug)]
pub(super) struct Handle<T>(pub *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: driver handles are process-wide names; the driver serialises what needs it.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// Opens a device by its ordinal. The primary context is retained, shared with every other library that uses it.
pub fn device(ordinal: usize) -> Result<&'static Device, Error> {
    let slot = DEVICES.get(ordinal).ok_or_else(|| Error::value("device", format!("below {MAX_DEVICES}"), ordinal))?;
    if let Some(device) = slot.get() {
        return Ok(device);
    }
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = slot.get() {
        return Ok(device);
    }
    open()?;
    let count = result::device::get_count().map_err(refused("cuDeviceGetCount"))?;
    if ordinal >= count as usize {
        return Err(Error::Device(format!("`device` must be one of the driver's {count} devices, got {ordinal}")));
    }
    let described = describe(ordinal as i32)?;
    let handle = result::device::get(ordinal as i32).map_err(refused("cuDeviceGet"))?;
    // SAFETY: `handle` was handed out by the driver just now; the context is never released.
    let context = unsafe { result::primary_ctx::retain(handle) }.map_err(refused("cuDevicePrimaryCtxRetain"))?;
    let facts = DeviceFacts {
        multiprocessors: described.multiprocessors.max(1) as usize,
        shared_memory_per_block: described.shared_memory_per_block.max(0) as usize,
        compute_capability: described.compute_capability,
    };
    let functions = [const { OnceLock::new() }; MODULES.len()];
    Ok(slot.get_or_init(|| Device { ordinal, facts, context: Handle(context), functions }))
}

impl Device {
    /// The ordinal.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// What plans depend on.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The primary context.
    pub(super) fn context(&self) -> sys::CUcontext {
        self.context.0
    }

    /// Loads everything that a family's decodes, cache writers and readers, exact conversions and merges need, so that later
    /// calls load nothing. Not on a capturing thread.
    pub fn warm_up(&self, spec: &FamilySpec) -> Result<(), Error> {
        let _context = self.enter()?;
        let secondary = spec.secondary.iter().map(|format| FamilySpec::find(spec.family, *format));
        for spec in std::iter::once(Ok(spec)).chain(secondary) {
            let spec = spec?;
            let module = spec.module;
            for kernel in KERNELS.iter().filter(|kernel| kernel.module == module) {
                self.function(module, kernel.entry, std::ptr::null_mut())?;
            }
            self.warm_up_caches(spec)?;
        }
        self.warm_up_kernel(("merge", MERGE_ENTRIES[0]))
    }

    /// Loads what writers, readers and exact conversions of one format need.
    pub(super) fn warm_up_caches(&self, spec: &FamilySpec) -> Result<(), Error> {
        let record = (record_module(spec)?, RECORD_ENTRIES[0]);
        for kernel in [record, (WINNERS_MODULE, WINNERS_ENTRIES[0]), (MOVE_MODULE, MOVE_ENTRIES[0])] {
            self.warm_up_kernel(kernel)?;
        }
        Ok(())
    }

    /// Loads the module of an entry point.
    pub(super) fn warm_up_kernel(&self, (module, entry): (&str, &str)) -> Result<(), Error> {
        let _context = self.enter()?;
        self.function(module, entry, std::ptr::null_mut()).map(drop)
    }

    /// Makes the device's context current; the guard restores the one that was.
    pub(super) fn enter(&self) -> Result<ContextGuard, Error> {
        let previous = result::ctx::get_current().map_err(refused("cuCtxGetCurrent"))?;
        let previous = previous.unwrap_or(std::ptr::null_mut());
        if previous == self.context.0 {
            return Ok(ContextGuard { restore: None });
        }
        // SAFETY: the context is retained for the process's life.
        unsafe { result::ctx::set_current(self.context.0) }.map_err(refused("cuCtxSetCurrent"))?;
        Ok(ContextGuard { restore: Some(previous) })
    }

    /// Work enqueued on `stream` from now on comes after what `producer` holds now.
    ///
    /// # Safety
    /// Both must be live streams of this device's primary context (null: its default stream).
    pub unsafe fn wait_for(&self, stream: sys::CUstream, producer: sys::CUstream) -> Result<(), Error> {
        let _context = self.enter()?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` is a valid place; the streams are the caller's.
        unsafe {
            sys::cuEventCreate(&mut event, flags).result().map_err(refused("cuEventCreate"))?;
            let recorded = sys::cuEventRecord(event, producer).result().map_err(refused("cuEventRecord"));
            let waits = recorded
                .and_then(|()| sys::cuStreamWaitEvent(stream, event, 0).result().map_err(refused("cuStreamWaitEvent")));
            // The driver keeps the event until its work is done.
            sys::cuEventDestroy_v2(event).result().map_err(refused("cuEventDestroy"))?;
            waits
        }
    }

    /// Whether work given to `stream` is being captured.
    ///
    /// # Safety
    /// `stream` must be a live stream of this device's primary context (null: its default stream).
    pub unsafe fn is_capturing(&self, stream: sys::CUstream) -> Result<bool, Error> {
        let _context = self.enter()?;
        is_capturing(stream)
    }

    /// An entry point, whose module is loaded at first use. Refused on a capturing stream while the module is cold.
    pub(super) fn function(&self, module: &str, entry: &str, stream: sys::CUstream) -> Result<sys::CUfunction, Error> {
        let missing = || Error::Device(format!("module {module} has no entry point {entry}"));
        let index = MODULES.iter().position(|(name, _)| *name == module).ok_or_else(missing)?;
        let functions = match self.functions[index].get() {
            Some(functions) => functions,
            None => {
                refuse_while_capturing(stream)?;
                let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
                if self.functions[index].get().is_none() {
                    let loaded = load(MODULES[index])?;
                    let _ = self.functions[index].set(loaded);
                }
                self.functions[index].get().ok_or_else(missing)?
            }
        };
        functions.iter().find(|(name, _)| *name == entry).map(|(_, function)| function.0).ok_or_else(missing)
    }
}

/// Restores the thread's context.
pub(super) struct ContextGuard {
    restore: Option<sys::CUcontext>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(previous) = self.restore {
            // SAFETY: the context was current on this thread when the guard was made.
            let _ = unsafe { result::ctx::set_current(previous) };
        }
    }
}

/// Whether work given to a stream of the current context is being captured.
pub(super) fn is_capturing(stream: sys::CUstream) -> Result<bool, Error> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: `status` is a valid place; the stream is the caller's.
    unsafe { sys::cuStreamIsCapturing(stream, &mut status) }.result().map_err(refused("cuStreamIsCapturing"))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// A kernel is not loaded for a stream whose work is being captured.
fn refuse_while_capturing(stream: sys::CUstream) -> Result<(), Error> {
    if !is_capturing(stream)? {
        return Ok(());
    }
    let first = "call warmup() for this family (which loads no lossy conversion: convert once) before the capture";
    Err(Error::Device(format!("the stream is being captured, but the kernel is not loaded yet: {first}")))
}

/// Loads a module into the current context. Another thread's capture is left alone.
fn load((name, ptx): (&'static str, &str)) -> Result<Functions, Error> {
    let image = CString::new(ptx).map_err(|_| Error::Device(format!("module {name} holds a NUL byte")))?;
    let _relaxed = RelaxedCapture::enter()?;
    let mut module = std::ptr::null_mut();
    // SAFETY: `image` is NUL-terminated PTX and outlives the call; no options are passed.
    unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast::<c_void>(),
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    }
    .result()
    .map_err(refused("cuModuleLoadDataEx"))?;
    let decode: Vec<&Kernel> = KERNELS.iter().filter(|kernel| kernel.module == name).collect();
    let others: &[&'static str] = match name {
        "merge" => &MERGE_ENTRIES,
        WINNERS_MODULE => &WINNERS_ENTRIES,
        MOVE_MODULE => &MOVE_ENTRIES,
        _ if decode.is_empty() && conversion_entries(name).next().is_none() => &RECORD_ENTRIES,
        _ => &[],
    };
    let others = others.iter().copied().chain(conversion_entries(name));
    let mut functions = Vec::new();
    for entry in decode.iter().map(|kernel| kernel.entry).chain(others) {
        let symbol = CString::new(entry).map_err(|_| Error::Device(format!("entry point {entry} holds a NUL byte")))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: `module` was loaded just now; `symbol` is NUL-terminated.
        unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) }
            .result()
            .map_err(refused("cuModuleGetFunction"))?;
        functions.push((entry, Handle(function)));
    }
    for kernel in decode {
        let Some((_, function)) = functions.iter().find(|(entry, _)| *entry == kernel.entry) else { continue };
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: `function` belongs to the module that was loaded just now.
        // A device without the room refuses here; its plan never chooses this kernel.
        let _ = unsafe { sys::cuFuncSetAttribute(function.0, attribute, kernel.shared_bytes as i32) };
    }
    Ok(functions)
}

/// Lets this thread load and allocate while another thread captures in global mode.
pub(super) struct RelaxedCapture {
    previous: sys::CUstreamCaptureMode,
}

impl RelaxedCapture {
    pub fn enter() -> Result<Self, Error> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is a valid place.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }
            .result()
            .map_err(refused("cuThreadExchangeStreamCaptureMode"))?;
        Ok(Self { previous: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: `previous` is a valid place that holds the mode this thread had.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.previous) };
    }
}
