// Which row a slot belongs to if several name it: the lowest, whatever order warps run in.
//
// Of up to 1,024 rows every warp compares its slot with those of all lower rows, the first of which are on their way beside
// the latent. For more, a kernel before the writer (winners.cu) finds the rows that win, a bit each. The host decides
// (src/cuda/caches.rs).
#pragma once
#include "cache_args.cuh"

constexpr int WRITE_ROWS = 16;  // most of a block, one warp each: the launch says how many

// An int32 or int64 as it lies in memory: nothing waits for it before its value is asked for.
struct RowNumber {
  u32 low, high;

  DEVICE void load(const void* numbers, bool wide, u32 row) {
    if (wide) {
      const uint2 both = __ldg(static_cast<const uint2*>(numbers) + row);
      low = both.x, high = both.y;
    } else {
      low = __ldg(static_cast<const u32*>(numbers) + row), high = 0;
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

DEVICE bool wins(const WriteArgs& args, u32 row) { return args.winners[row / 32] >> row % 32 & 1; }

// COUNT numbers, `stride` rows apart from `row` on, as far as they lie before `end`.
template <int COUNT>
struct RowNumbers {
  RowNumber numbers[COUNT];

  DEVICE void load(const void* from, bool wide, u32 row, u32 stride, u32 end) {
    if (wide) load_all<true>(from, row, stride, end);
    else load_all<false>(from, row, stride, end);
  }

 private:
  template <bool WIDE>
  DEVICE void load_all(const void* from, u32 row, u32 stride, u32 end) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (row + i * stride < end) numbers[i].load(from, WIDE, row + i * stride);
  }
};

// The slots of the lower rows of a warp's row.
struct LowerSlots {
  static constexpr u32 OF_LANE = 8, AT_ONCE = 32 * OF_LANE;
  RowNumbers<OF_LANE> slots;

  // Those of the first rows: long before they are needed.
  DEVICE void load(const WriteArgs& args, u32 end, u32 lane) { slots.load(args.slots, args.wide_slots, lane, 32, end); }

  DEVICE bool have(const WriteArgs& args, RowNumber slot, u32 end, u32 lane) {
    bool found = false;
#pragma unroll 1
    for (u32 row = lane;; row += AT_ONCE) {
#pragma unroll
      for (u32 i = 0; i < OF_LANE; i++) {
        const RowNumber lower = slots.numbers[i];
        found |= row + i * 32 < end && lower.low == slot.low && lower.high == slot.high;
      }
      if (row - lane + AT_ONCE >= end) return __any_sync(~0u, found);
      slots.load(args.slots, args.wide_slots, row + AT_ONCE, 32, end);
    }
  }
};
