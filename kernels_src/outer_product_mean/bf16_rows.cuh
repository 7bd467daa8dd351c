// For stages 10 and 11: rows of D bf16 channels as a quad of lanes holds them, lane t of the four
// the pieces t, t + 4, … of 8 channels.
#pragma once

#include "cuda.cuh"

#include <cuda_bf16.h>

using Bf16 = __nv_bfloat16;
constexpr int kChunks = ceil_div(D, 32);  // pieces of a row in a thread

// The two bf16 of a register.
__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Channels c to c + 7 of a row, zeros from D on.
__device__ inline void load_chunk(uint32_t (&x)[4], const Bf16* row, int c, bool valid) {
    if constexpr (D % 8 == 0) {
        const bool inside = valid && c < D;
        const uint4 chunk = inside ? *reinterpret_cast<const uint4*>(row + c) : uint4{0, 0, 0, 0};
        x[0] = chunk.x, x[1] = chunk.y, x[2] = chunk.z, x[3] = chunk.w;
    } else {
        for (int e = 0; e < 8; e += 2) {
            x[e / 2] = 0;
            if (valid && c + e < D) x[e / 2] |= __bfloat16_as_ushort(row[c + e]);
            if (valid && c + e + 1 < D) x[e / 2] |= __bfloat16_as_ushort(row[c + e + 1]) << 16;
        }
    }
}

// Deviations of a row from its mean, squared and summed; its quad of lanes has the row.
__device__ inline float sum_squares(const uint32_t (&x)[kChunks][4], float mean) {
    float squares = 0;
#pragma unroll
    for (int m = 0; m < kChunks; ++m) {
        for (int e = 0; e < 4; ++e) {
            const int c = 8 * (4 * m + threadIdx.x % 4) + 2 * e;
            const float first = low(x[m][e]) - mean, second = high(x[m][e]) - mean;
            if (D % 32 == 0 || c < D) squares += first * first;
            if (D % 32 == 0 || c + 1 < D) squares += second * second;
        }
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    return squares + __shfl_xor_sync(~0u, squares, 2);
}
