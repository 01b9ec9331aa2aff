// Which row a slot belongs to if several name it: the lowest, whatever order warps run in.
//
// Up to some thousands of rows every block reads the slots of all lower rows: quadratic, but these few bytes lie in the
// cache, they come while the latents do, and the search needs no memory and no second launch. A bit map of the block's own
// slots sorts out nearly all of them; only what falls on a set bit is compared. For more rows a kernel before the writer
// (claim_slots) enters every row into a hash table of row indices, whose keys are the rows' slots: open addressing, each
// slot keeping its lowest row. The host decides (src/cuda/caches.rs), and fills the table with ~0 before.
#pragma once
#include "cache_args.cuh"

constexpr int WRITE_ROWS = 16;  // most of a block, one warp each: the launch says how many
constexpr u32 NO_ROW = ~0u;
constexpr u32 NO_SLOT_BITS = ~0u;

// An int32 or int64 as it lies in memory: nothing waits for it before its value is asked for.
struct RowNumber {
  u32 low, high;

  DEVICE void load(const void* numbers, bool wide, u32 row) {
    if (wide) {
      const uint2 both = __ldg(static_cast<const uint2*>(numbers) + row);
      low = both.x, high = both.y;
    } else {
      low = __ldg(static_cast<const u32*>(numbers) + row);
    }
  }
  DEVICE i64 value(bool wide) const {
    return wide ? static_cast<i64>(static_cast<u64>(high) << 32 | low) : static_cast<i64>(static_cast<int>(low));
  }
};

// A slot that does not exist becomes -1.
DEVICE i64 existing(const WriteArgs& args, RowNumber slot) {
  const i64 value = slot.value(args.wide_slots);
  return static_cast<u64>(value) < args.to.num_slots ? value : -1;
}

DEVICE i64 slot_of(const WriteArgs& args, u32 row) {
  RowNumber slot;
  slot.load(args.slots, args.wide_slots, row);
  return existing(args, slot);
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

// The low words of the slots of ROWS adjacent rows from `first` on, as far as they lie before `end`, in a warp; loaded long
// before they are needed.
struct LowerSlots {
  static constexpr int OF_LANE = 8, ROWS = 32 * OF_LANE;
  u32 low[OF_LANE];

  DEVICE void load(const WriteArgs& args, u32 first, u32 end, u32 lane) {
    if (args.wide_slots) load_words<2>(args.slots, first + lane, end);
    else load_words<1>(args.slots, first + lane, end);
  }

 private:
  template <int WORDS>
  DEVICE void load_words(const void* slots, u32 row, u32 end) {
    const u32* from = static_cast<const u32*>(slots) + static_cast<u64>(row) * WORDS;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) low[i] = row + i * 32 < end ? __ldg(from + i * 32 * WORDS) : NO_SLOT_BITS;
  }
};

// What a block shares in its search: bits of its own slots, and which of its rows have lost.
struct Filter {
  static constexpr u32 BITS = 1 << 15;
  uint4 quads[BITS / 128];
  u32 lost;

  DEVICE void clear() {
    if (threadIdx.x == 0) lost = 0;
    for (u32 at = threadIdx.x; at < BITS / 128; at += blockDim.x)
      quads[at] = make_uint4(0, 0, 0, 0);
  }
  DEVICE void add(u32 slot) { atomicOr(reinterpret_cast<u32*>(quads) + slot % BITS / 32, 1u << slot % 32); }
  DEVICE u32 has(u32 slot) const { return reinterpret_cast<const u32*>(quads)[slot % BITS / 32] >> slot % 32 & 1; }
};

// The block's rows (a bit each) whose slots are those of the rows from `first` on that fell on set bits (`hits`, a bit each of
// the lane's rows). `slots`: of the block's rows, one a lane.
DEVICE u32 rows_that_lose(const WriteArgs& args, i64 slots, u32 hits, u32 first, u32 end, u32 lane) {
  u32 lost = 0;
#pragma unroll 1
  for (int i = 0; i < LowerSlots::OF_LANE; i++) {
    if (!__any_sync(~0u, hits >> i & 1)) continue;
    const u32 lower = first + i * 32 + lane;
    const i64 slot = lower < end ? slot_of(args, lower) : -1;
#pragma unroll 1
    for (u32 r = 0; r < blockDim.x / 32; r++) {
      const i64 own = __shfl_sync(~0u, slots, r);
      lost |= static_cast<u32>(__any_sync(~0u, slot >= 0 && slot == own)) << r;
    }
  }
  return lost;
}

// Whether a lower row names the slot of the warp's row. All threads of the block call it. `slots`: of the block's rows, one a
// lane; `filter`: cleared, if there are lower rows; `lower`: loaded from the warp's first rows.
DEVICE bool lower_row_has(const WriteArgs& args, i64 slots, Filter& filter, LowerSlots& lower, u32 first_row, u32 warp, u32 lane) {
  const i64 slot = __shfl_sync(~0u, slots, warp);
  const bool lost = __any_sync(~0u, lane < warp && slots == slot);
  if (!first_row) return lost;
  __syncthreads();
  if (lane == 0 && slot >= 0) filter.add(static_cast<u32>(slot));
  __syncthreads();
  u32 found = 0;
#pragma unroll 1
  for (u32 first = warp * LowerSlots::ROWS; first < first_row; first += LowerSlots::OF_LANE * blockDim.x) {
    if (first != warp * LowerSlots::ROWS) lower.load(args, first, first_row, lane);
    u32 hits = 0;
#pragma unroll
    for (int i = 0; i < LowerSlots::OF_LANE; i++) hits |= filter.has(lower.low[i]) << i;
    if (__any_sync(~0u, hits)) found |= rows_that_lose(args, slots, hits, first, first_row, lane);
  }
  if (lane == 0 && found) atomicOr(&filter.lost, found);
  __syncthreads();
  return lost || filter.lost >> warp & 1;
}
