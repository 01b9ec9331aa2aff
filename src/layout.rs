//! Geometry of a packed cache: page size and strides, checked, and 64-bit offsets of everything in it.

use crate::family::{DEFAULT_PAGE_BLOCK_SIZE, Placement, RowFormat};
use crate::{Error, FamilySpec};

/// Pages and padded rows start at multiples of this many bytes.
pub const ALIGNMENT: usize = 16;

/// Widths of records of other engines, whose bytes mean something else.
const FOREIGN_RECORDS: &[(usize, &str)] = &[
    (352, "the NVFP4 record of a FlashMLA fork, with FP8 RoPE lanes"),
    (416, "an NVFP4 record of GLM-5.2 for SM100"),
    (432, "the NVFP4 record of B12X"),
];

/// Page size and strides as a caller names them; `None` means what our writers choose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Tokens per page (default 64).
    pub page_block_size: Option<i64>,
    /// Bytes from page to page (default: the dense page, rounded up to 16).
    pub page_stride: Option<i64>,
    /// Bytes from row to row, inline families only (default: the dense row).
    pub row_stride: Option<i64>,
}

/// The checked layout of every page of a packed cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLayout {
    row: RowFormat,
    page_block_size: usize,
    page_stride: usize,
    row_stride: usize,
}

impl PageLayout {
    /// Checks a geometry. `prefix` ("" or "extra_") goes before the argument names of the refusals.
    pub fn new(spec: &FamilySpec, geometry: Geometry, prefix: &str) -> Result<Self, Error> {
        let row = spec.row;
        let record = row.bytes_per_token() as i128;
        let mut reasons = Vec::new();
        let mut refuse = |argument: &str, accepted: String, got: i128| {
            reasons.push(format!("`{prefix}{argument}` must be {accepted}, got {got}"));
        };

        let page = i128::from(geometry.page_block_size.unwrap_or(DEFAULT_PAGE_BLOCK_SIZE as i64));
        if page < 1 {
            refuse("page_block_size", "a positive number of tokens".into(), page);
        }
        let row_stride = geometry.row_stride.map_or(record, i128::from);
        match row.placement {
            Placement::Footer if row_stride != record => refuse(
                "row_stride",
                format!("{record} bytes for family {}, whose rows are tightly packed", spec.family),
                row_stride,
            ),
            Placement::Inline if row_stride < record || row_stride % ALIGNMENT as i128 != 0 => refuse(
                "row_stride",
                format!("a multiple of {ALIGNMENT} bytes and at least {record} for family {}", spec.family),
                row_stride,
            ),
            _ => {}
        }
        let dense = page.max(1).saturating_mul(row_stride.max(record));
        let page_stride =
            geometry.page_stride.map_or(dense.saturating_add((-dense).rem_euclid(ALIGNMENT as i128)), i128::from);
        if page_stride < dense || page_stride % ALIGNMENT as i128 != 0 {
            refuse(
                "page_stride",
                format!("a multiple of {ALIGNMENT} bytes and at least {dense} ({page} rows of {row_stride} bytes)"),
                page_stride,
            );
        }
        match (usize::try_from(page), usize::try_from(row_stride), i64::try_from(page_stride)) {
            (Ok(page_block_size), Ok(row_stride), Ok(page_stride)) if reasons.is_empty() => {
                Ok(Self { row, page_block_size, page_stride: page_stride as usize, row_stride })
            }
            _ => {
                if reasons.is_empty() {
                    let accepted = "small enough for a page to have a 64-bit number of bytes";
                    reasons.push(format!("`{prefix}page_block_size` must be {accepted}, got {page}"));
                }
                Err(Error::Unsupported { reasons })
            }
        }
    }

    /// The packed record.
    pub fn row(&self) -> &RowFormat {
        &self.row
    }

    /// Tokens per page.
    pub fn page_block_size(&self) -> usize {
        self.page_block_size
    }

    /// Bytes from page to page.
    pub fn page_stride(&self) -> usize {
        self.page_stride
    }

    /// Bytes from row to row (footer families: of the record, whose bytes are not contiguous).
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Bytes from the first to the last payload byte of a page.
    pub fn page_extent(&self) -> usize {
        (self.page_block_size - 1) * self.row_stride + self.row.bytes_per_token()
    }

    /// Bytes from the first to the last payload byte of `pages` pages; `None` beyond 64 bits.
    pub fn extent(&self, pages: usize) -> Option<usize> {
        match pages.checked_sub(1) {
            None => Some(0),
            Some(gaps) => gaps.checked_mul(self.page_stride)?.checked_add(self.page_extent()),
        }
    }

    /// Offset of a row's codes inside its page.
    fn codes_offset(&self, row: usize) -> usize {
        match self.row.placement {
            Placement::Inline => row * self.row_stride,
            Placement::Footer => row * (self.row.code_bytes() + self.row.rope_bytes()),
        }
    }

    /// Offset of a row's scales inside its page.
    fn scales_offset(&self, row: usize) -> usize {
        match self.row.placement {
            Placement::Inline => self.codes_offset(row) + self.row.code_bytes(),
            Placement::Footer => self.codes_offset(self.page_block_size) + row * self.row.scale_bytes(),
        }
    }

    /// Offset of a row's RoPE lanes inside its page.
    fn rope_offset(&self, row: usize) -> usize {
        let after_codes = self.codes_offset(row) + self.row.code_bytes();
        match self.row.placement {
            Placement::Inline => after_codes + self.row.scale_bytes(),
            Placement::Footer => after_codes,
        }
    }

    /// The parts of row `row` of a page.
    pub(crate) fn record<'a>(&self, page: &'a [u8], row: usize) -> Record<&'a [u8]> {
        let part = |offset: usize, bytes: usize| &page[offset..offset + bytes];
        Record {
            codes: part(self.codes_offset(row), self.row.code_bytes()),
            scales: part(self.scales_offset(row), self.row.scale_bytes()),
            rope: part(self.rope_offset(row), self.row.rope_bytes()),
        }
    }

    /// Copies a finished record into row `row` of a page.
    pub(crate) fn store<Bytes: AsRef<[u8]>>(&self, page: &mut [u8], row: usize, record: &Record<Bytes>) {
        for (offset, bytes) in [
            (self.codes_offset(row), &record.codes),
            (self.scales_offset(row), &record.scales),
            (self.rope_offset(row), &record.rope),
        ] {
            let bytes = bytes.as_ref();
            page[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// The three parts of a token's record.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record<Bytes> {
    pub codes: Bytes,
    pub scales: Bytes,
    pub rope: Bytes,
}

impl Record<Vec<u8>> {
    /// The same, borrowed.
    pub fn as_slices(&self) -> Record<&[u8]> {
        Record { codes: &self.codes, scales: &self.scales, rope: &self.rope }
    }
}

/// Geometry and page count of an array of bytes that holds a packed cache, from its shape and byte strides.
///
/// Accepted shapes, b = bytes per token: `[pages, page_bytes]`, `[pages, page, b]`, `[pages, 1, page, b]` (HND) and
/// `[pages, page, 1, b]` (NHD). Strides of dimensions of size 1 mean nothing and are ignored. `name` is the argument.
pub fn geometry_of_shape(
    spec: &FamilySpec,
    name: &str,
    shape: &[usize],
    strides: &[isize],
) -> Result<(usize, Geometry), Error> {
    let record = spec.row.bytes_per_token();
    let family = spec.family;
    let last = *shape.last().unwrap_or(&0);
    let (page_axis, row_axis) = match shape {
        [_, _] => (0, None),
        [_, _, _] => (0, Some(1)),
        [_, 1, _, _] => (0, Some(2)),
        [_, _, 1, _] => (0, Some(1)),
        [_, _, _, _] => {
            let accepted = "a 4-D cache with a singleton KV-head axis in dim 1 (HND) or dim 2 (NHD)";
            return Err(Error::value(name, accepted, format!("shape {shape:?}")));
        }
        // What an engine binds before its pool exists.
        [0] => return Ok((0, Geometry::default())),
        _ => {
            return Err(Error::value(name, "an array of 2, 3 or 4 dimensions", format!("{} dimensions", shape.len())));
        }
    };
    if last > 1 && strides[shape.len() - 1] != 1 {
        let got = format!("a stride of {} bytes", strides[shape.len() - 1]);
        return Err(Error::value(name, "dense in its last dimension", got));
    }
    let page_block_size = match row_axis {
        Some(axis) => shape[axis],
        None if last > 0 && last.is_multiple_of(record) => last / record,
        None => {
            let accepted = format!("a whole number of rows of {record} bytes wide for family {family}");
            return Err(Error::value(name, accepted, format!("2-D blocks of {last} bytes")));
        }
    };
    let wide_enough = match spec.row.placement {
        Placement::Inline => last >= record,
        Placement::Footer => last == record,
    };
    if row_axis.is_some()
        && let Some(foreign) = foreign_record(spec, last)
    {
        let accepted = format!("{record} bytes in its last dimension for family {family} (of padded rows, a slice)");
        return Err(Error::value(name, accepted, format!("{last}, probably {foreign}: another layout")));
    }
    if row_axis.is_some() && !wide_enough {
        let at_least = if spec.row.placement == Placement::Inline { "at least " } else { "" };
        let accepted = format!("{at_least}{record} bytes in its last dimension for family {family}");
        return Err(Error::value(name, accepted, last));
    }
    let stride_of = |axis: usize| (shape[axis] > 1).then(|| strides[axis] as i64);
    let geometry = Geometry {
        page_block_size: Some(page_block_size as i64),
        page_stride: stride_of(page_axis),
        row_stride: row_axis.and_then(stride_of),
    };
    Ok((shape[0], geometry))
}

/// What rows of `width` bytes probably are, if not `spec`'s.
fn foreign_record(spec: &FamilySpec, width: usize) -> Option<String> {
    if width == spec.row.bytes_per_token() {
        return None;
    }
    if width == 2 * spec.d_qk() {
        return Some(format!("unquantised bf16 rows of {} dimensions", spec.d_qk()));
    }
    FOREIGN_RECORDS.iter().find(|(bytes, _)| *bytes == width).map(|(_, name)| (*name).into())
}

/// A packed cache to read: bytes, layout, number of pages, and the factor of its values.
#[derive(Debug, Clone, Copy)]
pub struct CacheView<'a> {
    pub(crate) spec: &'static FamilySpec,
    pub(crate) layout: PageLayout,
    bytes: &'a [u8],
    pages: usize,
    pub(crate) kv_global_scale: f32,
}

impl<'a> CacheView<'a> {
    /// A view of `pages` pages that start at `bytes[0]`. `bytes` may end with the last page's payload.
    pub fn new(
        spec: &'static FamilySpec,
        geometry: Geometry,
        pages: usize,
        bytes: &'a [u8],
        kv_global_scale: f32,
    ) -> Result<Self, Error> {
        let layout = PageLayout::new(spec, geometry, "")?;
        require_page_bytes("kv_cache", layout.extent(pages), pages, bytes.len())?;
        check_global_scale(spec, kv_global_scale)?;
        Ok(Self { spec, layout, bytes, pages, kv_global_scale })
    }

    /// Number of slots: pages times page size.
    pub fn num_slots(&self) -> u64 {
        self.pages as u64 * self.layout.page_block_size as u64
    }

    /// The checked layout.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// The family table's line.
    pub fn spec(&self) -> &'static FamilySpec {
        self.spec
    }

    /// The record of a slot below `num_slots`.
    pub(crate) fn record(&self, slot: u64) -> Record<&'a [u8]> {
        let page_block_size = self.layout.page_block_size as u64;
        let (page, row) = ((slot / page_block_size) as usize, (slot % page_block_size) as usize);
        self.layout.record(&self.bytes[page * self.layout.page_stride..], row)
    }
}

/// A packed cache to write.
#[derive(Debug)]
pub struct CacheViewMut<'a> {
    pub(crate) spec: &'static FamilySpec,
    pub(crate) layout: PageLayout,
    pub(crate) bytes: &'a mut [u8],
    pub(crate) pages: usize,
    pub(crate) kv_global_scale: f32,
}

impl<'a> CacheViewMut<'a> {
    /// As [`CacheView::new`], to write.
    pub fn new(
        spec: &'static FamilySpec,
        geometry: Geometry,
        pages: usize,
        bytes: &'a mut [u8],
        kv_global_scale: f32,
    ) -> Result<Self, Error> {
        let layout = PageLayout::new(spec, geometry, "")?;
        require_page_bytes("kv_cache", layout.extent(pages), pages, bytes.len())?;
        check_global_scale(spec, kv_global_scale)?;
        Ok(Self { spec, layout, bytes, pages, kv_global_scale })
    }

    /// Number of slots: pages times page size.
    pub fn num_slots(&self) -> u64 {
        self.pages as u64 * self.layout.page_block_size as u64
    }
}

/// `needed`: bytes of so many pages; `None` if they do not fit in 64 bits.
pub(crate) fn require_page_bytes(name: &str, needed: Option<usize>, pages: usize, len: usize) -> Result<(), Error> {
    match needed {
        Some(needed) if needed <= len => Ok(()),
        needed => {
            let bytes = needed.map_or("more than 2^64".into(), |needed| needed.to_string());
            Err(Error::value(name, format!("at least {bytes} bytes for {pages} pages"), format!("{len} bytes")))
        }
    }
}

/// What kernels load 16 bytes at a time starts at a multiple of them.
#[cfg(feature = "cuda")]
pub(crate) fn require_aligned(name: &str, address: u64) -> Result<(), Error> {
    if address.is_multiple_of(ALIGNMENT as u64) {
        return Ok(());
    }
    Err(Error::value(name, format!("{ALIGNMENT}-byte aligned"), format!("address {address:#x}")))
}

/// A factor other than 1 only where the format has one.
pub(crate) fn check_global_scale(spec: &FamilySpec, scale: f32) -> Result<(), Error> {
    let has_one = spec.row.scale == crate::family::ScaleRule::E4m3Nvfp4 { global: true };
    if has_one && !(scale.is_finite() && scale > 0.0) {
        return Err(Error::value("kv_global_scale", "a positive finite FP32 number", scale));
    }
    if !has_one && scale != 1.0 {
        let accepted = format!("1.0 for a {} cache of family {}, which has none", spec.format, spec.family);
        return Err(Error::value("kv_global_scale", accepted, scale));
    }
    Ok(())
}
