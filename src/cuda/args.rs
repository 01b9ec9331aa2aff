//! Launch arguments: the Rust twin of `kernels/include/args.cuh`.

use std::mem::{offset_of, size_of};

/// `CandidateArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct CandidateArgs {
    pub cache: u64,
    pub indices: u64,
    pub lengths: u64,
    pub page_stride: i64,
    pub indices_stride: i64,
    pub num_slots: u32,
    pub page_block_size: u32,
    pub page_shift: i32,
    pub row_stride: u32,
    pub topk: i32,
    pub reserved: i32,
}

impl CandidateArgs {
    /// No cache at all.
    pub const NONE: Self = Self {
        cache: 0,
        indices: 0,
        lengths: 0,
        page_stride: 0,
        indices_stride: 0,
        num_slots: 0,
        page_block_size: 1,
        page_shift: 0,
        row_stride: 0,
        topk: 0,
        reserved: 0,
    };
}

/// `DecodeArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct DecodeArgs {
    pub main: CandidateArgs,
    pub extra: CandidateArgs,
    pub q: u64,
    pub out: u64,
    pub lse: u64,
    pub sink: u64,
    pub partial: u64,
    pub partial_state: u64,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub lse_stride: i64,
    pub num_tokens: i32,
    pub num_heads: i32,
    pub splits: i32,
    pub first_split: i32,
    pub all_splits: i32,
    pub scale_log2: f32,
    pub out_type: i32,
    pub lse_natural: i32,
    pub out_aligned: i32,
    pub kv_global_scale: f32,
}

impl DecodeArgs {
    /// As the kernel reads it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the struct is `repr(C)` of integers and floats without padding.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast::<u8>(), size_of::<Self>()) }
    }
}

/// `StateArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct StateArgs {
    pub out: u64,
    pub lse: u64,
    pub row_stride: i64,
    pub dim_stride: i64,
    pub lse_stride: i64,
}

/// `MergeStatesArgs` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct MergeStatesArgs {
    pub a: StateArgs,
    pub b: StateArgs,
    pub merged: StateArgs,
    pub num_rows: u32,
    pub d_v: u32,
    pub out_type: i32,
    pub lse_natural: i32,
    pub aligned: i32,
    pub reserved: i32,
}

impl MergeStatesArgs {
    /// As the kernel reads it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the struct is `repr(C)` of integers, `reserved` stands where padding would be.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast::<u8>(), size_of::<Self>()) }
    }
}

// The sizes that args.cuh asserts; its fields follow in the same order and alignment.
const _: () = assert!(size_of::<CandidateArgs>() == 64 && size_of::<DecodeArgs>() == 240);
const _: () = assert!(offset_of!(CandidateArgs, num_slots) == 40 && offset_of!(CandidateArgs, topk) == 56);
const _: () = assert!(offset_of!(DecodeArgs, q) == 128 && offset_of!(DecodeArgs, out_token_stride) == 176);
const _: () = assert!(offset_of!(DecodeArgs, num_tokens) == 200 && offset_of!(DecodeArgs, lse_natural) == 228);
const _: () = assert!(size_of::<StateArgs>() == 40 && size_of::<MergeStatesArgs>() == 144);
const _: () = assert!(offset_of!(StateArgs, lse_stride) == 32 && offset_of!(MergeStatesArgs, aligned) == 136);
