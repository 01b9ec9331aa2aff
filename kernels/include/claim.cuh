// Which row a slot belongs to if several name it: the lowest, whatever order warps run in.
//
// Of few rows every warp compares its slot with those of all lower rows: one load, on its way beside the latent. For more,
// two kernels before the writer clear a hash table of row indices and enter every row: keys are the rows' slots, addressing is
// open, each slot keeps its lowest row. The host decides (src/cuda/caches.rs).
#pragma once
#include "cache_args.cuh"

constexpr int WRITE_ROWS = 16;  // most of a block, one warp each: the launch says how many
constexpr u32 NO_ROW = ~0u;

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
DEVICE void claim(const WriteArgs& args, u32 row, i64 slot) {
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

// The slots of the rows below `end`, in a warp.
struct LowerSlots {
  static constexpr int OF_LANE = 8;  // so many rows without a table: MAX_SEARCHED_ROWS in src/cuda/caches.rs
  RowNumber slots[OF_LANE];

  DEVICE void load(const WriteArgs& args, u32 end, u32 lane) {
    if (args.wide_slots) load_all<true>(args, end, lane);
    else load_all<false>(args, end, lane);
  }

  DEVICE bool has(const WriteArgs& args, RowNumber slot, u32 end, u32 lane) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
      found |= lane + i * 32 < end && slots[i].low == slot.low && (!args.wide_slots || slots[i].high == slot.high);
    return __any_sync(~0u, found);
  }

 private:
  template <bool WIDE>
  DEVICE void load_all(const WriteArgs& args, u32 end, u32 lane) {
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
      if (lane + i * 32 < end) slots[i].load(args.slots, WIDE, lane + i * 32);
  }
};
