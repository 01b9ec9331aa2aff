// Inline PTX, all of it: everything below is plain .target sm_90 and PTX 8.6.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define DEVICE __device__ __forceinline__
#define MINUS_INFINITY __uint_as_float(0xff800000u)

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace ptx {

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- mbarriers: initialised by one thread, then fenced and followed by a CTA barrier
DEVICE void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"(barrier),
               "r"(bytes) : "memory");
}

// ---- copies from global to shared memory
// One elected lane of a converged warp copies; all lanes pass the same addresses.
DEVICE void bulk_copy_elected(u32 to, u64 from, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n\t.reg .pred chosen;\n\telect.sync _|chosen, 0xffffffff;\n\t"
      "@chosen cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n\t}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Eight bytes, or eight zero bytes if `present` is 0.
DEVICE void async_copy_8(u32 to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(present ? 8 : 0) : "memory");
}
// Arrives (one expected arrival per thread) when this thread's earlier async_copy_8 have landed.
DEVICE void async_copies_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- shared memory
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE void ldmatrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE float load_f32(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
DEVICE float2 load_f32x2(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
DEVICE float4 load_f32x4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
DEVICE u32 load_u32(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
DEVICE void load_u32x2(u32 (&v)[2], u32 address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address));
}
DEVICE void load_u32x4(u32 (&v)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address)
               : "memory");
}
DEVICE u32 load_u16(u32 address) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}
DEVICE u32 load_u8(u32 address) {
  u32 value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
DEVICE void store_f32(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
DEVICE void store_shared(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
DEVICE void store_shared(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store_u32(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE void store_shared(u32 address, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
DEVICE void store_u8(u32 address, u32 value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ---- barriers of a part of the CTA, reached by whole warps, and the grid's programmatic dependency
DEVICE void named_barrier(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE bool named_barrier_any(int id, int threads, bool flag) {
  u32 any;
  asm volatile(
      "{\n\t.reg .pred mine, all;\n\tsetp.ne.u32 mine, %1, 0;\n\t"
      "barrier.cta.red.or.aligned.pred all, %2, %3, mine;\n\tselp.u32 %0, 1, 0, all;\n\t}"
      : "=r"(any) : "r"(static_cast<u32>(flag)), "r"(id), "r"(threads) : "memory");
  return any;
}
// Read anew at every call, so that what is made from it need not stay in registers.
DEVICE u32 block_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- arithmetic
// As an instruction, because the compiler makes an array in local memory of what it could choose by address.
DEVICE float select(bool first, float a, float b) {
  float chosen;
  asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tselp.f32 %0, %1, %2, p;\n\t}"
      : "=f"(chosen) : "f"(a), "f"(b), "r"(static_cast<u32>(first)));
  return chosen;
}
DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE u32 warp_max(u32 value) {
  u32 largest;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
  return largest;
}
// Four E4M3 codes to four exact f16: bytes 0 and 1 in `low`, 2 and 3 in `high`.
DEVICE void e4m3_to_f16(u32 codes, u32& low, u32& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}" : "=r"(low), "=r"(high) : "r"(codes));
}
// The two low E4M3 codes.
DEVICE u32 e4m3_pair_to_f16(u32 codes) {
  u32 pair;
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tcvt.rn.f16x2.e4m3x2 %0, l;\n\t}" : "=r"(pair) : "r"(codes));
  return pair;
}
// Two values as E4M3 codes, nearest, ties to even, saturating; that of `low` in the lower byte.
DEVICE u32 f32_to_e4m3(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- global memory; stores as instructions, because the compiler splits vector stores that stand beside scalar ones
DEVICE void store_global(void* to, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
}
DEVICE void store_global(void* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store_global(void* to, u32 a, u32 b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}

// What `from` holds, or `otherwise` if not `present`. In this place of the code: a load that moves up past the last use of
// the value before it needs a register copy behind it, which waits for memory.
DEVICE int load_or(const int* from, bool present, int otherwise) {
  int value;
  asm volatile(
      "{\n\t.reg .pred present;\n\tsetp.ne.u32 present, %2, 0;\n\tmov.s32 %0, %3;\n\t"
      "@present ld.global.nc.s32 %0, [%1];\n\t}" : "=&r"(value) : "l"(from), "r"(static_cast<u32>(present)), "r"(otherwise));
  return value;
}

// The same value, which the assembler must keep in a register: it cannot be made anew from what it was computed from.
DEVICE u32 pinned(u32 value) { return __shfl_sync(~0u, value, threadIdx.x & 31); }

// ---- packing
// The larger, or NaN beside a NaN.
DEVICE float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

DEVICE float2 unpack_bf16(u32 x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
DEVICE u32 pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const u32&>(pair);
}
DEVICE u32 pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const u32&>(pair);
}
DEVICE float2 unpack_f16(u32 x) { return __half22float2(reinterpret_cast<const __half2&>(x)); }
DEVICE u32 multiply_f16(u32 a, u32 b) {
  const __half2 product = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const u32&>(product);
}

}  // namespace ptx
