//! Workspaces: device memory for the partial results of splits.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::device::{Device, RelaxedCapture};
use super::driver::refused;
use crate::Error;

/// Device memory that a launch may write: the caller's, or ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workspace {
    /// First byte; 16-byte aligned.
    pub pointer: sys::CUdeviceptr,
    /// Length.
    pub bytes: usize,
}

/// Ours, by device and stream: launches of one stream follow one another and may share.
static OWN: Mutex<FxHashMap<(usize, usize), Workspace>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

impl Workspace {
    /// No memory.
    pub const EMPTY: Self = Self { pointer: 0, bytes: 0 };

    /// Our workspace of a stream, at least `bytes` long. Grows by doubling; what it outgrew stays, since captured graphs
    /// may write there. Graphs that were captured on one stream share it: replay them one after another.
    pub fn of_stream(device: &Device, stream: sys::CUstream, bytes: usize) -> Result<Self, Error> {
        if bytes == 0 {
            return Ok(Self::EMPTY);
        }
        let key = (device.ordinal(), stream as usize);
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        let present = own.get(&key).copied().unwrap_or(Self::EMPTY);
        if present.bytes >= bytes {
            return Ok(present);
        }
        let _context = device.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let bytes = bytes.next_power_of_two().max(1 << 20);
        let mut pointer = 0;
        // SAFETY: `pointer` is a valid place; the memory is never freed.
        unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes) }.result().map_err(refused("cuMemAlloc"))?;
        let grown = Self { pointer, bytes };
        own.insert(key, grown);
        Ok(grown)
    }
}
