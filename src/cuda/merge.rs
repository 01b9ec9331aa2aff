//! Joining two partial results over disjoint candidates.

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::args::{MergeStatesArgs, StateArgs};
use super::device::Device;
use super::launch::{Launch, OutType, Parameters};
use crate::support::explain_capability;
use crate::{Error, LseBase};

/// Threads of a block of `merge_states`, and values that one of them takes.
const THREADS: u32 = 256;
const VALUES: usize = 4;

/// A partial result in device memory: N = tokens times heads rows. Strides in elements.
#[derive(Debug, Clone, Copy)]
pub struct StateOnDevice {
    /// `[N, d_v]`.
    pub out: CUdeviceptr,
    /// From row to row and from value to value of `out`.
    pub out_strides: [i64; 2],
    /// float32 `[N]`; -inf = no candidates, and `out` is ignored, whatever it holds.
    pub lse: CUdeviceptr,
    /// From row to row of `lse`.
    pub lse_stride: i64,
}

/// Two partial results over disjoint candidates and where their join goes.
#[derive(Debug, Clone, Copy)]
pub struct MergeOnDevice {
    /// One side. At most one of the two may have counted a sink.
    pub a: StateOnDevice,
    /// The other.
    pub b: StateOnDevice,
    /// The join.
    pub merged: StateOnDevice,
    /// Rows of each.
    pub num_rows: usize,
    /// Values of a row.
    pub d_v: usize,
    /// Type of every `out`.
    pub out_type: OutType,
    /// Base of every `lse`.
    pub lse_base: LseBase,
}

impl Device {
    /// Enqueues on `stream` what [`crate::merge_states`] computes, in float32. Allocates nothing and waits for nothing once
    /// the module is loaded, which [`Device::warm_up`] of any family does.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device is too old; [`Error::Value`] if there are too many values for one launch; [`Error::Device`] if the driver refuses, or if the
    /// stream is being captured while the module is not loaded yet.
    ///
    /// # Safety
    /// Every pointer must be valid on this device for `num_rows` rows of `d_v` values under its strides, aligned to its
    /// elements, until the work is done; `merged` must overlap neither itself nor an input, nor be used by other work
    /// meanwhile; `stream` must belong to this device's primary context (null: its default stream).
    pub unsafe fn merge_states(&self, merge: &MergeOnDevice, stream: CUstream) -> Result<(), Error> {
        if merge.num_rows == 0 {
            return Ok(());
        }
        let (major, minor) = self.facts().compute_capability;
        if let Some(reason) = explain_capability((major.into(), minor.into())) {
            return Err(Error::unsupported(reason));
        }
        let mut launch = merge_launch(merge)?;
        let _context = self.enter()?;
        let function = self.function(launch.module, launch.entry, stream)?;
        // SAFETY: the parameters are those of this entry point; the caller vouches for the pointers in them.
        unsafe { launch.enqueue(function, stream) }
    }
}

/// What [`Device::merge_states`] enqueues for at least one row. Asks no driver.
///
/// # Errors
/// [`Error::Value`] if there are too many values for one launch.
pub fn merge_launch(merge: &MergeOnDevice) -> Result<Launch, Error> {
    let threads = merge.num_rows.saturating_mul(merge.d_v.div_ceil(VALUES).max(1));
    let threads = u32::try_from(threads).ok().filter(|_| merge.d_v <= i32::MAX as usize).ok_or_else(|| {
        let got = format!("{} rows of {} values", merge.num_rows, merge.d_v);
        Error::value("out_a", "small enough for one launch (2^34 values)", got)
    })?;
    Ok(Launch {
        module: "merge",
        entry: "merge_states",
        grid: [threads.div_ceil(THREADS), 1],
        threads: THREADS,
        shared_bytes: 0,
        after_previous: false,
        parameters: Parameters::States(arguments(merge)),
    })
}

fn arguments(merge: &MergeOnDevice) -> MergeStatesArgs {
    let states = [&merge.a, &merge.b, &merge.merged];
    MergeStatesArgs {
        a: state(&merge.a),
        b: state(&merge.b),
        merged: state(&merge.merged),
        num_rows: merge.num_rows as u32,
        d_v: merge.d_v as u32,
        out_type: merge.out_type as i32,
        lse_natural: i32::from(merge.lse_base == LseBase::E),
        aligned: i32::from(states.iter().all(|state| aligned(state, merge.out_type))),
        reserved: 0,
    }
}

fn state(state: &StateOnDevice) -> StateArgs {
    StateArgs {
        out: state.out,
        lse: state.lse,
        row_stride: state.out_strides[0],
        dim_stride: state.out_strides[1],
        lse_stride: state.lse_stride,
    }
}

/// Whether every group of four values is adjacent and starts at a multiple of its size.
fn aligned(state: &StateOnDevice, out_type: OutType) -> bool {
    let group = if out_type == OutType::F32 { 16 } else { 8 };
    let [row_stride, dim_stride] = state.out_strides;
    dim_stride == 1 && row_stride % 4 == 0 && state.out.is_multiple_of(group)
}
