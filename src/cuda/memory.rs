//! Device memory of our own, for results whose library cannot make them.

use cudarc::driver::sys;

use super::device::{Device, Handle, RelaxedCapture, is_capturing};
use super::driver::refused;
use crate::Error;

/// Device memory. Freed when dropped, after everything that the device was given before.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: &'static Device,
    pointer: sys::CUdeviceptr,
    /// Recorded after the last write.
    written: Handle<sys::CUevent_st>,
}

impl DeviceMemory {
    /// At least `bytes` bytes that nobody has written. Waits for nothing, but is no work of a stream: not for captures.
    pub fn new(device: &'static Device, bytes: usize) -> Result<Self, Error> {
        let _context = device.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let mut written = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `written` is a valid place.
        unsafe { sys::cuEventCreate(&mut written, flags) }.result().map_err(refused("cuEventCreate"))?;
        let mut memory = Self { device, pointer: 0, written: Handle(written) };
        // SAFETY: `pointer` is a valid place; an allocation of no bytes is refused, hence one at least.
        unsafe { sys::cuMemAlloc_v2(&mut memory.pointer, bytes.max(1)) }.result().map_err(refused("cuMemAlloc"))?;
        Ok(memory)
    }

    /// The device.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// First byte.
    pub fn pointer(&self) -> sys::CUdeviceptr {
        self.pointer
    }

    /// What `stream` was given so far writes the memory. Captured work is left out: its replays are the caller's to order.
    ///
    /// # Safety
    /// `stream` must be a live stream of the device's primary context (null: its default stream).
    pub unsafe fn mark_written(&self, stream: sys::CUstream) -> Result<(), Error> {
        let _context = self.device.enter()?;
        if is_capturing(stream)? {
            return Ok(());
        }
        // SAFETY: the event is ours; the stream is the caller's.
        unsafe { sys::cuEventRecord(self.written.0, stream) }.result().map_err(refused("cuEventRecord"))
    }

    /// Work enqueued on `stream` from now on comes after the last write that was marked.
    ///
    /// # Safety
    /// As in [`Self::mark_written`].
    pub unsafe fn make_ready(&self, stream: sys::CUstream) -> Result<(), Error> {
        let _context = self.device.enter()?;
        // SAFETY: the event is ours; the stream is the caller's.
        unsafe { sys::cuStreamWaitEvent(stream, self.written.0, 0) }.result().map_err(refused("cuStreamWaitEvent"))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // At the end of a process the driver may be gone already, and the memory with it.
        let (Ok(_context), Ok(_relaxed)) = (self.device.enter(), RelaxedCapture::enter()) else { return };
        // SAFETY: both are ours and used no more; cuMemFree waits for the work that may still touch the memory.
        unsafe {
            let _ = sys::cuMemFree_v2(self.pointer);
            let _ = sys::cuEventDestroy_v2(self.written.0);
        }
    }
}
