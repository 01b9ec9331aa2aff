// Writer and reader of dsv4.
#include "cache.cuh"

CACHE_KERNELS(Dsv4)
