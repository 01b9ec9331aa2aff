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
  const i64 token = work.token;
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::STAGES; stage++) {
      ptx::mbarrier_init(T::full(shared, stage), T::FULL_ARRIVALS);
      ptx::mbarrier_init(T::free(shared, stage), T::PV_WARPS);
      ptx::mbarrier_init(T::weighted(shared, stage), T::QK_WARPS);
    }
    ptx::mbarrier_fence_init();
  }

  if (warp >= T::QK_WARPS) {
    PvWarp<T> pv(shared, warp - T::QK_WARPS, lane);
    Gather<T> gather(args, work, shared, warp - T::QK_WARPS, lane);
    int first[T::STAGES];
#pragma unroll
    for (int stage = 0; stage < T::STAGES; stage++) first[stage] = gather.slot(stage);
    __syncthreads();
#pragma unroll
    for (int stage = 0; stage < T::STAGES; stage++)
      if (stage < work.chunks) gather.issue(stage, stage, first[stage]);
    gather.upcoming = gather.slot(T::STAGES);
    pv.run(gather, work);

    __syncthreads();  // all weights are used
    __syncthreads();  // sums are in shared memory
    __syncthreads();  // factors are in shared memory
    const int first_head = work.head_group * T::HEADS;
    if (args.splits == 1) {
      pv.for_each_run([&](int head, int dim, const auto& run) {
        if (first_head + head >= args.num_heads) return;
        const float factor = ptx::load_f32(shared + T::RESCALE_AT + head * 4);
        constexpr int COUNT = sizeof(run) / sizeof(float);
        float final[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) final[i] = run[i] * factor;
        store_out(args, token, first_head + head, dim, final);
      });
    } else if (work.chunks > 0) {
      pv.for_each_run([&](int head, int dim, const auto& run) {
        if (first_head + head >= args.num_heads) return;
        const i64 row = (token * args.num_heads + first_head + head) * args.splits + work.split;
        float* partial = args.partial + row * T::Format::D_V + dim;
        constexpr int COUNT = sizeof(run) / sizeof(float);
        if constexpr (COUNT == 4) *reinterpret_cast<float4*>(partial) = make_float4(run[0], run[1], run[2], run[3]);
        else *reinterpret_cast<float2*>(partial) = make_float2(run[0], run[1]);
      });
    }
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
    __syncthreads();
    if (threadIdx.x < T::HEADS) {
      const int head = work.head_group * T::HEADS + threadIdx.x;
      float sum = 0.f;
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) sum += ptx::load_f32(qk.reduce_at(quarter, threadIdx.x));
      const u32 at = shared + T::RESCALE_AT + threadIdx.x * 4;
      const float reference = ptx::load_f32(at);
      if (head < args.num_heads) {
        if (args.splits == 1) {
          ptx::store_f32(at, finish_head(args, token, head, reference, sum));
        } else {
          args.partial_state[(token * args.num_heads + head) * args.splits + work.split] = make_float2(reference, sum);
        }
      }
    }
    __syncthreads();
  }
}

// What the host must know of an entry point; build.py reads these constants out of the PTX.
struct KernelShape {
  int heads, chunk, threads, shared_bytes;
};

// An entry point and its shape: DECODE_KERNEL(name, format, 16-head tiles, groups of QK warps, stages).
#define DECODE_KERNEL(NAME, ...)                                                                              \
  extern "C" __device__ const KernelShape NAME##_shape = {Tile<__VA_ARGS__>::HEADS, Tile<__VA_ARGS__>::CHUNK, \
                                                          Tile<__VA_ARGS__>::THREADS,                         \
                                                          Tile<__VA_ARGS__>::SHARED_BYTES};                   \
  extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, 1)                                 \
      NAME(const __grid_constant__ DecodeArgs args) {                                                         \
    decode<Tile<__VA_ARGS__>>(args);                                                                          \
  }
