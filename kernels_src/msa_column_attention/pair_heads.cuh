// Queries, keys and values of stage 10's core as pairs (fp16_pairs.cuh), between global memory,
// shared memory and registers, and the keys' mask. A row of a head is its big values and then its
// small ones.
#pragma once

#include "msa_column_attention/pair_weights.cuh"

constexpr int kCoreThreads = 128;
constexpr int kQueryTiles = kHeadDim <= 32 ? 2 : 1;  // 16 queries each, of a warp
constexpr int kWarpQueries = 16 * kQueryTiles;
constexpr int kKeys = kHeadDim <= 64 ? 32 : 16;  // in shared memory at a time
constexpr int kSteps = ceil_div(kHeadDim, 16);   // mma steps over a head's channels,
constexpr int kPadded = 16 * kSteps;             // the last one filled up by zeros
constexpr int kHeadStride = 2 * kPadded + 8;     // halves from row to row in shared memory

// key_bias[b][n][s] = 0, or -∞ for masked keys and for those that fill up the last tile
__global__ void __launch_bounds__(kThreads)
    key_bias_kernel(const float* mask, float* key_bias, int S, int N, int64_t columns) {
    const int padded = ceil_div(S, kKeys) * kKeys;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t column = i % columns, s = i / columns;
    if (s >= padded) return;
    const bool keep = s < S && mask[(column / N * S + s) * N + column % N] != 0;
    key_bias[column * padded + s] = keep ? 0 : -INFINITY;
}

// Starts the copy of kRows rows of a head, those past the first `rows` as zeros; `stride` halves
// lie from row to row.
template <int kRows>
__device__ void copy_head(__half* to, const __half* from, int64_t stride, int rows) {
    constexpr int kPieces = kRows * kPadded / 4;  // of 16 bytes
#pragma unroll
    for (int first = 0; first < kPieces; first += kCoreThreads) {
        const int i = first + threadIdx.x;
        const int row = i / (kPadded / 4), part = i / (kPadded / 8) % 2, c = i % (kPadded / 8) * 8;
        const bool valid = row < rows && c < kHeadDim;
        if (kPieces % kCoreThreads == 0 || i < kPieces) {
            copy_async_16(to + row * kHeadStride + part * kPadded + c,
                          from + (valid ? row * stride + part * kHeadDim + c : 0), valid);
        }
    }
}

// A warp's queries between key tiles; lane (g, t) has rows g and g + 8 of each 16-query tile.
struct Queries {
    uint32_t big[kQueryTiles][kSteps][4], small[kQueryTiles][kSteps][4];
    float sums[kQueryTiles][kHeadDim / 8][4];               // Σ weight · v
    float highest[kQueryTiles][2], totals[kQueryTiles][2];  // score, and this lane's Σ weight
};

// d += a · (columns 8·half … of b, 16 columns from ldmatrix), for every query tile and both halves
template <int kColumns, int kASteps>
__device__ void add_products(float (&d)[kQueryTiles][kColumns][4], int first_column, int end_column,
                             const uint32_t (&a)[kQueryTiles][kASteps][4], int step,
                             const uint32_t (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2 * kQueryTiles; ++i) {
        const int half = i % 2;
        if (first_column + half >= end_column) continue;
        const uint32_t columns[2] = {b[2 * half], b[2 * half + 1]};
        mma_m16n8k16_fp16(d[i / 2][first_column + half], a[i / 2][step], columns);
    }
}

// gated = σ(g) ∘ sums / totals in q's place and form, by way of the warp's own rows in shared
// memory
__device__ void store_queries(Queries& queries, const float* g, __half* rows, __half* gated,
                              int64_t stride, int first, int S) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < 2 * kQueryTiles; ++i) {
        const int row = i * 8 + lane / 4;
        float total = queries.totals[i / 2][i % 2];
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            total += __shfl_xor_sync(kFullMask, total, lanes);
        }
        const float inverse = 1 / total;  // every key masked: 0 · 1/0 = NaN, as it must be
        const float* gate = g + min(first + row, S - 1) * (stride / 2) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
            float y[2];
            for (int e = 0; e < 2; ++e) {
                y[e] = queries.sums[i / 2][j][i % 2 * 2 + e] * inverse;
                y[e] *= __fdividef(1.0f, 1.0f + expf(-gate[8 * j + e]));
            }
            uint32_t big, small;
            split(y[0], y[1], big, small);
            __half* to = rows + row * kHeadStride + 8 * j + lane % 4 * 2;
            memcpy(to, &big, sizeof big);
            memcpy(to + kPadded, &small, sizeof small);
        }
    }
    __syncwarp();
    for (int i = lane; i < kWarpQueries * kHeadDim / 4; i += kWarpSize) {
        const int row = i / (kHeadDim / 4), part = i / (kHeadDim / 8) % 2;
        const int c = i % (kHeadDim / 8) * 8;
        if (first + row >= S) break;
        *reinterpret_cast<uint4*>(gated + (first + row) * stride + part * kHeadDim + c) =
            *reinterpret_cast<const uint4*>(rows + row * kHeadStride + part * kPadded + c);
    }
}
