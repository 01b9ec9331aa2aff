// Between the formats of dsv4.
#include "convert.cuh"

CONVERT_KERNEL(dsv4_to_dsv4_nvfp4, Dsv4, Dsv4Nvfp4)
CONVERT_KERNEL(dsv4_nvfp4_to_dsv4, Dsv4Nvfp4, Dsv4)
