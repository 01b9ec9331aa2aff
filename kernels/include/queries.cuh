// Q in the registers of a QK warp: a quarter of the K dimensions of its group's heads, as f16 scaled by one power of two per
// head.
#pragma once
#include "args.cuh"
#include "format.cuh"
#include "tile.cuh"

template <class T>
struct Queries {
  using Format = typename T::Format;
  static constexpr int M = T::GROUP_HEAD_TILES;

  const DecodeArgs& args;
  const Work& work;
  u32 shared;
  int quarter, group, lane;                            // dimension quarter and group of this warp
  u32 nope[M][T::STEPS][4];                            // A fragments, f16
  u32 rope[M][T::ROPE_STEPS ? T::ROPE_STEPS : 1][4];   // A fragments, bf16
  float scale[T::ROWS];                                // from products to base-2 logits, of the rows that this warp finishes

  DEVICE Queries(const DecodeArgs& args_, const Work& work_, u32 shared_, int warp, int lane_)
      : args(args_), work(work_), shared(shared_), quarter(warp & 3), group(warp >> 2), lane(lane_) {}

  DEVICE int quad() const { return lane >> 2; }
  DEVICE int pair() const { return lane & 3; }
  DEVICE int first_head() const { return T::STAGED ? 0 : group * M * 16; }  // inside the CTA
  // Candidate tiles by slot: slot 0 of a warp is the tile that it finishes.
  DEVICE int own_tile() const { return quarter % T::TILES; }
  DEVICE int part() const { return quarter / T::TILES; }
  DEVICE int tile(int slot) const {  // of the chunk
    return (T::STAGED ? group * T::TILES : 0) + (own_tile() + slot) % T::TILES;
  }
  DEVICE int head(int row) const {  // of a row that this warp finishes, inside the CTA
    const int accumulator_row = part() * T::ROWS + row;
    return first_head() + accumulator_row / 2 * 16 + accumulator_row % 2 * 8 + quad();
  }
  DEVICE bool is_rope(int step) const {                                 // dsv4: RoPE lanes instead of a last group
    return T::ROPE_IS_LAST_GROUP && quarter == 3 && step >= T::STEPS - Format::ROPE / 16;
  }
  DEVICE u32 reduce_at(int entry, int head) const { return shared + T::REDUCE_AT + (entry * T::HEADS + head) * 4; }
  DEVICE void group_barrier() const { ptx::named_barrier(2 + group, 128); }
  DEVICE void all_barrier() const { ptx::named_barrier(1, T::QK_WARPS * 32); }

  // Shared address of row `candidate` of the tile in `slot`.
  DEVICE u32 tile_row(int stage, int slot, int candidate) const {
    return shared + T::ROWS_AT + (stage * T::CHUNK + tile(slot) * 8 + candidate) * Format::ROW;
  }

  // Loads Q in the order of the K codes that a thread gets from ldmatrix: four adjacent dimensions of every 16 (E4M3); or
  // eight adjacent of every 32, of which a step takes four, those that lie two apart side by side (E2M1). RoPE lanes use the
  // ordinary order.
  DEVICE void load() {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int head = work.head_group * T::HEADS + first_head() + m * 16 + quad();
      const bool low = head < args.num_heads, high = head + 8 < args.num_heads;
      const __nv_bfloat16* row = args.q + (static_cast<i64>(work.token) * args.num_heads + head) * T::D_QK;
      const __nv_bfloat16* row8 = row + 8 * T::D_QK;
#pragma unroll
      for (int step = 0; step < T::STEPS; step++) {
        const int dim = (quarter * T::STEPS + step) * 16;
        u32 (&a)[4] = nope[m][step];
        if (is_rope(step)) {
          a[0] = load_as<u32>(row + dim + pair() * 2, low), a[2] = load_as<u32>(row + dim + pair() * 2 + 8, low);
          a[1] = load_as<u32>(row8 + dim + pair() * 2, high), a[3] = load_as<u32>(row8 + dim + pair() * 2 + 8, high);
        } else if constexpr (Format::FP4) {
          if (step % 2) continue;  // two steps at once
          u32 (&b)[4] = nope[m][step + 1];
          const uint4 x = load_as<uint4>(row + dim + pair() * 8, low), y = load_as<uint4>(row8 + dim + pair() * 8, high);
          interleave(x.x, x.y, a[0], a[2]), interleave(y.x, y.y, a[1], a[3]);
          interleave(x.z, x.w, b[0], b[2]), interleave(y.z, y.w, b[1], b[3]);
        } else {
          a[0] = load_as<u32>(row + dim + pair() * 4, low), a[2] = load_as<u32>(row + dim + pair() * 4 + 2, low);
          a[1] = load_as<u32>(row8 + dim + pair() * 4, high), a[3] = load_as<u32>(row8 + dim + pair() * 4 + 2, high);
        }
      }
#pragma unroll
      for (int step = 0; step < T::ROPE_STEPS; step++) {
        const int dim = Format::QUANTISED + (quarter * T::ROPE_STEPS + step) * 16 + pair() * 2;
        u32 (&a)[4] = rope[m][step];
        a[0] = load_as<u32>(row + dim, low), a[2] = load_as<u32>(row + dim + 8, low);
        a[1] = load_as<u32>(row8 + dim, high), a[3] = load_as<u32>(row8 + dim + 8, high);
      }
    }
  }

  // As many values as a word of this type holds; zeros if there is no such head.
  template <class Word>
  static DEVICE Word load_as(const __nv_bfloat16* from, bool present) {
    return present ? __ldg(reinterpret_cast<const Word*>(from)) : Word{};
  }

  // (x0, x1) and (y0, y1) to (x0, y0) and (x1, y1).
  static DEVICE void interleave(u32 x, u32 y, u32& first, u32& second) {
    first = __byte_perm(x, y, 0x5410), second = __byte_perm(x, y, 0x7632);
  }

  // Scales the quantised dimensions of every head by a power of two that brings the largest to [2^14, 2^15), the RoPE
  // lanes by the same; the sign of sm_scale goes into Q, so that logits grow with products.
  DEVICE void bring_to_f16() {
    u32 largest[M][2];  // bits of the largest |bf16|
#pragma unroll
    for (int m = 0; m < M; m++) {
      u32 packed[2] = {0, 0};
#pragma unroll
      for (int step = 0; step < T::STEPS; step++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (!is_rope(step)) packed[e & 1] = __vmaxu2(packed[e & 1], nope[m][step][e] & 0x7fff7fffu);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 v = max(packed[r] & 0xffff, packed[r] >> 16);
        v = max(v, __shfl_xor_sync(~0u, v, 1));
        v = max(v, __shfl_xor_sync(~0u, v, 2));
        largest[m][r] = v;
        if ((!T::STAGED || group == 0) && pair() == 0)
          ptx::store_u32(reduce_at(quarter, first_head() + m * 16 + quad() + r * 8), v);
      }
    }
    all_barrier();
#pragma unroll
    for (int m = 0; m < M; m++) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 v = largest[m][r];
#pragma unroll
        for (int z = 0; z < 4; z++) v = max(v, ptx::load_u32(reduce_at(z, first_head() + m * 16 + quad() + r * 8)));
        const int exponent = v == 0 ? 0 : max(static_cast<int>(v >> 7), 20) - 127;
        const float power = __uint_as_float(static_cast<u32>(127 + max(-126, min(14 - exponent, 120))) << 23);
        factor[r] = args.scale_log2 < 0.f ? -power : power;
        const int row = m * 2 + r;
        const float to_logit = args.scale_log2 / factor[r];
        scale[row % T::ROWS] = row < T::ROWS ? to_logit : ptx::select(part() == 0, scale[row % T::ROWS], to_logit);
      }
#pragma unroll
      for (int step = 0; step < T::STEPS; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 x = ptx::unpack_bf16(nope[m][step][e]);
          const float f = factor[e & 1];
          nope[m][step][e] = is_rope(step) ? ptx::pack_bf16(x.x * f, x.y * f) : ptx::pack_f16(x.x * f, x.y * f);
        }
#pragma unroll
      for (int step = 0; step < T::ROPE_STEPS; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 x = ptx::unpack_bf16(rope[m][step][e]);
          rope[m][step][e] = ptx::pack_bf16(x.x * factor[e & 1], x.y * factor[e & 1]);
        }
    }
    all_barrier();  // the reduction buffer is free again
  }
};
