// Decode of 528-byte inline records, one or two caches: dsv4_1_inline.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv4_1Inline, 1, 1, 4)
DECODE_KERNEL(decode_32, Dsv4_1Inline, 2, 2, 4)
