// The table of claims, for more rows than a search for duplicates is fast enough for; claim.cuh says how it works.
#include "claim.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) claim_slots(const __grid_constant__ WriteArgs args) {
  const u32 row = blockIdx.x * THREADS + threadIdx.x;
  if (row < args.num_rows) claim(args, row);
}
