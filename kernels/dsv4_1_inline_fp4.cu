// Decode of 288-byte E2M1 inline records: the secondary cache of dsv4_1_inline.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv4_1InlineFp4, 1, 2, 4)
DECODE_KERNEL(decode_32, Dsv4_1InlineFp4, 2, 2, 3)
