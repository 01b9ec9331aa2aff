// Row formats: how a token's record lies in global memory, and how it lies in shared memory once it is gathered.
// In shared memory every format is one row: codes, then scales and BF16 RoPE lanes at the offsets below. Row strides are
// odd multiples of 16 bytes, so that ldmatrix reads eight rows without bank conflicts. DUAL: there may be a secondary cache of
// the same format. SECONDARY: the records of secondary caches only, beside a primary cache of another format.
#pragma once

struct Dsv3_2 {  // dsv3_2 and glm_nsa: inline 512 E4M3 | 4 FP32 | 64 BF16
  static constexpr int QUANTISED = 512, ROPE = 64, D_V = 512, GROUP = 128, WINDOW = 0;
  static constexpr int ROW = 656, SCALES = 512, ROPE_AT = 528;
  static constexpr int COPY = 656, FOOTER = 0, FOOTER_AT = 0;
  static constexpr bool UE8M0 = false, FP4 = false, DUAL = false, SECONDARY = false;
};

struct Glm53Nope {  // inline 512 E4M3 | 4 FP32
  static constexpr int QUANTISED = 512, ROPE = 0, D_V = 512, GROUP = 128, WINDOW = 0;
  static constexpr int ROW = 528, SCALES = 512, ROPE_AT = 0;
  static constexpr int COPY = 528, FOOTER = 0, FOOTER_AT = 0;
  static constexpr bool UE8M0 = false, FP4 = false, DUAL = false, SECONDARY = false;
};

struct Dsv4 {  // page of rows 448 E4M3 | 64 BF16, then page of footers 7 UE8M0 | pad
  static constexpr int QUANTISED = 448, ROPE = 64, D_V = 512, GROUP = 64, WINDOW = 0;
  static constexpr int ROW = 592, SCALES = 576, ROPE_AT = 448;
  static constexpr int COPY = 576, FOOTER = 8, FOOTER_AT = 576;
  static constexpr bool UE8M0 = true, FP4 = false, DUAL = true, SECONDARY = false;
};

struct Dots3Swa {  // page of rows 1024 E4M3 | 64 BF16, then page of footers 8 UE8M0
  static constexpr int QUANTISED = 1024, ROPE = 64, D_V = 1024, GROUP = 128, WINDOW = 513;
  static constexpr int ROW = 1168, SCALES = 1152, ROPE_AT = 1024;
  static constexpr int COPY = 1152, FOOTER = 8, FOOTER_AT = 1152;
  static constexpr bool UE8M0 = true, FP4 = false, DUAL = false, SECONDARY = false;
};

struct Dsv4_1 {  // page of rows 512 E4M3, then page of footers 16 UE8M0
  static constexpr int QUANTISED = 512, ROPE = 0, D_V = 512, GROUP = 32, WINDOW = 0;
  static constexpr int ROW = 528, SCALES = 512, ROPE_AT = 0;
  static constexpr int COPY = 512, FOOTER = 16, FOOTER_AT = 512;
  static constexpr bool UE8M0 = true, FP4 = false, DUAL = true, SECONDARY = false;
};

struct Dsv4_1Inline {  // inline 512 E4M3 | 16 UE8M0
  static constexpr int QUANTISED = 512, ROPE = 0, D_V = 512, GROUP = 32, WINDOW = 0;
  static constexpr int ROW = 528, SCALES = 512, ROPE_AT = 0;
  static constexpr int COPY = 528, FOOTER = 0, FOOTER_AT = 0;
  static constexpr bool UE8M0 = true, FP4 = false, DUAL = true, SECONDARY = false;
};

struct Dsv4Nvfp4 {  // page of rows 448 E2M1 | 64 BF16, then page of footers 28 E4M3 | pad
  static constexpr int QUANTISED = 448, ROPE = 64, D_V = 512, GROUP = 16, WINDOW = 0;
  static constexpr int ROW = 400, SCALES = 352, ROPE_AT = 224;
  static constexpr int COPY = 352, FOOTER = 32, FOOTER_AT = 352;
  static constexpr bool UE8M0 = false, FP4 = true, DUAL = true, SECONDARY = false;
};

struct GlmNsaNvfp4 {  // inline 512 E2M1 | 32 E4M3 | 64 BF16
  static constexpr int QUANTISED = 512, ROPE = 64, D_V = 512, GROUP = 16, WINDOW = 0;
  static constexpr int ROW = 432, SCALES = 256, ROPE_AT = 288;
  static constexpr int COPY = 416, FOOTER = 0, FOOTER_AT = 0;
  static constexpr bool UE8M0 = false, FP4 = true, DUAL = false, SECONDARY = false;
};

struct Dsv4_1Fp4 {  // page of rows 512 E2M1, then page of footers 32 E4M3
  static constexpr int QUANTISED = 512, ROPE = 0, D_V = 512, GROUP = 16, WINDOW = 0;
  static constexpr int ROW = 304, SCALES = 256, ROPE_AT = 0;
  static constexpr int COPY = 256, FOOTER = 32, FOOTER_AT = 256;
  static constexpr bool UE8M0 = false, FP4 = true, DUAL = false, SECONDARY = true;
};

struct Dsv4_1InlineFp4 {  // inline 512 E2M1 | 32 E4M3
  static constexpr int QUANTISED = 512, ROPE = 0, D_V = 512, GROUP = 16, WINDOW = 0;
  static constexpr int ROW = 304, SCALES = 256, ROPE_AT = 0;
  static constexpr int COPY = 288, FOOTER = 0, FOOTER_AT = 0;
  static constexpr bool UE8M0 = false, FP4 = true, DUAL = false, SECONDARY = true;
};
