// The writer of packed caches. One warp = one latent row.
//
// Contract: WriteArgs (cache_args.cuh). With slots the row goes to its slot, if that exists, its position exists and no lower
// row names the slot; nothing else is touched. Without slots row r goes to slot r, slots without a row become zero, and
// so does every byte between records.
// Geometry: a row or slot per warp, up to WRITE_ROWS warps a block, as the launch says; grid = ceil(rows or slots / warps).
#pragma once
#include "latent.cuh"
#include "winners.cuh"
#include "zero.cuh"

template <class R>
DEVICE void store_scale(u8* scales, int group, u32 stored) {
  if (R::SCALE == 4) reinterpret_cast<u32*>(scales)[group] = stored;
  else scales[group] = stored;
}

// `source.take(args, v, i, lane)`: the values of the lane's unit i; `rope_word`: its two RoPE lanes. A loop, because
// instructions that a kernel has not executed yet come slowly.
template <class R, class Args, class Source>
DEVICE void store_record(const Args& args, Source& source, u32 rope_word, const RecordPlace& place, int lane) {
  constexpr int LANES = R::GROUP / UNIT;  // of a group
  if (rope_dims<R>(args)) reinterpret_cast<u32*>(place.data + args.to.rope_at)[lane] = rope_word;
  if (R::PAD && lane < R::PAD) place.scales[R::SCALES * R::SCALE + lane] = 0;
#pragma unroll 1
  for (int i = 0; i < units_of_lane<R>(); i++) {
    float v[UNIT];
    source.take(args, v, i, lane);
    if (R::RULE == NVFP4_GLOBAL && args.global_scale != 1.f) divide_by_global(v, largest_bits(v), args.global_scale);
    u32 amax = largest_bits(v);
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    if (!has_unit<R>(i, lane)) continue;
    const int unit = i * 32 + lane;
    u32 stored;
    uint2 codes;
    if (amax < INFINITE) {
      const Scale scale = scale_of<R>(amax);
      stored = scale.stored;
      codes = codes_of<R>(v, scale);
    } else {
      stored = non_finite_scale<R>();
      codes = non_finite_codes<R>(v, amax);
    }
    if (R::FP4) reinterpret_cast<u32*>(place.data)[unit] = codes.x;
    else reinterpret_cast<uint2*>(place.data)[unit] = codes;
    if (lane % LANES == 0) store_scale<R>(place.scales, unit / LANES, stored);
  }
}

template <class R>
DEVICE void write_cache(const WriteArgs& args) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 row = blockIdx.x * (blockDim.x >> 5) + warp;
  const bool present = row < args.num_rows, rotates = R::ROPE && args.cos_sin;
  // Everything whose address is known is on its way before anything is waited for.
  RowNumber slot_number, position_number;
  if (args.slots && present) slot_number.load(args.slots, args.wide_slots, row);
  if (rotates && present) position_number.load(args.positions, args.wide_positions, row);
  Latent<R> latent;
  if (present) latent.load(args, row, lane);
  const bool searches = args.slots && !args.winners;
  LowerSlots lower;
  if (searches) lower.load(args, present ? row : 0, lane);

  i64 slot = row < args.to.num_slots ? static_cast<i64>(row) : -1;
  if (args.slots) slot = present ? existing(args, slot_number) : -1;
  u64 position = ~0ull;
  if (rotates && present) position = position_number.value(args.wide_positions);
  const bool turns = position < args.max_position;
  Turn turn;
  if (turns) turn.load(args, position, lane);
  if (args.winners) ptx::wait_for_previous_grid();  // even for a row without a slot: no block ends before the kernel before
  if (slot < 0) return;
  if (searches && lower.have(args, slot_number, row, lane)) return;
  if (args.winners && !wins(args, row)) return;
  const RecordPlace place = RecordPlace::of(args.to, slot);
  if (present) {
    if (rotates && !turns) return;
    const u32 rope_word = turns ? latent.rotated_rope_word(turn, args.half_split, lane) : latent.rope_word();
    store_record<R>(args, latent, rope_word, place, lane);
  } else {
    zero_record(args.to, place, R::CODE_BYTES, R::SCALE_BYTES, rope_dims<R>(args) * 2, lane);
  }
  if (!args.slots) zero_gaps(args.to, place, args.row_gap, args.page_gap_at, lane);
}
