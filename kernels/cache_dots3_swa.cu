// Writer and reader of dots3_swa.
#include "cache.cuh"

CACHE_KERNELS(Record<1024, 128, UE8M0>)
