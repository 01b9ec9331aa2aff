// Writer and reader of dsv4_1, with footers or inline.
#include "cache.cuh"

CACHE_KERNELS(Dsv4_1)
