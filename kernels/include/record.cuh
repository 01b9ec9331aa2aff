// Packed records: what their codes and scales are. Where they lie is a matter of CacheArgs. src/cuda/caches.rs chooses among
// the records by these numbers, and a test compares them with the family table.
#pragma once

enum ScaleRule {
  UE8M0,         // E4M3 codes under a power of two, stored as its biased exponent
  POW2_FP32,     // the same power of two, stored as FP32
  ARBITRARY,     // E4M3 codes under amax / 448, stored as FP32
  FLOORED,       // E2M1 codes under E4M3 of amax / 6, at least 2^-9
  NVFP4,         // E2M1 codes under E4M3 of amax / 6, possibly zero
  NVFP4_GLOBAL,  // the same of values that were divided by a factor of the cache
};

// PAD: zero bytes after the scales. ROPE: there may be BF16 RoPE lanes, 64 or (glm53_nope) none.
template <int QUANTISED_, int GROUP_, ScaleRule RULE_, bool ROPE_ = true, int PAD_ = 0>
struct Record {
  static constexpr int QUANTISED = QUANTISED_, GROUP = GROUP_, PAD = PAD_;
  static constexpr bool ROPE = ROPE_;
  static constexpr ScaleRule RULE = RULE_;
  static constexpr bool FP4 = RULE == FLOORED || RULE == NVFP4 || RULE == NVFP4_GLOBAL;
  static constexpr int SCALE = RULE == POW2_FP32 || RULE == ARBITRARY ? 4 : 1;
  static constexpr int SCALES = QUANTISED / GROUP;
  static constexpr int CODE_BYTES = FP4 ? QUANTISED / 2 : QUANTISED;
  static constexpr int SCALE_BYTES = SCALES * SCALE + PAD;
};

// Every kind there is.
using Dsv4 = Record<448, 64, UE8M0, true, 1>;
using Dsv3_2 = Record<512, 128, POW2_FP32>;
using Glm = Record<512, 128, ARBITRARY>;  // of glm_nsa and, without RoPE lanes, glm53_nope
using Dots3Swa = Record<1024, 128, UE8M0>;
using Dsv4_1 = Record<512, 32, UE8M0, false>;
using Dsv4Nvfp4 = Record<448, 16, NVFP4, true, 4>;
using GlmNvfp4 = Record<512, 16, NVFP4_GLOBAL>;
using Fp4 = Record<512, 16, FLOORED, false>;
