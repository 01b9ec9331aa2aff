// The decode kernel. One CTA = one token, Tile::HEADS heads, one split of the token's candidates.
//
// Contract: DecodeArgs (args.cuh). Without splits the CTA writes out and lse; with splits it writes float32 partial
// values and (reference, sum), which merge.cu joins. Absent candidates read a zero row and weigh nothing.
// Geometry: grid ceil(H / HEADS) * T * splits, block Tile::THREADS, dynamic shared memory Tile::SHARED_BYTES.
#pragma once
#include "args.cuh"
#include "format.cuh"
#include "gather.cuh"
#include "output.cuh"
#include "pv.cuh"
#include "qk.cuh"
#include "tile.cuh"

template <class T>
DEVICE void decode(const DecodeArgs& args) {
  extern __shared__ __align__(128) u8 shared_memory[];
  const u32 shared = ptx::shared_address(shared_memory);
  // Through a shuffle the assembler sees that a warp has one role: without it the loops are slower.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const Work work = Work::of<T>(args);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::STAGES; stage++) {
      ptx::mbarrier_init(T::full(shared, stage), T::FULL_ARRIVALS);
      ptx::mbarrier_init(T::free(shared, stage), T::FREE_ARRIVALS);
    }
    for (int buffer = 0; buffer < T::BUFFERS; buffer++) ptx::mbarrier_init(T::weighted(shared, buffer), 32 * T::QK_WARPS);
    for (int half = 0; half < T::VALUE_HALVES; half++) ptx::mbarrier_init(T::values_free(shared, half), 32 * T::PV_WARPS);
    ptx::mbarrier_init(T::met(shared), T::THREADS);
    ptx::mbarrier_fence_init();
  }
  __syncthreads();

  // All warps, at whatever place in the code. Not a CTA barrier: the roles would stand at different ones, and racecheck
  // miscounts those that follow barriers of a part of the CTA.
  const auto meet = [&](u32 parity) {
    ptx::mbarrier_arrive(T::met(shared));
    ptx::mbarrier_wait(T::met(shared), parity);
  };

  const bool split = T::Format::SECONDARY || args.all_splits > 1;
  if (warp >= T::QK_WARPS) {
    PvWarp<T> pv(shared, warp - T::QK_WARPS, lane);
    Gather<T> gather(args, work, shared, warp - T::QK_WARPS, lane);
    int first[T::STAGES];
#pragma unroll
    for (int stage = 0; stage < T::STAGES; stage++) first[stage] = gather.next_slot();
#pragma unroll
    for (int stage = 0; stage < T::STAGES; stage++)
      if (stage < work.chunks) gather.issue(stage, gather.source(stage, first[stage]));
    const int upcoming = gather.next_slot();
    if constexpr (T::STAGED) pv.run_staged(gather, work, upcoming);
    else pv.run(gather, work, upcoming);
    if (split && work.chunks > 0) pv.store_partials(args, Place::of<T>(args));
    meet(0);
    if (!split) pv.store_values(args);
  } else {
    QkWarp<T> qk(args, work, shared, warp, lane);
    if (work.chunks > 0) {
      qk.load();
      qk.bring_to_f16();
      qk.run();
    }
    qk.store_sums();
    meet(0);
  }

  // Rows and weights are done with, sums are there.
  const Place place = Place::of<T>(args);
  const int first_head = place.head_group * T::HEADS;
  const u32 heads = min(T::HEADS, args.num_heads - first_head);
  if (threadIdx.x < heads) {
    const State state = state_of_head<T>(shared, threadIdx.x);
    const int head = first_head + threadIdx.x;
    if (split) {
      args.partial_state[place.partial_row(args, head)] = make_float2(state.reference, state.sum);
    } else {
      const Finished finished = finish_head(args, head, state.reference, state.sum);
      ptx::store_f32(shared + T::FACTOR_AT + threadIdx.x * 4, finished.factor);
      store_lse(args, place.token, head, finished.lse);
    }
  }
  if (split) {
    // A token's splits may be two launches (two row formats): the second does not end before the first.
    ptx::wait_for_previous_grid();
    return;
  }
  // The output's type and alignment vary: values go through shared memory, so that the code for them stands once.
  meet(1);
  constexpr u32 FOURS = T::Format::D_V / 4;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < heads * FOURS; i += T::THREADS) {
    const u32 head = i / FOURS, dim = i % FOURS * 4;
    const float4 v = ptx::load_f32x4(shared + T::ROWS_AT + (head * T::RESULT_STRIDE + dim) * 4);
    const float factor = ptx::load_f32(shared + T::FACTOR_AT + head * 4);
    const float final[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    store_out(args, place.token, first_head + head, dim, final);
  }
}

// What the host must know of an entry point; build.py reads these constants out of the PTX.
struct KernelShape {
  int heads, chunk, threads, shared_bytes;
};

// An entry point and its shape: DECODE_KERNEL(name, format, 16-head tiles, groups of QK warps,
// stages[, PV warps]).
#define DECODE_KERNEL(NAME, ...)                                                                              \
  extern "C" __device__ const KernelShape NAME##_shape = {Tile<__VA_ARGS__>::HEADS, Tile<__VA_ARGS__>::CHUNK, \
                                                          Tile<__VA_ARGS__>::THREADS,                         \
                                                          Tile<__VA_ARGS__>::SHARED_BYTES};                   \
  extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, 1)                                 \
      NAME(const __grid_constant__ DecodeArgs args) {                                                         \
    decode<Tile<__VA_ARGS__>>(args);                                                                          \
  }
