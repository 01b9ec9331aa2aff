//! Packed caches on a device: the launches that write and read them.

use std::ops::RangeInclusive;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::cache_args::{CacheArgs, ReadArgs, WriteArgs, gaps};
use super::device::Device;
use super::launch::{CacheOnDevice, Launch, OutType, Parameters, enqueue_each};
use super::workspace::Workspace;
use crate::support::explain_capability;
use crate::{Error, FamilySpec, RopePairs, ScaleRule};

/// Warps of a block that reads, moves or converts, one slot each: READ_SLOTS and MOVE_SLOTS of the kernels.
pub(super) const SLOTS_PER_BLOCK: usize = 8;
/// Most warps of a block that writes, one row each: WRITE_ROWS of the kernels.
const MOST_ROWS_PER_BLOCK: usize = 16;
/// About as many blocks as a large GPU has multiprocessors. Few rows are spread over them: one alone on a multiprocessor is there
/// soonest. As many find winners, each of which reads the slots below its own rows.
const BLOCKS: usize = 128;
/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Most rows of which a warp compares its slot with those of all lower ones: one launch, but quadratic.
const MAX_SEARCHED_ROWS: usize = 1024;
/// Threads of a block that finds winners: THREADS of the kernel.
const WINNER_THREADS: usize = 512;
/// Fewest and most rows of such a block: SEGMENT of the kernel.
const SEGMENT: RangeInclusive<usize> = 64..=1024;
/// Most rows or slots of a launch.
pub(super) const MAX_ROWS: usize = i32::MAX as usize;

/// The modules, by the record that they write and read.
const RECORD_MODULES: &[(ScaleRule, usize, &str)] = &[
    (ScaleRule::Ue8m0, 448, "cache_dsv4"),
    (ScaleRule::Pow2Fp32, 512, "cache_dsv3_2"),
    (ScaleRule::ArbitraryFp32, 512, "cache_glm"),
    (ScaleRule::Ue8m0, 1024, "cache_dots3_swa"),
    (ScaleRule::Ue8m0, 512, "cache_dsv4_1"),
    (ScaleRule::E4m3Nvfp4 { global: false }, 448, "cache_dsv4_nvfp4"),
    (ScaleRule::E4m3Nvfp4 { global: true }, 512, "cache_glm_nvfp4"),
    (ScaleRule::E4m3Floored, 512, "cache_fp4"),
];

/// Entry points of such a module, and of the module for many rows.
pub(super) const RECORD_ENTRIES: [&str; 2] = ["write", "read"];
pub(super) const WINNERS_MODULE: &str = "winners";
pub(super) const WINNERS_ENTRIES: [&str; 1] = ["find_winners"];

/// The module that writes and reads the records of a line of the family table.
pub fn record_module(spec: &FamilySpec) -> Result<&'static str, Error> {
    let key = (spec.row.scale, spec.row.quantised_dims);
    let found = RECORD_MODULES.iter().find(|(scale, dims, _)| (*scale, *dims) == key);
    found.map(|(_, _, module)| *module).ok_or_else(|| {
        let got = format!("'{}' of family {}", spec.format, spec.family);
        Error::value("kv_cache_format", "a format that GPU kernels write", got)
    })
}

/// int32 or int64 numbers in device memory, one per row.
#[derive(Debug, Clone, Copy)]
pub struct RowNumbers {
    /// The first.
    pub pointer: CUdeviceptr,
    /// int64 instead of int32.
    pub wide: bool,
}

/// The rotation of every row, as [`crate::Rotation`].
#[derive(Debug, Clone, Copy)]
pub struct RotationOnDevice {
    /// float32 `[max_position, rope_dims]`, contiguous, 16-byte aligned.
    pub cos_sin: CUdeviceptr,
    /// Rows of the table.
    pub max_position: usize,
    /// A position per row.
    pub positions: RowNumbers,
    /// The pairs.
    pub pairs: RopePairs,
}

/// Latent rows and where they go.
#[derive(Debug, Clone, Copy)]
pub struct WriteOnDevice {
    /// Line of the family table.
    pub spec: &'static FamilySpec,
    /// The cache.
    pub cache: CacheOnDevice,
    /// `[num_rows, d_qk]`, contiguous, 16-byte aligned.
    pub latent: CUdeviceptr,
    /// Type of `latent`.
    pub latent_type: OutType,
    /// Rows of `latent`.
    pub num_rows: usize,
    /// A slot per row, as [`crate::append_kv_cache`] takes them. None: as [`crate::pack_kv_cache`], row r goes to slot r, and
    /// all other bytes of the cache's `pages * page_stride` become zero.
    pub slots: Option<RowNumbers>,
    /// The rotation of the RoPE lanes.
    pub rotation: Option<RotationOnDevice>,
    /// Divides every value of a format that has one; 1 elsewhere.
    pub kv_global_scale: f32,
}

/// A cache and where its values go.
#[derive(Debug, Clone, Copy)]
pub struct ReadOnDevice {
    /// Line of the family table.
    pub spec: &'static FamilySpec,
    /// The cache.
    pub cache: CacheOnDevice,
    /// float32 `[num_slots, d_qk]`, contiguous, 16-byte aligned.
    pub out: CUdeviceptr,
    /// Multiplies every value of a format that has one; 1 elsewhere.
    pub kv_global_scale: f32,
}

impl WriteOnDevice {
    /// Bytes of workspace: none up to 1,024 rows.
    pub fn workspace_bytes(&self) -> usize {
        self.slots.map_or(0, |_| Self::append_workspace_bytes(self.num_rows))
    }

    /// The same of an append of so many rows.
    pub fn append_workspace_bytes(num_rows: usize) -> usize {
        if num_rows > MAX_SEARCHED_ROWS { size_of::<u32>() * num_rows.div_ceil(u32::BITS as usize) } else { 0 }
    }
}

impl Device {
    /// Enqueues on `stream` what [`crate::append_kv_cache_with_rope`] or [`crate::pack_kv_cache`] does, with the same bytes.
    /// Allocates nothing and waits for nothing once the modules are loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device is too old; [`Error::Value`] if the workspace is too small or there are too many
    /// rows for one launch; [`Error::Device`] if the driver refuses, or if the stream is being captured while a module is
    /// not loaded yet.
    ///
    /// # Safety
    /// Every pointer must be valid on this device for what its field says, until the work is done; cache and workspace
    /// must overlap neither each other nor an input, nor be used by other work meanwhile; `stream` must belong to
    /// this device's primary context (null: its default stream).
    pub unsafe fn write_kv_cache(
        &self,
        write: &WriteOnDevice,
        workspace: Workspace,
        stream: CUstream,
    ) -> Result<(), Error> {
        let launches = write_launches(write, workspace)?;
        // SAFETY: the caller vouches for the pointers in the launches.
        unsafe { self.enqueue_all(launches, stream) }
    }

    /// Enqueues on `stream` what [`crate::unpack_kv_cache`] computes. Allocates nothing and waits for nothing once the module
    /// is loaded.
    ///
    /// # Errors
    /// As [`Device::write_kv_cache`].
    ///
    /// # Safety
    /// As [`Device::write_kv_cache`], of `out`.
    pub unsafe fn read_kv_cache(&self, read: &ReadOnDevice, stream: CUstream) -> Result<(), Error> {
        let launches = [read_launch(read)?];
        // SAFETY: the caller vouches for the pointers in the launch.
        unsafe { self.enqueue_all(launches, stream) }
    }

    /// # Safety
    /// The pointers in the launches must be valid for what their kernels do.
    pub(super) unsafe fn enqueue_all<const N: usize>(
        &self,
        mut launches: [Option<Launch>; N],
        stream: CUstream,
    ) -> Result<(), Error> {
        if launches.iter().flatten().next().is_none() {
            return Ok(());
        }
        let (major, minor) = self.facts().compute_capability;
        if let Some(reason) = explain_capability((major.into(), minor.into())) {
            return Err(Error::unsupported(reason));
        }
        let _context = self.enter()?;
        // Every module is loaded before anything is enqueued.
        let functions = self.functions(&launches, stream)?;
        // SAFETY: the caller vouches for the pointers in the parameters.
        unsafe { enqueue_each(functions, &mut launches, stream) }
    }
}

/// What [`Device::write_kv_cache`] enqueues, in this order: for more than 1,024 rows the kernel that finds who wins a
/// slot; then the writer, which may start while that still runs. Asks no driver.
///
/// # Errors
/// [`Error::Value`] if the workspace is too small or there are too many rows.
pub fn write_launches(write: &WriteOnDevice, workspace: Workspace) -> Result<[Option<Launch>; 2], Error> {
    let module = record_module(write.spec)?;
    let layout = &write.cache.layout;
    let row = layout.row();
    let num_slots = write.cache.num_slots();
    let warps = if write.slots.is_some() { write.num_rows } else { num_slots };
    if warps.max(write.num_rows) > MAX_ROWS {
        return Err(Error::value("latent", format!("at most {MAX_ROWS} rows and slots for one launch"), warps));
    }
    let needed = write.workspace_bytes();
    if workspace.bytes < needed {
        return Err(Error::value("workspace", format!("at least {needed} bytes"), workspace.bytes));
    }
    if warps == 0 {
        return Ok([None, None]);
    }
    if needed > 0 && num_slots >= u32::MAX as usize {
        return Err(Error::value("cache", format!("of fewer than {} slots for so many rows", u32::MAX), num_slots));
    }
    let segment = write.num_rows.div_ceil(BLOCKS).next_multiple_of(WARP).clamp(*SEGMENT.start(), *SEGMENT.end());
    let (row_gap, page_gap_at) = gaps(layout);
    let args = WriteArgs {
        to: CacheArgs::of(&write.cache),
        latent: write.latent,
        slots: write.slots.map_or(0, |slots| slots.pointer),
        winners: if needed > 0 { workspace.pointer } else { 0 },
        cos_sin: write.rotation.map_or(0, |rotation| rotation.cos_sin),
        positions: write.rotation.map_or(0, |rotation| rotation.positions.pointer),
        max_position: write.rotation.map_or(0, |rotation| rotation.max_position as u64),
        row_gap,
        page_gap_at,
        num_rows: write.num_rows as u32,
        segment: segment as u32,
        rope_dims: row.rope_dims as u32,
        latent_type: write.latent_type as i32,
        wide_slots: write.slots.is_some_and(|slots| slots.wide).into(),
        wide_positions: write.rotation.is_some_and(|rotation| rotation.positions.wide).into(),
        half_split: write.rotation.is_some_and(|rotation| rotation.pairs == RopePairs::HalfSplit).into(),
        global_scale: write.kv_global_scale,
    };
    let per_block = warps.div_ceil(BLOCKS).next_power_of_two().min(MOST_ROWS_PER_BLOCK);
    let writer = launch(module, "write", warps * WARP, per_block * WARP, Parameters::Write(args));
    if needed == 0 {
        return Ok([None, Some(writer)]);
    }
    let blocks = write.num_rows.div_ceil(segment);
    let parameters = Parameters::Write(args);
    let find = launch(WINNERS_MODULE, WINNERS_ENTRIES[0], blocks * WINNER_THREADS, WINNER_THREADS, parameters);
    Ok([Some(find), Some(Launch { after_previous: true, ..writer })])
}

/// What [`Device::read_kv_cache`] enqueues. Asks no driver.
///
/// # Errors
/// [`Error::Value`] if there are too many slots.
pub fn read_launch(read: &ReadOnDevice) -> Result<Option<Launch>, Error> {
    let module = record_module(read.spec)?;
    let num_slots = read.cache.num_slots();
    if num_slots > MAX_ROWS {
        return Err(Error::value("cache", format!("of at most {MAX_ROWS} slots for one launch"), num_slots));
    }
    let args = ReadArgs {
        from: CacheArgs::of(&read.cache),
        out: read.out,
        rope_dims: read.spec.row.rope_dims as u32,
        global_scale: read.kv_global_scale,
    };
    let read = || launch(module, "read", num_slots * WARP, SLOTS_PER_BLOCK * WARP, Parameters::Read(args));
    Ok((num_slots > 0).then(read))
}

/// As many blocks of `per_block` threads as it takes.
pub(super) fn launch(
    module: &'static str,
    entry: &'static str,
    threads: usize,
    per_block: usize,
    parameters: Parameters,
) -> Launch {
    Launch {
        module,
        entry,
        grid: [threads.div_ceil(per_block) as u32, 1],
        threads: per_block as u32,
        shared_bytes: 0,
        after_previous: false,
        parameters,
    }
}
