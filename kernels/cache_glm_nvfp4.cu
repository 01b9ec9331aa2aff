// Writer and reader of glm_nsa in NVFP4.
#include "cache.cuh"

CACHE_KERNELS(GlmNvfp4)
