// Shape of a CTA's work and of its shared memory.
#pragma once
#include "args.cuh"

// One CTA serves one token, HEAD_TILES * 16 heads and one split of the token's candidates, CHUNK at a time. QK_WARPS warps
// compute scores and weights, PV_WARPS warps gather rows and accumulate values; they meet at mbarriers only.
template <class Format_, int HEAD_TILES_, int QK_GROUPS_, int STAGES_, int PV_WARPS_ = 8>
struct Tile {
  using Format = Format_;
  static constexpr int HEAD_TILES = HEAD_TILES_;        // 16-head tiles of the CTA
  static constexpr int QK_GROUPS = QK_GROUPS_;          // groups of four QK warps
  static constexpr int STAGES = STAGES_;                // chunks in flight
  static constexpr int CHUNK = 32;
  static constexpr int PV_WARPS = PV_WARPS_;
  static constexpr int QK_WARPS = 4 * QK_GROUPS;
  static constexpr int THREADS = 32 * (QK_WARPS + PV_WARPS);
  static constexpr int HEADS = 16 * HEAD_TILES;
  static constexpr int ROWS_PER_WARP = CHUNK / PV_WARPS;
  static constexpr int D_QK = Format::QUANTISED + Format::ROPE;
  static constexpr int PV_DIMS = Format::D_V / PV_WARPS;  // value dimensions of a PV warp

  // ---- K dimensions of a QK warp, in steps of 16: E4M3 steps, then its share of the RoPE lanes.
  // Where the quantised dimensions do not make whole blocks of 64 for four warps (dsv4: seven blocks), the RoPE lanes stand
  // in for the last block of the last warp.
  static constexpr bool ROPE_IS_LAST_GROUP = Format::QUANTISED % 256 != 0;
  static constexpr int STEPS = (Format::QUANTISED + (ROPE_IS_LAST_GROUP ? Format::ROPE : 0)) / 64;
  static constexpr int STEPS_PER_GROUP = Format::GROUP / 16;
  static constexpr int GROUPS = STEPS / STEPS_PER_GROUP;
  static constexpr int ROPE_STEPS = ROPE_IS_LAST_GROUP ? 0 : Format::ROPE / 64;
  // Candidate tiles that a QK warp computes at once, in independent accumulators.
  static constexpr int TILES_IN_FLIGHT = STEPS > 8 ? 1 : 2;
  static_assert(STEPS % 4 == 0 && (QK_GROUPS == 1 || QK_GROUPS == 2), "");

  // ---- E4M3: a group of QK warps has its own head tiles; PV warps take values from the rows. E2M1: staged, a group takes half
  // of each chunk for all heads, forms f16 values once, and leaves them in a ring of half chunks for the PV warps.
  static constexpr bool STAGED = Format::FP4;
  static constexpr int GROUP_HEAD_TILES = STAGED ? HEAD_TILES : HEAD_TILES / QK_GROUPS;
  static constexpr int TILES = STAGED ? CHUNK / 8 / QK_GROUPS : CHUNK / 8;          // 8-candidate tiles of a group
  static constexpr int PARTS = 4 / TILES;                    // a QK warp finishes a tile for a part of its heads,
  static constexpr int ROWS = 2 * GROUP_HEAD_TILES / PARTS;  // so many accumulator rows
  static constexpr int VALUE_HALVES = STAGED ? 3 : 0;
  static constexpr int VALUE_STRIDE = Format::D_V * 2;                              // swizzled: QK and PV without conflicts
  static constexpr int VALUE_BYTES = 16 * VALUE_STRIDE;                             // of a half chunk
  static_assert(!STAGED || QK_GROUPS == 2, "a group fills a half chunk");
  static_assert(PARTS * TILES == 4 && GROUP_HEAD_TILES * (STAGED ? 1 : QK_GROUPS) == HEAD_TILES, "");
  static DEVICE u32 swizzle(u32 candidate) { return (candidate & 1) << 2 | (candidate >> 1 & 3); }
  static constexpr int BUFFERS = STAGED ? 2 : STAGES;                               // of weights

  // ---- shared memory, bytes from its start
  static constexpr int WEIGHT_STRIDE = CHUNK + 8;                                   // f16 per head, conflict-free
  static constexpr int WEIGHT_BYTES = HEADS * WEIGHT_STRIDE * 2;                    // of one stage
  static constexpr int EXCHANGE_REGION = 256 * ROWS;                                // partial scores from warp to warp
  static constexpr int ROWS_AT = 0;                                                 // [STAGES][CHUNK][ROW]
  static constexpr int VALUES_AT = (STAGES * CHUNK * Format::ROW + 127) / 128 * 128;  // [VALUE_HALVES][16][VALUE_STRIDE]
  static constexpr int WEIGHTS_AT = VALUES_AT + VALUE_HALVES * VALUE_BYTES;         // [BUFFERS][HEADS][WEIGHT_STRIDE] f16
  static constexpr int EXCHANGE_AT = WEIGHTS_AT + BUFFERS * WEIGHT_BYTES;           // [QK warp][3] regions
  static constexpr int RESCALE_AT = EXCHANGE_AT + 3 * QK_WARPS * EXCHANGE_REGION;   // [BUFFERS][HEADS] f32
  static constexpr int REDUCE_AT = RESCALE_AT + BUFFERS * HEADS * 4;                // [4][HEADS] f32
  static constexpr int REFERENCE_AT = REDUCE_AT + 4 * HEADS * 4;                    // [HEADS] f32
  static constexpr int FACTOR_AT = REFERENCE_AT + HEADS * 4;                        // [HEADS] f32
  static constexpr int BARRIERS_AT = FACTOR_AT + HEADS * 4;                         // [BARRIERS] u64
  static constexpr int BARRIERS = 2 * STAGES + BUFFERS + VALUE_HALVES + 1;
  static constexpr int RAISED_AT = BARRIERS_AT + BARRIERS * 8;                      // [BUFFERS] u32
  static constexpr int PRESENT_AT = RAISED_AT + BUFFERS * 4;                        // [STAGES][PV warp] u8
  static constexpr int SHARED_BYTES = PRESENT_AT + STAGES * PV_WARPS;
  static_assert(SHARED_BYTES <= 101376, "shared memory of a block on SM120");
  static constexpr int RESULT_STRIDE = Format::D_V + 4;                             // f32 per head, conflict-free
  static_assert(HEADS * RESULT_STRIDE * 4 <= RESCALE_AT, "results lie where rows, weights and exchange were");

  // What completes a stage: every PV warp's bulk copies, and where footers are 8 bytes every row's small copy.
  static constexpr int FULL_ARRIVALS = PV_WARPS + (Format::FOOTER == 8 ? CHUNK : 0);
  static constexpr u32 WARP_BULK_BYTES = ROWS_PER_WARP * (Format::COPY + (Format::FOOTER >= 16 ? Format::FOOTER : 0));

  // ---- mbarriers: rows are there; rows are done with; weights (and staged values) are there; a half of the values is done
  // with; all warps are here
  static constexpr int FREE_ARRIVALS = 32 * (STAGED ? QK_WARPS : PV_WARPS);
  static DEVICE u32 full(u32 shared, int stage) { return shared + BARRIERS_AT + stage * 8; }
  static DEVICE u32 free(u32 shared, int stage) { return full(shared, STAGES + stage); }
  static DEVICE u32 weighted(u32 shared, int buffer) { return full(shared, 2 * STAGES + buffer); }
  static DEVICE u32 values_free(u32 shared, int half) { return full(shared, 2 * STAGES + BUFFERS + half); }
  static DEVICE u32 met(u32 shared) { return full(shared, BARRIERS - 1); }
  static DEVICE u32 values(u32 shared, int half) { return shared + VALUES_AT + half * VALUE_BYTES; }
};

// Which token, heads and split a CTA serves.
struct Place {
  int token, head_group, split;

  // Row of partial values and states of one head.
  DEVICE i64 partial_row(const DecodeArgs& args, int head) const {
    return (static_cast<i64>(token) * args.num_heads + head) * args.all_splits + args.first_split + split;
  }

  template <class T>
  static DEVICE Place of(const DecodeArgs& args) {
    const u32 block = ptx::block_index();
    const u32 head_groups = (args.num_heads + T::HEADS - 1) / T::HEADS;
    Place place;
    place.head_group = block % head_groups;  // fastest, so that CTAs that share rows run together
    place.token = block / head_groups % args.num_tokens;
    place.split = block / head_groups / args.num_tokens;
    return place;
  }
};

// The part of a token's candidates that a CTA works through.
struct Work {
  int token, head_group;
  int length, extra_length;  // candidates of the two caches
  int main_chunks;           // chunks before the first chunk of the extra cache
  int first_chunk, chunks;

  template <class T>
  static DEVICE Work of(const DecodeArgs& args) {
    const Place place = Place::of<T>(args);
    Work work;
    work.token = place.token;
    work.head_group = place.head_group;
    work.length = length_of(args.main, work.token);
    if (T::Format::WINDOW > 0) work.length = min(work.length, T::Format::WINDOW);
    work.extra_length = T::Format::DUAL ? length_of(args.extra, work.token) : 0;
    work.main_chunks = (work.length + T::CHUNK - 1) / T::CHUNK;
    const i64 all = work.main_chunks + (work.extra_length + T::CHUNK - 1) / T::CHUNK;
    work.first_chunk = static_cast<int>(all * place.split / args.splits);
    work.chunks = static_cast<int>(all * (place.split + 1) / args.splits) - work.first_chunk;
    return work;
  }

  static DEVICE int length_of(const CandidateArgs& candidates, int token) {
    if (candidates.lengths == nullptr) return candidates.topk;
    return min(max(__ldg(candidates.lengths + token), 0), candidates.topk);
  }
};
