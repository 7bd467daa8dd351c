// Tensor cores and asynchronous copies of sm_80 and later, one thin function each. Compiled by g++
// the same functions are models (cpu/tensor_core.h, cpu/async_copy.h).
//
// Which element a register holds, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix Fragments
// for mma"):
//     d (16 x 8, float)     d[0], d[1]: row g,     columns 2t, 2t+1;   d[2], d[3]: row g + 8
//     m16n8k8, tf32         a[0..3]: (g, t), (g+8, t), (g, t+4), (g+8, t+4);   b[0..1]: (t, g),
//     (t+4, g) m16n8k16, two 16-bit  a[0..3]: row g, g+8, g, g+8, columns 2t, 2t+1 (a[2], a[3]:
//     plus 8) values a register,    b[0..1]: column g, rows 2t, 2t+1 (b[1]: plus 8) the first one
//     low     m16n8k8, bf16: the same without a[2], a[3] and b[1]
// ldmatrix loads 8 x 8 matrices of 16-bit values: lane i gives the address of row i % 8 of matrix i
// / 8, and r[j] gets of matrix j row g, columns 2t, 2t+1 (trans: rows 2t, 2t+1 of column g).
#pragma once

#include "cuda.cuh"

#include <cuda_bf16.h>

#ifdef __CUDACC__

// d += a · b
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
__device__ inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void ldmatrix_x1(uint32_t (&r)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void ldmatrix_x1_trans(uint32_t (&r)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy from global to shared memory; zeros if not valid, and then nothing is read.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ inline void copy_async_8(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid ? 8 : 0)
                 : "memory");
}
__device__ inline void copy_async_4(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}
// The thread's copies since the last commit become a group.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of the thread's groups are still under way. Other threads see the copies
// after a barrier that follows.
template <int kPending>
__device__ inline void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// To the nearest TF32 (10 bits of fraction), ties away from zero.
__device__ inline uint32_t to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}
// 2^x to about 2 units in the last place; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

#else
#include "cpu/async_copy.h"
#include "cpu/tensor_core.h"
#endif

// Two values as bf16 in one register, `low` in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// x = big + small to 21 bits: three TF32 products, big·small' + small·big' + big·big', give a
// product of fp32 accuracy.
__device__ inline void split_tf32(float x, uint32_t& big, uint32_t& small) {
    big = to_tf32(x);
    small = to_tf32(x - __uint_as_float(big));
}

// Two values, each as a sum of kTerms bf16 values (8 bits each), packed as pack_bf16 does; the
// largest first.
template <int kTerms>
__device__ inline void split_bf16(float low, float high, uint32_t (&terms)[kTerms]) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
        terms[i] = pack_bf16(low, high);
        low -= __uint_as_float(terms[i] << 16);
        high -= __uint_as_float(terms[i] & 0xFFFF0000);
    }
}
