// The table of claims, for more rows than a warp compares; claim.cuh says how it works. Each kernel may start, and load what no
// kernel before it writes, while the one before still runs.
#include "claim.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) clear_claims(const __grid_constant__ WriteArgs args) {
  ptx::launch_dependents();
  const u32 at = blockIdx.x * THREADS + threadIdx.x;  // of four entries
  if (at <= args.claim_mask / 4) reinterpret_cast<uint4*>(args.claims)[at] = make_uint4(NO_ROW, NO_ROW, NO_ROW, NO_ROW);
}

extern "C" __global__ void __launch_bounds__(THREADS) claim_slots(const __grid_constant__ WriteArgs args) {
  ptx::launch_dependents();
  const u32 row = blockIdx.x * THREADS + threadIdx.x;
  const i64 slot = row < args.num_rows ? slot_of(args, row) : -1;
  ptx::wait_for_previous_grid();
  if (slot >= 0) claim(args, row, slot);
}
