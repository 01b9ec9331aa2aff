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

// Weight of one split under the row's reference; the row's reference and total sum.
struct RowState {
  float reference, sum;

  // `states` of all splits, each lane of the warp two.
  DEVICE static RowState of(const float2* states, int splits, int lane) {
    const float2 none = make_float2(NO_REFERENCE, 0.f);
    const float2 a = lane < splits ? __ldcg(states + lane) : none;
    const float2 b = lane + 32 < splits ? __ldcg(states + lane + 32) : none;
    RowState row;
    row.reference = fmaxf(a.x, b.x);
#pragma unroll
    for (int step = 16; step; step >>= 1) row.reference = fmaxf(row.reference, __shfl_xor_sync(~0u, row.reference, step));
    row.sum = a.y * ptx::exp2_approximate(a.x - row.reference) + b.y * ptx::exp2_approximate(b.x - row.reference);
#pragma unroll
    for (int step = 16; step; step >>= 1) row.sum += __shfl_xor_sync(~0u, row.sum, step);
    return row;
  }
};

template <int COUNT>
DEVICE void load_partials(float4 (&v)[COUNT], float2 (&state)[COUNT], const float* values, const float2* states, int first,
                          int stride, int splits, int d_v) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int split = first + i * stride;
    state[i] = split < splits ? __ldcg(states + split) : make_float2(NO_REFERENCE, 0.f);
    v[i] = split < splits ? __ldcg(reinterpret_cast<const float4*>(values + static_cast<i64>(split) * d_v))
                          : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// A split without candidates has written no values: its weight is 0 and what was loaded for it must not count.
template <int COUNT>
DEVICE float4 weighted_sum(const float4 (&v)[COUNT], const float2 (&state)[COUNT], float reference) {
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    if (state[i].y == 0.f) continue;
    const float weight = ptx::exp2_approximate(state[i].x - reference);
    total.x += weight * v[i].x, total.y += weight * v[i].y, total.z += weight * v[i].z, total.w += weight * v[i].w;
  }
  return total;
}

DEVICE void finish(const DecodeArgs& args, i64 row, int dim, const RowState& state, float4 total, bool writes_lse) {
  const i64 token = static_cast<u32>(row) / args.num_heads;  // rows are the grid, which is 32 bits wide
  const int head = row - token * args.num_heads;
  const Finished finished = finish_head(args, head, state.reference, state.sum);
  const float factor = finished.factor;
  const float final[4] = {total.x * factor, total.y * factor, total.z * factor, total.w * factor};
  store_out(args, token, head, dim, final);
  if (writes_lse) store_lse(args, token, head, finished.lse);
}

extern "C" __global__ void __launch_bounds__(256) merge_few(const __grid_constant__ DecodeArgs args, int d_v) {
  const i64 row = blockIdx.x;
  const int dim = threadIdx.x * 4;
  const float2* states = args.partial_state + row * args.splits;
  ptx::wait_for_previous_grid();
  float4 v[FEW];
  float2 state[FEW];
  load_partials(v, state, args.partial + row * args.splits * d_v + dim, states, 0, 1, args.splits, d_v);
  RowState all = {NO_REFERENCE, 0.f};
#pragma unroll
  for (int i = 0; i < FEW; i++) all.reference = fmaxf(all.reference, state[i].x);
#pragma unroll
  for (int i = 0; i < FEW; i++) all.sum += state[i].y * ptx::exp2_approximate(state[i].x - all.reference);
  finish(args, row, dim, all, weighted_sum(v, state, all.reference), threadIdx.x == 0);
}

extern "C" __global__ void __launch_bounds__(256) merge_many(const __grid_constant__ DecodeArgs args, int d_v) {
  __shared__ float4 shares[SHARES][32];
  const i64 row = blockIdx.x;
  const int share = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int dim = blockIdx.y * 128 + lane * 4;
  const float2* states = args.partial_state + row * args.splits;
  ptx::wait_for_previous_grid();
  float4 v[MANY / SHARES];
  float2 state[MANY / SHARES];
  load_partials(v, state, args.partial + row * args.splits * d_v + dim, states, share, SHARES, args.splits, d_v);
  const RowState all = RowState::of(states, args.splits, lane);
  shares[share][lane] = weighted_sum(v, state, all.reference);
  __syncthreads();
  if (share) return;
  float4 total = shares[0][lane];
#pragma unroll
  for (int i = 1; i < SHARES; i++) {
    const float4 other = shares[i][lane];
    total.x += other.x, total.y += other.y, total.z += other.z, total.w += other.w;
  }
  finish(args, row, dim, all, total, blockIdx.y == 0 && lane == 0);
}
