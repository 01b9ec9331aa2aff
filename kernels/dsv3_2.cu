// Decode of 656-byte rows with FP32 scales: dsv3_2 and glm_nsa.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Dsv3_2, 1, 1, 4)
DECODE_KERNEL(decode_32, Dsv3_2, 2, 2, 3)
