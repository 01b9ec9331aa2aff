//! Launch arguments of the cache kernels: the Rust twin of `kernels/include/cache_args.cuh`.

use std::mem::{offset_of, size_of};

use super::launch::CacheOnDevice;
use crate::{PageLayout, Placement};

/// `CacheArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct CacheArgs {
    pub cache: u64,
    pub page_stride: i64,
    pub data_stride: i64,
    pub scales_at: i64,
    pub scale_stride: i64,
    pub num_slots: u64,
    pub page_block_size: u64,
    pub page_shift: i32,
    pub rope_at: u32,
}

/// `WriteArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct WriteArgs {
    pub to: CacheArgs,
    pub latent: u64,
    pub slots: u64,
    pub winners: u64,
    pub cos_sin: u64,
    pub positions: u64,
    pub max_position: u64,
    pub row_gap: i64,
    pub page_gap_at: i64,
    pub num_rows: u32,
    pub segment: u32,
    pub rope_dims: u32,
    pub latent_type: i32,
    pub wide_slots: i32,
    pub wide_positions: i32,
    pub half_split: i32,
    pub global_scale: f32,
}

/// `ReadArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct ReadArgs {
    pub from: CacheArgs,
    pub out: u64,
    pub rope_dims: u32,
    pub global_scale: f32,
}

/// `MoveArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct MoveArgs {
    pub from: CacheArgs,
    pub to: CacheArgs,
    pub num_slots: u64,
    pub row_gap: i64,
    pub page_gap_at: i64,
    pub code_bytes: u32,
    pub scale_bytes: u32,
    pub rope_dims: u32,
    pub from_global_scale: f32,
    pub global_scale: f32,
    pub reserved: u32,
}

// The sizes that cache_args.cuh asserts; its fields follow in the same order and alignment.
const _: () = assert!(size_of::<CacheArgs>() == 64 && size_of::<WriteArgs>() == 160 && size_of::<ReadArgs>() == 80);
const _: () = assert!(size_of::<MoveArgs>() == 176);
const _: () = assert!(offset_of!(CacheArgs, page_shift) == 56 && offset_of!(WriteArgs, num_rows) == 128);

/// Bytes between the end of an inline record and the next row, and from the start of a page to the end of its last row.
pub(super) fn gaps(layout: &PageLayout) -> (i64, i64) {
    let row_gap = match layout.row().placement {
        Placement::Inline => layout.row_stride() - layout.row().bytes_per_token(),
        Placement::Footer => 0,
    };
    (row_gap as i64, (layout.page_block_size() * layout.row_stride()) as i64)
}

impl CacheArgs {
    pub fn of(cache: &CacheOnDevice) -> Self {
        let layout = &cache.layout;
        let row = layout.row();
        let (page, codes, scales) = (layout.page_block_size(), row.code_bytes(), row.scale_bytes());
        let (data_stride, scales_at, scale_stride, rope_at) = match row.placement {
            Placement::Inline => (layout.row_stride(), codes, layout.row_stride(), codes + scales),
            Placement::Footer => {
                let data = codes + row.rope_bytes();
                (data, page * data, scales, codes)
            }
        };
        Self {
            cache: cache.pointer,
            page_stride: layout.page_stride() as i64,
            data_stride: data_stride as i64,
            scales_at: scales_at as i64,
            scale_stride: scale_stride as i64,
            num_slots: cache.pages as u64 * page as u64,
            page_block_size: page as u64,
            page_shift: if page.is_power_of_two() { page.trailing_zeros() as i32 } else { -1 },
            rope_at: rope_at as u32,
        }
    }
}

/// The bytes of a kernel parameter, as the kernel reads it.
macro_rules! parameter_bytes {
    ($($args:ty),+) => {
        $(impl $args {
            pub fn bytes(&self) -> &[u8] {
                // SAFETY: the struct is `repr(C)` of integers and floats without padding.
                unsafe { std::slice::from_raw_parts((&raw const *self).cast::<u8>(), size_of::<Self>()) }
            }
        })+
    };
}
parameter_bytes!(WriteArgs, ReadArgs, MoveArgs);
