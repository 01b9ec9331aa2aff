//! Writers and the reader of packed caches on the CPU.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::codec::{RowWriter, dequantise};
use crate::layout::{CacheView, CacheViewMut, Geometry, PageLayout};
use crate::rope::Rotation;
use crate::{Element, Error, FamilySpec, threads};

/// A freshly packed cache and its layout.
#[derive(Debug, Clone)]
pub struct PackedCache {
    /// All pages, each `layout.page_stride()` bytes.
    pub bytes: Vec<u8>,
    /// Number of pages.
    pub pages: usize,
    /// The layout of a page.
    pub layout: PageLayout,
}

/// Quantises latents `[N, d_qk]` into slots 0 to N-1 of a new cache. Gaps and unused slots are zero bytes.
///
/// `kv_global_scale` is 1.0 except for glm_nsa NVFP4, where every value is divided by it first.
pub fn pack_kv_cache<T: Element>(
    spec: &'static FamilySpec,
    latent: ArrayView2<'_, T>,
    geometry: Geometry,
    kv_global_scale: f32,
) -> Result<PackedCache, Error> {
    let layout = PageLayout::new(spec, geometry, "")?;
    let pages = latent.nrows().div_ceil(layout.page_block_size());
    let mut bytes = zeroed(&layout, pages, "latent")?;
    pack_kv_cache_into(CacheViewMut::new(spec, geometry, pages, &mut bytes, kv_global_scale)?, latent)?;
    Ok(PackedCache { bytes, pages, layout })
}

/// The bytes of a new cache, made for `argument`.
pub(crate) fn zeroed(layout: &PageLayout, pages: usize, argument: &str) -> Result<Vec<u8>, Error> {
    let too_large = || Error::value(argument, "small enough for its cache to fit in memory", format!("{pages} pages"));
    let len = pages.checked_mul(layout.page_stride()).ok_or_else(too_large)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| too_large())?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Quantises latents `[N, d_qk]` into slots 0 to N-1. Other bytes keep what they held.
pub fn pack_kv_cache_into<T: Element>(cache: CacheViewMut<'_>, latent: ArrayView2<'_, T>) -> Result<(), Error> {
    check_width(cache.spec, latent.ncols())?;
    let num_slots = cache.num_slots();
    if latent.nrows() as u64 > num_slots {
        return Err(Error::value("latent", format!("at most {num_slots} rows, one per slot"), latent.nrows()));
    }
    let rows: Vec<SlotOfRow> = (0..latent.nrows()).map(|row| SlotOfRow { slot: row as u64, row }).collect();
    write_rows(cache, latent, &rows, None);
    Ok(())
}

/// Quantises latents `[N, d_qk]` into the slots that `slot_mapping` (N entries) names.
///
/// A negative or too large slot skips its row; of several rows for one slot the lowest row wins. Only addressed bytes
/// change, and none if an error is returned.
pub fn append_kv_cache<T: Element>(
    cache: CacheViewMut<'_>,
    latent: ArrayView2<'_, T>,
    slot_mapping: &[i64],
) -> Result<(), Error> {
    append(cache, latent, slot_mapping, None)
}

/// The same with the RoPE lanes rotated before they are stored. The lowest row wins a slot before positions are looked at:
/// if its position is not in the table, nobody writes the slot.
pub fn append_kv_cache_with_rope<T: Element>(
    cache: CacheViewMut<'_>,
    latent: ArrayView2<'_, T>,
    slot_mapping: &[i64],
    rotation: &Rotation<'_>,
) -> Result<(), Error> {
    rotation.check(cache.spec, latent.nrows())?;
    append(cache, latent, slot_mapping, Some(rotation))
}

fn append<T: Element>(
    cache: CacheViewMut<'_>,
    latent: ArrayView2<'_, T>,
    slot_mapping: &[i64],
    rotation: Option<&Rotation<'_>>,
) -> Result<(), Error> {
    check_width(cache.spec, latent.ncols())?;
    check_slots(slot_mapping.len(), latent.nrows())?;
    let num_slots = cache.num_slots();
    let mut rows: Vec<SlotOfRow> = slot_mapping
        .iter()
        .enumerate()
        .filter_map(|(row, slot)| u64::try_from(*slot).ok().map(|slot| SlotOfRow { slot, row }))
        .filter(|entry| entry.slot < num_slots)
        .collect();
    rows.sort_unstable();
    rows.dedup_by_key(|entry| entry.slot); // keeps the first, which is the lowest row
    write_rows(cache, latent, &rows, rotation);
    Ok(())
}

/// Dequantises every slot into `out`, `[num_slots, d_qk]`.
pub fn unpack_kv_cache(cache: &CacheView<'_>, mut out: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    let expected = (cache.num_slots(), cache.spec.d_qk());
    if (out.nrows() as u64, out.ncols()) != expected || !out.is_standard_layout() {
        return Err(Error::value("out", format!("a dense array of shape {expected:?}"), format!("{:?}", out.dim())));
    }
    threads::install(|| {
        out.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(slot, mut row)| {
            if let Some(values) = row.as_slice_mut() {
                dequantise(cache.layout.row(), &cache.record(slot as u64), cache.kv_global_scale, values);
            }
        });
    });
    Ok(())
}

/// A latent row and the slot it goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SlotOfRow {
    slot: u64,
    row: usize,
}

pub(crate) fn check_slots(slots: usize, rows: usize) -> Result<(), Error> {
    if slots != rows {
        let accepted = format!("one slot per row of `latent` ({rows})");
        return Err(Error::value("slot_mapping", accepted, format!("{slots} slots")));
    }
    Ok(())
}

fn check_width(spec: &FamilySpec, width: usize) -> Result<(), Error> {
    if width == spec.d_qk() {
        return Ok(());
    }
    Err(Error::value("latent", format!("{} wide for family {}", spec.d_qk(), spec.family), width))
}

/// Writes rows sorted by slot, without duplicates; pages in parallel, since each is a slice of its own.
fn write_rows<T: Element>(
    cache: CacheViewMut<'_>,
    latent: ArrayView2<'_, T>,
    rows: &[SlotOfRow],
    rotation: Option<&Rotation<'_>>,
) {
    let CacheViewMut { layout, bytes, kv_global_scale, .. } = cache;
    if rows.is_empty() {
        return;
    }
    let page_block_size = layout.page_block_size() as u64;
    threads::install(|| {
        bytes.par_chunks_mut(layout.page_stride()).enumerate().for_each_init(
            || (RowWriter::new(layout.row()), Vec::new()),
            |(writer, gathered), (page, bytes)| {
                let first_slot = page as u64 * page_block_size;
                let begin = rows.partition_point(|entry| entry.slot < first_slot);
                for entry in rows[begin..].iter().take_while(|entry| entry.slot < first_slot + page_block_size) {
                    let of_row = rotation.map(|rotation| rotation.of_row(entry.row));
                    if let Some(None) = of_row {
                        continue; // no such position
                    }
                    let row = latent.row(entry.row);
                    let values = row.as_slice().unwrap_or_else(|| {
                        gathered.clear();
                        gathered.extend(row.iter().copied());
                        gathered
                    });
                    writer.quantise(layout.row(), values, of_row.flatten(), kv_global_scale);
                    layout.store(bytes, (entry.slot - first_slot) as usize, &writer.record);
                }
            },
        );
    });
}
