// A latent row in the registers of a warp, in units of eight values: lane l holds the quantised units l, l + 32, ..., and each
// of the last eight lanes one unit of the RoPE lanes.
#pragma once
#include "cache_args.cuh"
#include "quantise.cuh"

constexpr int UNIT = 8;
constexpr int ROPE_UNITS = 8, FIRST_ROPE_LANE = 32 - ROPE_UNITS;
constexpr int ROPE_PAIRS = ROPE_UNITS * UNIT / 2;

template <class R>
DEVICE constexpr int units_of_lane() { return (R::QUANTISED / UNIT + 31) / 32; }

template <class R>
DEVICE bool has_unit(int i, int lane) {
  return R::QUANTISED % (32 * UNIT) == 0 || i * 32 + lane < R::QUANTISED / UNIT;
}

template <class R>
struct Latent {
  static constexpr int UNITS = units_of_lane<R>();

  float v[UNITS][UNIT];
  u32 rope[UNIT];   // FP32 bits
  bool rope_is_bf16;

  // Those of the lane's unit i.
  DEVICE void take(const WriteArgs&, float (&values)[UNIT], int i, int) const {
#pragma unroll
    for (int e = 0; e < UNIT; e++) values[e] = v[i][e];
  }

  DEVICE void load(const WriteArgs& args, u64 row, int lane) {
    const u64 first = row * (R::QUANTISED + rope_dims<R>(args));
    const bool has_rope = rope_dims<R>(args) && lane >= FIRST_ROPE_LANE;
    // One branch for all units, so that every load is on its way before the first is waited for.
    if (args.latent_type == ELEMENT_BF16) load_all<ELEMENT_BF16>(args.latent, first, has_rope, lane);
    else if (args.latent_type == ELEMENT_F16) load_all<ELEMENT_F16>(args.latent, first, has_rope, lane);
    else load_all<ELEMENT_F32>(args.latent, first, has_rope, lane);
  }

  // Products and their sum are rounded one by one, the result once to bf16; a NaN becomes the quiet one. All lanes of the
  // warp call it.
  DEVICE void rotate(const WriteArgs& args, u64 position, int lane) {
    const int unit = lane & (ROPE_UNITS - 1);
    const float* cosines = args.cos_sin + position * (2 * ROPE_PAIRS);
    const float* sines = cosines + ROPE_PAIRS;
    u32 rotated[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
      const u32 across = __shfl_xor_sync(~0u, rope[i], ROPE_UNITS / 2);
      const float partner = __uint_as_float(args.half_split ? across : rope[i ^ 1]);
      const int pair = args.half_split ? (unit & (ROPE_UNITS / 2 - 1)) * UNIT + i : unit * (UNIT / 2) + i / 2;
      const bool second = args.half_split ? unit >= ROPE_UNITS / 2 : i & 1;
      const float own = __fmul_rn(__uint_as_float(rope[i]), cosines[pair]);
      const float other = __fmul_rn(partner, sines[pair]);
      const float sum = second ? __fadd_rn(other, own) : __fsub_rn(own, other);
      rotated[i] = sum == sum ? bf16_bits(__float_as_uint(sum)) << 16 : FP32_NAN;
    }
#pragma unroll
    for (int i = 0; i < UNIT; i++) rope[i] = rotated[i];
    rope_is_bf16 = true;
  }

  // Two bf16 a word.
  DEVICE uint4 rope_words() const {
    u32 words[UNIT / 2];
#pragma unroll
    for (int i = 0; i < UNIT / 2; i++) words[i] = rope_bits(rope[2 * i]) | rope_bits(rope[2 * i + 1]) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

 private:
  DEVICE u32 rope_bits(u32 bits) const { return rope_is_bf16 ? bits >> 16 : bf16_bits(bits); }

  template <int TYPE>
  DEVICE void load_all(const void* latent, u64 first, bool has_rope, int lane) {
    constexpr int WORDS = TYPE == ELEMENT_F32 ? UNIT : UNIT / 2;
    const u32* words = static_cast<const u32*>(latent) + first / UNIT * WORDS;
    u32 raw[UNITS + 1][WORDS];
#pragma unroll
    for (int i = 0; i <= UNITS; i++) {
      const bool is_rope = i == UNITS;
      const int unit = is_rope ? R::QUANTISED / UNIT + lane - FIRST_ROPE_LANE : i * 32 + lane;
      const bool present = is_rope ? has_rope : has_unit<R>(i, lane);
#pragma unroll
      for (int w = 0; w < WORDS; w += 4) {
        const uint4 four = present ? __ldg(reinterpret_cast<const uint4*>(words + unit * WORDS + w)) : make_uint4(0, 0, 0, 0);
        raw[i][w] = four.x, raw[i][w + 1] = four.y, raw[i][w + 2] = four.z, raw[i][w + 3] = four.w;
      }
    }
#pragma unroll
    for (int i = 0; i <= UNITS; i++) {
#pragma unroll
      for (int e = 0; e < UNIT; e++) {
        const u32 half = TYPE == ELEMENT_F32 ? 0 : e & 1 ? raw[i][e / 2 % WORDS] >> 16 : raw[i][e / 2 % WORDS] & 0xffff;
        const u32 bits = TYPE == ELEMENT_F32    ? raw[i][e % WORDS]
                         : TYPE == ELEMENT_BF16 ? half << 16
                         : i == UNITS           ? f32_bits_of_f16(half)
                                                : __float_as_uint(ptx::unpack_f16(half).x);
        if (i == UNITS) rope[e] = bits;
        else v[i][e] = __uint_as_float(bits);
      }
    }
    rope_is_bf16 = TYPE == ELEMENT_BF16;
  }
};
