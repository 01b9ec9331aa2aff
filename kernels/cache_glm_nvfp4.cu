// Writer and reader of glm_nsa in NVFP4.
#include "cache.cuh"

CACHE_KERNELS(Record<512, 16, NVFP4_GLOBAL>)
