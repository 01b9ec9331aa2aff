// From stored codes and scales to numbers: exact f16 operands of the matrix instructions.
//
// An E4M3 code is an f16. An E2M1 code times its E4M3 scale has at most six significant bits and is a multiple of 2^-10
// up to 2688: it is formed as f16 times 2^-7, and E2M1_UNIT stands outside the products.
#pragma once
#include "ptx.cuh"

constexpr float E2M1_UNIT = 128.f;

// A UE8M0 scale: 2^(b - 127), also for b = 0; 255 stands for NaN.
DEVICE float ue8m0_value(u32 exponent) {
  return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : exponent << 23);
}

// Two E4M3 scales as f16 times 2^7: what e2m1_pair must be multiplied by.
DEVICE u32 e2m1_scales(u32 codes) { return ptx::multiply_f16(ptx::e4m3_pair_to_f16(codes), 0x58005800u); }

// E2M1 code `i` of each half of a word, as f16 times 2^-14: the code's three low bits are the low bits of an f16 exponent
// and its highest mantissa bit, subnormal numbers included.
DEVICE u32 e2m1_pair(u32 word, int i) {
  const u32 magnitudes = i < 3 ? word << (9 - 4 * i) : word >> 3;
  return (magnitudes & 0x0e000e00u) | (word << (12 - 4 * i) & 0x80008000u);
}

// Codes of 64 dimensions of 8 candidates, in the order of ldmatrix: a thread holds dimensions of one candidate.
template <bool FP4>
struct KeyCodes {  // E4M3: four dimensions of each 16
  u32 words[4];

  // `at`: this lane's 16-byte row of the block.
  DEVICE void load(u32 at, u32) { ptx::ldmatrix_x4(words, at); }

  // B fragments of 16 dimensions.
  DEVICE void fragment(int step, u32& b0, u32& b1) const { ptx::e4m3_to_f16(words[step], b0, b1); }
};

template <>
struct KeyCodes<true> {  // E2M1: eight dimensions of each 32, even and odd steps share them
  u32 words[2], scales[2];

  // `scales_at`: the four scales of this thread's candidate.
  DEVICE void load(u32 at, u32 scales_at) {
    ptx::ldmatrix_x2(words, at);
    const bool upper = threadIdx.x & 2;  // the upper 16 of 32 dimensions
    const u32 both = e2m1_scales(__byte_perm(ptx::load_u32(scales_at), 0, upper ? 0x31 : 0x20));
    scales[0] = __byte_perm(both, 0, 0x1010), scales[1] = __byte_perm(both, 0, 0x3232);
  }

  DEVICE void fragment(int step, u32& b0, u32& b1) const {
    const int word = step >> 1, half = step & 1;
    b0 = ptx::multiply_f16(e2m1_pair(words[word], 2 * half), scales[word]);
    b1 = ptx::multiply_f16(e2m1_pair(words[word], 2 * half + 1), scales[word]);
  }
};
