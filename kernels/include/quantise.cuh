// Numbers to codes and back, bit for bit as src/codec does it on the CPU. Pure functions, IEEE arithmetic without flushing.
#pragma once
#include "codes.cuh"
#include "record.cuh"

constexpr u32 INFINITE = 0x7f800000u;  // magnitude bits of an infinity; NaNs lie above
constexpr u32 FP32_NAN = 0x7fc00000u;
constexpr float E4M3_LARGEST = 448.f, E2M1_LARGEST = 6.f;
constexpr float E4M3_FLOOR = 1e-4f;           // smallest maximum, and smallest ratio, that a scale is made from
constexpr float FP4_SMALLEST_SCALE = 1.f / 512;

// x / y as IEEE rounds it, given the rounded reciprocal of y, without a branch: the second correction starts from a
// quotient within one unit in the last place, which makes it right (Markstein). x, y and the quotient stay far from
// overflow; where the remainder is subnormal the quotient is smaller than anything a code can tell from zero.
DEVICE float divide(float x, float y, float reciprocal) {
  float quotient = __fmul_rn(x, reciprocal);
  quotient = __fmaf_rn(__fmaf_rn(-quotient, y, x), reciprocal, quotient);
  quotient = __fmaf_rn(__fmaf_rn(-quotient, y, x), reciprocal, quotient);
  return copysignf(quotient, x);
}

// The same for a quotient that becomes an E2M1 code under an E4M3 scale, whose sign is taken from x: one correction suffices.
// A tie between codes times such a scale is an FP32 number, so x / y is a tie exactly or by more than half a unit not.
DEVICE float divide_for_e2m1(float x, float y, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, y, x), reciprocal, quotient);
}

// The E2M1 value nearest to a magnitude, ties to even, beyond 6 the largest. Not for NaN.
DEVICE float e2m1_nearest(float x) {
  const float magnitude = fminf(fabsf(x), E2M1_LARGEST);
  // Adding 2^22 times the power of two below rounds to that power's half, which is the step of the codes there.
  const float power = __uint_as_float(max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u));
  constexpr float ROUNDING = 1 << 22;
  return __fmaf_rn(power, -ROUNDING, __fmaf_rn(power, ROUNDING, magnitude));
}

// E2M1 codes of eight values, nearest to the first ones' magnitudes, with the signs of the second ones.
DEVICE u32 e2m1_codes(const float (&magnitudes)[8], const float (&signs)[8]) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // As f16 times 2^-14 (0x0400): the code's three low bits are bits 9 to 11.
    const u32 pair = ptx::pack_f16(e2m1_nearest(magnitudes[i]), e2m1_nearest(magnitudes[i + 4]));
    const u32 halves = __byte_perm(__float_as_uint(signs[i]), __float_as_uint(signs[i + 4]), 0x7632) >> 3;
    const u32 both = ptx::multiply_f16(pair, 0x04000400u) | (halves & 0x10001000u);
    codes |= i < 3 ? both >> (9 - 4 * i) : both << 3;
  }
  return codes;
}

DEVICE float e4m3_value(u32 code) {
  return ptx::unpack_f16(ptx::e4m3_pair_to_f16(code)).x;
}

// A bf16 of FP32 bits: nearest, ties to even; a NaN keeps its upper bits and becomes quiet.
DEVICE u32 bf16_bits(u32 x) {
  if ((x & 0x7fffffffu) > INFINITE) return x >> 16 | 0x40;
  return (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

// FP32 bits of an f16's: exact; a NaN keeps its bits and becomes quiet.
DEVICE u32 f32_bits_of_f16(u32 half) {
  if ((half & 0x7fff) > 0x7c00) return (half & 0x8000) << 16 | FP32_NAN | (half & 0x3ff) << 13;
  return __float_as_uint(ptx::unpack_f16(half).x);
}

// A group's scale: as it is stored, and as values are brought under it.
struct Scale {
  u32 stored;        // the byte or the FP32 bits
  float factor;      // what values are multiplied by, or divided by
  float reciprocal;  // of the divisor
};

// `amax`: bits of the largest magnitude of the group, finite.
template <class R>
DEVICE Scale scale_of(u32 amax) {
  const float largest = __uint_as_float(amax);
  if constexpr (R::FP4) {
    float ratio = divide(largest, E2M1_LARGEST, 1.f / 6);
    if (R::RULE == FLOORED) ratio = fmaxf(ratio, FP4_SMALLEST_SCALE);
    const u32 code = ptx::f32_to_e4m3(ratio, 0.f) & 0xff;
    const float scale = e4m3_value(code);
    const float reciprocal = scale == 0.f ? 0.f : __frcp_rn(scale);
    return {code, R::RULE == FLOORED ? scale : reciprocal, reciprocal};
  } else {
    const float ratio = divide(fmaxf(largest, E4M3_FLOOR), E4M3_LARGEST, 1.f / 448);
    if constexpr (R::RULE == ARBITRARY) return {__float_as_uint(ratio), ratio, __frcp_rn(ratio)};
    const u32 bits = __float_as_uint(fmaxf(ratio, E4M3_FLOOR));
    const u32 exponent = (bits >> 23) + (bits << 9 != 0);  // of the power of two at or above
    return {R::RULE == UE8M0 ? exponent : exponent << 23, __uint_as_float((254 - exponent) << 23), 0.f};
  }
}

// The stored scale of a group with an infinite or NaN value.
template <class R>
DEVICE u32 non_finite_scale() {
  return R::FP4 ? 0x7f : R::RULE == UE8M0 ? 0xff : FP32_NAN;
}

template <class R>
DEVICE float under_scale(float x, const Scale& scale) {
  if (R::RULE == ARBITRARY) return divide(x, scale.factor, scale.reciprocal);
  if (R::RULE == FLOORED) return divide_for_e2m1(x, scale.factor, scale.reciprocal);
  return __fmul_rn(x, scale.factor);
}

// Codes of eight values, the first in the lowest bits: two words of E4M3, or one word of E2M1 in `x`.
template <class R>
DEVICE uint2 codes_of(const float (&v)[8], const Scale& scale) {
  if constexpr (R::FP4) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; i++) scaled[i] = under_scale<R>(v[i], scale);
    return make_uint2(e2m1_codes(scaled, v), 0);
  } else {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = ptx::f32_to_e4m3(under_scale<R>(v[2 * i], scale), under_scale<R>(v[2 * i + 1], scale));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
}

// The same in a group whose magnitudes reach `amax`, an infinity or a NaN: of E4M3 a NaN makes every code NaN, infinities
// alone become NaN codes and leave signed zeros beside them; of E2M1 every code is zero.
template <class R>
DEVICE uint2 non_finite_codes(const float (&v)[8], u32 amax) {
  u32 words[2] = {0, 0};
  if constexpr (!R::FP4) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 bits = __float_as_uint(v[i]);
      const bool nan = amax > INFINITE || (bits & 0x7fffffffu) == INFINITE;
      words[i / 4] |= (nan ? 0x7fu : bits >> 24 & 0x80) << i % 4 * 8;
    }
  }
  return make_uint2(words[0], words[1]);
}

// Eight values divided by a cache's global scale, as IEEE rounds (but for results that no code can tell from zero).
DEVICE void divide_by_global(float (&v)[8], u32 amax, float global) {
  constexpr float TOP = 1ull << 60;  // inside, no quotient or remainder leaves the normal range
  if (amax < __float_as_uint(TOP) && global < TOP && global > 1.f / TOP) {
    const float reciprocal = __frcp_rn(global);
#pragma unroll
    for (float& x : v) x = divide(x, global, reciprocal);
  } else {
#pragma unroll
    for (float& x : v) x = __fdiv_rn(x, global);
  }
}

// The largest magnitude of eight values, as bits: they order as the magnitudes do, NaNs above infinities.
DEVICE u32 largest_bits(const float (&v)[8]) {
  float largest = 0;
#pragma unroll
  for (float x : v) largest = ptx::max_or_nan(largest, fabsf(x));
  return __float_as_uint(largest);
}
