// Writer and reader of glm_nsa and, without RoPE lanes, glm53_nope.
#include "cache.cuh"

CACHE_KERNELS(Glm)
