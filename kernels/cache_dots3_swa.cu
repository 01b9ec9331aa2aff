// Writer and reader of dots3_swa.
#include "cache.cuh"

CACHE_KERNELS(Dots3Swa)
