// The entry points of one kind of record: CACHE_KERNELS(record). Writers stay within the registers of two blocks a multiprocessor.
#pragma once
#include "read.cuh"
#include "write.cuh"

// What a test compares with the family table; it reads these constants out of the PTX.
struct RecordShape {
  int quantised, group, code_bytes, scale_bytes;
};

#define CACHE_KERNELS(R)                                                                                             \
  extern "C" __device__ const RecordShape record = {R::QUANTISED, R::GROUP, R::CODE_BYTES, R::SCALE_BYTES};         \
  extern "C" __global__ void __launch_bounds__(32 * WRITE_ROWS, 2) write(const __grid_constant__ WriteArgs args) {  \
    write_cache<R>(args);                                                                                           \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(32 * READ_SLOTS) read(const __grid_constant__ ReadArgs args) {       \
    read_cache<R>(args);                                                                                            \
  }
