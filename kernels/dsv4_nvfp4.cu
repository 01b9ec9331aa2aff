// Decode of 384-byte E2M1 records with scale footers, one or two caches: dsv4 (nvfp4).
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv4Nvfp4, 1, 2, 3)
DECODE_KERNEL(decode_32, Dsv4Nvfp4, 2, 2, 2)
