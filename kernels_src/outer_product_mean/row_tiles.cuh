// Stage 13's first kernel: rows of a and b, projected once, in the order in which the lanes of the
// second one's mma hold them. Four warps normalise a tile's 16 rows while four others scale and
// split the weights.
#pragma once

#include "hopper.cuh"
#include "outer_product_mean/row_products.cuh"
#include "outer_product_mean/split_projections.cuh"

constexpr int kProjectThreads = 2 * kColumnTiles * kWarpSize;
constexpr int kRowPairs = ceil_div(S, 2);
static_assert(D <= 64, "a lane holds its part of a row tile in registers");

// 16 rows of a or b as mma's a: halves of the channels, big and small parts. Of a: two s, 8 i each;
// of b: one s.
struct RowTile {
    uint2 lane[2][2][kWarpSize][2];
};

// Channel of column n of a tile of 8, in the order of row tiles: the two tiles of a half alternate,
// so that a lane of the second kernel has two neighbours of out_weight's k.
__device__ int channel_at(int column, int n) { return column / 2 * 16 + n * 2 + column % 2; }

// Eight channels of the weights, by a warp, for the four warps that make a row tile.
__device__ void scale_weights(SharedProjection& to, int column, const float* layer_norm_weight,
                              const float* layer_norm_bias, const float* weight,
                              const float* bias) {
    const int n = threadIdx.x % kWarpSize / 4;
    Affine affine;
    load_affine(affine, layer_norm_weight, layer_norm_bias);
    Projection projection;
    scale_projection(projection, channel_at(column, n), weight, bias, affine);
    store_projection(to, column, column * 8 + n, projection);
}

// Eight channels of a row tile, times 2^shift, by one warp.
__device__ void project_tile(RowTile& to, const SharedProjection& projection, int column,
                             const float (&x)[2][kSteps][4], const float (&present)[2], int shift) {
    const int lane = threadIdx.x % kWarpSize;
    float sums[4] = {}, small_sums[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t big[4], small[4];
        split_tile(x, step, big, small);
        const uint4 w = projection.weight[column][step][lane];
        mma_m16n8k16_fp16(small_sums, small, {w.x, w.y});
        mma_m16n8k16_fp16(sums, big, {w.x, w.y});
        mma_m16n8k16_fp16(small_sums, big, {w.z, w.w});
    }
    uint2 words[2];
    for (int row = 0; row < 2; ++row) {
        float value[2];
        for (int e = 0; e < 2; ++e) {
            const float2 channel = projection.channel[column * 8 + lane % 4 * 2 + e];
            const float sum = sums[2 * row + e] + small_sums[2 * row + e];
            value[e] = (sum * channel.x + channel.y) * present[row] * power_of_two(shift);
        }
        split(value[0], value[1], row == 0 ? words[0].x : words[0].y,
              row == 0 ? words[1].x : words[1].y);
    }
    for (int part = 0; part < 2; ++part) to.lane[column / 2][part][lane][column % 2] = words[part];
}

// a [batch][tile of i][pair of s] and b [batch][tile of 32 j][s][16 j], a block a tile; the powers
// of two that they are scaled by
__global__ void __launch_bounds__(kProjectThreads)
    project_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                   const float* layer_norm_bias, const float* proj_a_weight,
                   const float* proj_a_bias, const float* proj_b_weight, const float* proj_b_bias,
                   RowTile* a, RowTile* b, int* shifts, int N, int a_tiles) {
    SHARED(SharedProjection, projection);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int column = warp % kColumnTiles;
    const bool is_a = int(blockIdx.x) < a_tiles;
    const int tile = is_a ? blockIdx.x : blockIdx.x - a_tiles;
    const int i_tiles = ceil_div(N, kResiduesI), j_tiles = ceil_div(N, kResiduesJ);
    const int64_t batch = is_a ? tile / kRowPairs / i_tiles : tile / 2 / S / j_tiles;
    const int first = is_a ? tile / kRowPairs % i_tiles * kResiduesI
                           : tile / 2 / S % j_tiles * kResiduesJ + tile % 2 * 16;
    const auto row_of = [&](int half) {
        const int s = is_a ? tile % kRowPairs * 2 + half : tile / 2 % S;
        const int n = first + (is_a ? 0 : half * 8) + lane / 4;
        return s < S && n < N ? int64_t(s) * N + n : -1;
    };
    wait_for_previous_kernel();
    next_kernel_may_start();  // which reads what was there before this kernel, and then waits
    float x[2][kSteps][4], present[2];
    if (warp < kColumnTiles) {
        load_tile(msa + batch * S * N * D, mask + batch * S * N, row_of, x, present);
        normalize(x);
    } else {
        scale_weights(projection, column, layer_norm_weight, layer_norm_bias,
                      is_a ? proj_a_weight : proj_b_weight, is_a ? proj_a_bias : proj_b_bias);
    }
    __syncthreads();
    if (warp >= kColumnTiles) return;
    const int shift = shift_of(projection) - (is_a ? kHeadroom : 0);
    project_tile(is_a ? a[tile] : b[tile], projection, column, x, present, shift);
    if (tile == 0 && threadIdx.x == 0) shifts[is_a ? 0 : 1] = shift;
}
