// From records of one kind to records of another, whose values are quantised anew. RoPE lanes keep their bits.
//
// Contract: MoveArgs. Slot s goes to slot s; slots at or past num_slots, and every byte between records, become zero.
// Geometry: one warp = one slot of the new cache, MOVE_SLOTS warps a block.
#pragma once
#include "read.cuh"
#include "write.cuh"

// A record in the registers of a warp, as it is stored: of every unit of eight values that the writer wants from a lane, the
// codes and the scale that they stand under. Nothing waits for the loads before values are asked for.
template <class R>
struct StoredRecord {
  static constexpr int UNITS = units_of_lane<R>(), WORDS = R::FP4 ? 1 : 2;

  u32 rope_word;

  DEVICE void load(const MoveArgs& args, const RecordPlace& place, int lane) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      const int unit = i * 32 + lane, group = unit * UNIT / R::GROUP;
      if (!has_unit<R>(i, lane)) continue;
      if constexpr (R::FP4) {
        codes[i][0] = __ldg(reinterpret_cast<const u32*>(place.data) + unit);
      } else {
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(place.data) + unit);
        codes[i][0] = both.x, codes[i][1] = both.y;
      }
      scales[i] = R::SCALE == 4 ? __ldg(reinterpret_cast<const u32*>(place.scales) + group) : __ldg(place.scales + group);
    }
    if (rope_dims<R>(args)) rope_word = __ldg(reinterpret_cast<const u32*>(place.data + args.from.rope_at) + lane);
  }

  // The values of the next unit: the others move up, so that no register is found by a number. Zeros where the lane has none.
  DEVICE void take(const MoveArgs& args, float (&v)[UNIT], int, int) {
    const float scale = scale_value<R>(scales[0]);
    const float4 low = values_of<R>(codes[0][0], scale, args.from_global_scale);
    const float4 high = values_of<R>(R::FP4 ? codes[0][0] >> 16 : codes[0][WORDS - 1], scale, args.from_global_scale);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
#pragma unroll
    for (int i = 0; i + 1 < UNITS; i++) {
      scales[i] = scales[i + 1];
#pragma unroll
      for (int w = 0; w < WORDS; w++) codes[i][w] = codes[i + 1][w];
    }
  }

 private:
  u32 codes[UNITS][WORDS], scales[UNITS];
};

template <class From, class To>
DEVICE void convert_cache(const MoveArgs& args) {
  static_assert(From::QUANTISED == To::QUANTISED && From::ROPE == To::ROPE, "the same dimensions");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 slot = static_cast<u64>(blockIdx.x) * MOVE_SLOTS + warp;
  if (slot >= args.to.num_slots) return;
  const RecordPlace to = RecordPlace::of(args.to, slot);
  if (slot < args.num_slots) {
    StoredRecord<From> record = {};
    record.load(args, RecordPlace::of(args.from, slot), lane);
    store_record<To>(args, record, record.rope_word, to, lane);
  } else {
    zero_record(args.to, to, To::CODE_BYTES, To::SCALE_BYTES, rope_dims<To>(args) * 2, lane);
  }
  zero_gaps(args.to, to, args.row_gap, args.page_gap_at, lane);
}

#define CONVERT_KERNEL(NAME, FROM, TO)                                                                            \
  extern "C" __global__ void __launch_bounds__(32 * MOVE_SLOTS) NAME(const __grid_constant__ MoveArgs args) { \
    convert_cache<FROM, TO>(args);                                                                                \
  }
