// proj_a or proj_b, scaled by LayerNorm's scale, in shared memory: an operand in two parts of all
// the block's warps. See split_operands.cuh.
#pragma once

#include "outer_product_mean/split_operands.cuh"

struct SharedProjection {
    uint4 weight[kColumnTiles][kSteps][kWarpSize];  // big and small parts, as mma's b
    float2 channel[kHidden];                        // a sum's factor, and what is added then
    float bound[kColumnTiles];                      // of |a| or |b|
};

__device__ int shift_of(const SharedProjection& projection) {
    float bound = 0;
    for (int tile = 0; tile < kColumnTiles; ++tile) bound = fmaxf(bound, projection.bound[tile]);
    return shift_of(bound);
}

// One tile's part of it, by one warp; at: where the factor of the lane's channel goes.
__device__ void store_projection(SharedProjection& to, int tile, int at,
                                 const Projection& projection) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        to.weight[tile][step][lane] =
            make_uint4(projection.big[step][0], projection.big[step][1], projection.small[step][0],
                       projection.small[step][1]);
    }
    if (lane % 4 == 0) to.channel[at] = make_float2(projection.factor, projection.constant);
    if (lane == 0) to.bound[tile] = projection.bound;
}

// sums = x · projection: 16 rows by the columns of channel_of. Products with a small part have a
// sum of their own: mma truncates what it adds, and of these it matters less.
__device__ void project(const SharedProjection& projection, const uint32_t (&big)[kSteps][4],
                        const uint32_t (&small)[kSteps][4], float (&sums)[kColumnTiles][4]) {
    const int lane = threadIdx.x % kWarpSize;
    float small_sums[kColumnTiles][4] = {};
    for (int at = 0; at < 4 * kColumnTiles; ++at) sums[at / 4][at % 4] = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint4 w[kColumnTiles];
        for (int tile = 0; tile < kColumnTiles; ++tile) {
            w[tile] = projection.weight[tile][step][lane];
        }
        for (int tile = 0; tile < kColumnTiles; ++tile) {
            mma_m16n8k16_fp16(small_sums[tile], small[step], {w[tile].x, w[tile].y});
        }
        for (int tile = 0; tile < kColumnTiles; ++tile) {
            mma_m16n8k16_fp16(sums[tile], big[step], {w[tile].x, w[tile].y});
        }
        for (int tile = 0; tile < kColumnTiles; ++tile) {
            mma_m16n8k16_fp16(small_sums[tile], big[step], {w[tile].z, w[tile].w});
        }
    }
    for (int at = 0; at < 4 * kColumnTiles; ++at)
        sums[at / 4][at % 4] += small_sums[at / 4][at % 4];
}

// The lane's 8 channels, from 8t on, of row g (half 0) or g + 8 of a tile, times mask and scale.
__device__ void finish(const SharedProjection& projection, const float (&sums)[kColumnTiles][4],
                       int half, float factor, uint4& big, uint4& small) {
    const float2* channel = &projection.channel[threadIdx.x % 4 * 8];
    uint32_t words[2][kColumnTiles];
    for (int c = 0; c < kColumnTiles; ++c) {
        const float2 first = channel[2 * c], second = channel[2 * c + 1];
        split((sums[c][2 * half] * first.x + first.y) * factor,
              (sums[c][2 * half + 1] * second.x + second.y) * factor, words[0][c], words[1][c]);
    }
    big = make_uint4(words[0][0], words[0][1], words[0][2], words[0][3]);
    small = make_uint4(words[1][0], words[1][1], words[1][2], words[1][3]);
}
