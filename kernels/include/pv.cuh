// Values: the PV warps. Warp w accumulates PV_DIMS value dimensions of all heads of the CTA, in registers.
//
// Weights come as f16; the scale of a candidate's group is multiplied into them after division by a unit, a power of two
// that follows the chunk's largest scale, so that the products stay inside f16. E4M3 codes are exact in f16. Of E2M1 records
// the QK warps leave f16 values, times their scales, in the value ring. dsv4's RoPE lanes, which are values too, are BF16:
// warp 7 multiplies them with the weights as a sum of two BF16 numbers.
#pragma once
#include "args.cuh"
#include "codes.cuh"
#include "format.cuh"
#include "gather.cuh"
#include "tile.cuh"

constexpr int SCALE_SHIFT = 6;  // a scale of half the unit to the unit is stored as 2^5 to 2^6

template <class T>
struct PvWarp {
  using Format = typename T::Format;
  static constexpr int M = T::HEAD_TILES;
  static constexpr int N = T::PV_DIMS / 8;                                          // 8-dimension tiles
  // Scale groups of a warp; of no use to staged values.
  static constexpr int GROUPS = !T::STAGED && T::PV_DIMS > Format::GROUP ? T::PV_DIMS / Format::GROUP : 1;
  static constexpr int N_PER_GROUP = N / GROUPS;
  static constexpr bool HAS_ROPE = Format::D_V > Format::QUANTISED;                 // RoPE lanes are values

  u32 shared;
  int warp, lane;
  float values[M][N][4];
  int unit[GROUPS];  // biased exponent
  // Staged: this lane's shared addresses of weights, and of columns 16 * d in a half of the value ring.
  u32 weights_lane, values_lane[T::STAGED ? N / 2 : 1];

  DEVICE PvWarp(u32 shared_, int warp_, int lane_) : shared(shared_), warp(warp_), lane(lane_) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) values[m][n][e] = 0.f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) unit[g] = 127;
    if constexpr (T::STAGED) {
      static_assert(T::PV_DIMS == 64, "a warp's units are those that the swizzle permutes");
      weights_lane = ptx::pinned(weights_at(0, 0, 0));
#pragma unroll
      for (int d = 0; d < N / 2; d++)
        values_lane[d] = ptx::pinned(T::values(shared, 0) + (lane & 15) * T::VALUE_STRIDE + warp * 128 +
                                     (d * 2 + (lane >> 4) ^ T::swizzle(lane)) * 16);
    }
  }

  DEVICE bool is_rope() const { return HAS_ROPE && warp == T::PV_WARPS - 1; }
  DEVICE u32 rows_at(int stage) const { return shared + T::ROWS_AT + stage * T::CHUNK * Format::ROW; }

  DEVICE void multiply(int first, int last, float low, float high) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
        if (n >= first && n < last) {
          values[m][n][0] *= low, values[m][n][1] *= low;
          values[m][n][2] *= high, values[m][n][3] *= high;
        }
  }

  // The QK warps raised references at this chunk: what was summed before shrinks.
  DEVICE void rescale(int buffer) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const u32 at = shared + T::RESCALE_AT + (buffer * T::HEADS + m * 16 + (lane >> 2)) * 4;
      const float low = ptx::load_f32(at), high = ptx::load_f32(at + 8 * 4);
#pragma unroll
      for (int n = 0; n < N; n++) {
        values[m][n][0] *= low, values[m][n][1] *= low;
        values[m][n][2] *= high, values[m][n][3] *= high;
      }
    }
  }

  // Scale of candidate `candidate` for group g of this warp.
  DEVICE float scale(int stage, int candidate, int g) const {
    const int group = warp * T::PV_DIMS / Format::GROUP + g;
    const u32 at = rows_at(stage) + candidate * Format::ROW + Format::SCALES;
    if (!Format::UE8M0) return ptx::load_f32(at + group * 4);
    return ue8m0_value(ptx::load_u8(at + group));
  }

  // Scales over the unit for candidates 2*(lane % 16) and the next, as f16; moves the unit when the chunk asks for it.
  DEVICE u32 scales_over_unit(int stage, int g) {
    const float a = scale(stage, (lane & 15) * 2, g), b = scale(stage, (lane & 15) * 2 + 1, g);
    const u32 bits = max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu);
    const int largest = static_cast<int>(ptx::warp_max(bits) >> 23);
    if (__builtin_expect(largest != 0 && (largest >= unit[g] || largest < unit[g] - 8), 0)) {
      const int moved = max(min(largest + 1, 250), 8);
      const int down = max(-126, min(127, unit[g] - moved));
      const float factor = __uint_as_float(static_cast<u32>(127 + down) << 23);
      multiply(g * N_PER_GROUP, (g + 1) * N_PER_GROUP, factor, factor);
      unit[g] = moved;
    }
    const float inverse = __uint_as_float(static_cast<u32>(254 - unit[g] + SCALE_SHIFT) << 23);
    return ptx::pack_f16(a * inverse, b * inverse);
  }

  DEVICE u32 weights_at(int buffer, int m, int k) const {
    return shared + T::WEIGHTS_AT + buffer * T::WEIGHT_BYTES +
           ((m * 16 + (lane & 15)) * T::WEIGHT_STRIDE + k * 16 + (lane >> 4) * 8) * 2;
  }
  DEVICE u32 values_at(int stage, int k) const {  // transposed ldmatrix: candidates by 16-byte columns
    return rows_at(stage) + (k * 16 + (lane & 7) + (lane >> 3 & 1) * 8) * Format::ROW + (lane >> 4) * 16;
  }

  DEVICE void accumulate(int stage) {
    u32 scales[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) scales[g] = scales_over_unit(stage, g);
#pragma unroll
    for (int k = 0; k < T::CHUNK / 16; k++) {
      u32 weights[M][4];
#pragma unroll
      for (int m = 0; m < M; m++) ptx::ldmatrix_x4(weights[m], weights_at(stage, m, k));
      const u32 from = values_at(stage, k) + warp * T::PV_DIMS;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const u32 low = __shfl_sync(~0u, scales[g], k * 8 + (lane & 3));
        const u32 high = __shfl_sync(~0u, scales[g], k * 8 + (lane & 3) + 4);
        u32 scaled[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
          scaled[m][0] = ptx::multiply_f16(weights[m][0], low), scaled[m][1] = ptx::multiply_f16(weights[m][1], low);
          scaled[m][2] = ptx::multiply_f16(weights[m][2], high), scaled[m][3] = ptx::multiply_f16(weights[m][3], high);
        }
#pragma unroll
        for (int d = g * N_PER_GROUP / 4; d < (g + 1) * N_PER_GROUP / 4; d++) {
          u32 codes[4];
          ptx::ldmatrix_x4_transposed(codes, from + d * 32);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            // A register holds two candidates of an even and an odd dimension: one tile of each.
            u32 even0, odd0, even1, odd1;
            ptx::e4m3_to_f16(__byte_perm(codes[2 * j], 0, 0x3120), even0, odd0);
            ptx::e4m3_to_f16(__byte_perm(codes[2 * j + 1], 0, 0x3120), even1, odd1);
#pragma unroll
            for (int m = 0; m < M; m++) {
              ptx::mma_f16(values[m][d * 4 + j * 2], scaled[m], even0, even1);
              ptx::mma_f16(values[m][d * 4 + j * 2 + 1], scaled[m], odd0, odd1);
            }
          }
        }
      }
    }
  }

  // Half k of a chunk from a half of the value ring.
  DEVICE void accumulate_staged(int buffer, int k, int half) {
    u32 weights[M][4];
#pragma unroll
    for (int m = 0; m < M; m++)
      ptx::ldmatrix_x4(weights[m], weights_lane + buffer * T::WEIGHT_BYTES + (m * 16 * T::WEIGHT_STRIDE + k * 16) * 2);
#pragma unroll
    for (int d = 0; d < N / 2; d++) {
      u32 b[4];
      ptx::ldmatrix_x4_transposed(b, values_lane[d] + half * T::VALUE_BYTES);
#pragma unroll
      for (int m = 0; m < M; m++) {
        ptx::mma_f16(values[m][d * 2], weights[m], b[0], b[1]);
        ptx::mma_f16(values[m][d * 2 + 1], weights[m], b[2], b[3]);
      }
    }
  }

  // Half k of a chunk; `lanes_at(d)`: where the lane's row of columns 16 * d starts.
  template <class LanesAt>
  DEVICE void accumulate_rope(int buffer, int k, const LanesAt& lanes_at) {
#pragma unroll
    for (int m = 0; m < M; m++) {  // one head tile at a time: its two parts are all the registers there are
      u32 main[4], rest[4];
      ptx::ldmatrix_x4(main, weights_at(buffer, m, k));
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float2 weight = ptx::unpack_f16(main[e]);
        main[e] = ptx::pack_bf16(weight.x, weight.y);
        const float2 rounded = ptx::unpack_bf16(main[e]);
        rest[e] = ptx::pack_bf16(weight.x - rounded.x, weight.y - rounded.y);
      }
#pragma unroll
      for (int d = 0; d < N / 2; d++) {
        u32 lanes[4];
        ptx::ldmatrix_x4_transposed(lanes, lanes_at(d));
#pragma unroll
        for (int j = 0; j < 2; j++) {
          ptx::mma_bf16(values[m][d * 2 + j], main, lanes[2 * j], lanes[2 * j + 1]);
          ptx::mma_bf16(values[m][d * 2 + j], rest, lanes[2 * j], lanes[2 * j + 1]);
        }
      }
    }
  }

  // `upcoming`: slot of this lane's row in chunk STAGES, the first that is not under way.
  DEVICE void run(Gather<T>& gather, const Work& work, int upcoming) {
    int stage = 0, left_stage = 0;
    u32 parity = 0, left_parity = 0;
    for (int chunk = 0; chunk < work.chunks; chunk++) {
      const int refill = chunk - 1 + T::STAGES;  // into the stage that chunk - 1 leaves
      if (chunk >= 1 && refill < work.chunks) {
        const RowSource source = gather.source(refill, upcoming);
        upcoming = gather.next_slot();
        ptx::mbarrier_wait(T::free(shared, left_stage), left_parity);
        gather.issue(left_stage, source);
      }
      ptx::mbarrier_wait(T::full(shared, stage), parity);
      ptx::mbarrier_wait(T::weighted(shared, stage), parity);
      if (__builtin_expect(ptx::load_u32(shared + T::RAISED_AT + stage * 4), 0)) rescale(stage);
      if (is_rope()) {
#pragma unroll
        for (int k = 0; k < T::CHUNK / 16; k++) {
          const u32 from = values_at(stage, k) + Format::ROPE_AT;
          accumulate_rope(stage, k, [&](int d) { return from + d * 32; });
        }
      } else {
        accumulate(stage);
      }
      ptx::mbarrier_arrive(T::free(shared, stage));
      left_stage = stage, left_parity = parity;
      if (++stage == T::STAGES) stage = 0, parity ^= 1;
    }
  }

  // The same for staged values. The QK warps are done with rows long before the weights are there.
  DEVICE void run_staged(Gather<T>& gather, const Work& work, int upcoming) {
    int stage = 0, buffer = 0, half = 0;
    u32 parity = 0, buffer_parity = 0;
    for (int chunk = 0; chunk < work.chunks; chunk++) {
      const int refill = chunk + T::STAGES;
      if (refill < work.chunks) {
        const RowSource source = gather.source(refill, upcoming);
        upcoming = gather.next_slot();
        ptx::mbarrier_wait(T::free(shared, stage), parity);
        gather.issue(stage, source);
      }
      ptx::mbarrier_wait(T::weighted(shared, buffer), buffer_parity);
      if (__builtin_expect(ptx::load_u32(shared + T::RAISED_AT + buffer * 4), 0)) rescale(buffer);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        if (is_rope()) accumulate_rope(buffer, k, [&](int d) { return values_lane[d] + half * T::VALUE_BYTES; });
        else accumulate_staged(buffer, k, half);
        ptx::mbarrier_arrive(T::values_free(shared, half));
        if (++half == T::VALUE_HALVES) half = 0;
      }
      if (++stage == T::STAGES) stage = 0, parity ^= 1;
      if (++buffer == T::BUFFERS) buffer = 0, buffer_parity ^= 1;
    }
  }

  // Hands this thread's values, in true units, to store(head of the CTA, dimension, value, ...), as many as lie side by side.
  template <class Store>
  DEVICE void each_value(const DecodeArgs& args, const Store& store) const {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int head = m * 16 + (lane >> 2) + r * 8;
        if (is_rope()) {
#pragma unroll
          for (int n = 0; n < N; n++) {
            const int dim = T::STAGED ? n / 4 * 32 + (lane & 3) * 8 + n % 4 * 2 : n * 8 + (lane & 3) * 2;
            store(head, Format::QUANTISED + dim, values[m][n][2 * r], values[m][n][2 * r + 1]);
          }
        } else if (T::STAGED) {
          // Of every four dimensions this lane has two and the next lane two; of two tiles, either lane takes the four of one.
          const float scale = E2M1_UNIT * args.kv_global_scale;
          const bool odd = lane & 1;
#pragma unroll
          for (int n = 0; n < N; n += 2) {
            float own[2], given[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
              const float first = values[m][n][2 * r + c] * scale, second = values[m][n + 1][2 * r + c] * scale;
              own[c] = ptx::select(odd, second, first);
              given[c] = __shfl_xor_sync(~0u, ptx::select(odd, first, second), 1);
            }
            store(head, warp * T::PV_DIMS + (n + (lane & 1)) * 8 + (lane & 2) * 2, ptx::select(odd, given[0], own[0]),
                  ptx::select(odd, own[0], given[0]), ptx::select(odd, given[1], own[1]), ptx::select(odd, own[1], given[1]));
          }
        } else {
#pragma unroll
          for (int n = 0; n < N; n += 2) {  // an even and an odd tile interleave
            const float true_unit =
                __uint_as_float(static_cast<u32>(unit[n / N_PER_GROUP]) << 23) * (1.f / (1 << SCALE_SHIFT));
            store(head, warp * T::PV_DIMS + n * 8 + (lane & 3) * 4, values[m][n][2 * r] * true_unit,
                  values[m][n + 1][2 * r] * true_unit, values[m][n][2 * r + 1] * true_unit,
                  values[m][n + 1][2 * r + 1] * true_unit);
          }
        }
      }
  }

  // To shared memory, float32 [HEADS][RESULT_STRIDE], over what is no longer needed.
  DEVICE void store_values(const DecodeArgs& args) const {
    each_value(args, [&](int head, int dim, auto... v) {
      ptx::store_shared(shared + T::ROWS_AT + (head * T::RESULT_STRIDE + dim) * 4, v...);
    });
  }

  // To global memory: the partial values of a split.
  DEVICE void store_partials(const DecodeArgs& args, const Place& place) const {
    const int first_head = place.head_group * T::HEADS;
    float* to = args.partial + place.partial_row(args, first_head) * Format::D_V;
    each_value(args, [&](int head, int dim, auto... v) {
      if (first_head + head < args.num_heads) {
        ptx::store_global(to + static_cast<i64>(head) * args.all_splits * Format::D_V + dim, v...);
      }
    });
  }
};
