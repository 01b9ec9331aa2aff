//! From one cache on a device to another: records as they are, or quantised anew.

use cudarc::driver::sys::CUstream;

use super::cache_args::{CacheArgs, MoveArgs, gaps};
use super::caches::{MAX_ROWS, SLOTS_PER_BLOCK, WARP, launch, record_module};
use super::device::Device;
use super::launch::{CacheOnDevice, Launch, Parameters};
use crate::layout::check_global_scale;
use crate::{Conversion, Error, FamilySpec};

pub(super) const MOVE_MODULE: &str = "move";
pub(super) const MOVE_ENTRIES: [&str; 1] = ["move_records"];

/// The kernels that quantise anew: record modules of both sides, module and entry point. Records of dsv3_2 are read as those
/// of glm_nsa are.
const CONVERSIONS: &[(&str, &str, &str, &str)] = &[
    ("cache_dsv4", "cache_dsv4_nvfp4", "convert_dsv4", "dsv4_to_dsv4_nvfp4"),
    ("cache_dsv4_nvfp4", "cache_dsv4", "convert_dsv4", "dsv4_nvfp4_to_dsv4"),
    ("cache_glm", "cache_dsv3_2", "convert_glm", "glm_to_dsv3_2"),
    ("cache_glm", "cache_glm_nvfp4", "convert_glm", "glm_to_glm_nvfp4"),
    ("cache_dsv3_2", "cache_glm_nvfp4", "convert_glm", "glm_to_glm_nvfp4"),
    ("cache_glm_nvfp4", "cache_dsv3_2", "convert_glm", "glm_nvfp4_to_dsv3_2"),
    ("cache_glm_nvfp4", "cache_glm", "convert_glm", "glm_nvfp4_to_glm"),
    ("cache_glm", "cache_dsv4_1", "convert_dsv4_1", "glm_to_dsv4_1"),
    ("cache_glm", "cache_fp4", "convert_dsv4_1", "glm_to_fp4"),
    ("cache_dsv4_1", "cache_glm", "convert_dsv4_1", "dsv4_1_to_glm"),
    ("cache_dsv4_1", "cache_fp4", "convert_dsv4_1", "dsv4_1_to_fp4"),
    ("cache_fp4", "cache_glm", "convert_dsv4_1", "fp4_to_glm"),
    ("cache_fp4", "cache_dsv4_1", "convert_dsv4_1", "fp4_to_dsv4_1"),
];

/// Entry points of a module of conversions; none of any other.
pub(super) fn conversion_entries(module: &str) -> impl Iterator<Item = &'static str> {
    CONVERSIONS.iter().filter(move |line| line.2 == module).map(|line| line.3)
}

/// The kernel of a conversion, as module and entry point. Refuses records that do not hold the same dimensions.
pub fn conversion_kernel(from: &FamilySpec, to: &FamilySpec) -> Result<(&'static str, &'static str), Error> {
    if Conversion::between(from, to)? == Conversion::Exact {
        return Ok((MOVE_MODULE, MOVE_ENTRIES[0]));
    }
    let records = (record_module(from)?, record_module(to)?);
    let found = CONVERSIONS.iter().find(|line| (line.0, line.1) == records);
    found.map(|line| (line.2, line.3)).ok_or_else(|| {
        let got = format!("'{}' of family {}", to.format, to.family);
        Error::value("to_format", "a format into which GPU kernels convert that of `cache`", got)
    })
}

/// Factors of both formats, where they have one; the same if codes are kept.
pub(super) fn check_kv_global_scales(
    [from, to]: [&FamilySpec; 2],
    [from_scale, to_scale]: [f32; 2],
) -> Result<(), Error> {
    Conversion::between(from, to)?.check_global_scales(from_scale, to_scale)?;
    check_global_scale(from, from_scale).map_err(|error| error.about("from_kv_global_scale"))?;
    check_global_scale(to, to_scale).map_err(|error| error.about("to_kv_global_scale"))
}

/// A cache that becomes another one.
#[derive(Debug, Clone, Copy)]
pub struct ConvertOnDevice {
    /// Lines of the family table, old and new.
    pub specs: [&'static FamilySpec; 2],
    /// The old cache.
    pub from: CacheOnDevice,
    /// The new one, all of whose `pages * page_stride` bytes are written.
    pub to: CacheOnDevice,
    /// Slots that are converted, at most those of either cache.
    pub num_slots: usize,
    /// `kv_global_scale` of the old and of the new cache; 1 for a format that has none.
    pub kv_global_scales: [f32; 2],
}

impl Device {
    /// Enqueues on `stream` what [`crate::convert_kv_cache`] or [`crate::repage_kv_cache`] does, with the same bytes; the error
    /// of a lossy conversion is not measured. Allocates nothing and waits for nothing once the module is loaded.
    ///
    /// # Errors
    /// As [`Device::write_kv_cache`], and those of [`convert_launch`].
    ///
    /// # Safety
    /// As [`Device::write_kv_cache`], of both caches.
    pub unsafe fn convert_kv_cache(&self, convert: &ConvertOnDevice, stream: CUstream) -> Result<(), Error> {
        let launches = [convert_launch(convert)?];
        // SAFETY: the caller vouches for the pointers in the launch.
        unsafe { self.enqueue_all(launches, stream) }
    }
}

/// What [`Device::convert_kv_cache`] enqueues. Asks no driver.
///
/// # Errors
/// [`Error::Value`] if the records do not hold the same dimensions, if a factor is none of its format or not kept with the
/// codes, or if there are too many slots.
pub fn convert_launch(convert: &ConvertOnDevice) -> Result<Option<Launch>, Error> {
    let ConvertOnDevice { specs: [from, to], kv_global_scales: [from_scale, to_scale], .. } = *convert;
    let (module, entry) = conversion_kernel(from, to)?;
    check_kv_global_scales([from, to], [from_scale, to_scale])?;
    let num_slots = convert.to.num_slots();
    let held = convert.from.num_slots();
    if num_slots > MAX_ROWS {
        return Err(Error::value("cache", format!("of at most {MAX_ROWS} slots for one launch"), num_slots));
    }
    if convert.num_slots > held.min(num_slots) {
        let accepted = format!("at most {}, the slots of `cache`", held.min(num_slots));
        return Err(Error::value("num_slots", accepted, convert.num_slots));
    }
    let (row_gap, page_gap_at) = gaps(&convert.to.layout);
    let args = MoveArgs {
        from: CacheArgs::of(&convert.from),
        to: CacheArgs::of(&convert.to),
        num_slots: convert.num_slots as u64,
        row_gap,
        page_gap_at,
        code_bytes: to.row.code_bytes() as u32,
        scale_bytes: to.row.scale_bytes() as u32,
        rope_dims: to.row.rope_dims as u32,
        from_global_scale: from_scale,
        global_scale: to_scale,
        reserved: 0,
    };
    let convert = || launch(module, entry, num_slots * WARP, SLOTS_PER_BLOCK * WARP, Parameters::Move(args));
    Ok((num_slots > 0).then(convert))
}
