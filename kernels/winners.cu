// The rows that win their slots, for more rows than a warp compares: a bit each, in WriteArgs::winners.
//
// A block enters the slots of its segment of rows into a hash table in shared memory, and looks every slot of a lower row up in
// it. With as many blocks as there are multiprocessors that is a pass over the slots each: few bytes, no chains of atomics.
// Geometry: a segment (at most SEGMENT rows, a multiple of 32) a block.
#include "winners.cuh"

constexpr int THREADS = 512, SEGMENT = 1024;
constexpr u32 ENTRIES = 4 * SEGMENT;
constexpr u32 NO_SLOT = ~0u;    // the host refuses caches of so many slots
constexpr u32 LOWER_ROW = 0;    // a row below the segment has the slot; row r of the segment counts as r + 1

__shared__ __align__(16) u32 slot_of_entry[ENTRIES], lowest_of_entry[ENTRIES];

DEVICE u32 existing_or_none(const WriteArgs& args, RowNumber slot) {
  return slot.high == 0 && slot.low < static_cast<u32>(args.to.num_slots) ? slot.low : NO_SLOT;
}

DEVICE u32 first_entry(u32 slot) { return slot * 0x9e3779b9u / (~0u / ENTRIES + 1); }

// The entry of a slot, or the free one where it would stand.
DEVICE u32 find(u32 slot) {
  u32 at = first_entry(slot);
  while (slot_of_entry[at] != slot && slot_of_entry[at] != NO_SLOT) at = (at + 1) % ENTRIES;
  return at;
}

DEVICE void enter(u32 slot, u32 row) {
  u32 at = first_entry(slot);
  while (true) {
    const u32 there = atomicCAS(&slot_of_entry[at], NO_SLOT, slot);
    if (there == NO_SLOT || there == slot) break;
    at = (at + 1) % ENTRIES;
  }
  atomicMin(&lowest_of_entry[at], row + 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) find_winners(const __grid_constant__ WriteArgs args) {
  ptx::launch_dependents();
  const u32 first = blockIdx.x * args.segment, end = min(first + args.segment, args.num_rows);
  // Slots are on their way before anything is waited for: one of the segment, and those of the first lower rows.
  constexpr int AT_ONCE = 16;
  RowNumbers<1> own;
  RowNumbers<AT_ONCE> lower;
  own.load(args.slots, args.wide_slots, first + threadIdx.x, THREADS, end);
  lower.load(args.slots, args.wide_slots, threadIdx.x, THREADS, first);
#pragma unroll
  for (u32 at = threadIdx.x; at < ENTRIES / 4; at += THREADS) {
    reinterpret_cast<uint4*>(slot_of_entry)[at] = make_uint4(NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT);
    reinterpret_cast<uint4*>(lowest_of_entry)[at] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  __syncthreads();
  for (u32 row = first + threadIdx.x; row < end; row += THREADS) {
    if (row != first + threadIdx.x) own.load(args.slots, args.wide_slots, row, THREADS, end);
    const u32 slot = existing_or_none(args, own.numbers[0]);
    if (slot != NO_SLOT) enter(slot, row);
  }
  __syncthreads();
  for (u32 row = threadIdx.x; row < first; row += AT_ONCE * THREADS) {
    if (row != threadIdx.x) lower.load(args.slots, args.wide_slots, row, THREADS, first);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const u32 slot = row + i * THREADS < first ? existing_or_none(args, lower.numbers[i]) : NO_SLOT;
      if (slot == NO_SLOT || slot_of_entry[first_entry(slot)] == NO_SLOT) continue;  // nearly all
      const u32 at = find(slot);
      if (slot_of_entry[at] == slot) atomicMin(&lowest_of_entry[at], LOWER_ROW);
    }
  }
  __syncthreads();
  for (u32 row = first + threadIdx.x; row / 32 * 32 < end; row += THREADS) {
    own.load(args.slots, args.wide_slots, row, THREADS, end);
    const u32 slot = row < end ? existing_or_none(args, own.numbers[0]) : NO_SLOT;
    const u32 word = __ballot_sync(~0u, slot != NO_SLOT && lowest_of_entry[find(slot)] == row + 1);
    if (threadIdx.x % 32 == 0) args.winners[row / 32] = word;
  }
}
