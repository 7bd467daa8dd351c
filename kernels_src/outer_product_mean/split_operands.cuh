// For stages 08, 09, 12 and 13: fp32 operands in two parts, and msa and the projections as such
// operands.
//
// An operand is big + small, two fp16 that hold 22 bits; of the four products of two operands three
// are made, small · small is below fp32's own rounding. So that values neither overflow fp16 nor
// fall into its subnormals, they are scaled by an exact power of two that their largest possible
// magnitude, known from the weights alone, gives. In tensor cores' fragments g = lane / 4, t = lane
// % 4 (see tensor_core.cuh). D and C are compile-time constants.
#pragma once

#include "tensor_core.cuh"

#include <cuda_fp16.h>

constexpr float kEpsilon = 1e-5f;
constexpr int kHidden = 32;                                     // C, padded with zeros
constexpr int kColumnTiles = kHidden / 8;                       // of h, or k, as mma has them
constexpr int kSteps = ceil_div(D, 16);                         // of 16 d
constexpr int kInputShift = D <= 64 ? 12 : D <= 256 ? 11 : 10;  // √D · 2^kInputShift ≤ 2^15
static_assert(D <= 1024 && C <= kHidden);

// x and y as big + small, to 22 bits
__device__ void split(float x, float y, uint32_t& big, uint32_t& small) {
    const __half2 high = __floats2half2_rn(x, y);
    const float2 back = __half22float2(high);
    const __half2 low = __floats2half2_rn(x - back.x, y - back.y);
    memcpy(&big, &high, sizeof big);
    memcpy(&small, &low, sizeof small);
}

// The power of two that takes values up to bound below 2^15; fp16 ends at 65,504.
__device__ int shift_of(float bound) {
    const int exponent = int(__float_as_uint(bound) >> 23) - 127;
    return min(max(14 - exponent, -80), 80);
}
__device__ float power_of_two(int n) { return __uint_as_float(uint32_t(n + 127) << 23); }

// value · 2^n for n from -252 on to 254, as the sum of three shifts may be
__device__ float scale_by(float value, int n) {
    return value * power_of_two(n / 2) * power_of_two(n - n / 2);
}

// The sum, or the largest, over the four lanes that share the rows of mma's operands and results.
__device__ float quad_sum(float value) {
    value += __shfl_xor_sync(kFullMask, value, 1);
    return value + __shfl_xor_sync(kFullMask, value, 2);
}
__device__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 1));
    return fmaxf(value, __shfl_xor_sync(kFullMask, value, 2));
}

// The four d of a step of 16 that a lane has, in mma's a as in its b: which columns of a, and rows
// of b, they are said to be does not matter, as long as it is the same, and four neighbours are one
// load of 16 bytes.
__device__ int first_d(int step) { return step * 16 + threadIdx.x % 4 * 4; }

// row[d] to row[d + 3]; zeros from D on
__device__ float4 load_four(const float* row, int d) {
    if (D % 4 == 0) return d < D ? load4(row + d) : make_float4(0, 0, 0, 0);
    return make_float4(d < D ? row[d] : 0, d + 1 < D ? row[d + 1] : 0, d + 2 < D ? row[d + 2] : 0,
                       d + 3 < D ? row[d + 3] : 0);
}

// Channel of column n of a projection's tile: a lane's results, columns 2t and 2t+1 of four tiles,
// are the 8 channels from 8t on.
__device__ int channel_of(int tile, int n) { return n / 2 * 8 + tile * 2 + n % 2; }

// LayerNorm's scale and shift for the d that a lane has.
struct Affine {
    float4 scale[kSteps], shift[kSteps];
};
__device__ void load_affine(Affine& affine, const float* layer_norm_weight,
                            const float* layer_norm_bias) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        affine.scale[step] = load_four(layer_norm_weight, first_d(step));
        affine.shift[step] = load_four(layer_norm_bias, first_d(step));
    }
}

// Eight channels of proj_a's or proj_b's weights, times LayerNorm's scale, as operands: mma's b.
struct Projection {
    uint32_t big[kSteps][2], small[kSteps][2];
    float factor, constant;  // a sum · factor + constant is the lane's channel's value
    float bound;             // of the eight channels' values
};

// By one warp, channel h being the lane's, of lane / 4. |a_h| ≤ √D ‖scale · weight_h‖ + |bias_h +
// Σ_d shift_d weight_hd|, by Cauchy and Schwarz, and b_k likewise.
__device__ void scale_projection(Projection& projection, int h, const float* weight,
                                 const float* bias, const Affine& affine) {
    float scaled[kSteps][4], largest = 0, squares = 0, constant = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const float4 w = h < C ? load_four(weight + h * D, first_d(step)) : make_float4(0, 0, 0, 0);
        const float4 scale = affine.scale[step], shift = affine.shift[step];
        const float products[4] = {w.x * scale.x, w.y * scale.y, w.z * scale.z, w.w * scale.w};
        for (int e = 0; e < 4; ++e) {
            scaled[step][e] = products[e];
            largest = fmaxf(largest, fabsf(products[e]));
        }
        constant += w.x * shift.x + w.y * shift.y + w.z * shift.z + w.w * shift.w;
    }
    const int shift = shift_of(quad_max(largest));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        for (int half = 0; half < 2; ++half) {
            const float x = scaled[step][2 * half] * power_of_two(shift);
            const float y = scaled[step][2 * half + 1] * power_of_two(shift);
            squares += x * x + y * y;
            split(x, y, projection.big[step][half], projection.small[step][half]);
        }
    }
    const float norm = sqrtf(quad_sum(squares)) * power_of_two(-shift);
    projection.constant = quad_sum(constant) + (h < C ? bias[h] : 0);
    projection.factor = power_of_two(-kInputShift - shift);
    projection.bound = warp_max(norm * sqrtf(float(D)) + fabsf(projection.constant));
}

// The part of a tile of 16 rows that the lane holds: row_of(half) of the batch, or zeros where that
// is -1
template <typename RowOf>
__device__ void load_tile(const float* msa, const float* mask, RowOf row_of,
                          float (&x)[2][kSteps][4], float (&present)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t row = row_of(half);
        present[half] = row >= 0 ? mask[row] : 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const float4 four =
                row >= 0 ? load_four(msa + row * D, first_d(step)) : make_float4(0, 0, 0, 0);
            x[half][step][0] = four.x, x[half][step][1] = four.y;
            x[half][step][2] = four.z, x[half][step][3] = four.w;
        }
    }
}

// x·2^kInputShift = (msa - mean) / σ of both rows of a tile that the lane shares; four lanes a row
__device__ void normalize(float (&x)[2][kSteps][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = 0, squares = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            for (int e = 0; e < 4; ++e) sum += x[half][step][e];
        }
        const float mean = quad_sum(sum) / D;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            for (int e = 0; e < 4; ++e) {
                x[half][step][e] = first_d(step) + e < D ? x[half][step][e] - mean : 0;
                squares += x[half][step][e] * x[half][step][e];
            }
        }
        const float scale = power_of_two(kInputShift) / sqrtf(quad_sum(squares) / D + kEpsilon);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            for (int e = 0; e < 4; ++e) x[half][step][e] *= scale;
        }
    }
}

// Step `step` of the tile as mma's a: rows g, g + 8, g, g + 8, two of the lane's d and the other
// two
__device__ void split_tile(const float (&x)[2][kSteps][4], int step, uint32_t (&big)[4],
                           uint32_t (&small)[4]) {
    for (int e = 0; e < 4; ++e) {
        const float* pair = &x[e % 2][step][e / 2 * 2];
        split(pair[0], pair[1], big[e], small[e]);
    }
}

// A warp's tile of 16 rows, normalised, as operands in two parts; row_of as in load_tile
template <typename RowOf>
__device__ void load_operands(const float* msa, const float* mask, RowOf row_of,
                              uint32_t (&big)[kSteps][4], uint32_t (&small)[kSteps][4],
                              float (&present)[2]) {
    float x[2][kSteps][4];
    load_tile(msa, mask, row_of, x, present);
    normalize(x);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) split_tile(x, step, big[step], small[step]);
}
