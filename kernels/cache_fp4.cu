// Writer and reader of the FP4 caches of dsv4_1, with footers or inline.
#include "cache.cuh"

CACHE_KERNELS(Fp4)
