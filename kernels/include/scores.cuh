// Scores of a QK warp: products of its quarter of the dimensions with the candidates of its group, slot by slot (slot 0 is the
// tile that the warp finishes).
#pragma once
#include "codes.cuh"
#include "queries.cuh"

template <class T, bool FP4>
struct Scores;

// E4M3: codes are f16, the scale of a group multiplies its products.
template <class T>
struct Scores<T, false> : Queries<T> {
  using Format = typename T::Format;
  using Queries<T>::Queries;
  static constexpr int M = T::GROUP_HEAD_TILES;
  static constexpr int TILES = T::TILES_IN_FLIGHT;
  static constexpr int SCALE_WORDS = Format::UE8M0 ? 1 : T::GROUPS;

  // Stored scales of candidates 2*pair and 2*pair + 1 of a tile, for this warp's groups: FP32, or UE8M0 bytes in one word.
  DEVICE void load_scales(u32 row, u32 (&words)[2][SCALE_WORDS]) const {
    static_assert(!Format::UE8M0 || T::GROUPS == 4 || T::GROUPS == 2, "a word or half a word");
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const u32 at = row + c * Format::ROW + Format::SCALES;
      if (Format::UE8M0) {
        words[c][0] = T::GROUPS == 4 ? ptx::load_u32(at + this->quarter * 4) : ptx::load_u16(at + this->quarter * 2);
      } else {
#pragma unroll
        for (int g = 0; g < SCALE_WORDS; g++) words[c][g] = ptx::load_u32(at + (this->quarter * T::GROUPS + g) * 4);
      }
    }
  }
  static DEVICE float scale_of(const u32 (&words)[SCALE_WORDS], int g) {
    return Format::UE8M0 ? ue8m0_value(words[0] >> (8 * g) & 0xff) : __uint_as_float(words[Format::UE8M0 ? 0 : g]);
  }

  DEVICE void scores(int stage, float (&partial)[M][T::TILES][4]) const {
#pragma unroll
    for (int slot = 0; slot < T::TILES; slot += TILES) {
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) partial[m][slot + i][e] = 0.f;
      u32 scales[TILES][2][SCALE_WORDS];
      u32 codes_at[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        load_scales(this->tile_row(stage, slot + i, this->pair() * 2), scales[i]);
        codes_at[i] = this->tile_row(stage, slot + i, this->lane & 7) + (this->lane >> 3) * 16 + this->quarter * T::STEPS * 16;
      }
      float product[M][TILES][4];
#pragma unroll
      for (int block = 0; block < T::STEPS / 4; block++) {
        if (T::ROPE_IS_LAST_GROUP && this->quarter == 3 && block == T::STEPS / 4 - 1) {
          rope_products(stage, slot, partial);
          continue;
        }
        u32 codes[TILES][4];  // of 64 dimensions; a thread holds four of each 16, of one candidate
#pragma unroll
        for (int i = 0; i < TILES; i++) ptx::ldmatrix_x4(codes[i], codes_at[i] + block * 64);
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
            ptx::e4m3_to_f16(codes[i][z], b0, b1);
#pragma unroll
            for (int m = 0; m < M; m++) ptx::mma_f16(product[m][i], this->nope[m][step], b0, b1);
          }
          if (step % T::STEPS_PER_GROUP == T::STEPS_PER_GROUP - 1) {
            const int g = step / T::STEPS_PER_GROUP;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
              const float even = scale_of(scales[i][0], g), odd = scale_of(scales[i][1], g);
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
          ptx::ldmatrix_x2(lanes, this->tile_row(stage, slot + i, this->lane & 7) + Format::ROPE_AT +
                                      (this->lane >> 3 & 1) * 16 + (this->quarter * T::ROPE_STEPS + step) * 32);
#pragma unroll
          for (int m = 0; m < M; m++) ptx::mma_bf16(partial[m][slot + i], this->rope[m][step], lanes[0], lanes[1]);
        }
    }
  }

  // dsv4, last quarter: 64 RoPE lanes in place of a scale group.
  DEVICE void rope_products(int stage, int slot, float (&partial)[M][T::TILES][4]) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 lanes[4];
        ptx::ldmatrix_x4(lanes, this->tile_row(stage, slot + i, this->lane & 7) + Format::ROPE_AT + (this->lane >> 3) * 16 +
                                    half * 64);
#pragma unroll
        for (int z = 0; z < 2; z++)
#pragma unroll
          for (int m = 0; m < M; m++)
            ptx::mma_bf16(partial[m][slot + i], this->nope[m][T::STEPS - 4 + half * 2 + z], lanes[2 * z], lanes[2 * z + 1]);
      }
    }
  }
};

// E2M1: a code times its scale is an f16. They are formed once, multiplied here, and left in shared memory for the PV warps:
// VALUE_STRIDE bytes a candidate, 16-byte units swizzled so that neither side has bank conflicts. A unit holds eight
// dimensions, of which position 4j + 2i + h is dimension 4j + 2h + i; or (dsv4) RoPE lanes half * 32 + pair * 2 + {0, 1, 8, 9, ...}.
template <class T>
struct Scores<T, true> : Queries<T> {
  using Format = typename T::Format;
  static constexpr int M = T::GROUP_HEAD_TILES;
  static constexpr int BLOCKS = T::STEPS / 4;  // of 64 dimensions
  static constexpr u32 STAGE_BYTES = T::CHUNK * Format::ROW;
  static_assert(T::TILES == 2 && BLOCKS == 2 && T::ROPE_STEPS <= 1, "loads of both tiles and blocks at once");

  static constexpr u32 VALUE_TILE = 8 * T::VALUE_STRIDE;

  // Shared addresses of this lane in slot 0: in the rows for ldmatrix, in the rows for scales, in a half of the value ring.
  u32 codes_at, scales_at, values_at;
  int next_row;  // from rows of slot 0 to rows of slot 1

  DEVICE Scores(const DecodeArgs& args, const Work& work, u32 shared, int warp, int lane)
      : Queries<T>(args, work, shared, warp, lane) {
    const int quad = this->quad();
    codes_at = ptx::pinned(this->tile_row(0, 0, lane & 7) + (lane >> 3) * 16);
    scales_at = ptx::pinned(this->tile_row(0, 0, quad) + Format::SCALES + this->quarter * 8);
    values_at = ptx::pinned(this->own_tile() * VALUE_TILE + quad * T::VALUE_STRIDE + this->quarter * 256 +
                            (this->pair() ^ T::swizzle(quad)) * 16);
    next_row = ptx::pinned((this->tile(1) - this->tile(0)) * 8 * Format::ROW);
  }

  // `values`: shared address of the half of the value ring that this group fills.
  DEVICE void scores(int stage, u32 values, u32 values_free, u32 free_parity, float (&partial)[M][2][4]) const {
    const bool rope_last = T::ROPE_IS_LAST_GROUP && this->quarter == 3;
    u32 words[2][4], stored[2][2];  // eight dimensions of each 32, of one candidate; scales of four groups a word
    u32 rope[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 row = codes_at + stage * STAGE_BYTES + i * next_row;
      ptx::ldmatrix_x4(words[i], row + this->quarter * 64);
      ptx::load_u32x2(stored[i], scales_at + stage * STAGE_BYTES + i * next_row);
      if (T::ROPE_STEPS) ptx::ldmatrix_x2(rope[i], row + Format::ROPE_AT + this->quarter * 32);
    }
    ptx::mbarrier_wait(values_free, free_parity);
    if (rope_last) {  // RoPE lanes go straight to the values, and come back from there when it is their turn
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 lanes[4];
          ptx::ldmatrix_x4(lanes, codes_at + stage * STAGE_BYTES + i * next_row + Format::ROPE_AT + half * 64);
          ptx::store_shared(rope_at(values, i, half), lanes);
        }
    }
    ptx::mbarrier_arrive(T::free(this->shared, stage));
    const float code_scale = E2M1_UNIT * this->args.kv_global_scale;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 to = values + (values_at ^ i * VALUE_TILE);
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) partial[m][i][e] = 0.f;
#pragma unroll
      for (int block = 0; block < 2; block++) {
        if (rope_last && block == 1) continue;
        // The lower or the upper 16 of every 32 dimensions.
        const u32 scales = ptx::e4m3_pair_to_f16(__byte_perm(stored[i][block], 0, this->pair() & 2 ? 0x31 : 0x20));
#pragma unroll
        for (int word = 0; word < 2; word++) {
          const u32 scale = __byte_perm(scales, 0, word ? 0x3232 : 0x1010);
          u32 b[4];
          e2m1_to_f16(words[i][block * 2 + word], b);
#pragma unroll
          for (int z = 0; z < 4; z++) b[z] = ptx::multiply_f16(b[z], scale);
#pragma unroll
          for (int z = 0; z < 2; z++)
#pragma unroll
            for (int m = 0; m < M; m++)
              ptx::mma_f16(partial[m][i], this->nope[m][block * 4 + word * 2 + z], b[2 * z], b[2 * z + 1]);
          ptx::store_shared(to + block * 128 ^ word * 64, b);
        }
      }
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) partial[m][i][e] *= code_scale;
      if (rope_last) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 lanes[4];
          ptx::load_u32x4(lanes, rope_at(values, i, half));
#pragma unroll
          for (int z = 0; z < 2; z++)
#pragma unroll
            for (int m = 0; m < M; m++)
              ptx::mma_bf16(partial[m][i], this->nope[m][4 + half * 2 + z], lanes[2 * z], lanes[2 * z + 1]);
        }
      } else if (T::ROPE_STEPS) {
#pragma unroll
        for (int m = 0; m < M; m++) ptx::mma_bf16(partial[m][i], this->rope[m][0], rope[i][0], rope[i][1]);
      }
    }
  }

  // dsv4, last quarter: where this lane leaves its RoPE lanes of slot i.
  DEVICE u32 rope_at(u32 values, int i, int half) const { return values + (values_at ^ i * VALUE_TILE) + 128 ^ half * 64; }
};
