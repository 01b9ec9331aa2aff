// Decode of 288-byte E2M1 records with scale footers: the secondary cache of dsv4_1.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv4_1Fp4, 1, 2, 4)
DECODE_KERNEL(decode_32, Dsv4_1Fp4, 2, 2, 3)
