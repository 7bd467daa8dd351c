// Stage 10's kernels before and after the core: LayerNorm and the four projections, and out_proj. A
// block multiplies its rows, which stay in shared memory as pairs (fp16_pairs.cuh), by all weights,
// which stream past. Bytes: 4·(1 + 4 + 2)·B·N·S·D, and 4·5·D² of weights a block from L2.
#pragma once

#include "msa_column_attention/pair_weights.cuh"

constexpr float kEpsilon = 1e-5f;

// A block is 2 × 4 warps.
constexpr int kTileRows =
    D <= 256 ? 128 : 64;  // its rows of x, kept in shared memory, all D channels
constexpr int kRowTiles = kTileRows / 2 / 16;  // 16-row tiles of a warp
constexpr int kTileOutputs = 128;  // weights stream past: these outputs at a time, 32 a warp,
constexpr int kDepth = 32;         // and these channels of them
constexpr int kChunks = ceil_div(D, kDepth);
constexpr int kStages = 4;                      // weight tiles under way and in use
constexpr int kXStride = kChunks * kDepth + 8;  // halves from row to row: an odd number of 16 bytes
constexpr int kWeightStride = kDepth + 8;
constexpr int kXHalves = kTileRows * kXStride, kWeightHalves = kTileOutputs * kWeightStride;
constexpr int kMultiplyBytes = sizeof(__half) * 2 * (kXHalves + kStages * kWeightHalves);

// Starts the copies of a tile of weights, zeros if there are no more: kTileOutputs rows of kDepth
// channels, big and then small.
// Row 8·j + 2·t + i of 32 holds output 8·t + 2·j + i: so lane t of a row of results ends with 8
// neighbours.
template <int kOutputs>
__device__ inline void copy_weights(const __half* big, const __half* small, int first_output,
                                    int first_channel, __half* tile, bool more) {
#pragma unroll
    for (int piece = 0; piece < kTileOutputs * kDepth / 8; piece += kThreads) {  // of 16 bytes
        const int row = (piece + threadIdx.x) / (kDepth / 8), c = threadIdx.x % (kDepth / 8) * 8;
        const int output =
            first_output + row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
        const bool valid = more && output < kOutputs && first_channel + c < D;
        const int64_t from = valid ? int64_t(output) * D + first_channel + c : 0;
        copy_async_16(tile + row * kWeightStride + c, big + from, valid);
        copy_async_16(tile + kWeightHalves + row * kWeightStride + c, small + from, valid);
    }
}

// big_sums + small_sums += 16 channels of x (this lane's rows for ldmatrix) · those of a tile of
// weights
__device__ inline void multiply_step(const __half* x, const __half* weight,
                                     float (&big_sums)[kRowTiles][4][4],
                                     float (&small_sums)[kRowTiles][4][4]) {
    uint32_t big_w[2][4], small_w[2][4];  // 16 outputs each: two column tiles
    for (int pair = 0; pair < 2; ++pair) {
        ldmatrix_x4(big_w[pair], weight + pair * 16 * kWeightStride);
        ldmatrix_x4(small_w[pair], weight + pair * 16 * kWeightStride + kWeightHalves);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
        uint32_t big_x[4], small_x[4];
        ldmatrix_x4(big_x, x + r * 16 * kXStride);
        ldmatrix_x4(small_x, x + r * 16 * kXStride + kXHalves);
#pragma unroll
        for (int i = 0; i < 12; ++i) {  // the three products of a sum lie four mma apart
            const int j = i % 4;
            const uint32_t (&from)[4] = i / 4 == 1 ? small_w[j / 2] : big_w[j / 2];
            const uint32_t w[2] = {from[j % 2 * 2], from[j % 2 * 2 + 1]};
            mma_m16n8k16_fp16(i / 4 == 2 ? big_sums[r][j] : small_sums[r][j],
                              i / 4 == 0 ? small_x : big_x, w);
        }
    }
}

// x · weightsᵀ for the block's rows and kOutputs outputs, from row first_row of the weights on.
// load_x(chunk) starts the copies of a chunk of x, if any; store(r, output, y) gets outputs output
// … output + 7 of row r, scaled.
template <int kOutputs, typename LoadX, typename Store>
__device__ inline void multiply(const Weights& weights, int first_row, __half* x, LoadX load_x,
                                Store store) {
    constexpr int kTiles = ceil_div(kOutputs, kTileOutputs) * kChunks;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const __half* big = weights.big + int64_t(first_row) * D;
    const __half* small = weights.small + int64_t(first_row) * D;
    __half* stages = x + 2 * kXHalves;
    const auto load = [=](int tile) {
        if (tile < kChunks) load_x(tile);
        copy_weights<kOutputs>(big, small, tile / kChunks * kTileOutputs, tile % kChunks * kDepth,
                               stages + tile % kStages * 2 * kWeightHalves, tile < kTiles);
        copy_async_commit();
    };
    for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
    const int first = warp / 4 * kRowTiles * 16;  // of the warp's rows
    const __half* x_row = x + (first + lane % 16) * kXStride + lane / 16 * 8;
    const __half* weight_row =
        stages + (warp % 4 * 32 + lane / 16 * 8 + lane % 8) * kWeightStride + lane / 8 % 2 * 8;
    for (int tile = 0; tile < kTiles;) {
        float big_sums[kRowTiles][4][4] = {}, small_sums[kRowTiles][4][4] = {};
        for (int chunk = 0; chunk < kChunks; ++chunk, ++tile) {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // the tile is there, and the one before is done with
            const __half* weight = weight_row + tile % kStages * 2 * kWeightHalves;
#pragma unroll
            for (int k = 0; k < kDepth; k += 16) {
                multiply_step(x_row + chunk * kDepth + k, weight + k, big_sums, small_sums);
                // Here, and without a branch, so that addresses are computed while tensor cores
                // work: 679 cycles of issue and fixed latencies a tile, not 798 (SASS).
                if (k == 0) load(tile + kStages - 1);
            }
        }
        const int output = (tile - 1) / kChunks * kTileOutputs + warp % 4 * 32 + lane % 4 * 8;
        if (output >= kOutputs) continue;
        float factors[8], biases[8];
        for (int i = 0; i < 8; ++i) {
            factors[i] = weights.factors[first_row + output + i];
            biases[i] = weights.biases[first_row + output + i];
        }
#pragma unroll
        for (int half = 0; half < 2 * kRowTiles; ++half) {  // rows g and g + 8 of each row tile
            float y[8];
            for (int i = 0; i < 8; ++i) {
                const int e = half % 2 * 2 + i % 2;
                y[i] = big_sums[half / 2][i / 2][e] + small_sums[half / 2][i / 2][e];
                y[i] = y[i] * factors[i] + biases[i];
            }
            store(first + half * 8 + lane / 4, output, y);
        }
    }
}

// x̂ = (x - mean) / deviation of the block's rows as pairs, four rows of a warp under way together
__device__ void normalise(const float* msa, int64_t first, int64_t rows, __half* x) {
    constexpr int kPieces = ceil_div(D, 4 * kWarpSize), kTogether = 4;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int r0 = warp * kTogether; r0 < kTileRows; r0 += kThreads / kWarpSize * kTogether) {
        float4 u[kTogether][kPieces];
        for (int i = 0; i < kTogether * kPieces; ++i) {
            const int64_t r = min(first + r0 + i / kPieces, rows - 1);
            const int c = 4 * (lane + i % kPieces * kWarpSize);
            u[i / kPieces][i % kPieces] = c < D ? load4(msa + r * D + c) : make_float4(0, 0, 0, 0);
        }
        for (int r = 0; r < kTogether; ++r) {
            float mean = 0, variance = 0;
            for (const float4& v : u[r]) mean += v.x + v.y + v.z + v.w;
            mean = warp_sum(mean) / D;
            for (int i = 0; i < kPieces; ++i) {
                float4& v = u[r][i];
                if (4 * (lane + i * kWarpSize) >= D) continue;
                v = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
                variance += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
            const float inverse = rsqrtf(warp_sum(variance) / D + kEpsilon);
            for (int i = 0; i < kPieces; ++i) {
                const int c = 4 * (lane + i * kWarpSize);
                if (c >= kChunks * kDepth) continue;  // zeros from D to there
                const float4 v = u[r][i];
                uint2 big, small;
                split(v.x * inverse, v.y * inverse, big.x, small.x);
                split(v.z * inverse, v.w * inverse, big.y, small.y);
                *reinterpret_cast<uint2*>(x + (r0 + r) * kXStride + c) = big;
                *reinterpret_cast<uint2*>(x + kXHalves + (r0 + r) * kXStride + c) = small;
            }
        }
    }
}

// A row of a head is its big values and then its small ones: q as [b][s][n][head] rows, k and v as
// [b][n][head][s]; g is laid out as msa.
__global__ void __launch_bounds__(kThreads, 1)
    projection_kernel(const float* msa, Weights weights, __half* q, __half* k, __half* v, float* g,
                      int64_t rows, int S, int N) {
    DYNAMIC_SHARED(__half, x);
    SHARED(int64_t, places, [kTileRows]);  // of head 0's row in k and v
    const int64_t first = int64_t(blockIdx.x) * kTileRows;
    for (int r = threadIdx.x; r < kTileRows; r += kThreads) {
        const int64_t n = (first + r) % N, s = (first + r) / N % S, b = (first + r) / N / S;
        places[r] = (b * N + n) * H * S + s;
    }
    normalise(msa, first, rows, x);
    const auto store = [&](int r, int output, const float (&y)[8]) {
        if (first + r >= rows) return;
        const int m = output / D, e = output % D, head = e / kHeadDim, c = e % kHeadDim;
        if (m == 3) {
            float* to = g + (first + r) * D + e;
            store4(to, make_float4(y[0], y[1], y[2], y[3]));
            store4(to + 4, make_float4(y[4], y[5], y[6], y[7]));
            return;
        }
        uint4 big, small;
        split(y[0], y[1], big.x, small.x);
        split(y[2], y[3], big.y, small.y);
        split(y[4], y[5], big.z, small.z);
        split(y[6], y[7], big.w, small.w);
        const int64_t row = m == 0 ? (first + r) * H + head : places[r] + int64_t(head) * S;
        __half* to = (m == 0 ? q : m == 1 ? k : v) + row * 2 * kHeadDim + c;
        *reinterpret_cast<uint4*>(to) = big;
        *reinterpret_cast<uint4*>(to + kHeadDim) = small;
    };
    multiply<4 * D>(weights, 0, x, [](int) {}, store);
}

// out = gated · out_weightᵀ + out_bias, in gated's place: a block has read its rows before it
// writes the first.
__global__ void __launch_bounds__(kThreads, 1)
    output_kernel(const __half* gated, Weights weights, float* out, int64_t rows) {
    DYNAMIC_SHARED(__half, x);
    const int64_t first = int64_t(blockIdx.x) * kTileRows;
    const auto load = [=](int chunk) {
#pragma unroll
        for (int piece = 0; piece < kTileRows * kDepth / 8; piece += kThreads) {  // of 16 bytes
            const int r = (piece + threadIdx.x) / (kDepth / 8);
            const int c = chunk * kDepth + threadIdx.x % (kDepth / 8) * 8;
            const bool valid = first + r < rows && c < D;
            const int64_t from = ((first + r) * H + c / kHeadDim) * 2 * kHeadDim + c % kHeadDim;
            copy_async_16(x + r * kXStride + c, gated + (valid ? from : 0), valid);
            copy_async_16(x + kXHalves + r * kXStride + c, gated + (valid ? from + kHeadDim : 0),
                          valid);
        }
    };
    const auto store = [=](int r, int e, const float (&y)[8]) {
        if (first + r >= rows) return;
        float* to = out + (first + r) * D + e;
        store4(to, make_float4(y[0], y[1], y[2], y[3]));
        store4(to + 4, make_float4(y[4], y[5], y[6], y[7]));
    };
    multiply<D>(weights, 4 * D, x, load, store);
}
