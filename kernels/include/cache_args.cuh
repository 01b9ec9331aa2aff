// Launch arguments of the kernels that write and read packed caches, by value. The Rust twin is `src/cuda/cache_args.rs`.
#pragma once
#include "ptx.cuh"

// Where the records of a cache lie. Byte offsets; inline rows and page footers differ in nothing but these numbers.
struct CacheArgs {
  u8* cache;            // first page; 16-byte aligned
  i64 page_stride;
  i64 data_stride;      // from row to row of codes and RoPE lanes
  i64 scales_at;        // from the start of a page to its first scales
  i64 scale_stride;
  u64 num_slots;
  u64 page_block_size;
  int page_shift;       // log2 of page_block_size, or -1 if that is no power of two
  u32 rope_at;          // from a row's codes to its RoPE lanes
};

struct WriteArgs {
  CacheArgs to;
  const void* latent;     // [num_rows, d_qk], contiguous, 16-byte aligned
  const void* slots;      // [num_rows]; or null: row r goes to slot r, and every byte between records becomes zero
  u32* winners;           // a bit of every row that goes to its slot; or null: warps compare slots with those of lower rows
  const float* cos_sin;   // [max_position, rope_dims], cosines then sines, 16-byte aligned; or null: no rotation
  const void* positions;  // [num_rows], if there is a rotation
  u64 max_position;
  i64 row_gap;            // bytes between the end of an inline record and the next row
  i64 page_gap_at;        // from the start of a page to the end of its last row
  u32 num_rows;
  u32 segment;            // rows of a block of find_winners
  u32 rope_dims;          // 64 or 0
  int latent_type;        // ElementType
  int wide_slots;         // 1: int64, 0: int32
  int wide_positions;
  int half_split;         // 1: lanes p and p + 32 are rotated together, 0: lanes 2p and 2p + 1
  float global_scale;     // divides every value
};

struct ReadArgs {
  CacheArgs from;
  float* out;             // [num_slots, d_qk], 16-byte aligned
  u32 rope_dims;          // 64 or 0
  float global_scale;     // multiplies every value
};

constexpr int MOVE_SLOTS = 8;  // of a block, one warp each

struct MoveArgs {
  CacheArgs from;
  CacheArgs to;
  u64 num_slots;          // that are moved
  i64 row_gap;            // of `to`, as in WriteArgs
  i64 page_gap_at;
  u32 code_bytes, scale_bytes;  // of a record that is moved as it is
  u32 rope_dims;                // 64 or 0
  float from_global_scale;      // multiplies every value that is quantised anew
  float global_scale;           // then divides it
  u32 reserved;
};

enum ElementType { ELEMENT_BF16 = 0, ELEMENT_F16 = 1, ELEMENT_F32 = 2 };

static_assert(sizeof(CacheArgs) == 64 && sizeof(WriteArgs) == 160 && sizeof(ReadArgs) == 80 && sizeof(MoveArgs) == 176,
              "the Rust twin has these sizes");

// RoPE lanes of a record.
template <class R, class Args>
DEVICE u32 rope_dims(const Args& args) {
  return R::ROPE ? args.rope_dims : 0;
}

// A record in memory.
struct RecordPlace {
  u8* page;
  u8* data;    // codes; RoPE lanes at rope_at
  u8* scales;
  u64 row;     // in the page

  static DEVICE RecordPlace of(const CacheArgs& args, u64 slot) {
    u64 page, row;
    if (args.page_shift >= 0) {
      page = slot >> args.page_shift;
      row = slot - (page << args.page_shift);
    } else if ((slot | args.page_block_size) >> 32 == 0) {
      page = static_cast<u32>(slot) / static_cast<u32>(args.page_block_size);
      row = static_cast<u32>(slot) - static_cast<u32>(page) * static_cast<u32>(args.page_block_size);
    } else {
      page = slot / args.page_block_size;
      row = slot - page * args.page_block_size;
    }
    u8* start = args.cache + page * args.page_stride;
    return {start, start + row * args.data_stride, start + args.scales_at + row * args.scale_stride, row};
  }
};
