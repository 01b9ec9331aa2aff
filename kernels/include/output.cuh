// Final values to memory, and the normaliser with sink and log-sum-exp.
#pragma once
#include "args.cuh"
#include "qk.cuh"

// A run of 2 or 4 adjacent values, in the type of the output.
template <int COUNT>
DEVICE void store_out(const DecodeArgs& args, i64 token, int head, int dim, const float (&v)[COUNT]) {
  const i64 at = token * args.out_token_stride + head * args.out_head_stride + dim;
  if (args.out_type == OUT_F32) {
    float* out = static_cast<float*>(args.out) + at;
#pragma unroll
    for (int i = 0; i < COUNT; i++) out[i] = v[i];
  } else {
    u16* out = static_cast<u16*>(args.out) + at;
    const bool half = args.out_type == OUT_F16;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const u32 pair = half ? ptx::pack_f16(v[i], v[i + 1]) : ptx::pack_bf16(v[i], v[i + 1]);
      out[i] = static_cast<u16>(pair), out[i + 1] = static_cast<u16>(pair >> 16);
    }
  }
}

// Joins a head's sum of 2^(logit - reference + WEIGHT_SHIFT) with its sink, writes the log-sum-exp, returns the factor from
// summed to final values.
DEVICE float finish_head(const DecodeArgs& args, i64 token, int head, float reference, float sum) {
  constexpr double LOG2_E = 1.4426950408889634;
  const float sink = args.sink ? __ldg(args.sink + head) : MINUS_INFINITY;
  float factor, lse;
  if (sum == 0.f) {  // no candidate: exactly the sink
    factor = 0.f;
    lse = args.lse_natural ? sink : static_cast<float>(sink * LOG2_E);
  } else {
    const float above = static_cast<float>(sink * LOG2_E) - (reference - WEIGHT_SHIFT);  // exponent of the sink's weight
    const bool only_sink = above > 120.f;
    const float total = sum + (only_sink ? 0.f : exp2f(above));
    factor = only_sink ? 0.f : 1.f / total;
    const float lse2 = only_sink ? static_cast<float>(sink * LOG2_E) : reference - WEIGHT_SHIFT + log2f(total);
    lse = args.lse_natural ? lse2 * 0.69314718056f : lse2;
  }
  if (args.lse) args.lse[token * args.lse_stride + head] = lse;
  return factor;
}
