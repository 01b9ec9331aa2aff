// The reader of packed caches. One warp = one slot; a lane takes four values at a time, so that reads and writes of a warp
// are dense.
//
// Contract: ReadArgs (cache_args.cuh): every slot becomes float32 [num_slots, d_qk].
// Geometry: READ_SLOTS warps a block; grid = ceil(num_slots / READ_SLOTS).
#pragma once
#include "cache_args.cuh"
#include "quantise.cuh"

constexpr int READ_SLOTS = 8;

template <class R>
DEVICE float scale_value(u32 stored) {
  return R::RULE == UE8M0 ? ue8m0_value(stored) : R::SCALE == 4 ? __uint_as_float(stored) : e4m3_value(stored);
}

template <class R>
DEVICE float4 values_of(u32 codes, float scale, float global_scale) {
  float v[4];
  if constexpr (R::FP4) {
    u32 pairs[4];  // of four codes the first two; the product with the scale is exact
    e2m1_to_f16(codes, pairs);
    const float2 even = ptx::unpack_f16(pairs[0]), odd = ptx::unpack_f16(pairs[1]);
    v[0] = even.x, v[1] = odd.x, v[2] = even.y, v[3] = odd.y;
    scale = __fmul_rn(scale, E2M1_UNIT);
  } else {
    u32 low, high;
    ptx::e4m3_to_f16(codes, low, high);
    const float2 a = ptx::unpack_f16(low), b = ptx::unpack_f16(high);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
  }
#pragma unroll
  for (float& x : v) x = __fmul_rn(x, scale);
  if constexpr (R::RULE == NVFP4_GLOBAL) {
#pragma unroll
    for (float& x : v) x = __fmul_rn(x, global_scale);
  }
  return make_float4(v[0], v[1], v[2], v[3]);
}

template <class R>
DEVICE void read_cache(const ReadArgs& args) {
  constexpr int FOURS = R::QUANTISED / 4, STEPS = (FOURS + 31) / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 slot = static_cast<u64>(blockIdx.x) * READ_SLOTS + warp;
  if (slot >= args.from.num_slots) return;
  const RecordPlace place = RecordPlace::of(args.from, slot);
  u32 codes[STEPS], scales[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int four = min(i * 32 + lane, FOURS - 1), group = four * 4 / R::GROUP;
    codes[i] = R::FP4 ? reinterpret_cast<const u16*>(place.data)[four] : reinterpret_cast<const u32*>(place.data)[four];
    scales[i] = R::SCALE == 4 ? reinterpret_cast<const u32*>(place.scales)[group] : place.scales[group];
  }
  uint2 rope = make_uint2(0, 0);
  const bool has_rope = lane * 4 < rope_dims<R>(args);
  if (has_rope) rope = reinterpret_cast<const uint2*>(place.data + args.from.rope_at)[lane];
  float4* out = reinterpret_cast<float4*>(args.out + slot * (R::QUANTISED + rope_dims<R>(args)));
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int four = i * 32 + lane;
    if (four < FOURS) out[four] = values_of<R>(codes[i], scale_value<R>(scales[i]), args.global_scale);
  }
  if (has_rope) {
    const float2 a = ptx::unpack_bf16(rope.x), b = ptx::unpack_bf16(rope.y);
    out[FOURS + lane] = make_float4(a.x, a.y, b.x, b.y);
  }
}
