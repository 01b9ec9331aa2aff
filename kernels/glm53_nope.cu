// Decode of 528-byte records with FP32 scales: glm53_nope.
#include "decode.cuh"

DECODE_KERNEL(decode_16, Glm53Nope, 1, 1, 4)
DECODE_KERNEL(decode_32, Glm53Nope, 2, 2, 4)
