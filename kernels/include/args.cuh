// Launch arguments, one struct by value. The Rust twin is `src/cuda/args.rs`; its test names these sizes.
#pragma once
#include "ptx.cuh"

// A packed cache and the candidates that are read from it. Strides of caches in bytes, of indices in elements.
struct CandidateArgs {
  const u8* cache;         // first page; 16-byte aligned
  const int* indices;      // [T, topk], row stride indices_stride
  const int* lengths;      // [T], or null: every row is topk long
  i64 page_stride;
  i64 indices_stride;
  u32 num_slots;           // slots at or past it are absent
  u32 page_block_size;
  int page_shift;          // log2 of page_block_size, or -1 if that is no power of two
  u32 row_stride;
  int topk;                // 0: there is no such cache
  int reserved;
};

struct DecodeArgs {
  CandidateArgs main;
  CandidateArgs extra;
  const __nv_bfloat16* q;  // [T, H, d_qk]
  void* out;               // [T, H, d_v], strides below
  float* lse;              // [T, H], row stride lse_stride; may be null
  const float* sink;       // [H] natural log, or null
  float* partial;          // [T, H, all_splits, d_v] if all_splits > 1
  float2* partial_state;   // [T, H, all_splits] (reference, sum)
  i64 out_token_stride;    // elements
  i64 out_head_stride;
  i64 lse_stride;
  int num_tokens;
  int num_heads;
  int splits;              // of this launch
  int first_split;         // this launch's first among all splits
  int all_splits;          // of the token: 1, or the length of the partial arrays
  float scale_log2;        // sm_scale * log2(e)
  int out_type;            // OutType
  int lse_natural;         // 1: natural logarithm, 0: base 2
  int out_aligned;         // 1: four adjacent outputs may be stored at once
  float kv_global_scale;   // of E2M1 codes
};

enum OutType { OUT_BF16 = 0, OUT_F16 = 1, OUT_F32 = 2 };

// Rows of values with a log-sum-exp each. Strides in elements.
struct StateArgs {
  void* out;               // [N, d_v]
  float* lse;              // [N]
  i64 row_stride;
  i64 dim_stride;
  i64 lse_stride;
};

struct MergeStatesArgs {
  StateArgs a, b;          // read only
  StateArgs merged;
  u32 num_rows;
  u32 d_v;
  int out_type;            // OutType, of all three
  int lse_natural;         // 1: natural logarithm, 0: base 2
  int aligned;             // 1: four adjacent values may be loaded and stored at once
  int reserved;
};

static_assert(sizeof(CandidateArgs) == 64 && sizeof(DecodeArgs) == 240, "the Rust twin has these sizes");
static_assert(sizeof(StateArgs) == 40 && sizeof(MergeStatesArgs) == 144, "the Rust twin has these sizes");
