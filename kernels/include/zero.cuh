// Zero bytes in slots without a record and between records.
#pragma once
#include "cache_args.cuh"

// `bytes` and the address are multiples of 8.
DEVICE void zero_bytes(u8* from, i64 bytes, int lane) {
#pragma unroll 1
  for (i64 at = lane * 8; at < bytes; at += 32 * 8)
    *reinterpret_cast<uint2*>(from + at) = make_uint2(0, 0);
}

// A slot without a record.
DEVICE void zero_record(const CacheArgs& cache, const RecordPlace& place, u32 codes, u32 scales, u32 rope, int lane) {
  zero_bytes(place.data, codes, lane);
  zero_bytes(place.scales, scales, lane);
  zero_bytes(place.data + cache.rope_at, rope, lane);
}

// What lies between this record and the next one; `row_gap` and `page_gap_at` as in WriteArgs.
DEVICE void zero_gaps(const CacheArgs& cache, const RecordPlace& place, i64 row_gap, i64 page_gap_at, int lane) {
  if (row_gap) zero_bytes(place.data + cache.data_stride - row_gap, row_gap, lane);
  if (place.row + 1 == cache.page_block_size) zero_bytes(place.page + page_gap_at, cache.page_stride - page_gap_at, lane);
}
