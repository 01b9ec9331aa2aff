// Decode of 416-byte E2M1 inline records: glm_nsa (nvfp4).
#include "decode.cuh"

DECODE_KERNEL(decode_16, GlmNsaNvfp4, 1, 2, 3)
DECODE_KERNEL(decode_32, GlmNsaNvfp4, 2, 2, 2)
