// Moves records from one cache to another, whose pages, strides and placement of scales may differ.
//
// Contract: MoveArgs. Slot s goes to slot s; slots at or past num_slots, and every byte between records, become zero.
// Geometry: one warp = one slot of the new cache, MOVE_SLOTS warps a block.
#include "zero.cuh"

// What a lane holds of a record: words l and l + 32 of the codes, word l of the scales and of the RoPE lanes.
struct Pieces {
  static constexpr int CODES = 2;  // of 512 bytes a warp, which the longest record fills

  uint4 codes[CODES], rope;
  uint2 scales;

  static DEVICE bool has(int piece, u32 bytes, u32 size, int lane) { return (piece * 32 + lane) * size < bytes; }

  // Every load is on its way before the first is waited for.
  DEVICE void load(const MoveArgs& args, const RecordPlace& from, int lane) {
#pragma unroll
    for (int i = 0; i < CODES; i++)
      if (has(i, args.code_bytes, 16, lane)) codes[i] = __ldg(reinterpret_cast<const uint4*>(from.data) + i * 32 + lane);
    if (has(0, args.scale_bytes, 8, lane)) scales = __ldg(reinterpret_cast<const uint2*>(from.scales) + lane);
    if (has(0, args.rope_dims * 2, 16, lane))
      rope = __ldg(reinterpret_cast<const uint4*>(from.data + args.from.rope_at) + lane);
  }

  DEVICE void store(const MoveArgs& args, const RecordPlace& to, int lane) const {
#pragma unroll
    for (int i = 0; i < CODES; i++)
      if (has(i, args.code_bytes, 16, lane)) reinterpret_cast<uint4*>(to.data)[i * 32 + lane] = codes[i];
    if (has(0, args.scale_bytes, 8, lane)) reinterpret_cast<uint2*>(to.scales)[lane] = scales;
    if (has(0, args.rope_dims * 2, 16, lane)) reinterpret_cast<uint4*>(to.data + args.to.rope_at)[lane] = rope;
  }
};

extern "C" __global__ void __launch_bounds__(32 * MOVE_SLOTS) move_records(const __grid_constant__ MoveArgs args) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 slot = static_cast<u64>(blockIdx.x) * MOVE_SLOTS + warp;
  if (slot >= args.to.num_slots) return;
  const RecordPlace to = RecordPlace::of(args.to, slot);
  if (slot < args.num_slots) {
    Pieces pieces = {};
    pieces.load(args, RecordPlace::of(args.from, slot), lane);
    pieces.store(args, to, lane);
  } else {
    zero_record(args.to, to, args.code_bytes, args.scale_bytes, args.rope_dims * 2, lane);
  }
  zero_gaps(args.to, to, args.row_gap, args.page_gap_at, lane);
}
