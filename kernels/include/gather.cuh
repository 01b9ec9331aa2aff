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
  u32 present;    // bit r: row r of the warp is there
};

template <class T>
struct Gather {
  using Format = typename T::Format;

  const DecodeArgs& args;
  const Work& work;
  u32 shared;
  int warp, lane;      // among the PV warps
  const int* next;     // this lane's index in the next chunk
  int left;            // candidates from there to the end of its cache's list; at most 0: none
  int before_extra;    // chunks until the secondary cache begins

  DEVICE Gather(const DecodeArgs& args_, const Work& work_, u32 shared_, int warp_, int lane_)
      : args(args_), work(work_), shared(shared_), warp(warp_), lane(lane_) {
    before_extra = work.main_chunks - work.first_chunk;
    if (!Format::DUAL || before_extra > 0) {
      start(args.main.indices + work.token * args.main.indices_stride, work.first_chunk, work.length);
    } else {
      start_extra();
    }
  }

  // Begins at a chunk of a list of `length` candidates.
  DEVICE void start(const int* list, int chunk, int length) {
    const int position = chunk * T::CHUNK + warp * T::ROWS_PER_WARP + lane;
    next = list + position;
    left = lane < T::ROWS_PER_WARP ? length - position : 0;
  }
  DEVICE void start_extra() {
    const int chunk = max(work.first_chunk - work.main_chunks, 0);
    start(args.extra.indices + work.token * args.extra.indices_stride, chunk, work.extra_length);
  }

  DEVICE bool is_extra(int chunk) const { return Format::DUAL && work.first_chunk + chunk >= work.main_chunks; }

  // The slot of this lane's row in the chunk after the one before; negative: none. Chunks past the CTA's last are asked for
  // too, and never used. Nothing here may depend on the loaded value: whoever tests it waits for memory.
  DEVICE int next_slot() {
    if (Format::DUAL && before_extra-- == 0) start_extra();
    const int slot = ptx::load_or(next, left > 0, -1);
    next += T::CHUNK;
    left -= T::CHUNK;
    return slot;
  }

  // Checks a slot against its cache and turns it into addresses: apart from issue(), so that it runs while a stage is
  // still in use.
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
    const bool present = static_cast<u32>(slot) < (extra ? args.extra.num_slots : args.main.num_slots);
    RowSource source;
    source.data = present ? page_start + static_cast<u64>(row) * (Format::FOOTER ? Format::FOOTER_AT : row_stride) : zero_row;
    // A page of footer rows is shorter than 4 GiB, or its layout is refused.
    const u32 to_footer = page_block_size * Format::FOOTER_AT - row * (Format::FOOTER_AT - Format::FOOTER);
    source.to_footer = present ? to_footer : 0;
    source.present = __ballot_sync(~0u, present);
    return source;
  }

  // Starts the copies of a chunk into a stage.
  DEVICE void issue(int stage, const RowSource& source) const {
    const u32 full = T::full(shared, stage);
    if (lane == 0) {
      ptx::store_u8(shared + T::PRESENT_AT + stage * T::PV_WARPS + warp, source.present);
      ptx::mbarrier_arrive_expect(full, T::WARP_BULK_BYTES);
    }
    __syncwarp();
    const u32 first = shared + T::ROWS_AT + (stage * T::CHUNK + warp * T::ROWS_PER_WARP) * Format::ROW;
#pragma unroll
    for (int r = 0; r < T::ROWS_PER_WARP; r++) {
      // Straight-line code with one elected lane: a divergent loop over lanes costs more than ten times as much.
      const u32 to = first + r * Format::ROW;
      ptx::bulk_copy_elected(to, broadcast(source.data, r), Format::COPY, full);
      if (Format::FOOTER >= 16) {
        ptx::bulk_copy_elected(to + Format::SCALES, broadcast(source.data + source.to_footer, r), Format::FOOTER, full);
      }
    }
    if (Format::FOOTER == 8 && lane < T::ROWS_PER_WARP) {
      ptx::async_copy_8(first + lane * Format::ROW + Format::SCALES, source.data + source.to_footer,
                        source.present >> lane & 1);
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
