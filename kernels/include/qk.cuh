// Scores and weights: the QK warps.
//
// In a group of four QK warps, warp d holds a quarter of the K dimensions of Q in registers, as f16 scaled by one power of
// two per head. It computes partial scores of all 32 candidates of a chunk, gives three of the four 8-candidate tiles
// away and finishes the fourth: sum over the group, scale to base-2 logits, mask, exponentiate against a reference.
// The reference of a head is raised, for all warps together, only when a logit exceeds it by more than 2^4; weights
// are stored as f16 times 2^WEIGHT_SHIFT.
#pragma once
#include "args.cuh"
#include "codes.cuh"
#include "format.cuh"
#include "tile.cuh"

constexpr float WEIGHT_SHIFT = 5.f;                 // a weight of 1 is stored as 2^5
constexpr float RAISE_ABOVE = WEIGHT_SHIFT + 4.f;   // exponent beyond which f16 weights times value scales could overflow
constexpr float NO_REFERENCE = -3e38f;              // below every finite logit

template <class T>
struct Queries {
  u32 nope[T::TILES_PER_GROUP][T::STEPS][4];                             // A fragments, f16
  u32 rope[T::TILES_PER_GROUP][T::ROPE_STEPS ? T::ROPE_STEPS : 1][4];    // A fragments, bf16
  float scale[T::TILES_PER_GROUP][2];                                    // from products to base-2 logits, rows l and l + 8
};

template <class T>
struct QkWarp {
  using Format = typename T::Format;
  static constexpr int M = T::TILES_PER_GROUP;
  static constexpr int TILES = T::TILES_IN_FLIGHT;
  static constexpr int CODES_PER_BYTE = Format::FP4 ? 2 : 1;

  const DecodeArgs& args;
  const Work& work;
  u32 shared;
  int quarter, group, lane;  // dimension quarter and head group of this warp
  Queries<T> q;
  float reference[M][2], sum[M][2];
  float logit[M][4];         // of the tile that this warp finishes

  DEVICE QkWarp(const DecodeArgs& args_, const Work& work_, u32 shared_, int warp, int lane_)
      : args(args_), work(work_), shared(shared_), quarter(warp & 3), group(warp >> 2), lane(lane_) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      reference[m][0] = reference[m][1] = NO_REFERENCE;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  DEVICE int quad() const { return lane >> 2; }
  DEVICE int pair() const { return lane & 3; }
  DEVICE int first_head() const { return group * M * 16; }              // inside the CTA
  DEVICE bool rope_step(int step) const {                               // dsv4: RoPE lanes instead of a last group
    return T::ROPE_IS_LAST_GROUP && quarter == 3 && step >= T::STEPS - Format::ROPE / 16;
  }
  DEVICE u32 reduce_at(int quarter_, int head) const { return shared + T::REDUCE_AT + (quarter_ * T::HEADS + head) * 4; }
  DEVICE void group_barrier() const { ptx::named_barrier(T::QK_GROUPS == 1 ? 2 : 2 + group, 128); }

  // Loads this warp's part of Q, in the order of the K codes that a thread gets from ldmatrix: four adjacent dimensions of
  // every 16 (E4M3), or eight adjacent of every 32, of which even steps take those that lie four apart (E2M1). RoPE lanes
  // use the ordinary order.
  DEVICE void load_q() {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int head = work.head_group * T::HEADS + first_head() + m * 16 + quad();
      const bool low = head < args.num_heads, high = head + 8 < args.num_heads;
      const __nv_bfloat16* row = args.q + (static_cast<i64>(work.token) * args.num_heads + head) * T::D_QK;
      const __nv_bfloat16* row8 = row + 8 * T::D_QK;
#pragma unroll
      for (int step = 0; step < T::STEPS; step++) {
        const int dim = (quarter * T::STEPS + step) * 16;
        u32 (&a)[4] = q.nope[m][step];
        if (rope_step(step)) {
          a[0] = load_pair(row + dim + pair() * 2, low), a[2] = load_pair(row + dim + pair() * 2 + 8, low);
          a[1] = load_pair(row8 + dim + pair() * 2, high), a[3] = load_pair(row8 + dim + pair() * 2 + 8, high);
        } else if (Format::FP4) {
          const int from = (dim & ~31) + pair() * 8 + (step & 1) * 2;
          interleave(load_pair(row + from, low), load_pair(row + from + 4, low), a[0], a[2]);
          interleave(load_pair(row8 + from, high), load_pair(row8 + from + 4, high), a[1], a[3]);
        } else {
          a[0] = load_pair(row + dim + pair() * 4, low), a[2] = load_pair(row + dim + pair() * 4 + 2, low);
          a[1] = load_pair(row8 + dim + pair() * 4, high), a[3] = load_pair(row8 + dim + pair() * 4 + 2, high);
        }
      }
#pragma unroll
      for (int step = 0; step < T::ROPE_STEPS; step++) {
        const int dim = Format::QUANTISED + (quarter * T::ROPE_STEPS + step) * 16 + pair() * 2;
        u32 (&a)[4] = q.rope[m][step];
        a[0] = load_pair(row + dim, low), a[2] = load_pair(row + dim + 8, low);
        a[1] = load_pair(row8 + dim, high), a[3] = load_pair(row8 + dim + 8, high);
      }
    }
  }

  static DEVICE u32 load_pair(const __nv_bfloat16* from, bool present) {
    return present ? __ldg(reinterpret_cast<const u32*>(from)) : 0;
  }

  // (x0, x1) and (y0, y1) to (x0, y0) and (x1, y1).
  static DEVICE void interleave(u32 x, u32 y, u32& first, u32& second) {
    first = __byte_perm(x, y, 0x5410), second = __byte_perm(x, y, 0x7632);
  }

  // Scales the quantised dimensions of every head by a power of two that brings the largest to [2^14, 2^15), the RoPE
  // lanes by the same; the sign of sm_scale goes into Q, so that logits grow with products.
  DEVICE void scale_q() {
    u32 largest[M][2];  // bits of the largest |bf16|
#pragma unroll
    for (int m = 0; m < M; m++) {
      u32 packed[2] = {0, 0};
#pragma unroll
      for (int step = 0; step < T::STEPS; step++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (!rope_step(step)) packed[e & 1] = __vmaxu2(packed[e & 1], q.nope[m][step][e] & 0x7fff7fffu);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 v = max(packed[r] & 0xffff, packed[r] >> 16);
        v = max(v, __shfl_xor_sync(~0u, v, 1));
        v = max(v, __shfl_xor_sync(~0u, v, 2));
        largest[m][r] = v;
        if (pair() == 0) ptx::store_u32(reduce_at(quarter, first_head() + m * 16 + quad() + r * 8), v);
      }
    }
    group_barrier();
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
        q.scale[m][r] = args.scale_log2 / factor[r];
      }
#pragma unroll
      for (int step = 0; step < T::STEPS; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 x = ptx::unpack_bf16(q.nope[m][step][e]);
          const float f = factor[e & 1];
          q.nope[m][step][e] = rope_step(step) ? ptx::pack_bf16(x.x * f, x.y * f) : ptx::pack_f16(x.x * f, x.y * f);
        }
#pragma unroll
      for (int step = 0; step < T::ROPE_STEPS; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 x = ptx::unpack_bf16(q.rope[m][step][e]);
          q.rope[m][step][e] = ptx::pack_bf16(x.x * factor[e & 1], x.y * factor[e & 1]);
        }
    }
    group_barrier();  // the reduction buffer is free again
  }

  // Shared address of candidate row `candidate` of tile slot `slot`: slot 0 is the tile this warp finishes.
  DEVICE u32 tile_row(int stage, int slot, int candidate) const {
    return shared + T::ROWS_AT + (stage * T::CHUNK + ((quarter + slot) & 3) * 8 + candidate) * Format::ROW;
  }

  // Stored scales of candidates 2*pair and 2*pair + 1 of a tile, for this warp's groups: FP32, or UE8M0 bytes in one word.
  static constexpr int SCALE_WORDS = Format::UE8M0 || Format::FP4 ? 1 : T::GROUPS;
  DEVICE void load_scales(u32 row, u32 (&words)[2][SCALE_WORDS]) const {
    static_assert(!Format::UE8M0 || T::GROUPS == 4 || T::GROUPS == 2, "a word or half a word");
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const u32 at = row + c * Format::ROW + Format::SCALES;
      if (Format::UE8M0) {
        words[c][0] = T::GROUPS == 4 ? ptx::load_u32(at + quarter * 4) : ptx::load_u16(at + quarter * 2);
      } else {
#pragma unroll
        for (int g = 0; g < SCALE_WORDS; g++) words[c][g] = ptx::load_u32(at + (quarter * T::GROUPS + g) * 4);
      }
    }
  }
  static DEVICE float scale_of(const u32 (&words)[SCALE_WORDS], int g) {
    return Format::UE8M0 ? ue8m0_value(words[0] >> (8 * g) & 0xff) : __uint_as_float(words[Format::UE8M0 ? 0 : g]);
  }

  // Partial scores of the chunk over this warp's dimensions, tile slot by tile slot.
  DEVICE void scores(int stage, float (&partial)[M][4][4]) const {
    const float code_scale = E2M1_UNIT * args.kv_global_scale;
#pragma unroll
    for (int slot = 0; slot < 4; slot += TILES) {
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) partial[m][slot + i][e] = 0.f;
      u32 scales[TILES][2][SCALE_WORDS];
      u32 codes_at[TILES], scales_at[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        if (!Format::FP4) load_scales(tile_row(stage, slot + i, pair() * 2), scales[i]);
        codes_at[i] = tile_row(stage, slot + i, lane & 7) + (lane >> 3) * 16 + quarter * T::STEPS * 16 / CODES_PER_BYTE;
        scales_at[i] = tile_row(stage, slot + i, quad()) + Format::SCALES + quarter * T::STEPS;
      }
      float product[M][TILES][4];
#pragma unroll
      for (int block = 0; block < T::STEPS / 4; block++) {
        if (T::ROPE_IS_LAST_GROUP && quarter == 3 && block == T::STEPS / 4 - 1) {
          rope_products(stage, slot, partial);
          continue;
        }
        KeyCodes<Format::FP4> codes[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) codes[i].load(codes_at[i] + block * 64 / CODES_PER_BYTE, scales_at[i] + block * 4);
#pragma unroll
        for (int z = 0; z < 4; z++) {
          const int step = block * 4 + z;
          if (step % T::STEPS_PER_GROUP == 0) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
              for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) product[m][i][e] = 0.f;
          }
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            u32 b0, b1;
            codes[i].fragment(z, b0, b1);
#pragma unroll
            for (int m = 0; m < M; m++) ptx::mma_f16(product[m][i], q.nope[m][step], b0, b1);
          }
          if (step % T::STEPS_PER_GROUP == T::STEPS_PER_GROUP - 1) {
            const int g = step / T::STEPS_PER_GROUP;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
              const float even = Format::FP4 ? code_scale : scale_of(scales[i][0], g);
              const float odd = Format::FP4 ? code_scale : scale_of(scales[i][1], g);
#pragma unroll
              for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) partial[m][slot + i][e] += product[m][i][e] * (e & 1 ? odd : even);
            }
          }
        }
      }
#pragma unroll
      for (int step = 0; step < T::ROPE_STEPS; step++)
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          u32 lanes[2];
          ptx::ldmatrix_x2(lanes, tile_row(stage, slot + i, lane & 7) + Format::ROPE_AT + (lane >> 3 & 1) * 16 +
                                      (quarter * T::ROPE_STEPS + step) * 32);
#pragma unroll
          for (int m = 0; m < M; m++) ptx::mma_bf16(partial[m][slot + i], q.rope[m][step], lanes[0], lanes[1]);
        }
    }
  }

  // dsv4, last quarter: 64 RoPE lanes in place of a scale group.
  DEVICE void rope_products(int stage, int slot, float (&partial)[M][4][4]) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 lanes[4];
        ptx::ldmatrix_x4(lanes, tile_row(stage, slot + i, lane & 7) + Format::ROPE_AT + (lane >> 3) * 16 + half * 64);
#pragma unroll
        for (int z = 0; z < 2; z++)
#pragma unroll
          for (int m = 0; m < M; m++)
            ptx::mma_bf16(partial[m][slot + i], q.nope[m][T::STEPS - 4 + half * 2 + z], lanes[2 * z], lanes[2 * z + 1]);
      }
    }
  }

  // Gives three tiles away, sums the own one over the group, turns it into masked base-2 logits.
  DEVICE void finish_tile(int stage, const float (&partial)[M][4][4]) {
    const u32 exchange = shared + T::EXCHANGE_AT + lane * 16;
    const int warp = group * 4 + quarter;
#pragma unroll
    for (int slot = 1; slot < 4; slot++)
#pragma unroll
      for (int m = 0; m < M; m++)
        ptx::store_shared(exchange + ((warp * 3 + slot - 1) * M + m) * T::EXCHANGE_SLOT, partial[m][slot][0],
                          partial[m][slot][1], partial[m][slot][2], partial[m][slot][3]);
    group_barrier();
    // Candidates 2*pair and 2*pair + 1 of tile `quarter`.
    const int candidate = quarter * 8 + pair() * 2;
    const u32 present = ptx::load_u8(shared + T::PRESENT_AT + stage * T::PV_WARPS + candidate / T::ROWS_PER_WARP) >>
                        candidate % T::ROWS_PER_WARP;
#pragma unroll
    for (int m = 0; m < M; m++) {
      float total[4];
#pragma unroll
      for (int e = 0; e < 4; e++) total[e] = partial[m][0][e];
#pragma unroll
      for (int slot = 1; slot < 4; slot++) {
        const int giver = group * 4 + ((quarter - slot) & 3);
        const float4 v = ptx::load_f32x4(exchange + ((giver * 3 + slot - 1) * M + m) * T::EXCHANGE_SLOT);
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
#pragma unroll
      for (int e = 0; e < 4; e++)
        logit[m][e] = present >> (e & 1) & 1 ? __fmul_rn(total[e], q.scale[m][e >> 1]) : MINUS_INFINITY;
    }
  }

  // Weights of the own tile under the present references, to shared memory; returns the largest exponent.
  DEVICE float store_weights(int stage, float (&tile_sum)[M][2]) const {
    float largest = MINUS_INFINITY;
    const u32 at = shared + T::WEIGHTS_AT + stage * T::WEIGHT_BYTES +
                   ((first_head() + quad()) * T::WEIGHT_STRIDE + quarter * 8 + pair() * 2) * 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        // Not an fma: the reference was made from the rounded product, and beyond 2^24 the difference must be exact.
        const float offset = WEIGHT_SHIFT - reference[m][r];
        const float x = __fadd_rn(logit[m][2 * r], offset), y = __fadd_rn(logit[m][2 * r + 1], offset);
        largest = fmaxf(largest, fmaxf(x, y));
        const float p = ptx::exp2_approximate(x), p1 = ptx::exp2_approximate(y);
        tile_sum[m][r] = p + p1;
        ptx::store_u32(at + (m * 16 + r * 8) * T::WEIGHT_STRIDE * 2, ptx::pack_f16(p, p1));
      }
    return largest;
  }

  // Raises the references of the group's heads to the maxima of this chunk, and says by how much.
  DEVICE void raise(int stage) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float v = fmaxf(logit[m][2 * r], logit[m][2 * r + 1]);
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 2));
        if (pair() == 0) ptx::store_f32(reduce_at(quarter, first_head() + m * 16 + quad() + r * 8), v);
      }
    group_barrier();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int head = first_head() + m * 16 + quad() + r * 8;
        float raised = reference[m][r];
#pragma unroll
        for (int z = 0; z < 4; z++) raised = fmaxf(raised, ptx::load_f32(reduce_at(z, head)));
        const float factor = ptx::exp2_approximate(reference[m][r] - raised);
        reference[m][r] = raised;
        sum[m][r] *= factor;
        if (quarter == 0 && pair() == 0) ptx::store_f32(shared + T::RESCALE_AT + (stage * T::HEADS + head) * 4, factor);
      }
  }

  DEVICE void run() {
    int stage = 0;
    u32 parity = 0;
    for (int chunk = 0; chunk < work.chunks; chunk++) {
      ptx::mbarrier_wait(T::full(shared, stage), parity);
      float partial[M][4][4];
      scores(stage, partial);
      finish_tile(stage, partial);
      // full(chunk) implies that the values of chunk - STAGES are done, so the weight buffer of this stage is free.
      float tile_sum[M][2];
      const bool too_large = store_weights(stage, tile_sum) > RAISE_ABOVE;
      const bool raised = ptx::named_barrier_any(1, T::QK_WARPS * 32, too_large);
      if (__builtin_expect(raised, 0)) {
        raise(stage);
        store_weights(stage, tile_sum);
        group_barrier();  // the reduction buffer is free again
      }
      if (threadIdx.x == 0) ptx::store_u32(shared + T::RAISED_AT + stage * 4, raised);
#pragma unroll
      for (int m = 0; m < M; m++) sum[m][0] += tile_sum[m][0], sum[m][1] += tile_sum[m][1];
      ptx::mbarrier_arrive(T::weighted(shared, stage));
      if (++stage == T::STAGES) stage = 0, parity ^= 1;
    }
  }

  // Sums and references of the group's heads to shared memory, for state_of_head.
  DEVICE void store_sums() const {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int head = first_head() + m * 16 + quad() + r * 8;
        float v = sum[m][r];
        v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if (pair() == 0) ptx::store_f32(reduce_at(quarter, head), v);
        if (pair() == 0 && quarter == 0) ptx::store_f32(shared + T::REFERENCE_AT + head * 4, reference[m][r]);
      }
  }
};

// A head's reference and its sum of 2^(logit - reference + WEIGHT_SHIFT).
struct State {
  float reference, sum;
};

template <class T>
DEVICE State state_of_head(u32 shared, int head) {
  State state = {ptx::load_f32(shared + T::REFERENCE_AT + head * 4), 0.f};
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++) {
    state.sum += ptx::load_f32(shared + T::REDUCE_AT + (quarter * T::HEADS + head) * 4);
  }
  return state;
}
