// What stage 12 does before and after its products: a, b and out_weight in two parts of fp16, in
// the order in which wgmma reads them, so that a stage of the ring is one contiguous piece; the
// powers of two that they are scaled by; the divisor, in two launches; and the store of a tile's
// results.
//
// A core matrix is 8 rows of 8 fp16, 128 bytes in one piece.
//     a, b    [batch][tile of 4 or 8 residues][step of 16 s][big, small]
//             [residue, h / 8][s / 8][s % 8][h % 8]
//     weight  [pass of 128 outputs p][step of 16 positions][big, small]
//             [position / 8][p / 8][p % 8][position % 8]
// Bytes: 4·B·S·N·D read, 4 · 64·B·S·N written. Operations: 3 · 2·B·S·N·D·64.
#pragma once

#include "hopper.cuh"
#include "outer_product_mean/row_counts.cuh"
#include "outer_product_mean/split_projections.cuh"
#include "outer_product_mean/tile_order.cuh"

constexpr int kDepth = 16;                              // s, or positions (h, k), of one step
constexpr int kPartElements = kHidden * kDepth;         // of one residue in one step, big or small
constexpr int kWeightElements = 2 * kOutputs * kDepth;  // of weight in one step
constexpr int kPrepareWarps = 32, kProjectWarps = 8;
constexpr int kProjectBlocks = D <= 64 ? 2 : 1;  // as many as registers allow
static_assert(D <= 256, "a lane holds its part of two rows of msa in registers");

// out_weight's row p in two parts, by a warp, and the power of two that it is scaled by.
__device__ void split_weight(const float* out_weight, __half* weight, float* shifts, int p, int P) {
    const int lane = threadIdx.x % kWarpSize;
    const float* row = out_weight + int64_t(p) * C * C;
    float largest = 0;
    for (int at = lane; at < C * C && p < P; at += kWarpSize) {
        largest = fmaxf(largest, fabsf(row[at]));
    }
    const int shift = shift_of(warp_max(largest));
    for (int position = lane * 8; position < kProduct; position += kWarpSize * 8) {
        uint32_t big[4], small[4];
        for (int pair = 0; pair < 4; ++pair) {
            float value[2];
            for (int e = 0; e < 2; ++e) {
                const int channel = p < P ? product_channel(position + 2 * pair + e, C) : -1;
                value[e] = channel < 0 ? 0 : row[channel] * power_of_two(shift);
            }
            split(value[0], value[1], big[pair], small[pair]);
        }
        const int step = p / kOutputs * (kProduct / kDepth) + position / kDepth;
        const int core = position % kDepth / 8 * (kOutputs / 8) + p % kOutputs / 8;
        __half* to = weight + int64_t(step) * kWeightElements + core * kCore + p % 8 * 8;
        *reinterpret_cast<uint4*>(to) = uint4{big[0], big[1], big[2], big[3]};
        *reinterpret_cast<uint4*>(to + kWeightElements / 2) =
            uint4{small[0], small[1], small[2], small[3]};
    }
    if (lane == 0) shifts[p] = shift;
}

__global__ void __launch_bounds__(kPrepareWarps* kWarpSize)
    prepare_kernel(const float* mask, const float* out_weight, float* reciprocal, __half* weight,
                   float* shifts, int S, int N, int P, int weight_blocks) {
    next_kernel_may_start();  // which waits only at its end
    const int block = blockIdx.x - weight_blocks, columns = ceil_div(N, kWarpSize);
    if (block < 0) {
        split_weight(out_weight, weight, shifts,
                     blockIdx.x * kPrepareWarps + threadIdx.x / kWarpSize, P);
    } else {
        count_rows<kPrepareWarps>(mask, reciprocal, block / columns, block % columns * kWarpSize, S,
                                  N);
    }
}

// a = proj_a(layer_norm(msa)) · mask and b likewise, a warp 16 rows s of a residue at a time.
// shifts[0], shifts[1]: the powers of two that they are scaled by.
__global__ void __launch_bounds__(kProjectWarps* kWarpSize, kProjectBlocks)
    project_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                   const float* layer_norm_bias, const float* proj_a_weight,
                   const float* proj_a_bias, const float* proj_b_weight, const float* proj_b_bias,
                   __half* a, __half* b, float* shifts, int S, int N, int steps, int padded_n,
                   int tiles) {
    DYNAMIC_SHARED(SharedProjection, projections);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    next_kernel_may_start();
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

    for (int tile = blockIdx.x * kProjectWarps + warp; tile < tiles;
         tile += gridDim.x * kProjectWarps) {
        const int n = tile % padded_n, step = tile / padded_n % steps;
        const int64_t batch = tile / padded_n / steps;
        const auto row_of = [&](int half) {
            const int s = step * kDepth + 8 * half + lane / 4;
            return s < S && n < N ? (batch * S + s) * N + n : -1;
        };
        uint32_t big[kSteps][4], small[kSteps][4];
        float present[2];
        load_operands(msa, mask, row_of, big, small, present);
        for (int matrix = 0; matrix < 2; ++matrix) {
            float sums[kColumnTiles][4];
            project(projections[matrix], big, small, sums);
            const float scale = power_of_two(shift_of(projections[matrix]));
            const int residues = matrix == 0 ? kTileI : kTileJ;  // of a tile
            const int64_t tile_index = batch * (padded_n / residues) + n / residues;
            __half* to =
                (matrix == 0 ? a : b) +
                ((tile_index * steps + step) * residues * 2 + n % residues) * kPartElements;
            to += lane % 4 * (2 * kCore) + lane / 4 * 8;
            for (int half = 0; half < 2; ++half, to += kCore) {
                uint4 words[2] = {};      // zeros past the edges
                if (row_of(half) >= 0) {  // a branch, since without one registers do not suffice
                    finish(projections[matrix], sums, half, present[half] * scale, words[0],
                           words[1]);
                }
                *reinterpret_cast<uint4*>(to) = words[0];
                *reinterpret_cast<uint4*>(to + residues * kPartElements) = words[1];
            }
        }
    }
    wait_for_previous_kernel();  // so that the next one need not
}

// Launches both kernels: a, b, weight, reciprocal and shifts are what the products read.
inline cudaError_t write_inputs(const float* msa, const float* mask, const float* layer_norm_weight,
                                const float* layer_norm_bias, const float* proj_a_weight,
                                const float* proj_a_bias, const float* proj_b_weight,
                                const float* proj_b_bias, const float* out_weight, __half* a,
                                __half* b, __half* weight, float* reciprocal, float* shifts,
                                int batches, int S, int N, int P, int steps, int padded_n,
                                cudaStream_t stream) {
    const int weight_blocks = ceil_div(P, kOutputs) * (kOutputs / kPrepareWarps);
    if (cudaError_t error =
            LAUNCH(prepare_kernel, dim3(weight_blocks + batches * ceil_div(N, kWarpSize)),
                   dim3(kPrepareWarps * kWarpSize), 0, stream)(
                mask, out_weight, reciprocal, weight, shifts + 2, S, N, P, weight_blocks)) {
        return error;
    }
    const int tiles = batches * steps * padded_n;
    const int blocks = min(ceil_div(tiles, kProjectWarps), multiprocessors() * kProjectBlocks);
    return LAUNCH(project_kernel, dim3(blocks), dim3(kProjectWarps * kWarpSize),
                  2 * sizeof(SharedProjection), stream)
        .early(EARLY)(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                      proj_b_weight, proj_b_bias, a, b, shifts, S, N, steps, padded_n, tiles);
}

// out[i][j][p] of a tile's 32 pairs for a warp's outputs p to p + 15, which were scaled by
// 2^(shift + shifts[p]); 8 lanes write 32 bytes in one piece.
__device__ inline void store_out(const float (&projected)[16], const float* shifts,
                                 const float* out_bias, float* out, int64_t batch, int first_i,
                                 int first_j, int p, int shift, int N, int P) {
    const int lane = threadIdx.x % kWarpSize;
    for (int half = 0; half < 2; ++half) {
        const int output = p + lane / 4 + 8 * half;
        if (output >= P) continue;
        const float bias = out_bias[output];
        const int back = -shift - int(shifts[output]);
        for (int e = 0; e < 8; ++e) {
            const int i = first_i + e / 2, j = first_j + lane % 4 * 2 + e % 2;
            if (i >= N || j >= N) continue;
            out[((batch * N + i) * N + j) * P + output] =
                scale_by(projected[e / 2 * 4 + 2 * half + e % 2], back) + bias;
        }
    }
}
