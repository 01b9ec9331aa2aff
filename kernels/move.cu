// Moves records from one cache to another, whose pages, strides and placement of scales may differ.
//
// Contract: MoveArgs. Slot s goes to slot s; slots at or past num_slots, and every byte between records, become zero.
// Geometry: one warp = one slot of the new cache, MOVE_SLOTS warps a block.
#include "zero.cuh"

constexpr int MOVE_SLOTS = 8;

// `bytes` and both addresses are multiples of the word's size.
template <class Word>
DEVICE void copy_bytes(u8* to, const u8* from, u32 bytes, int lane) {
  for (u32 at = lane * sizeof(Word); at < bytes; at += 32 * sizeof(Word))
    *reinterpret_cast<Word*>(to + at) = __ldg(reinterpret_cast<const Word*>(from + at));
}

extern "C" __global__ void __launch_bounds__(32 * MOVE_SLOTS) move_records(const __grid_constant__ MoveArgs args) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 slot = static_cast<u64>(blockIdx.x) * MOVE_SLOTS + warp;
  if (slot >= args.to.num_slots) return;
  const RecordPlace to = RecordPlace::of(args.to, slot);
  if (slot < args.num_slots) {
    const RecordPlace from = RecordPlace::of(args.from, slot);
    copy_bytes<uint4>(to.data, from.data, args.code_bytes, lane);
    copy_bytes<uint2>(to.scales, from.scales, args.scale_bytes, lane);
    copy_bytes<uint4>(to.data + args.to.rope_at, from.data + args.from.rope_at, args.rope_bytes, lane);
  } else {
    zero_record(args.to, to, args.code_bytes, args.scale_bytes, args.rope_bytes, lane);
  }
  zero_gaps(args.to, to, args.row_gap, args.page_gap_at, lane);
}
