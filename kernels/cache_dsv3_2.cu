// Writer and reader of dsv3_2.
#include "cache.cuh"

CACHE_KERNELS(Dsv3_2)
