// A latent row in the registers of a warp, as it lies in memory: lane l holds the units l, l + 32, ... of eight quantised
// values, and the RoPE lanes 2 l and 2 l + 1. Nothing waits for the loads before values and RoPE lanes are asked for.
#pragma once
#include "cache_args.cuh"
#include "quantise.cuh"

constexpr int UNIT = 8;
constexpr int ROPE_UNIT = 2, ROPE_PAIRS = 32;

template <class R>
DEVICE constexpr int units_of_lane() { return (R::QUANTISED / UNIT + 31) / 32; }

template <class R>
DEVICE bool has_unit(int i, int lane) {
  return R::QUANTISED % (32 * UNIT) == 0 || i * 32 + lane < R::QUANTISED / UNIT;
}

// Cosines and sines of a lane's RoPE lanes.
struct Turn {
  float cosine[ROPE_UNIT], sine[ROPE_UNIT];

  DEVICE void load(const WriteArgs& args, u64 position, int lane) {
    const float* cosines = args.cos_sin + position * (2 * ROPE_PAIRS);
#pragma unroll
    for (int i = 0; i < ROPE_UNIT; i++) {
      const int pair = args.half_split ? lane % (ROPE_PAIRS / ROPE_UNIT) * ROPE_UNIT + i : lane;
      cosine[i] = __ldg(cosines + pair);
      sine[i] = __ldg(cosines + ROPE_PAIRS + pair);
    }
  }
};

template <class R>
struct Latent {
  static constexpr int UNITS = units_of_lane<R>();

  DEVICE void load(const WriteArgs& args, u64 row, int lane) {
    const u64 first = row * (R::QUANTISED + rope_dims<R>(args));
    type = args.latent_type;
    from = static_cast<const u8*>(args.latent) + (first + lane * UNIT) * (type == ELEMENT_F32 ? 4 : 2);
    if (type == ELEMENT_F32) {
      const float* lanes = static_cast<const float*>(args.latent) + first + R::QUANTISED;
      if (rope_dims<R>(args)) rope = __ldg(reinterpret_cast<const uint2*>(lanes) + lane);
    } else {
#pragma unroll
      for (int i = 0; i < UNITS; i++)
        if (has_unit<R>(i, lane)) units[i] = __ldg(reinterpret_cast<const uint4*>(from) + i * 32);
      const u16* lanes = static_cast<const u16*>(args.latent) + first + R::QUANTISED;
      if (rope_dims<R>(args)) rope.x = __ldg(reinterpret_cast<const u32*>(lanes) + lane);
    }
  }

  // The values of unit `i` of the lane; called in order, once each.
  DEVICE void take(const WriteArgs&, float (&v)[UNIT], int i, int lane) {
    if (type == ELEMENT_F32) load_f32(v, i, lane);
    else if (type == ELEMENT_BF16) unpack<ELEMENT_BF16>(v);
    else unpack<ELEMENT_F16>(v);
#pragma unroll
    for (int next = 1; next < UNITS; next++) units[next - 1] = units[next];
  }

  // The lane's RoPE lanes as two bf16.
  DEVICE u32 rope_word() const {
    if (type == ELEMENT_BF16) return rope.x;
    return bf16_bits(rope_bits(0)) | bf16_bits(rope_bits(1)) << 16;
  }

  // The same, turned. Products and their sum are rounded one by one, the result once to bf16; a NaN becomes the quiet one.
  // All lanes of the warp call it.
  DEVICE u32 rotated_rope_word(const Turn& turn, bool half_split, int lane) const {
    u32 word = 0;
    const u32 bits[ROPE_UNIT] = {rope_bits(0), rope_bits(1)};
#pragma unroll
    for (int i = 0; i < ROPE_UNIT; i++) {
      const u32 across = __shfl_xor_sync(~0u, bits[i], ROPE_PAIRS / ROPE_UNIT);
      const float partner = __uint_as_float(half_split ? across : bits[i ^ 1]);
      const bool second = half_split ? lane >= ROPE_PAIRS / ROPE_UNIT : i;
      const float own = __fmul_rn(__uint_as_float(bits[i]), turn.cosine[i]);
      const float other = __fmul_rn(partner, turn.sine[i]);
      const float sum = second ? __fadd_rn(other, own) : __fsub_rn(own, other);
      word |= (sum == sum ? bf16_bits(__float_as_uint(sum)) : FP32_NAN >> 16) << 16 * i;
    }
    return word;
  }

 private:
  int type;
  uint4 units[UNITS];
  uint2 rope;
  const u8* from;

  // FP32 bits.
  DEVICE u32 rope_bits(int i) const {
    if (type == ELEMENT_F32) return i ? rope.y : rope.x;
    const u32 half = i ? rope.x >> 16 : rope.x & 0xffff;
    return type == ELEMENT_BF16 ? half << 16 : f32_bits_of_f16(half);
  }

  template <int TYPE>
  DEVICE void unpack(float (&v)[UNIT]) const {
    const u32 words[UNIT / 2] = {units[0].x, units[0].y, units[0].z, units[0].w};
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
      const u32 half = e & 1 ? words[e / 2] >> 16 : words[e / 2] & 0xffff;
      v[e] = TYPE == ELEMENT_BF16 ? __uint_as_float(half << 16) : ptx::unpack_f16(half).x;
    }
  }

  DEVICE void load_f32(float (&v)[UNIT], int i, int lane) const {
    const float4* unit = reinterpret_cast<const float4*>(from) + i * 64;
    float4 low = {}, high = {};
    if (has_unit<R>(i, lane)) low = __ldg(unit), high = __ldg(unit + 1);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  }
};
