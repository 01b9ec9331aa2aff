// Decode of 528-byte records with scale footers, one or two caches: dsv4_1.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv4_1, 1, 1, 4)
DECODE_KERNEL(decode_32, Dsv4_1, 2, 2, 4)
