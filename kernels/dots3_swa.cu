// Decode of 1160-byte records with scale footers: dots3_swa.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dots3Swa, 1, 1, 2, 4)
