// Softmax weights: the QK warps.
//
// In a group of four QK warps each takes a quarter of the K dimensions (scores.cuh). It gives three quarters of its partial
// scores away and finishes the rest, one candidate tile for one of PARTS parts of the heads: sum over the group, scale to
// base-2 logits, mask, exponentiate against a reference.
// The reference of a head is raised, for all warps together, only when a logit exceeds it by more than 2^4; weights
// are stored as f16 times 2^WEIGHT_SHIFT.
#pragma once
#include "scores.cuh"

constexpr float WEIGHT_SHIFT = 5.f;                 // a weight of 1 is stored as 2^5
constexpr float RAISE_ABOVE = WEIGHT_SHIFT + 4.f;   // exponent beyond which f16 weights times value scales could overflow
constexpr float NO_REFERENCE = -3e38f;              // below every finite logit

template <class T>
struct QkWarp : Scores<T, T::Format::FP4> {
  using Format = typename T::Format;
  static constexpr int M = T::GROUP_HEAD_TILES, ROWS = T::ROWS, PARTS = T::PARTS;

  float reference[ROWS], sum[ROWS];  // of the rows that this warp finishes
  float logit[ROWS][2];

  DEVICE QkWarp(const DecodeArgs& args, const Work& work, u32 shared, int warp, int lane)
      : Scores<T, Format::FP4>(args, work, shared, warp, lane) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) reference[i] = NO_REFERENCE, sum[i] = 0.f;
  }

  // Which of the chunk's four tiles this warp finishes: its entry in reductions over candidates.
  DEVICE int entry() const { return this->tile(0); }

  // Bit 0 and 1: candidates 2*pair and 2*pair + 1 of the own tile are there.
  DEVICE u32 present(int stage) const {
    const int candidate = this->tile(0) * 8 + this->pair() * 2;
    return ptx::load_u8(this->shared + T::PRESENT_AT + stage * T::PV_WARPS + candidate / T::ROWS_PER_WARP) >>
           candidate % T::ROWS_PER_WARP;
  }

  // Where a giver leaves 32 times 2 * ROWS values: its own tile's for another part, or those of another slot for a part.
  DEVICE u32 exchange(int giver, int region) const {
    return this->shared + T::EXCHANGE_AT + ((this->group * 4 + giver) * 3 + region) * T::EXCHANGE_REGION +
           this->lane * min(8 * ROWS, 16);
  }

  // Gives partial scores away, sums the own ones over the group, turns them into masked base-2 logits.
  DEVICE void finish_tile(u32 present, const float (&partial)[M][T::TILES][4]) {
    const int quarter = this->quarter, part = this->part();
    // Rows of slot `slot` that belong to part `p`, as accumulators lie.
    const auto value = [&](int slot, int p, int i) { return partial[(p * ROWS * 2 + i) / 4][slot][(p * ROWS * 2 + i) % 4]; };
    const auto of_part = [&](bool first, int i) {
      return PARTS == 1 ? value(0, 0, i) : ptx::select(first, value(0, 0, i), value(0, PARTS - 1, i));
    };
    if (PARTS == 2) give(exchange(quarter, 0), [&](int i) { return of_part(part != 0, i); });
#pragma unroll
    for (int slot = 1; slot < T::TILES; slot++)
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        give(exchange(quarter, PARTS - 1 + (slot - 1) * PARTS + p), [&](int i) { return value(slot, p, i); });
    this->group_barrier();
    float total[ROWS * 2];
#pragma unroll
    for (int i = 0; i < ROWS * 2; i++) total[i] = of_part(part == 0, i);
#pragma unroll
    for (int other = 1; other < 4; other++) {
      const u32 from = PARTS == 1 ? exchange(quarter - other & 3, other - 1)
                                  : exchange(quarter ^ other, other == 2 ? 0 : 1 + part);
      if constexpr (ROWS == 1) {
        const float2 v = ptx::load_f32x2(from);
        total[0] += v.x, total[1] += v.y;
      } else {
#pragma unroll
        for (int i = 0; i < ROWS * 2; i += 4) {
          const float4 v = ptx::load_f32x4(from + i * 128);
          total[i] += v.x, total[i + 1] += v.y, total[i + 2] += v.z, total[i + 3] += v.w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS * 2; i++)
      logit[i / 2][i % 2] = present >> (i & 1) & 1 ? __fmul_rn(total[i], this->scale[i / 2]) : MINUS_INFINITY;
  }

  template <class Value>
  static DEVICE void give(u32 at, const Value& value) {
    if constexpr (ROWS == 1) {
      ptx::store_shared(at, value(0), value(1));
    } else {
#pragma unroll
      for (int i = 0; i < ROWS * 2; i += 4) ptx::store_shared(at + i * 128, value(i), value(i + 1), value(i + 2), value(i + 3));
    }
  }

  // Weights of the own tile under the present references, to shared memory; returns the largest exponent.
  DEVICE float store_weights(int buffer, float (&tile_sum)[ROWS]) const {
    float largest = MINUS_INFINITY;
    const u32 at = this->shared + T::WEIGHTS_AT + buffer * T::WEIGHT_BYTES + (this->tile(0) * 8 + this->pair() * 2) * 2;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      // Not an fma: the reference was made from the rounded product, and beyond 2^24 the difference must be exact.
      const float offset = WEIGHT_SHIFT - reference[i];
      const float x = __fadd_rn(logit[i][0], offset), y = __fadd_rn(logit[i][1], offset);
      largest = fmaxf(largest, fmaxf(x, y));
      const float p = ptx::exp2_approximate(x), p1 = ptx::exp2_approximate(y);
      tile_sum[i] = p + p1;
      ptx::store_u32(at + this->head(i) * T::WEIGHT_STRIDE * 2, ptx::pack_f16(p, p1));
    }
    return largest;
  }

  // Raises the references to the maxima of this chunk, and says by how much.
  DEVICE void raise(int buffer) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float v = fmaxf(logit[i][0], logit[i][1]);
      v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
      v = fmaxf(v, __shfl_xor_sync(~0u, v, 2));
      if (this->pair() == 0) ptx::store_f32(this->reduce_at(entry(), this->head(i)), v);
    }
    this->all_barrier();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float raised = reference[i];
#pragma unroll
      for (int z = 0; z < 4; z++) raised = fmaxf(raised, ptx::load_f32(this->reduce_at(z, this->head(i))));
      const float factor = ptx::exp2_approximate(reference[i] - raised);
      reference[i] = raised;
      sum[i] *= factor;
      if (entry() == 0 && this->pair() == 0)
        ptx::store_f32(this->shared + T::RESCALE_AT + (buffer * T::HEADS + this->head(i)) * 4, factor);
    }
  }

  DEVICE void run() {
    int stage = 0, buffer = 0;  // of rows, of weights
    u32 parity = 0;
    int half = this->group;     // of the value ring
    u32 half_parity = 1;        // at first it is free
    for (int chunk = 0; chunk < this->work.chunks; chunk++) {
      ptx::mbarrier_wait(T::full(this->shared, stage), parity);
      const u32 present = this->present(stage);
      float partial[M][T::TILES][4];
      if constexpr (T::STAGED) {
        this->scores(stage, T::values(this->shared, half), T::values_free(this->shared, half), half_parity, partial);
        if ((half += 2) >= T::VALUE_HALVES) half -= T::VALUE_HALVES, half_parity ^= 1;
      } else {
        this->scores(stage, partial);
      }
      finish_tile(present, partial);
      // The weight buffer is free: full(chunk) implies that the values of chunk - STAGES are done, and so does, for
      // chunk - 2, the free half of the value ring.
      float tile_sum[ROWS];
      const bool too_large = store_weights(buffer, tile_sum) > RAISE_ABOVE;
      const bool raised = ptx::named_barrier_any(1, T::QK_WARPS * 32, too_large);
      if (__builtin_expect(raised, 0)) {
        raise(buffer);
        store_weights(buffer, tile_sum);
        this->all_barrier();  // the reduction buffer is free again
      }
      if (threadIdx.x == 0) ptx::store_u32(this->shared + T::RAISED_AT + buffer * 4, raised);
#pragma unroll
      for (int i = 0; i < ROWS; i++) sum[i] += tile_sum[i];
      ptx::mbarrier_arrive(T::weighted(this->shared, buffer));
      if (++stage == T::STAGES) stage = 0, parity ^= 1;
      if (++buffer == T::BUFFERS) buffer = 0;
    }
  }

  // Sums and references to shared memory, for state_of_head.
  DEVICE void store_sums() const {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float v = sum[i];
      v += __shfl_xor_sync(~0u, v, 1);
      v += __shfl_xor_sync(~0u, v, 2);
      if (this->pair() == 0) ptx::store_f32(this->reduce_at(entry(), this->head(i)), v);
      if (this->pair() == 0 && entry() == 0) ptx::store_f32(this->shared + T::REFERENCE_AT + this->head(i) * 4, reference[i]);
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
  for (int entry = 0; entry < 4; entry++) {
    state.sum += ptx::load_f32(shared + T::REDUCE_AT + (entry * T::HEADS + head) * 4);
  }
  return state;
}
