//! From one packed cache to another: other pages and strides, other families and formats.

use rayon::prelude::*;

use crate::cache::zeroed;
use crate::codec::{RowWriter, dequantise};
use crate::layout::{CacheView, CacheViewMut, PageLayout};
use crate::{Error, FamilySpec, Geometry, PackedCache, ScaleRule, threads};

/// What a conversion of one record into another does to its quantised values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conversion {
    /// Codes and scales are moved as they are: every value stays.
    Exact,
    /// Values are dequantised to FP32 and quantised by the other format's rule.
    Lossy,
}

impl Conversion {
    /// Between two lines of the family table. Refuses records that do not hold the same dimensions.
    pub fn between(from: &FamilySpec, to: &FamilySpec) -> Result<Self, Error> {
        let (a, b) = (&from.row, &to.row);
        if (a.quantised_dims, a.rope_dims) != (b.quantised_dims, b.rope_dims) {
            let accepted = format!(
                "a family with {} quantised and {} RoPE dimensions, like {}",
                a.quantised_dims, a.rope_dims, from.family
            );
            let got = format!("{} with {} and {}", to.family, b.quantised_dims, b.rope_dims);
            return Err(Error::value("to_family", accepted, got));
        }
        // A power of two is an FP32 scale like any other; an FP32 scale is no power of two.
        let same_scales = a.scale == b.scale || (a.scale, b.scale) == (ScaleRule::Pow2Fp32, ScaleRule::ArbitraryFp32);
        Ok(if same_scales && a.group == b.group { Self::Exact } else { Self::Lossy })
    }

    /// Codes that are kept keep their factor.
    pub(crate) fn check_global_scales(self, from: f32, to: f32) -> Result<(), Error> {
        if self == Self::Exact && to != from {
            let accepted = format!("{from} like that of `cache`, whose codes are kept");
            return Err(Error::value("to_kv_global_scale", accepted, to));
        }
        Ok(())
    }
}

/// Converts the first `num_slots` slots (`None`: all) into a new cache of another family or format, under the same slot ids.
/// Gaps and slots that are left over in the last page become zero bytes.
///
/// RoPE lanes keep their bits. With [`Conversion::Exact`] codes and scales do, too (`to_global_scale` must then be that of
/// `from`); else values are dequantised to FP32 and quantised anew. Returns the cache and the relative L2 error of the
/// quantised values, 0 where nothing was lost; NaN if there was a NaN.
pub fn convert_kv_cache(
    from: &CacheView<'_>,
    to: &'static FamilySpec,
    geometry: Geometry,
    num_slots: Option<u64>,
    to_global_scale: f32,
) -> Result<(PackedCache, f64), Error> {
    let conversion = Conversion::between(from.spec, to)?;
    conversion.check_global_scales(from.kv_global_scale, to_global_scale)?;
    let num_slots = num_slots.unwrap_or(from.num_slots());
    if num_slots > from.num_slots() {
        return Err(Error::value(
            "num_slots",
            format!("at most {}, the slots of `cache`", from.num_slots()),
            num_slots,
        ));
    }
    let layout = PageLayout::new(to, geometry, "")?;
    let pages = num_slots.div_ceil(layout.page_block_size() as u64) as usize;
    let mut packed = PackedCache { bytes: zeroed(&layout, pages, "cache")?, pages, layout };
    let cache = CacheViewMut::new(to, geometry, pages, &mut packed.bytes, to_global_scale)?;
    let error = convert_into(from, num_slots, cache, conversion);
    Ok((packed, error))
}

/// Moves the first `num_slots` slots (`None`: all) into pages of another size or other strides, bit for bit, under the same
/// slot ids. Gaps and slots that are left over in the last page become zero bytes.
pub fn repage_kv_cache(from: &CacheView<'_>, geometry: Geometry, num_slots: Option<u64>) -> Result<PackedCache, Error> {
    Ok(convert_kv_cache(from, from.spec, geometry, num_slots, from.kv_global_scale)?.0)
}

/// Converts slot by slot, pages in parallel; returns the relative error.
fn convert_into(from: &CacheView<'_>, num_slots: u64, to: CacheViewMut<'_>, conversion: Conversion) -> f64 {
    let CacheViewMut { spec, layout, bytes, kv_global_scale, .. } = to;
    let page_block_size = layout.page_block_size() as u64;
    let dims = spec.row.quantised_dims;
    let page_sums = |writer: &mut Converter, page: usize, bytes: &mut [u8]| {
        let mut sums = Sums::default();
        let first_slot = page as u64 * page_block_size;
        for slot in first_slot..num_slots.min(first_slot + page_block_size) {
            let record = from.record(slot);
            let row = (slot - first_slot) as usize;
            match conversion {
                Conversion::Exact => layout.store(bytes, row, &record),
                Conversion::Lossy => {
                    let (before, after) = writer.values.split_at_mut(spec.d_qk());
                    dequantise(from.layout.row(), &record, from.kv_global_scale, before);
                    writer.row.requantise(layout.row(), &before[..dims], record.rope, kv_global_scale);
                    layout.store(bytes, row, &writer.row.record);
                    dequantise(layout.row(), &writer.row.record.as_slices(), kv_global_scale, after);
                    sums.add(&before[..dims], &after[..dims]);
                }
            }
        }
        sums
    };
    let sums = threads::install(|| {
        bytes
            .par_chunks_mut(layout.page_stride())
            .enumerate()
            .map_init(
                || Converter { row: RowWriter::new(layout.row()), values: vec![0.0; 2 * spec.d_qk()] },
                |writer, (page, bytes)| page_sums(writer, page, bytes),
            )
            .collect::<Vec<_>>()
    });
    // Page by page, so that the sum does not depend on the threads.
    sums.into_iter().fold(Sums::default(), Sums::join).relative()
}

/// Buffers of a thread.
struct Converter {
    row: RowWriter,
    /// A row's values before and after.
    values: Vec<f32>,
}

/// Squares of errors and of values.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    error: f64,
    norm: f64,
}

impl Sums {
    fn add(&mut self, before: &[f32], after: &[f32]) {
        for (before, after) in before.iter().zip(after) {
            self.error += (f64::from(*after) - f64::from(*before)).powi(2);
            self.norm += f64::from(*before).powi(2);
        }
    }

    fn join(self, other: Self) -> Self {
        Self { error: self.error + other.error, norm: self.norm + other.norm }
    }

    fn relative(self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() }
    }
}
