// Writer and reader of dsv4.
#include "cache.cuh"

CACHE_KERNELS(Record<448, 64, UE8M0, true, 1>)
