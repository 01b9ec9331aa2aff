// From stored codes and scales to numbers: exact f16 operands of the matrix instructions.
//
// An E4M3 code is an f16. An E2M1 code times its E4M3 scale has at most six significant bits and is a multiple of 2^-10
// up to 2688: it is formed as f16 times 2^-6, and E2M1_UNIT stands outside the products.
#pragma once
#include "ptx.cuh"

constexpr float E2M1_UNIT = 64.f;

// A UE8M0 scale: 2^(b - 127), also for b = 0; 255 stands for NaN.
DEVICE float ue8m0_value(u32 exponent) {
  return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : exponent << 23);
}

// Eight E2M1 codes as f16 times 2^-6: codes 0 and 2, 1 and 3, 4 and 6, 5 and 7. A code's bits are those of an E4M3 code whose
// exponents start lower, subnormal numbers included.
DEVICE void e2m1_to_f16(u32 codes, u32 (&pairs)[4]) {
  const u32 even = (codes << 2 & 0x1c1c1c1cu) | (codes << 4 & 0x80808080u);
  const u32 odd = (codes >> 2 & 0x1c1c1c1cu) | (codes & 0x80808080u);
  ptx::e4m3_to_f16(even, pairs[0], pairs[2]);
  ptx::e4m3_to_f16(odd, pairs[1], pairs[3]);
}
