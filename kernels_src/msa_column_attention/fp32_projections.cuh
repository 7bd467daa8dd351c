// Stage 08's first and last kernel: LayerNorm and the four projections, and out_proj, as a tiled
// product on CUDA cores. Bytes: 4·(1 + 4 + 2)·B·N·S·D; rows are read again for every 64 outputs and
// weights for every 128 rows, from L2.
#pragma once

#include "cuda.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kEpsilon = 1e-5f;

constexpr int kTileRows = 128;    // rows of x that a block of linear_kernel projects
constexpr int kTileOutputs = 64;  // to these many outputs; a thread has 8 × 4 of them in registers
constexpr int kTileDepth = 16;    // channels in shared memory at a time

// Means and inverse deviations of kTileRows rows, one warp a row, two passes over registers.
__device__ void row_statistics(const float* x, int64_t first, int64_t rows, float* means,
                               float* inverses) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll 2
    for (int r = warp; r < kTileRows; r += kWarps) {
        const float* row = x + min(first + r, rows - 1) * D;
        float values[ceil_div(D, kWarpSize)], mean = 0, variance = 0;
        for (int i = 0; i < ceil_div(D, kWarpSize); ++i) {
            const int c = lane + i * kWarpSize;
            values[i] = c < D ? row[c] : 0;
            mean += values[i];
        }
        mean = warp_sum(mean) / D;
        for (int i = 0; i < ceil_div(D, kWarpSize); ++i) {
            if (lane + i * kWarpSize < D) variance += (values[i] - mean) * (values[i] - mean);
        }
        variance = warp_sum(variance) / D;
        means[r] = mean;
        inverses[r] = rsqrtf(variance + kEpsilon);
    }
}

// A tile's kTileDepth channels of kTileRows rows from c0, normalised, channels first in shared
// memory.
template <bool kLayerNorm>
__device__ void load_x(const float* x, const float* norm_weight, const float* norm_bias,
                       const float* means, const float* inverses, int64_t first, int64_t rows,
                       int c0, float (*tile)[kTileRows + 4]) {
    for (int i = threadIdx.x; i < kTileRows * kTileDepth / 4; i += kThreads) {
        const int r = i / (kTileDepth / 4), c = i % (kTileDepth / 4) * 4;
        float4 u = make_float4(0, 0, 0, 0);
        if (c0 + c < D) u = load4(x + min(first + r, rows - 1) * D + c0 + c);
        if (kLayerNorm && c0 + c < D) {
            const float4 w = load4(norm_weight + c0 + c), bias = load4(norm_bias + c0 + c);
            u.x = (u.x - means[r]) * inverses[r] * w.x + bias.x;
            u.y = (u.y - means[r]) * inverses[r] * w.y + bias.y;
            u.z = (u.z - means[r]) * inverses[r] * w.z + bias.z;
            u.w = (u.w - means[r]) * inverses[r] * w.w + bias.w;
        }
        tile[c][r] = u.x;
        tile[c + 1][r] = u.y;
        tile[c + 2][r] = u.z;
        tile[c + 3][r] = u.w;
    }
}

// y[m][r][e] = Σ_c f(x[r][c]) weight_m[e][c] (+ bias[e] for the last m), f LayerNorm or nothing.
// The grid's x is a tile of rows, its y a matrix m and a tile of its outputs.
template <bool kLayerNorm>
__global__ void __launch_bounds__(kThreads)
    linear_kernel(const float* x, const float* norm_weight, const float* norm_bias,
                  const float* weight_0, const float* weight_1, const float* weight_2,
                  const float* weight_3, const float* last_bias, float* y, int64_t rows) {
    SHARED(float, x_tile, [kTileDepth][kTileRows + 4]);
    SHARED(float, weight_tile, [kTileDepth][kTileOutputs + 4]);
    SHARED(float, means, [kTileRows]);
    SHARED(float, inverses, [kTileRows]);
    const int64_t first = int64_t(blockIdx.x) * kTileRows;
    const int tiles = ceil_div(D, kTileOutputs), m = blockIdx.y / tiles;
    const int first_output = blockIdx.y % tiles * kTileOutputs;
    const float* weight = m == 0 ? weight_0 : m == 1 ? weight_1 : m == 2 ? weight_2 : weight_3;

    if (kLayerNorm) row_statistics(x, first, rows, means, inverses);
    const int row0 = threadIdx.x / 16 * 8, output0 = threadIdx.x % 16 * 4;
    float sums[8][4] = {};
    for (int c0 = 0; c0 < D; c0 += kTileDepth) {
        __syncthreads();
        load_x<kLayerNorm>(x, norm_weight, norm_bias, means, inverses, first, rows, c0, x_tile);
        const int e = threadIdx.x / (kTileDepth / 4), c = threadIdx.x % (kTileDepth / 4) * 4;
        float4 w = make_float4(0, 0, 0, 0);
        if (c0 + c < D) w = load4(weight + min(first_output + e, D - 1) * D + c0 + c);
        weight_tile[c][e] = w.x;
        weight_tile[c + 1][e] = w.y;
        weight_tile[c + 2][e] = w.z;
        weight_tile[c + 3][e] = w.w;
        __syncthreads();
#pragma unroll
        for (int depth = 0; depth < kTileDepth; ++depth) {
            const float4 low = load4(&x_tile[depth][row0]), high = load4(&x_tile[depth][row0 + 4]);
            const float4 w = load4(&weight_tile[depth][output0]);
            const float u[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                sums[r][0] += u[r] * w.x;
                sums[r][1] += u[r] * w.y;
                sums[r][2] += u[r] * w.z;
                sums[r][3] += u[r] * w.w;
            }
        }
    }
    const int e = first_output + output0;
    if (e >= D) return;
    float4 bias = make_float4(0, 0, 0, 0);
    if (blockIdx.y / tiles + 1 == gridDim.y / tiles) bias = load4(last_bias + e);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const float4 sum = make_float4(sums[r][0] + bias.x, sums[r][1] + bias.y,
                                       sums[r][2] + bias.z, sums[r][3] + bias.w);
        if (first + row0 + r < rows) store4(y + (m * rows + first + row0 + r) * D + e, sum);
    }
}
