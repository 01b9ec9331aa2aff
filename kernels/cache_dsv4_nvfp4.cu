// Writer and reader of dsv4 in NVFP4.
#include "cache.cuh"

CACHE_KERNELS(Record<448, 16, NVFP4, true, 4>)
