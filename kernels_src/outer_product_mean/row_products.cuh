// For stages 08 and 13: Σ_s Σ_k b[s,j,k] T[s,i,p,k] with T = Σ_h a[s,i,h] out_weight[p,h,k], a warp
// two p and one half of k, two rows s at a time. mma's rows are (s,i), then j; its columns k, then
// i. T goes from result to operand in registers: both have i in lane / 4 and k in lane % 4.
#pragma once

#include "outer_product_mean/split_operands.cuh"

constexpr int kResiduesI = 8, kResiduesJ = 32;  // i and j of a block
// Bits of fp16's range that a and out_weight each leave free: T, the sum of 32 products below
// 2^(15 - kHeadroom) squared, has to fit too. Small parts lose only what is below 2^-29 of the
// largest value possible.
constexpr int kHeadroom = 10;

// out_weight of a warp's p and k as mma's b, [p][k / 8][h / 16][big, small]
using Weights = uint32_t[2][2][2][2][2];

// From raw[p][k / 8][h / 16][h], scaled by the power of two that is returned.
__device__ int split_weights(const float (&raw)[2][2][2][4], Weights& weight) {
    float largest = 0;
    for (int at = 0; at < 32; ++at) {
        largest = fmaxf(largest, fabsf(raw[at / 16][at / 8 % 2][at / 4 % 2][at % 4]));
    }
    const int shift = shift_of(warp_max(largest)) - kHeadroom;
    for (int at = 0; at < 16; ++at) {
        const int p = at / 8, column = at / 4 % 2, step = at / 2 % 2, e = at % 2;
        const float* pair = &raw[p][column][step][2 * e];
        split(pair[0] * power_of_two(shift), pair[1] * power_of_two(shift),
              weight[p][column][step][0][e], weight[p][column][step][1][e]);
    }
    return shift;
}

// d += a · b with operands in two parts; the products with a small part have a sum of their own,
// so that chains of dependent mma are short and lose little.
__device__ void multiply(float (&d)[4], float (&d_small)[4], const uint32_t (&a)[2][4],
                         const uint32_t (&b)[2][2]) {
    mma_m16n8k16_fp16(d_small, a[0], b[1]);
    mma_m16n8k16_fp16(d_small, a[1], b[0]);
    mma_m16n8k16_fp16(d, a[0], b[0]);
}

// operand[s][p][big, small] = T of two rows s, a[h / 16][big, small] being theirs.
__device__ void contract_channels(const uint32_t (&a)[2][2][4], const Weights& weight,
                                  uint32_t (&operand)[2][2][2][2]) {
    float t[2][2][4] = {}, t_small[2][2][4] = {};
    for (int step = 0; step < 2; ++step) {
        for (int p = 0; p < 2; ++p) {
            for (int column = 0; column < 2; ++column) {
                multiply(t[p][column], t_small[p][column], a[step], weight[p][column][step]);
            }
        }
    }
    for (int at = 0; at < 8; ++at) {
        const int s = at / 4, p = at / 2 % 2, column = at % 2;
        const float (&sum)[4] = t[p][column], (&small)[4] = t_small[p][column];
        split(sum[2 * s] + small[2 * s], sum[2 * s + 1] + small[2 * s + 1],
              operand[s][p][0][column], operand[s][p][1][column]);
    }
}

// sums[p][j / 16] += b · T over two rows s, of which load_b(b, s, tile) gives 16 j; the last row of
// an odd number has no second.
template <typename LoadB>
__device__ void contract_rows(LoadB load_b, int rows, const uint32_t (&operand)[2][2][2][2],
                              float (&sums)[2][kResiduesJ / 16][4]) {
    for (int tile = 0; tile < kResiduesJ / 16; ++tile) {
        float sum[2][4] = {}, sum_small[2][4] = {};
        for (int s = 0; s < 2; ++s) {
            if (s >= rows) break;
            uint32_t b[2][4];
            load_b(b, s, tile);
            for (int p = 0; p < 2; ++p) multiply(sum[p], sum_small[p], b, operand[s][p]);
        }
        for (int at = 0; at < 8; ++at) {
            sums[at / 4][tile][at % 4] += sum[at / 4][at % 4] + sum_small[at / 4][at % 4];
        }
    }
}
