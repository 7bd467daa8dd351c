// Everything before the outer product in one kernel, for stages 05 to 07: LayerNorm, both
// projections, the mask and the divisor's reciprocal. A block takes 32 rows (b,s,n): a warp a row
// for mean and deviation, then both projections as one product of 32 rows × D by D × 2C, a register
// tile of 2 × 4 a thread. Further blocks of the same launch count the mask. C is a compile-time
// constant. Operations: 4·B·S·N·D·C. Bytes: 4·B·S·N·(D + 2·C), and 8·D·C of weights a block from
// L2.
#pragma once

#include "cuda.cuh"
#include "outer_product_mean/row_counts.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kEpsilon = 1e-5f;
constexpr int kRows = 32;            // (b,s,n) of a block's tile
constexpr int kColumns = 64;         // channels of a, then of b
constexpr int kDepth = 32;           // d at a time
constexpr int kStride = kDepth + 4;  // 16-byte rows that begin in different banks
constexpr int kGrid = 16;            // threads along each side of the tile
constexpr int kRowsEach = kRows / kGrid, kColumnsEach = kColumns / kGrid;

// mean[r] and deviation[r] = 1/σ of the block's rows of msa, one warp a row
__device__ void row_statistics(const float* msa, int64_t first_row, int64_t rows, int D,
                               float* mean, float* deviation) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int r = warp; r < kRows; r += kWarps) {
        const float* row = msa + min(first_row + r, rows - 1) * D;
        float sum = 0, squares = 0;
        for (int d = lane; d < D; d += kWarpSize) sum += row[d];
        const float middle = warp_sum(sum) / D;
        for (int d = lane; d < D; d += kWarpSize) {
            squares += (row[d] - middle) * (row[d] - middle);
        }
        squares = warp_sum(squares);
        if (lane == 0) {
            mean[r] = middle;
            deviation[r] = 1.0f / sqrtf(squares / D + kEpsilon);
        }
    }
    __syncthreads();
}

// a[row][h] = mask[row] (bias[h] + Σ_d x[row][d] weight[h][d]), and b likewise, x the LayerNorm of
// msa
__device__ void project(const float* msa, const float* mask, const float* layer_norm_weight,
                        const float* layer_norm_bias, const float* proj_a_weight,
                        const float* proj_a_bias, const float* proj_b_weight,
                        const float* proj_b_bias, float* a, float* b, int64_t first_row,
                        int first_column, int64_t rows, int D) {
    SHARED(float, x, [kRows][kStride]);
    SHARED(float, weight, [kColumns][kStride]);
    SHARED(float, mean, [kRows]);
    SHARED(float, deviation, [kRows]);
    const int y = threadIdx.x / kGrid, z = threadIdx.x % kGrid;  // rows y + 16·r, columns z + 16·c
    row_statistics(msa, first_row, rows, D, mean, deviation);

    float sum[kRowsEach][kColumnsEach] = {};
    for (int first = 0; first < D; first += kDepth) {
        const int d = first + threadIdx.x % kDepth;
        const float scale = d < D ? layer_norm_weight[d] : 0,
                    shift = d < D ? layer_norm_bias[d] : 0;
        for (int r = threadIdx.x / kDepth; r < kRows; r += kThreads / kDepth) {
            const float value = d < D ? msa[min(first_row + r, rows - 1) * D + d] : 0;
            x[r][d - first] = (value - mean[r]) * deviation[r] * scale + shift;
        }
        for (int c = threadIdx.x / kDepth; c < kColumns; c += kThreads / kDepth) {
            const int h = first_column + c;
            const float* row = h < C ? proj_a_weight + h * D : proj_b_weight + (h - C) * D;
            weight[c][d - first] = d < D && h < 2 * C ? row[d] : 0;
        }
        __syncthreads();
        for (int at = 0; at < kDepth; at += 4) {
            float4 w[kColumnsEach];
            for (int c = 0; c < kColumnsEach; ++c) w[c] = load4(&weight[z + kGrid * c][at]);
            for (int r = 0; r < kRowsEach; ++r) {
                const float4 v = load4(&x[y + kGrid * r][at]);
                for (int c = 0; c < kColumnsEach; ++c) {
                    sum[r][c] += v.x * w[c].x + v.y * w[c].y + v.z * w[c].z + v.w * w[c].w;
                }
            }
        }
        __syncthreads();  // the next tiles overwrite these
    }

    for (int r = 0; r < kRowsEach; ++r) {
        const int64_t row = first_row + y + kGrid * r;
        for (int c = 0; c < kColumnsEach; ++c) {
            const int h = first_column + z + kGrid * c;
            if (row >= rows || h >= 2 * C) continue;
            if (h < C) {
                a[row * C + h] = (sum[r][c] + proj_a_bias[h]) * mask[row];
            } else {
                b[row * C + h - C] = (sum[r][c] + proj_b_bias[h - C]) * mask[row];
            }
        }
    }
}

__global__ void __launch_bounds__(kThreads)
    inputs_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* proj_a_weight,
                  const float* proj_a_bias, const float* proj_b_weight, const float* proj_b_bias,
                  float* a, float* b, float* reciprocal, int B, int S, int N, int D) {
    const int64_t rows = int64_t(B) * S * N, row_tiles = ceil_div(rows, kRows);
    const int column_tiles = ceil_div(2 * C, kColumns), residue_tiles = ceil_div(N, kWarpSize);
    const int64_t tile = blockIdx.x - row_tiles * column_tiles;  // of residues, from 0 on
    if (tile < 0) {
        project(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                proj_b_weight, proj_b_bias, a, b, blockIdx.x / column_tiles * int64_t(kRows),
                blockIdx.x % column_tiles * kColumns, rows, D);
    } else {
        count_rows<kWarps>(mask, reciprocal, tile / residue_tiles, tile % residue_tiles * kWarpSize,
                           S, N);
    }
}

// Launches the kernel; a, b (B,S,N,C) and reciprocal (B,N) are its results.
inline cudaError_t launch_inputs(const float* msa, const float* mask,
                                 const float* layer_norm_weight, const float* layer_norm_bias,
                                 const float* proj_a_weight, const float* proj_a_bias,
                                 const float* proj_b_weight, const float* proj_b_bias, float* a,
                                 float* b, float* reciprocal, int B, int S, int N, int D,
                                 cudaStream_t stream) {
    const int64_t project_blocks = ceil_div(int64_t(B) * S * N, kRows) * ceil_div(2 * C, kColumns);
    const int64_t count_blocks = int64_t(B) * ceil_div(N, kWarpSize);
    return LAUNCH(inputs_kernel, dim3(project_blocks + count_blocks), dim3(kThreads), 0, stream)(
        msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias, proj_b_weight,
        proj_b_bias, a, b, reciprocal, B, S, N, D);
}
