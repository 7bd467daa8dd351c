// fp32 products on fp16 tensor cores: every operand is a pair, big + small, and a product three of
// fp16. A pair holds 22 bits where |value| < 2^15 and it is not far below the others that it is
// summed with, so powers of two, known before the data are seen, bring weights, queries, keys and
// values into range.
#pragma once

#include <cuda_fp16.h>
#include "tensor_core.cuh"

constexpr int kHeadDim = D / H;
constexpr int kThreads = 256;  // of a block of multiply(): 2 × 4 warps
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

// Two values as pairs, packed for the tensor core.
__device__ inline void split(float first, float second, uint32_t& big, uint32_t& small) {
    const __half2 rounded = __floats2half2_rn(first, second);
    const float2 back = __half22float2(rounded);
    const __half2 rest = __floats2half2_rn(first - back.x, second - back.y);
    memcpy(&big, &rounded, sizeof big);
    memcpy(&small, &rest, sizeof small);
}

// The power of two that takes a magnitude into [2^exponent, 2^(exponent + 1)); 1 for zero.
__device__ inline float scale_to(float magnitude, int exponent) {
    if (magnitude == 0) return 1;
    const int biased = __float_as_uint(magnitude) >> 23;
    return __uint_as_float(uint32_t(min(max(254 + exponent - biased, 1), 254)) << 23);
}

// The parameters as multiply() takes them. A row's largest weight is 8 to 16; output = factor · sum
// + bias.
struct Weights {
    __half *big, *small;      // [query, key, value, gate, out][D outputs][D channels]
    float *factors, *biases;  // [5][D]
    float* scales;            // [query, key, value][H]: powers of two that bring outputs below 2^15
};

// One row of one matrix by one warp; channel(c) is its weight of channel c, scale what its output
// is scaled by.
template <typename Channel>
__device__ inline void split_row(const Weights& weights, int row, float scale, float bias,
                                 Channel channel) {
    const int lane = threadIdx.x % kWarpSize;
    float largest = 0;
    for (int c = lane; c < D; c += kWarpSize) largest = fmaxf(largest, fabsf(channel(c)));
    const float row_scale = scale_to(warp_max(largest), 3);
    for (int c = 2 * lane; c < D; c += 2 * kWarpSize) {
        uint32_t big, small;
        split(channel(c) * row_scale, channel(c + 1) * row_scale, big, small);
        memcpy(weights.big + int64_t(row) * D + c, &big, sizeof big);
        memcpy(weights.small + int64_t(row) * D + c, &small, sizeof small);
    }
    if (lane == 0) {
        weights.factors[row] = scale / row_scale;
        weights.biases[row] = scale * bias;
    }
}

// A block one head of query, key, value or gate. LayerNorm's weight joins the matrices and its bias
// the biases, so that x̂ = (x - mean) / deviation is what they multiply. ‖x̂‖ ≤ √D, so |x̂·u + b| ≤ √D
// ‖u‖ + |b| ≤ D max|u| + |b|.
__global__ void __launch_bounds__(kThreads)
    prepare_projections_kernel(const float* norm_weight, const float* norm_bias,
                               const float* query_weight, const float* key_weight,
                               const float* value_weight, const float* gate_weight,
                               const float* gate_bias, Weights weights) {
    SHARED(float, biases, [kHeadDim]);
    SHARED(float, bounds, [kHeadDim]);
    const int m = blockIdx.x / H, first = blockIdx.x % H * kHeadDim;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const float* weight = m == 0   ? query_weight
                          : m == 1 ? key_weight
                          : m == 2 ? value_weight
                                   : gate_weight;
    for (int e = warp; e < kHeadDim; e += kThreads / kWarpSize) {
        const float* row = weight + int64_t(first + e) * D;
        float largest = 0, bias = 0;
        for (int c = lane; c < D; c += kWarpSize) {
            largest = fmaxf(largest, fabsf(row[c] * norm_weight[c]));
            bias += row[c] * norm_bias[c];
        }
        bias = warp_sum(bias) + (m == 3 ? gate_bias[first + e] : 0);
        largest = warp_max(largest);
        if (lane == 0) {
            biases[e] = bias;
            bounds[e] = D * largest + fabsf(bias);
        }
    }
    __syncthreads();
    float bound = 0;
    for (int e = 0; e < kHeadDim; ++e) bound = fmaxf(bound, bounds[e]);
    const float scale = m < 3 ? scale_to(bound, 14) : 1;
    if (m < 3 && threadIdx.x == 0) weights.scales[blockIdx.x] = scale;
    for (int e = warp; e < kHeadDim; e += kThreads / kWarpSize) {
        const float* row = weight + int64_t(first + e) * D;
        split_row(weights, m * D + first + e, scale, biases[e],
                  [=](int c) { return row[c] * norm_weight[c]; });
    }
}

// A warp one row of out_proj, whose inputs come scaled as the values were.
__global__ void __launch_bounds__(kThreads)
    prepare_output_kernel(const float* out_weight, const float* out_bias, Weights weights) {
    const int e = (blockIdx.x * kThreads + threadIdx.x) / kWarpSize;
    if (e >= D) return;
    split_row(weights, 4 * D + e, 1, out_bias[e], [=](int c) {
        return out_weight[int64_t(e) * D + c] / weights.scales[2 * H + c / kHeadDim];
    });
}

// Starts the copies of a tile of weights: kTileOutputs rows of kDepth channels, big and then small.
// Row 8·j + 2·t + i of 32 holds output 8·t + 2·j + i: so lane t of a row of results ends with 8
// neighbours.
template <int kOutputs>
__device__ inline void copy_weights(const __half* big, const __half* small, int first_output,
                                    int first_channel, __half* tile) {
#pragma unroll
    for (int piece = 0; piece < kTileOutputs * kDepth / 8; piece += kThreads) {  // of 16 bytes
        const int row = (piece + threadIdx.x) / (kDepth / 8), c = threadIdx.x % (kDepth / 8) * 8;
        const int output =
            first_output + row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
        const bool valid = output < kOutputs && first_channel + c < D;
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
        if (tile < kTiles) {
            copy_weights<kOutputs>(big, small, tile / kChunks * kTileOutputs,
                                   tile % kChunks * kDepth,
                                   stages + tile % kStages * 2 * kWeightHalves);
        }
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
            load(tile + kStages - 1);
            const __half* weight = weight_row + tile % kStages * 2 * kWeightHalves;
#pragma unroll
            for (int k = 0; k < kDepth; k += 16) {
                multiply_step(x_row + chunk * kDepth + k, weight + k, big_sums, small_sums);
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
