// Joins partial results.
//
// Splits of a decode: out and lse from float32 partial values and their (reference, sum).
// merge_few: up to FEW splits, one block of d_v / 4 threads a row; grid T * H.
// merge_many: up to MANY splits, blocks of 256 threads = 32 lanes of 4 dimensions times 8 shares of the splits; grid
// (T * H, d_v / 128).
// Both wait for the decode through programmatic launch, and issue every load before the first reduction.
//
// merge_states: two finished results over disjoint candidates, as `src/merge.rs` joins them; one thread of a block of 256
// takes four values of a row; grid ceil(N * max(1, ceil(d_v / 4)) / 256).
#include "output.cuh"

constexpr int FEW = 8;
constexpr int MANY = 64;
constexpr int SHARES = 8;

// The states of a row's splits, spread over the lanes of a warp: lane l holds splits l, l + 32, ...
template <int PER_LANE>
struct RowStates {
  float2 state[PER_LANE];  // (reference, sum)
  float weight[PER_LANE];  // of the split's values under the row's reference; 0 where a split had no candidates
  float reference, sum;    // of the row

  DEVICE void load(const float2* states, int splits, int lane) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int split = lane + i * 32;
      state[i] = split < splits ? __ldcg(states + split) : make_float2(NO_REFERENCE, 0.f);
    }
  }

  DEVICE void reduce() {
    reference = NO_REFERENCE;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) reference = fmaxf(reference, state[i].x);
#pragma unroll
    for (int step = 16; step; step >>= 1) reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      weight[i] = state[i].y == 0.f ? 0.f : ptx::exp2_approximate(state[i].x - reference);
      sum += state[i].y * weight[i];
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  }
};

// Sum over splits `first`, `first + stride`, ... of four dimensions; loaded in one go, before the first reduction.
template <int COUNT>
struct Partials {
  float4 v[COUNT];

  DEVICE void load(const float* values, int first, int stride, int splits, int d_v) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int split = first + i * stride;
      v[i] = split < splits ? __ldcg(reinterpret_cast<const float4*>(values + static_cast<i64>(split) * d_v))
                            : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  // A split without candidates has written no values: what was loaded for it must not count.
  template <int PER_LANE>
  DEVICE float4 weighted_sum(const RowStates<PER_LANE>& row, int first, int stride) const {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float weight = __shfl_sync(~0u, row.weight[i * PER_LANE / COUNT], (first + i * stride) & 31);
      if (weight == 0.f) continue;
      total.x += weight * v[i].x, total.y += weight * v[i].y, total.z += weight * v[i].z, total.w += weight * v[i].w;
    }
    return total;
  }
};

DEVICE void finish(const DecodeArgs& args, i64 row, int dim, float reference, float sum, float4 total, bool writes_lse) {
  const i64 token = static_cast<u32>(row) / args.num_heads;  // rows are the grid, which is 32 bits wide
  const int head = row - token * args.num_heads;
  const Finished finished = finish_head(args, head, reference, sum);
  const float factor = finished.factor;
  const float final[4] = {total.x * factor, total.y * factor, total.z * factor, total.w * factor};
  store_out(args, token, head, dim, final);
  if (writes_lse) store_lse(args, token, head, finished.lse);
}

extern "C" __global__ void __launch_bounds__(256) merge_few(const __grid_constant__ DecodeArgs args, int d_v) {
  const i64 row = blockIdx.x;
  const int dim = threadIdx.x * 4;
  ptx::wait_for_previous_grid();
  RowStates<1> states;
  Partials<FEW> partials;
  states.load(args.partial_state + row * args.all_splits, args.all_splits, threadIdx.x & 31);
  partials.load(args.partial + row * args.all_splits * d_v + dim, 0, 1, args.all_splits, d_v);
  states.reduce();
  const float4 total = partials.weighted_sum(states, 0, 1);
  finish(args, row, dim, states.reference, states.sum, total, threadIdx.x == 0);
}

extern "C" __global__ void __launch_bounds__(256) merge_many(const __grid_constant__ DecodeArgs args, int d_v) {
  __shared__ float4 shares[SHARES][32];
  const i64 row = blockIdx.x;
  const int share = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int dim = blockIdx.y * 128 + lane * 4;
  ptx::wait_for_previous_grid();
  RowStates<MANY / 32> states;
  Partials<MANY / SHARES> partials;
  states.load(args.partial_state + row * args.all_splits, args.all_splits, lane);
  partials.load(args.partial + row * args.all_splits * d_v + dim, share, SHARES, args.all_splits, d_v);
  states.reduce();
  shares[share][lane] = partials.weighted_sum(states, share, SHARES);
  __syncthreads();
  if (share) return;
  float4 total = shares[0][lane];
#pragma unroll
  for (int i = 1; i < SHARES; i++) {
    const float4 other = shares[i][lane];
    total.x += other.x, total.y += other.y, total.z += other.z, total.w += other.w;
  }
  finish(args, row, dim, states.reference, states.sum, total, blockIdx.y == 0 && lane == 0);
}

// Four values from `dim` on; past the row's end zeros.
DEVICE void load_values(float (&v)[4], const StateArgs& state, const MergeStatesArgs& args, u32 row, u32 dim) {
  const i64 at = row * state.row_stride + dim * state.dim_stride;
  const float* f32 = static_cast<const float*>(state.out) + at;
  const u16* half = static_cast<const u16*>(state.out) + at;
  u32 bits[4] = {0, 0, 0, 0};
  if (args.aligned && dim + 4 <= args.d_v) {
    if (args.out_type == OUT_F32) {
      const uint4 four = *reinterpret_cast<const uint4*>(f32);
      bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
    } else {
      const uint2 four = *reinterpret_cast<const uint2*>(half);
      bits[0] = four.x & 0xffff, bits[1] = four.x >> 16, bits[2] = four.y & 0xffff, bits[3] = four.y >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (dim + i >= args.d_v) continue;
      bits[i] = args.out_type == OUT_F32 ? __float_as_uint(f32[i * state.dim_stride]) : half[i * state.dim_stride];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i] = args.out_type == OUT_F32   ? __uint_as_float(bits[i])
           : args.out_type == OUT_F16 ? ptx::unpack_f16(bits[i]).x
                                      : __uint_as_float(bits[i] << 16);
  }
}

DEVICE void store_values(const float (&v)[4], const MergeStatesArgs& args, u32 row, u32 dim) {
  const StateArgs& state = args.merged;
  const i64 at = row * state.row_stride + dim * state.dim_stride;
  float* f32 = static_cast<float*>(state.out) + at;
  u16* half = static_cast<u16*>(state.out) + at;
  const u32 low = args.out_type == OUT_F16 ? ptx::pack_f16(v[0], v[1]) : ptx::pack_bf16(v[0], v[1]);
  const u32 high = args.out_type == OUT_F16 ? ptx::pack_f16(v[2], v[3]) : ptx::pack_bf16(v[2], v[3]);
  if (args.aligned && dim + 4 <= args.d_v) {
    if (args.out_type == OUT_F32) {
      *reinterpret_cast<float4*>(f32) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      *reinterpret_cast<uint2*>(half) = make_uint2(low, high);
    }
    return;
  }
  const u32 halves[4] = {low & 0xffff, low >> 16, high & 0xffff, high >> 16};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (dim + i >= args.d_v) continue;
    if (args.out_type == OUT_F32) {
      f32[i * state.dim_stride] = v[i];
    } else {
      half[i * state.dim_stride] = halves[i];
    }
  }
}

// One side of a row: does it count, and by how much of the whole.
struct Side {
  float weight;
  bool counts;

  // -inf minus itself counts as nothing, +inf minus itself as everything; 2^-1075 is 0 for the CPU, which weighs in
  // float64, and what weighs less here than float32 holds still counts.
  DEVICE static Side of(float lse, float largest, float to_log2) {
    const float exponent = (lse - largest) * to_log2;
    if (lse == MINUS_INFINITY || exponent < -1075.f) return {0.f, false};
    return {lse == largest ? 1.f : exp2f(exponent), true};
  }

  // A value under this side's share. What does not count is ignored, NaN included; an infinity of a vanishing share stays.
  DEVICE float part(float value, float total) const {
    if (!counts) return 0.f;
    const float share = weight / total;
    return share == 0.f && !isfinite(value) ? value : share * value;
  }
};

extern "C" __global__ void __launch_bounds__(256) merge_states(const __grid_constant__ MergeStatesArgs args) {
  const u32 fours = max(1u, (args.d_v + 3) / 4);  // rows without values still have a log-sum-exp
  const u64 id = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
  if (id >= static_cast<u64>(args.num_rows) * fours) return;
  const u32 row = static_cast<u32>(id) / fours, dim = static_cast<u32>(id) % fours * 4;  // the host keeps ids in 32 bits
  const float lse_a = args.a.lse[row * args.a.lse_stride], lse_b = args.b.lse[row * args.b.lse_stride];
  float a[4], b[4];
  load_values(a, args.a, args, row, dim);
  load_values(b, args.b, args, row, dim);
  const float largest = fmaxf(lse_a, lse_b);
  const float to_log2 = args.lse_natural ? 1.44269504089f : 1.f, from_log2 = args.lse_natural ? 0.69314718056f : 1.f;
  const Side side_a = Side::of(lse_a, largest, to_log2), side_b = Side::of(lse_b, largest, to_log2);
  const float total = side_a.weight + side_b.weight;
  float merged[4];
#pragma unroll
  for (int i = 0; i < 4; i++) merged[i] = side_a.part(a[i], total) + side_b.part(b[i], total);
  store_values(merged, args, row, dim);
  if (dim) return;
  const float both = side_a.counts && side_b.counts ? largest + from_log2 * log2f(total) : largest;
  args.merged.lse[row * args.merged.lse_stride] =
      !side_b.counts && side_a.counts ? lse_a : !side_a.counts && side_b.counts ? lse_b : both;
}
