// For stage 08: rows of msa and of weights, read by neighbouring lanes in pieces of four values and
// written to shared memory as operands in two parts.
#pragma once

#include "outer_product_mean/split_operands.cuh"

// row[at] to row[at + 3]; zeros from kSize on
template <int kSize>
__device__ float4 load_four(const float* row, int at, bool valid) {
    if (kSize % 4 == 0) return valid && at < kSize ? load4(row + at) : make_float4(0, 0, 0, 0);
    return make_float4(valid && at < kSize ? row[at] : 0, valid && at + 1 < kSize ? row[at + 1] : 0,
                       valid && at + 2 < kSize ? row[at + 2] : 0,
                       valid && at + 3 < kSize ? row[at + 3] : 0);
}

template <int kRows, int kWords>
__device__ void store_four(uint32_t (&to)[2][kRows][kWords], int row, int at, float4 v) {
    uint2 big, small;
    split(v.x, v.y, big.x, small.x);
    split(v.z, v.w, big.y, small.y);
    *reinterpret_cast<uint2*>(&to[0][row][at / 2]) = big;
    *reinterpret_cast<uint2*>(&to[1][row][at / 2]) = small;
}

__device__ float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }
__device__ float4 scaled(float4 v, float by) {
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ float4 product(float4 v, float4 w) {
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
}
__device__ float largest_of(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Over the 16 lanes that have a row.
__device__ float row_sum(float value) {
    for (int lanes = 8; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kFullMask, value, lanes);
    return value;
}
__device__ float row_max(float value) {
    for (int lanes = 8; lanes > 0; lanes /= 2) {
        value = fmaxf(value, __shfl_xor_sync(kFullMask, value, lanes));
    }
    return value;
}

// A 16 × 16 operand, mma's a: rows from `row` on, columns from 16 · step on
template <int kRows, int kWords>
__device__ void load_rows(uint32_t (&operand)[2][4], const uint32_t (&from)[2][kRows][kWords],
                          int row, int step) {
    const int lane = threadIdx.x % kWarpSize;
    for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(operand[part], &from[part][row + lane % 16][step * 8 + lane / 16 * 4]);
    }
}

// d += a · b with operands in two parts
__device__ void multiply(float (&d)[4], const uint32_t (&a)[2][4], const uint32_t* b_big,
                         const uint32_t* b_small) {
    mma_m16n8k16_fp16(d, a[1], {b_big[0], b_big[1]});
    mma_m16n8k16_fp16(d, a[0], {b_small[0], b_small[1]});
    mma_m16n8k16_fp16(d, a[0], {b_big[0], b_big[1]});
}
