// Writer and reader of dsv4 in NVFP4.
#include "cache.cuh"

CACHE_KERNELS(Dsv4Nvfp4)
