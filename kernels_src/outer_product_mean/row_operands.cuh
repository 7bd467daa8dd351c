// For stage 08: rows of a and b in shared memory as operands in two parts, 16 to a tile of the
// tensor cores: how projections write them and how products read them.
#pragma once

#include "outer_product_mean/row_products.cuh"
#include "outer_product_mean/split_projections.cuh"

constexpr int kRowWords = kHidden / 2 + 4;  // pairs of h or k; 80 bytes, no bank conflicts

// a or b, times 2^shift, of kTiles tiles of normalised rows, written from first_row on. The tiles
// share what is read of the weights.
template <int kTiles, int kRows>
__device__ void project_rows(const SharedProjection& projection, int shift,
                             const float (*x)[2][kSteps][4], const float (*present)[2],
                             uint32_t (&to)[2][kRows][kRowWords], int first_row) {
    const int lane = threadIdx.x % kWarpSize;
    const float scale = power_of_two(shift);
    float sums[kTiles][kColumnTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t big[kTiles][4], small[kTiles][4];
        for (int tile = 0; tile < kTiles; ++tile) {
            split_tile(x[tile], step, big[tile], small[tile]);
        }
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
            const uint4 w = projection.weight[column][step][lane];
            for (int tile = 0; tile < kTiles; ++tile) {
                mma_m16n8k16_fp16(sums[tile][column], big[tile], {w.z, w.w});
                mma_m16n8k16_fp16(sums[tile][column], small[tile], {w.x, w.y});
                mma_m16n8k16_fp16(sums[tile][column], big[tile], {w.x, w.y});
            }
        }
    }
    for (int tile = 0; tile < kTiles; ++tile) {
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + tile * 16 + half * 8 + lane / 4, word = lane % 4 * 4;
            finish(projection, sums[tile], half, present[tile][half] * scale,
                   reinterpret_cast<uint4&>(to[0][row][word]),
                   reinterpret_cast<uint4&>(to[1][row][word]));
        }
    }
}

// A 16 × 16 operand (big, small): rows from `row` on, h or k from 16 · step on
template <int kRows>
__device__ void load_operand(uint32_t (&operand)[2][4], const uint32_t (&from)[2][kRows][kRowWords],
                             int row, int step) {
    const int lane = threadIdx.x % kWarpSize;
    for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(operand[part], &from[part][row + lane % 16][step * 8 + lane / 16 * 4]);
    }
}
