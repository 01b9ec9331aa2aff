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
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Work work = Work::of<T>(args);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::STAGES; stage++) {
      ptx::mbarrier_init(T::full(shared, stage), T::FULL_ARRIVALS);
      ptx::mbarrier_init(T::free(shared, stage), 32 * T::PV_WARPS);
      ptx::mbarrier_init(T::weighted(shared, stage), 32 * T::QK_WARPS);
    }
    ptx::mbarrier_fence_init();
  }

  // The roles meet at barriers 0 from different places in the code; all that matters is that every warp comes.
  if (warp >= T::QK_WARPS) {
    PvWarp<T> pv(shared, warp - T::QK_WARPS, lane);
    Gather<T> gather(args, work, shared, warp - T::QK_WARPS, lane);
    int first[T::STAGES];
#pragma unroll
    for (int stage = 0; stage < T::STAGES; stage++) first[stage] = gather.next_slot();
    __syncthreads();  // mbarriers are initialised
#pragma unroll
    for (int stage = 0; stage < T::STAGES; stage++)
      if (stage < work.chunks) gather.issue(stage, gather.source(stage, first[stage]));
    pv.run(gather, work, gather.next_slot());
    __syncthreads();  // rows, weights and sums are done with
    pv.store_values();
  } else {
    QkWarp<T> qk(args, work, shared, warp, lane);
    if (work.chunks > 0) qk.load_q();
    __syncthreads();
    if (work.chunks > 0) {
      qk.scale_q();
      qk.run();
    }
    __syncthreads();
    qk.store_sums();
  }
  __syncthreads();

  const Place place = Place::of<T>(args);
  const i64 token = place.token;
  const int first_head = place.head_group * T::HEADS;
  const u32 heads = min(T::HEADS, args.num_heads - first_head);
  if (threadIdx.x < heads) {
    const int head = first_head + threadIdx.x;
    float sum = 0.f;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
      sum += ptx::load_f32(shared + T::REDUCE_AT + (quarter * T::HEADS + threadIdx.x) * 4);
    }
    const u32 at = shared + T::RESCALE_AT + threadIdx.x * 4;  // holds the reference, then the factor
    const float reference = ptx::load_f32(at);
    if (args.splits == 1) {
      const Finished finished = finish_head(args, head, reference, sum);
      ptx::store_f32(at, finished.factor);
      store_lse(args, token, head, finished.lse);
    } else {
      args.partial_state[(token * args.num_heads + head) * args.splits + place.split] = make_float2(reference, sum);
    }
  }
  if (args.splits > 1 && work.chunks == 0) return;
  __syncthreads();
  constexpr u32 FOURS = T::Format::D_V / 4;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < heads * FOURS; i += T::THREADS) {
    const u32 head = i / FOURS, dim = i % FOURS * 4;
    const float4 v = ptx::load_f32x4(shared + T::ROWS_AT + (head * T::RESULT_STRIDE + dim) * 4);
    if (args.splits == 1) {
      const float factor = ptx::load_f32(shared + T::RESCALE_AT + head * 4);
      const float final[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
      store_out(args, token, first_head + head, dim, final);
    } else {
      const i64 row = (token * args.num_heads + first_head + head) * args.splits + place.split;
      *reinterpret_cast<float4*>(args.partial + row * T::Format::D_V + dim) = v;
    }
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
