// Decode of 584-byte records with scale footers, one or two caches: dsv4.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv4, 1, 1, 4)
DECODE_KERNEL(decode_32, Dsv4, 2, 2, 4)
