// Writer and reader of dsv4_1, with footers or inline.
#include "cache.cuh"

CACHE_KERNELS(Record<512, 32, UE8M0, false>)
