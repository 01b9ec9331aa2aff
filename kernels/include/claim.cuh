// Which row a slot belongs to if several name it: the lowest, whatever order warps run in.
//
// Up to some thousands of rows every block reads the slots of all lower rows: quadratic, but these few bytes lie in the
// cache, and the search needs no memory and no second launch. For more rows a kernel before the writer (claim_slots)
// enters every row into a hash table of row indices, whose keys are the rows' slots: open addressing, each slot keeping
// its lowest row. The host decides (src/cuda/caches.rs), and fills the table with ~0 before.
#pragma once
#include "cache_args.cuh"

constexpr int WRITE_ROWS = 8;  // of a block, one warp each
constexpr u32 NO_ROW = ~0u;

// The slots of COUNT rows `stride` apart, all loaded before the first is needed. A slot that does not exist becomes -1, as that
// of a row at or past `rows` does.
template <int COUNT>
DEVICE void load_slots(i64 (&slots)[COUNT], const WriteArgs& args, u32 row, u32 stride, u32 rows) {
  if (args.wide_slots) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      slots[i] = row + i * stride < rows ? __ldg(static_cast<const i64*>(args.slots) + row + i * stride) : -1;
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      slots[i] = row + i * stride < rows ? __ldg(static_cast<const int*>(args.slots) + row + i * stride) : -1;
  }
#pragma unroll
  for (i64& slot : slots) slot = static_cast<u64>(slot) < args.to.num_slots ? slot : -1;
}

DEVICE i64 slot_of(const WriteArgs& args, u32 row) {
  i64 slot[1];
  load_slots(slot, args, row, 0, args.num_rows);
  return slot[0];
}

DEVICE u32 first_claim(const WriteArgs& args, i64 slot) {
  return static_cast<u32>(static_cast<u64>(slot) * 0x9e3779b97f4a7c15ull >> 32) & args.claim_mask;
}

// Enters a row. An entry only ever passes to a lower row of the same slot, so that searches stay valid.
DEVICE void claim(const WriteArgs& args, u32 row) {
  const i64 slot = slot_of(args, row);
  if (slot < 0) return;
  for (u32 at = first_claim(args, slot);; at = (at + 1) & args.claim_mask) {
    const u32 holder = atomicCAS(args.claims + at, NO_ROW, row);
    if (holder == NO_ROW) return;
    if (slot_of(args, holder) != slot) continue;
    atomicMin(args.claims + at, row);
    return;
  }
}

// Whether the row is the lowest of its slot. Every row is in the table, so that the search ends.
DEVICE bool holds_claim(const WriteArgs& args, u32 row, i64 slot) {
  for (u32 at = first_claim(args, slot);; at = (at + 1) & args.claim_mask) {
    const u32 holder = args.claims[at];
    if (holder == row) return true;
    if (slot_of(args, holder) == slot) return false;
  }
}

// Whether a lower row names the slot of the warp's row. All threads of the block call it, with their row's slot.
DEVICE bool lower_row_has(const WriteArgs& args, i64 slot, u32 first_row, int warp, int lane) {
  __shared__ i64 slots[WRITE_ROWS];
  __shared__ u32 lost;
  if (threadIdx.x == 0) lost = 0;
  if (lane == 0) slots[warp] = slot;
  __syncthreads();
  u32 low[WRITE_ROWS];
#pragma unroll
  for (int r = 0; r < WRITE_ROWS; r++) low[r] = static_cast<u32>(slots[r]);
  u32 found = 0;
  constexpr int AT_ONCE = 4, THREADS = 32 * WRITE_ROWS;
#pragma unroll 1
  for (u32 lower = threadIdx.x; lower < first_row; lower += AT_ONCE * THREADS) {
    i64 theirs[AT_ONCE];
    load_slots(theirs, args, lower, THREADS, first_row);
    bool may_match = false;
#pragma unroll
    for (int r = 0; r < WRITE_ROWS; r++) {
#pragma unroll
      for (i64 slot_of_lower : theirs) may_match |= static_cast<u32>(slot_of_lower) == low[r];
    }
    if (!may_match) continue;
#pragma unroll 1
    for (int r = 0; r < WRITE_ROWS; r++) {
      bool matches = false;
#pragma unroll
      for (i64 slot_of_lower : theirs) matches |= slot_of_lower == slots[r];
      found |= static_cast<u32>(matches) << r;
    }
  }
  const u32 row = threadIdx.x / WRITE_ROWS, lower = threadIdx.x % WRITE_ROWS;  // a pair of the block's own rows
  if (row < WRITE_ROWS && lower < row) found |= static_cast<u32>(slots[lower] == slots[row]) << row;
  if (found) atomicOr(&lost, found);
  __syncthreads();
  return lost >> warp & 1;
}
