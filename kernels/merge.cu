// Joins the splits of a decode: out and lse from float32 partial values and their (reference, sum).
//
// merge_few: up to FEW splits, one block of d_v / 4 threads a row; grid T * H.
// merge_many: up to MANY splits, blocks of 256 threads = 32 lanes of 4 dimensions times 8 shares of the splits; grid
// (T * H, d_v / 128).
// Both wait for the decode through programmatic launch, and issue every load before the first reduction.
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
