// Writer and reader of dsv3_2.
#include "cache.cuh"

CACHE_KERNELS(Record<512, 128, POW2_FP32>)
