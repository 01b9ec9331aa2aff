// Final values to memory, and the normaliser with sink and log-sum-exp.
#pragma once
#include "args.cuh"
#include "qk.cuh"

// Four adjacent values, in the type of the output.
DEVICE void store_out(const DecodeArgs& args, i64 token, int head, int dim, const float (&v)[4]) {
  const i64 at = token * args.out_token_stride + head * args.out_head_stride + dim;
  const u32 low = args.out_type == OUT_F16 ? ptx::pack_f16(v[0], v[1]) : ptx::pack_bf16(v[0], v[1]);
  const u32 high = args.out_type == OUT_F16 ? ptx::pack_f16(v[2], v[3]) : ptx::pack_bf16(v[2], v[3]);
  if (args.out_type == OUT_F32) {
    float* out = static_cast<float*>(args.out) + at;
    if (args.out_aligned) {
      ptx::store_global(out, v[0], v[1], v[2], v[3]);
    } else {
      out[0] = v[0], out[1] = v[1], out[2] = v[2], out[3] = v[3];
    }
  } else {
    u16* out = static_cast<u16*>(args.out) + at;
    if (args.out_aligned) {
      ptx::store_global(out, low, high);
    } else {
      out[0] = low & 0xffff, out[1] = low >> 16, out[2] = high & 0xffff, out[3] = high >> 16;
    }
  }
}

struct Finished {
  float factor;  // from summed to final values
  float lse;
};

// Joins a head's sum of 2^(logit - reference + WEIGHT_SHIFT) with its sink.
DEVICE Finished finish_head(const DecodeArgs& args, int head, float reference, float sum) {
  constexpr double LOG2_E = 1.4426950408889634;
  const float sink = args.sink ? __ldg(args.sink + head) : MINUS_INFINITY;
  if (sum == 0.f) return {0.f, args.lse_natural ? sink : static_cast<float>(sink * LOG2_E)};  // exactly the sink
  const float sink2 = sink * static_cast<float>(LOG2_E);
  const float above = sink2 - (reference - WEIGHT_SHIFT);  // exponent of the sink's weight
  const bool only_sink = above > 120.f;
  const float total = sum + (only_sink ? 0.f : ptx::exp2_approximate(above));
  const float lse2 = only_sink ? sink2 : reference - WEIGHT_SHIFT + log2f(total);
  return {only_sink ? 0.f : 1.f / total, args.lse_natural ? lse2 * 0.69314718056f : lse2};
}

DEVICE void store_lse(const DecodeArgs& args, i64 token, int head, float lse) {
  if (args.lse) args.lse[token * args.lse_stride + head] = lse;
}
