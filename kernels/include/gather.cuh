// Gathering rows: each PV warp brings ROWS_PER_WARP rows of every chunk to shared memory, by one bulk copy a row.
// Lane r < ROWS_PER_WARP looks after row r of the warp. Indices are loaded one chunk ahead of the copies that need them.
#pragma once
#include "args.cuh"
#include "tile.cuh"

__device__ __align__(128) u8 zero_row[1152];  // what an absent candidate reads; never written

// Where a lane's row of a chunk lies in global memory.
struct RowSource {
  const u8* data;
  u32 to_footer;  // bytes from data to footer
  bool present;
};

template <class T>
struct Gather {
  using Format = typename T::Format;

  const DecodeArgs& args;
  const Work& work;
  u32 shared;
  int warp, lane;  // among the PV warps

  DEVICE bool is_extra(int chunk) const { return Format::DUAL && work.first_chunk + chunk >= work.main_chunks; }

  // The slot of this lane's row in a chunk of this CTA, checked against the cache; -1: absent. Arguments of the two caches
  // are chosen one by one: a choice of the struct would read them through an address.
  DEVICE int slot(int chunk) const {
    const bool extra = is_extra(chunk);
    const int length = extra ? work.extra_length : work.length;
    const int first = work.first_chunk + chunk - (extra ? work.main_chunks : 0);
    const int position = first * T::CHUNK + warp * T::ROWS_PER_WARP + lane;
    if (lane >= T::ROWS_PER_WARP || chunk >= work.chunks || position >= length) return -1;
    const int* indices = extra ? args.extra.indices : args.main.indices;
    const i64 stride = extra ? args.extra.indices_stride : args.main.indices_stride;
    const int index = __ldg(indices + work.token * stride + position);
    return static_cast<u32>(index) < (extra ? args.extra.num_slots : args.main.num_slots) ? index : -1;
  }

  // Turns a slot into addresses: apart from issue(), so that it runs while a stage is still in use.
  DEVICE RowSource source(int chunk, int slot) const {
    const bool extra = is_extra(chunk);
    const int page_shift = extra ? args.extra.page_shift : args.main.page_shift;
    const u32 page_block_size = extra ? args.extra.page_block_size : args.main.page_block_size;
    const u8* cache = extra ? args.extra.cache : args.main.cache;
    const i64 page_stride = extra ? args.extra.page_stride : args.main.page_stride;
    const u32 row_stride = extra ? args.extra.row_stride : args.main.row_stride;
    const u32 page = page_shift >= 0 ? static_cast<u32>(slot) >> page_shift : slot / page_block_size;
    const u32 row = slot - page * page_block_size;
    const u8* page_start = cache + static_cast<i64>(page) * page_stride;
    RowSource source;
    source.present = slot >= 0;
    source.data = source.present ? page_start + static_cast<u64>(row) * (Format::FOOTER ? Format::FOOTER_AT : row_stride) : zero_row;
    // A page of footer rows is shorter than 4 GiB, or its layout is refused.
    const u32 to_footer = page_block_size * Format::FOOTER_AT - row * (Format::FOOTER_AT - Format::FOOTER);
    source.to_footer = source.present ? to_footer : 0;
    return source;
  }

  // Starts the copies of a chunk into a stage.
  DEVICE void issue(int stage, const RowSource& source) const {
    const u32 mask = __ballot_sync(~0u, source.present);
    const u32 full = T::full(shared, stage);
    if (lane == 0) {
      ptx::store_u8(shared + T::PRESENT_AT + stage * T::PV_WARPS + warp, mask);
      ptx::mbarrier_arrive_expect(full, T::WARP_BULK_BYTES);
    }
    __syncwarp();
    const u32 first = shared + T::ROWS_AT + (stage * T::CHUNK + warp * T::ROWS_PER_WARP) * Format::ROW;
#pragma unroll
    for (int r = 0; r < T::ROWS_PER_WARP; r++) {
      // Straight-line code with one elected lane: a divergent loop over lanes costs more than ten times as much.
      const u32 to = first + r * Format::ROW;
      ptx::bulk_copy_elected(to, broadcast(source.data, r), Format::COPY, full);
      if (Format::FOOTER == 16) ptx::bulk_copy_elected(to + Format::SCALES, broadcast(source.data + source.to_footer, r), 16, full);
    }
    if (Format::FOOTER == 8 && lane < T::ROWS_PER_WARP) {
      ptx::async_copy_8(first + lane * Format::ROW + Format::SCALES, source.data + source.to_footer, source.present);
      ptx::async_copies_arrive(full);
    }
  }

  static DEVICE u64 broadcast(const u8* pointer, int from_lane) {
    const u64 address = reinterpret_cast<u64>(pointer);
    const u32 low = __shfl_sync(~0u, static_cast<u32>(address), from_lane);
    const u32 high = __shfl_sync(~0u, static_cast<u32>(address >> 32), from_lane);
    return static_cast<u64>(high) << 32 | low;
  }
};
