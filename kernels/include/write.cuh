// The writer of packed caches. One warp = one latent row.
//
// Contract: WriteArgs (cache_args.cuh). With slots the row goes to its slot, if that exists, its position exists and no lower
// row names the slot; nothing else is touched. Without slots row r goes to slot r, slots without a row become zero, and
// so does every byte between records.
// Geometry: a row or slot per warp, WRITE_ROWS warps a block; grid = ceil(rows or slots / WRITE_ROWS).
#pragma once
#include "claim.cuh"
#include "latent.cuh"
#include "zero.cuh"

template <class R>
DEVICE void store_scale(u8* scales, int group, u32 stored) {
  if (R::SCALE == 4) reinterpret_cast<u32*>(scales)[group] = stored;
  else scales[group] = stored;
}

// Codes and scales. `source.take(args, v, i, lane)` gives the values of the lane's unit i, asked for in turn and once.
template <class R, class Args, class Source>
DEVICE void store_values(const Args& args, Source& source, const RecordPlace& place, int lane) {
  constexpr int UNITS = units_of_lane<R>(), LANES = R::GROUP / UNIT;  // lanes of a group
  float v[UNITS][UNIT];
#pragma unroll
  for (int i = 0; i < UNITS; i++) source.take(args, v[i], i, lane);
  u32 amax[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    if (R::RULE == NVFP4_GLOBAL && args.global_scale != 1.f) divide_by_global(v[i], largest_bits(v[i]), args.global_scale);
    amax[i] = largest_bits(v[i]);
  }
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) amax[i] = max(amax[i], __shfl_xor_sync(~0u, amax[i], step));
  }
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    if (!has_unit<R>(i, lane)) continue;
    const int unit = i * 32 + lane;
    u32 stored;
    uint2 codes;
    if (amax[i] < INFINITE) {
      const Scale scale = scale_of<R>(amax[i]);
      stored = scale.stored;
      codes = codes_of<R>(v[i], scale);
    } else {
      stored = non_finite_scale<R>();
      codes = non_finite_codes<R>(v[i], amax[i]);
    }
    if (R::FP4) reinterpret_cast<u32*>(place.data)[unit] = codes.x;
    else reinterpret_cast<uint2*>(place.data)[unit] = codes;
    if (lane % LANES == 0) store_scale<R>(place.scales, unit / LANES, stored);
  }
  if (R::PAD && lane < R::PAD) place.scales[R::SCALES * R::SCALE + lane] = 0;
}

// A whole record; `rope_word`: RoPE lanes 2 lane and 2 lane + 1.
template <class R, class Args, class Source>
DEVICE void store_record(const Args& args, Source& source, u32 rope_word, const RecordPlace& place, int lane) {
  if (rope_dims<R>(args)) reinterpret_cast<u32*>(place.data + args.to.rope_at)[lane] = rope_word;
  store_values<R>(args, source, place, lane);
}

template <class R>
DEVICE void write_cache(const WriteArgs& args) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 first_row = blockIdx.x * WRITE_ROWS, row = first_row + warp;
  const bool present = row < args.num_rows;
  Latent<R> latent = {};
  if (present) latent.load(args, row, lane);
  i64 slot = -1;
  if (!args.slots) slot = row < args.to.num_slots ? static_cast<i64>(row) : -1;
  else if (present) slot = slot_of(args, row);
  u64 position = 0;
  if (R::ROPE && args.cos_sin && present) {
    position = args.wide_positions ? __ldg(static_cast<const u64*>(args.positions) + row)
                                   : static_cast<i64>(__ldg(static_cast<const int*>(args.positions) + row));
  }
  if (args.slots && !args.claims && lower_row_has(args, slot, first_row, warp, lane)) return;
  if (slot < 0) return;
  if (args.slots && args.claims && !holds_claim(args, row, slot)) return;
  if (R::ROPE && args.cos_sin && present) {
    if (position >= args.max_position) return;
    latent.rotate(args, position, lane);
  }
  const RecordPlace place = RecordPlace::of(args.to, slot);
  if (present) {
    store_values<R>(args, latent, place, lane);
    if (rope_dims<R>(args) && lane >= FIRST_ROPE_LANE)
      reinterpret_cast<uint4*>(place.data + args.to.rope_at)[lane - FIRST_ROPE_LANE] = latent.rope_words();
  } else {
    zero_record(args.to, place, R::CODE_BYTES, R::SCALE_BYTES, rope_dims<R>(args) * 2, lane);
  }
  if (!args.slots) zero_gaps(args.to, place, args.row_gap, args.page_gap_at, lane);
}
