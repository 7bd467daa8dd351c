// What stage 09 does before its products: a, b and out_weight as operands in two parts, the powers
// of two that they are scaled by, and the divisor. Two launches, prepare_kernel and inputs_kernel.
#pragma once

#include "outer_product_mean/row_counts.cuh"
#include "outer_product_mean/split_projections.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRowWords = kHidden;            // big, then small parts of a row of a or b
constexpr int kChannels = kHidden * kHidden;  // (h,k) of a pair, in the order of channel_at
constexpr int kOutputs = 128;                 // p of a block
constexpr int kOutputTiles = kOutputs / 8;    // as mma has them
constexpr int kInputBlocks = 132;             // the H200's multiprocessors
static_assert(D <= 256, "a lane holds its part of two rows of msa in registers");

// The channel h·C + k at a position of the projection's order, -1 in the padding. A lane has, of a
// pair and an h, k = 2t, 2t+1 of four tiles: here they are 8 neighbours.
__device__ int channel_at(int position) {
    const int h = position / kHidden,
              k = position % 8 / 2 * 8 + position % kHidden / 8 * 2 + position % 2;
    return h < C && k < C ? h * C + k : -1;
}

// out_weight's channels p as operands in two parts, a warp each, and the powers of two that they
// are scaled by. weight[p / 128][step of 16 channels][p / 8 % 16][lane]
__device__ void split_weight(const float* out_weight, uint4* weight, float* shifts, int p, int P) {
    const int lane = threadIdx.x % kWarpSize;
    const float* row = out_weight + int64_t(p) * C * C;
    float largest = 0;
    for (int at = lane; at < C * C && p < P; at += kWarpSize)
        largest = fmaxf(largest, fabsf(row[at]));
    const int shift = shift_of(warp_max(largest));
    for (int at = lane; at < kChannels / 4; at += kWarpSize) {
        const int step = at / 4, t = at % 4;
        float value[4];
        for (int e = 0; e < 4; ++e) {
            const int channel = channel_at(step * 16 + e / 2 * 8 + t * 2 + e % 2);
            value[e] = p < P && channel >= 0 ? row[channel] * power_of_two(shift) : 0;
        }
        uint4 words;
        split(value[0], value[1], words.x, words.z);
        split(value[2], value[3], words.y, words.w);
        const int64_t tile = (int64_t(p / kOutputs) * (kChannels / 16) + step) * kOutputTiles;
        weight[(tile + p % kOutputs / 8) * kWarpSize + p % 8 * 4 + t] = words;
    }
    if (lane == 0) shifts[p] = shift;
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const float* mask, const float* out_weight, float* reciprocal, float* weight,
                   float* shifts, int S, int N, int P, int weight_blocks) {
    const int block = blockIdx.x - weight_blocks, residue_tiles = ceil_div(N, kWarpSize);
    if (block < 0) {
        split_weight(out_weight, reinterpret_cast<uint4*>(weight), shifts,
                     blockIdx.x * kWarps + threadIdx.x / kWarpSize, P);
    } else {
        count_rows<kWarps>(mask, reciprocal, block / residue_tiles,
                           block % residue_tiles * kWarpSize, S, N);
    }
}

// a and b of all rows (b,s,n), 16 a warp at a time, as they enter the product: (row, big or small,
// 32 channels) of fp16. shifts[0], shifts[1]: the powers of two that they are scaled by
__global__ void __launch_bounds__(kThreads, 1)
    inputs_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* proj_a_weight,
                  const float* proj_a_bias, const float* proj_b_weight, const float* proj_b_bias,
                  uint32_t* a, uint32_t* b, float* shifts, int64_t rows) {
    DYNAMIC_SHARED(SharedProjection, projections);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    {
        Affine affine;
        load_affine(affine, layer_norm_weight, layer_norm_bias);
        const bool is_a = warp < kColumnTiles;
        Projection projection;
        scale_projection(projection, channel_of(warp % kColumnTiles, lane / 4),
                         is_a ? proj_a_weight : proj_b_weight, is_a ? proj_a_bias : proj_b_bias,
                         affine);
        store_projection(projections[is_a ? 0 : 1], warp % kColumnTiles,
                         channel_of(warp % kColumnTiles, lane / 4), projection);
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x < 2) {
        shifts[threadIdx.x] = shift_of(projections[threadIdx.x]);
    }

    const int64_t stride = int64_t(gridDim.x) * kWarps * 16;
    for (int64_t first = (int64_t(blockIdx.x) * kWarps + warp) * 16; first < rows;
         first += stride) {
        const auto row_of = [&](int half) {
            const int64_t row = first + half * 8 + lane / 4;
            return row < rows ? row : -1;
        };
        uint32_t big[kSteps][4], small[kSteps][4];
        float present[2];
        load_operands(msa, mask, row_of, big, small, present);
#pragma unroll 1
        for (int matrix = 0; matrix < 2; ++matrix) {
            float sums[kColumnTiles][4];
            project(projections[matrix], big, small, sums);
            const float scale = power_of_two(shift_of(projections[matrix]));
            for (int half = 0; half < 2; ++half) {
                if (row_of(half) < 0) continue;
                uint4 words[2];
                finish(projections[matrix], sums, half, present[half] * scale, words[0], words[1]);
                uint32_t* to = (matrix == 0 ? a : b) + row_of(half) * kRowWords + lane % 4 * 4;
                *reinterpret_cast<uint4*>(to) = words[0];
                *reinterpret_cast<uint4*>(to + kRowWords / 2) = words[1];
            }
        }
    }
}
