// Stage 10's weights as pairs (fp16_pairs.cuh), prepared in each call by two small kernels, with
// the powers of two that keep whatever the weights will be multiplied with in fp16's range.
#pragma once

#include "msa_column_attention/fp16_pairs.cuh"

constexpr int kHeadDim = D / H;
constexpr int kThreads = 256;  // of a block of every kernel but the core

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

// Both kernels, one after the other.
inline cudaError_t prepare_weights(const float* norm_weight, const float* norm_bias,
                                   const float* query_weight, const float* key_weight,
                                   const float* value_weight, const float* gate_weight,
                                   const float* gate_bias, const float* out_weight,
                                   const float* out_bias, Weights weights, cudaStream_t stream) {
    const cudaError_t error = LAUNCH(prepare_projections_kernel, dim3(4 * H), dim3(kThreads), 0,
                                     stream)(norm_weight, norm_bias, query_weight, key_weight,
                                             value_weight, gate_weight, gate_bias, weights);
    if (error) return error;
    return LAUNCH(prepare_output_kernel, dim3(ceil_div(D * kWarpSize, kThreads)), dim3(kThreads), 0,
                  stream)(out_weight, out_bias, weights);
}
