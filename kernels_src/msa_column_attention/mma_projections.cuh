// Stage 11's kernels before and after the core: LayerNorm and the four projections, and out_proj. A
// block multiplies kRows rows of one column, which stay in shared memory, by all weights, which
// stream past in slabs. Bytes: 2·(1 + 4 + 2)·B·N·S·D, and 2·5·D² of weights a block from L2.
#pragma once

#include "msa_column_attention/bf16_rows.cuh"

constexpr int kThreads = 128;
constexpr int kRows = 128;
constexpr int kDepth = (D + 31) / 32 * 32;   // channels, padded to whole slabs
constexpr int kSlab = 32;                    // channels of the weights that one step brings
constexpr int kSlabs = 3;                    // slabs in flight
constexpr int kPasses = D > 128 ? 2 : 1;     // over the outputs of one weight matrix
constexpr int kOutputs = D > 64 ? 128 : 64;  // outputs of a pass
constexpr int kTiles = kOutputs / 16;        // n8 tiles of a warp: 2 × 2 warps share a pass
constexpr int kGemmBlocks = D > 64 ? 2 : 4;  // on a multiprocessor
constexpr int kGemmShared = (kRows * kDepth + kSlabs * kOutputs * kSlab) * sizeof(bf16);

struct Weights {  // of the projections that a GEMM computes, in this order
    const bf16 *first, *second, *third, *fourth;
    __device__ const bf16* operator[](int i) const {
        return i == 0 ? first : i == 1 ? second : i == 2 ? third : fourth;
    }
};

// Where a chunk lies in rows of kRowChunks chunks in shared memory: without padding, yet the same
// chunk of 8 consecutive rows is in 8 different groups of banks.
template <int kRowChunks>
__device__ inline int swizzle(int row, int chunk) {
    constexpr int kGroup = kRowChunks % 8 == 0 ? 8 : kRowChunks % 4 == 0 ? 4 : 2 - kRowChunks % 2;
    return row * kRowChunks + (chunk ^ row / (8 / kGroup) % kGroup);
}

// finish(matrix, row, output, y) for every row of x · weightsᵀ and 8 neighbouring outputs. The
// weights arrive slab by slab, in slots ordered so that a thread's sums are neighbours: of a warp's
// tile sum[m][4 * i + j][2 * half + e] is row 16 m + 8 half + lane / 4, output 32 i + lane % 4 * 8
// + 2 j + e.
template <int kMatrices, typename Finish>
__device__ void multiply(const bf16* x, bf16* slabs, Weights weights, Finish finish) {
    constexpr int kSteps = kDepth / kSlab, kAllSteps = kMatrices * kPasses * kSteps;
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 64 * 64, slot0 = threadIdx.x / 32 % 2 * (kOutputs / 2);
    const auto load = [&](int step) {
        const int pass = step / kSteps, channel0 = step % kSteps * kSlab;
        const bf16* weight = weights[pass / kPasses];
        bf16* slab = slabs + step % kSlabs * kOutputs * kSlab;
        const auto copy = [&](int i) {
            const int slot = i / 4, channel = channel0 + i % 4 * 8;
            const int output = pass % kPasses * kOutputs + output_of_slot(slot);
            const bool valid = D == kDepth && D % kOutputs == 0 || output < D && channel < D;
            copy_async_16(slab + 8 * swizzle<4>(slot, i % 4),
                          weight + (valid ? output * D + channel : 0), valid);
        };
        if (step < kAllSteps) spread<kOutputs * kSlab / 8, kThreads>(copy);
        copy_async_commit();
    };
    for (int step = 0; step < kSlabs - 1; ++step) load(step);
    for (int pass = 0, step = 0; pass < kMatrices * kPasses; ++pass) {
        float sum[4][kTiles][4] = {};
        for (int channel = 0; channel < kDepth; channel += kSlab, ++step) {
            copy_async_wait<kSlabs - 2>();
            __syncthreads();  // this step's slab is there, and the one before may be overwritten
            load(step + kSlabs - 1);
            const bf16* slab = slabs + step % kSlabs * kOutputs * kSlab;
#pragma unroll
            for (int k = 0; k < kSlab / 8; k += 2) {
                const bf16* a_row =
                    x + 8 * swizzle<kDepth / 8>(row0 + lane % 16, channel / 8 + k + lane / 16);
                const bf16* b_row =
                    slab + 8 * swizzle<4>(slot0 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2);
                uint32_t a[4][4];
#pragma unroll
                for (int m = 0; m < 4; ++m) ldmatrix_x4(a[m], a_row + 16 * m * kDepth);
#pragma unroll
                for (int j = 0; j < kTiles; j += 2) {
                    uint32_t b[4];
                    ldmatrix_x4(b, b_row + 8 * j * kSlab);
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        mma_m16n8k16_bf16(sum[m][j], a[m], {b[0], b[1]});
                        mma_m16n8k16_bf16(sum[m][j + 1], a[m], {b[2], b[3]});
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kTiles / 4; ++i) {
            const int output = pass % kPasses * kOutputs + slot0 + 32 * i + lane % 4 * 8;
            if (output >= D) break;
#pragma unroll
            for (int half = 0; half < 8; ++half) {
                float y[8];
                for (int c = 0; c < 8; ++c)
                    y[c] = sum[half / 2][4 * i + c / 2][half % 2 * 2 + c % 2];
                finish(pass / kPasses, row0 + 8 * half + lane / 4, output, y);
            }
        }
    }
}

// projected (4, columns, H, padded, d) = q·log2(e)/√d, k, v (0 where masked) and σ(gate), and
// key_mask (columns, padded); a block takes kRows rows of one column, all outputs.
__global__ void __launch_bounds__(kThreads, kGemmBlocks)
    prologue_kernel(const bf16* msa, const bf16* mask, const bf16* layer_norm_weight,
                    const bf16* layer_norm_bias, Weights weights, const bf16* gate_bias,
                    bf16* projected, bf16* key_mask, int first_column, int columns, int S, int N) {
    DYNAMIC_SHARED(bf16, x);
    SHARED(float, kept, [kRows]);
    const int padded = padded_rows(S), blocks = padded / kRows, local = blockIdx.x / blocks;
    const int first = blockIdx.x % blocks * kRows;
    const int64_t column = first_column + local, b = column / N, n = column % N;
    const int s = first + threadIdx.x;
    const bool keep = s < S && __bfloat162float(mask[(b * S + s) * N + n]) != 0;
    kept[threadIdx.x] = keep;
    key_mask[int64_t(blockIdx.x) * kRows + threadIdx.x] = __float2bfloat16_rn(keep);
    layer_norm<32, D, kDepth>(msa + ((b * S + first) * N + n) * D, int64_t(N) * (D / 8),
                              threadIdx.x / 32 * 32, S - first, layer_norm_weight, layer_norm_bias,
                              x, swizzle<kDepth / 8>);
    const float query_scale = kLog2E * rsqrtf(kChannels);
    multiply<4>(
        x, x + kRows * kDepth, weights, [&](int matrix, int row, int output, float (&y)[8]) {
            const int64_t head = (int64_t(matrix) * columns + local) * H + output / kChannels;
            const int64_t to = (head * padded + first + row) * kChunks + output % kChannels / 8;
            if (matrix == 3) {
                float bias[8];
                unpack(load8(gate_bias, output / 8), bias);
                for (int c = 0; c < 8; ++c) y[c] = sigmoid(y[c] + bias[c]);
                store8(projected, to, pack(y));
            } else {
                const float factor = matrix == 0 ? query_scale : matrix == 1 ? 1 : kept[row];
                for (int c = 0; c < 8; ++c) y[c] *= factor;
                store8(projected, to, pack(y));
            }
        });
}

// out (B, S, N, D) = gated (columns, H, padded, d), heads side by side, · out_weight + out_bias
__global__ void __launch_bounds__(kThreads, kGemmBlocks)
    epilogue_kernel(const bf16* gated, Weights weights, const bf16* out_bias, bf16* out,
                    int first_column, int S, int N) {
    DYNAMIC_SHARED(bf16, x);
    const int padded = padded_rows(S), blocks = padded / kRows, local = blockIdx.x / blocks;
    const int first = blockIdx.x % blocks * kRows;
    const int64_t column = first_column + local, b = column / N, n = column % N;
    const int64_t from = int64_t(local) * H * padded + first;  // of the first head's rows
    spread<kRows * D / 8, kThreads>([&](int i) {
        const int head = i / (kRows * kChunks), row = i / kChunks % kRows, c = i % kChunks;
        const int64_t chunk = (from + head * padded + row) * kChunks + c;
        copy_async_16(x + 8 * swizzle<kDepth / 8>(row, head * kChunks + c), gated + 8 * chunk);
    });
    spread<kRows*(kDepth - D) / 8, kThreads>([&](int i) {
        store8(x, swizzle<kDepth / 8>(i % kRows, D / 8 + i / kRows), make_uint4(0, 0, 0, 0));
    });
    multiply<1>(x, x + kRows * kDepth, weights, [&](int, int row, int output, float (&y)[8]) {
        float bias[8];
        unpack(load8(out_bias, output / 8), bias);
        for (int c = 0; c < 8; ++c) y[c] += bias[c];
        const int s = first + row;
        if (s < S) store8(out, ((b * S + s) * N + n) * (D / 8) + output / 8, pack(y));
    });
}
