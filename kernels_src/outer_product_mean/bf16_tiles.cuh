// What stages 10 and 11 have in common: everything before and after the matrix products of a tile.
// a, b, out_proj's weights and the divisors are written in the order in which the matrix
// instructions read them, so that a tile is one contiguous piece.
//
// A core matrix is 8 rows of 8 bf16, 128 bytes in one piece.
//     a, b    [batch][tile of 4 or 8 residues][step of kDepth s][residue, h / 8][s / 8][s % 8][h %
//     8] weight  [pass of 128 outputs p][position / 8][p / 8][p % 8][position % 8]
// Bytes: 2·B·S·N·D read, 2 · 64·B·S·N written. Operations: 2·B·S·N·D·64.
#pragma once

#include "hopper.cuh"
#include "outer_product_mean/bf16_rows.cuh"
#include "outer_product_mean/tile_order.cuh"

#ifndef DEPTH
#define DEPTH 32  // rows of the alignment in one step of the product's pipeline: 16, 32 or 64
#endif

constexpr float kEpsilon = 1e-5f;
constexpr int kHidden = 32;                        // C, padded with zeros
constexpr int kDepth = DEPTH;                      // s
constexpr int kPadS = 64;                          // a and b end in zeros at multiples of this
constexpr int kWeightStride = 32 * (kChunks | 1);  // odd: adjacent rows lie half the banks apart
constexpr int kOutRow = 24;  // a warp's 16 outputs of a pair, padded so that banks differ
constexpr int kOutElements = kTileI * kTileJ * kOutRow;
constexpr uint32_t kOnes = 0x3F803F80;  // two bf16 of 1
constexpr int kPrepareThreads = 1024, kProjectThreads = 256;
constexpr int kProjectWarps = kProjectThreads / kWarpSize;
constexpr int kProjectBlocks = D <= 256 ? 2 : 1;  // at a time on a multiprocessor

// The core matrix in a (kTile = kTileI) or b (kTileJ) of residue n, rows s / 8, channels h / 8.
template <int kTile>
__device__ int64_t core_offset(int64_t batch, int n, int s, int h, int padded_s, int padded_n) {
    const int64_t tile = batch * (padded_n / kTile) + n / kTile;
    const int64_t step = tile * (padded_s / kDepth) + s / kDepth;
    const int core = (n % kTile * (kHidden / 8) + h / 8) * (kDepth / 8) + s % kDepth / 8;
    return step * (kTile * kHidden * kDepth) + core * kCore;
}

// weight: out_weight in core matrices; reciprocal[b][n] = 1 / max(1, Σ_s mask[b,s,n])
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const Bf16* out_weight, const Bf16* mask, Bf16* weight, float* reciprocal, int S,
                   int N, int C, int P, int padded_n, int weight_blocks) {
    next_kernel_may_start();  // which waits only at its end
    SHARED(float, partial, [kPrepareThreads / kWarpSize][kWarpSize]);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (int(blockIdx.x) < weight_blocks) {
        const int row = blockIdx.x * kPrepareThreads + threadIdx.x;  // of a core matrix
        const int p = row / (kOutputs * kProduct / 8) * kOutputs + row % kOutputs;
        const int position = row / kOutputs % (kProduct / 8) * 8;
        for (int e = 0; e < 8; ++e) {
            const int channel = p < P ? product_channel(position + e, C) : -1;
            weight[int64_t(row) * 8 + e] =
                channel < 0 ? __float2bfloat16_rn(0) : out_weight[int64_t(p) * C * C + channel];
        }
    } else {
        const int columns = ceil_div(padded_n, kWarpSize), block = blockIdx.x - weight_blocks;
        const int64_t batch = block / columns;
        const int n = block % columns * kWarpSize + lane;
        float count = 0;
#pragma unroll 8
        for (int s = warp; s < S && n < N; s += kPrepareThreads / kWarpSize) {
            count += __bfloat162float(mask[(batch * S + s) * N + n]);
        }
        partial[warp][lane] = count;
        __syncthreads();
        if (warp != 0 || n >= padded_n) return;
        for (int w = 1; w < kPrepareThreads / kWarpSize; ++w) count += partial[w][lane];
        reciprocal[batch * padded_n + n] = 1.0f / fmaxf(1.0f, count);
    }
}

// a = proj_a(layer_norm(msa)) · mask and b likewise. LayerNorm moves behind the projection,
// w·((x - mean) / σ · scale + shift) + bias = (v·x - mean Σv) / σ + (w·shift + bias), v = w ·
// scale, so that msa's rows are operands as they were read. A warp takes 16 rows s of a residue at
// a time: m16n8k16 with 16 rows × 64 outputs, a's before b's.
__global__ void __launch_bounds__(kProjectThreads, kProjectBlocks)
    project_kernel(const Bf16* msa, const Bf16* mask, const Bf16* layer_norm_weight,
                   const Bf16* layer_norm_bias, const Bf16* proj_a_weight, const Bf16* proj_a_bias,
                   const Bf16* proj_b_weight, const Bf16* proj_b_bias, Bf16* a, Bf16* b, int S,
                   int N, int C, int padded_s, int padded_n, int tiles) {
    DYNAMIC_SHARED(Bf16, weight);              // v[output][kWeightStride]
    SHARED(float, weight_sum, [2 * kHidden]);  // Σv
    SHARED(float, constant, [2 * kHidden]);    // w·shift + bias
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, quarter = lane % 4;
    next_kernel_may_start();
    {
        static_assert(kProjectThreads == 2 * kHidden * 4);
        const int output = threadIdx.x / 4, h = output % kHidden;  // a quad an output
        const Bf16* w = (output < kHidden ? proj_a_weight : proj_b_weight) + int64_t(h) * D;
        float v_sum = 0, shifted = 0;
#pragma unroll 4
        for (int m = 0; m < kChunks; ++m) {
            const int c = 8 * (4 * m + quarter);
            uint32_t v[4], scale[4], shift[4];
            load_chunk(v, w, c, h < C);
            load_chunk(scale, layer_norm_weight, c, true);
            load_chunk(shift, layer_norm_bias, c, true);
            for (int e = 0; e < 4; ++e) {
                shifted += low(v[e]) * low(shift[e]) + high(v[e]) * high(shift[e]);
                v[e] = pack_bf16(low(v[e]) * low(scale[e]), high(v[e]) * high(scale[e]));
                v_sum += low(v[e]) + high(v[e]);
            }
            *reinterpret_cast<uint4*>(weight + output * kWeightStride + c) =
                uint4{v[0], v[1], v[2], v[3]};
        }
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            v_sum += __shfl_xor_sync(~0u, v_sum, lanes);
            shifted += __shfl_xor_sync(~0u, shifted, lanes);
        }
        const Bf16* bias = output < kHidden ? proj_a_bias : proj_b_bias;
        if (quarter == 0) weight_sum[output] = v_sum;
        if (quarter == 0) constant[output] = h < C ? shifted + __bfloat162float(bias[h]) : 0;
    }
    __syncthreads();

    for (int tile = blockIdx.x * kProjectWarps + warp; tile < tiles;
         tile += gridDim.x * kProjectWarps) {
        const int n = tile % padded_n, s0 = tile / padded_n % (padded_s / 16) * 16;
        const int64_t batch = tile / padded_n / (padded_s / 16);
        uint32_t x[2][kChunks][4];  // rows s0 + lane / 4 and 8 further
        float present[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int s = s0 + lane / 4 + 8 * half;
            const bool valid = s < S && n < N;
            const int64_t row = (batch * S + s) * N + n;
            present[half] = valid ? __bfloat162float(mask[row]) : 0;
#pragma unroll
            for (int m = 0; m < kChunks; ++m) {
                load_chunk(x[half][m], msa + row * D, 8 * (4 * m + quarter), valid);
            }
        }
        // Which channel a position of the sum stands for is free as long as both operands agree: a
        // lane's chunk of 8 serves two products, 4 channels each.
        float sums[8][4] = {}, row_sum[4] = {};  // outputs 8 · t + 2 · quarter + …, as mma's result
#pragma unroll
        for (int m = 0; m < kChunks; ++m) {
            const uint32_t first_rows[4] = {x[0][m][0], x[1][m][0], x[0][m][1], x[1][m][1]};
            const uint32_t second_rows[4] = {x[0][m][2], x[1][m][2], x[0][m][3], x[1][m][3]};
            mma_m16n8k16_bf16(row_sum, first_rows, {kOnes, kOnes});
            mma_m16n8k16_bf16(row_sum, second_rows, {kOnes, kOnes});
            for (int t = 0; t < 8; ++t) {
                const uint4 v = *reinterpret_cast<const uint4*>(
                    weight + (8 * t + lane / 4) * kWeightStride + 8 * (4 * m + quarter));
                mma_m16n8k16_bf16(sums[t], first_rows, {v.x, v.y});
                mma_m16n8k16_bf16(sums[t], second_rows, {v.z, v.w});
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float mean = row_sum[2 * half] / D;
            const float inverse = rsqrtf(sum_squares(x[half], mean) / D + kEpsilon);
            const float by = inverse * present[half], mean_by = mean * by;
            for (int t = 0; t < 8; ++t) {  // a warp writes a core matrix at a time
                const int output = 8 * t + 2 * quarter, s = s0 + 8 * half, h = t % 4 * 8;
                float y[2];
                for (int e = 0; e < 2; ++e) {
                    y[e] = sums[t][2 * half + e] * by - weight_sum[output + e] * mean_by +
                           constant[output + e] * present[half];
                }
                Bf16* core = t < 4 ? a + core_offset<kTileI>(batch, n, s, h, padded_s, padded_n)
                                   : b + core_offset<kTileJ>(batch, n, s, h, padded_s, padded_n);
                reinterpret_cast<uint32_t*>(core)[lane] = pack_bf16(y[0], y[1]);
            }
        }
    }
    wait_for_previous_kernel();  // so that the next one need not
}

// Launches both kernels: a, b, weight and reciprocal are what the product reads.
inline cudaError_t write_inputs(const Bf16* msa, const Bf16* mask, const Bf16* layer_norm_weight,
                                const Bf16* layer_norm_bias, const Bf16* proj_a_weight,
                                const Bf16* proj_a_bias, const Bf16* proj_b_weight,
                                const Bf16* proj_b_bias, const Bf16* out_weight, Bf16* a, Bf16* b,
                                Bf16* weight, float* reciprocal, int B, int S, int N, int C, int P,
                                cudaStream_t stream) {
    const int padded_s = ceil_div(S, kPadS) * kPadS, padded_n = ceil_div(N, kPadN) * kPadN;
    const int weight_blocks = ceil_div(P, kOutputs) * (kOutputs * kProduct / 8 / kPrepareThreads);
    const int count_blocks = B * ceil_div(padded_n, kWarpSize);
    if (cudaError_t error = LAUNCH(prepare_kernel, dim3(weight_blocks + count_blocks),
                                   dim3(kPrepareThreads), 0, stream)(
            out_weight, mask, weight, reciprocal, S, N, C, P, padded_n, weight_blocks)) {
        return error;
    }
    const int tiles = B * (padded_s / 16) * padded_n;
    const int blocks = min(ceil_div(tiles, kProjectWarps), multiprocessors() * kProjectBlocks);
    const size_t shared_bytes = 2 * kHidden * kWeightStride * sizeof(Bf16);
    return LAUNCH(project_kernel, dim3(blocks), dim3(kProjectThreads), shared_bytes, stream)
        .early(EARLY)(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                      proj_b_weight, proj_b_bias, a, b, S, N, C, padded_s, padded_n, tiles);
}

// out[i][j][p] of a tile's 32 pairs for a warp's outputs p to p + 15. projected is the result of
// 16 outputs × 32 pairs in mma's order; rows, 32 × kOutRow, is the warp's own shared memory.
__device__ inline void store_out(const float* projected, Bf16* rows, const Bf16* out_bias,
                                 Bf16* out, int64_t batch, int i, int j, int p, int N, int P) {
    const int lane = threadIdx.x % kWarpSize;
    for (int half = 0; half < 2; ++half) {
        const int output = lane / 4 + 8 * half;
        const float bias = p + output < P ? __bfloat162float(out_bias[p + output]) : 0;
        for (int e = 0; e < 8; ++e) {
            const int pair = e / 2 * kTileJ + lane % 4 * 2 + e % 2;
            const float value = projected[e / 2 * 4 + 2 * half + e % 2] + bias;
            rows[pair * kOutRow + output] = __float2bfloat16_rn(value);
        }
    }
    __syncwarp();
    i += lane / kTileJ, j += lane % kTileJ;  // a lane writes one pair
    const Bf16* row = rows + lane * kOutRow;
    Bf16* to = out + ((batch * N + i) * N + j) * P + p;
    for (int first = 0; first < 16 && i < N && j < N; first += 8) {
        if (P % 8 != 0) {
            for (int e = first; e < first + 8 && p + e < P; ++e) to[e] = row[e];
        } else if (p + first < P) {
            *reinterpret_cast<uint4*>(to + first) = *reinterpret_cast<const uint4*>(row + first);
        }
    }
    __syncwarp();
}
