// Stage 12's kernel after the core: out_proj, with weights that stay. Persistent blocks hold all of
// them in shared memory, and one thread copies rows several tiles ahead of the two warpgroups that
// multiply. Bytes: 4·B·N·S·D, and 2·D² of weights a multiprocessor. Against blocks that each waited
// for their rows and fetched the weights again, predicted 25 µs less at af2 and 5 at extra; it was
// 12 and none.
#pragma once

#include "msa_column_attention/wgmma_projections.cuh"

constexpr int kOutWarps = 8;  // that multiply; one more loads
constexpr int kOutThreads = (kOutWarps + 1) * kWarpSize;
constexpr bool kShareRows = D == 256;             // both warpgroups take all rows, a pass each,
constexpr int kTileRows = kShareRows ? 64 : 128;  // or else 64 rows each and all passes
constexpr int kPassStep = kShareRows ? 2 : 1;
constexpr int kPassBytes = kOutputs * D * sizeof(bf16);
constexpr int kWeightBytes = kPasses * kPassBytes;
constexpr int kRowsBytes = kTileRows * D * sizeof(bf16);
constexpr int kRowStages = D > 64 ? (225 * 1024 - kWeightBytes) / kRowsBytes : 8;
constexpr int kOutShared = kWeightBytes + kRowStages * kRowsBytes;

// The loading thread: the weights, and then rows tile by tile.
__device__ void load_rows(const bf16* gated, const bf16* packed, unsigned char* weights,
                          Barrier* full, Barrier* empty, int tiles, int padded) {
    barrier_arrive_expect(full + kRowStages, kWeightBytes);
    for (int pass = 0; pass < kPasses; ++pass) {
        copy_bulk(weights + pass * kPassBytes, packed + pass * (kPassBytes / sizeof(bf16)),
                  kPassBytes, full + kRowStages);
    }
    start_in_turn();  // weights are older than the kernel before this one
    const int blocks = padded / kTileRows;
    Place<kRowStages> place;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, place.advance()) {
        unsigned char* to = weights + kWeightBytes + place.stage * kRowsBytes;
        barrier_wait(empty + place.stage, place.parity ^ 1);
        barrier_arrive_expect(full + place.stage, kRowsBytes);
        for (int c = 0; c < D / 8; ++c) {
            const int64_t row = (int64_t(tile / blocks) * (D / 8) + c) * padded;
            copy_bulk(to + c * kTileRows * kRowBytes, gated + (row + tile % blocks * kTileRows) * 8,
                      kTileRows * kRowBytes, full + place.stage);
        }
    }
}

// 8 outputs of out_proj, those of one chunk of a row of msa
__device__ void store_output(float (&y)[8], const bf16* bias, bf16* out, int64_t row, int chunk) {
    float shift[8];
    unpack(load8(bias, chunk), shift);
    for (int c = 0; c < 8; ++c) y[c] += shift[c];
    store8(out, row * (D / 8) + chunk, pack(y));
}

// out (B, S, N, D) = gated (columns, D / 8, padded, 8) · out_weight + out_bias
__global__ void __launch_bounds__(kOutThreads, 1)
    epilogue_kernel(const bf16* gated, const bf16* packed, const bf16* out_bias, bf16* out,
                    int first_column, int columns, int S, int N) {
    DYNAMIC_SHARED(unsigned char, shared);
    SHARED(Barrier, full, [kRowStages + 1]);  // the last one is the weights'
    SHARED(Barrier, empty, [kRowStages]);
    const int padded = padded_rows(S), blocks = padded / kTileRows, tiles = columns * blocks;
    const int warp = uniform_warp(), lane = threadIdx.x % kWarpSize, group = warp / 4;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kRowStages + 1; ++stage) barrier_init(full + stage, 1);
        for (int stage = 0; stage < kRowStages; ++stage) barrier_init(empty + stage, kOutWarps);
        barrier_init_fence();
    }
    __syncthreads();
    if (warp == kOutWarps) {
        if (lane == 0) load_rows(gated, packed, shared, full, empty, tiles, padded);
        return;
    }
    const int row0 = kShareRows ? 0 : group * 64;  // the warpgroup's first of a tile
    const uint64_t rows =
        wgmma_operand(shared + kWeightBytes + row0 * kRowBytes, kTileRows * kRowBytes, 128);
    const uint64_t weights = wgmma_operand(shared, kOutputs * kRowBytes, 128);
    Place<kRowStages> place;
    barrier_wait(full + kRowStages, 0);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, place.advance()) {
        const int64_t column = first_column + tile / blocks, b = column / N, n = column % N;
        const int first = tile % blocks * kTileRows + row0 + warp % 4 * 16 + lane / 4;
        barrier_wait(full + place.stage, place.parity);
        for (int pass = kShareRows ? group : 0; pass < kPasses; pass += kPassStep) {
            float sum[kOutputs / 2];
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < D / 8; c += 2) {
                wgmma<bf16, Major::K, Major::K>(
                    sum, operand_at<kRowsBytes>(rows, place.stage, c * kTileRows * kRowBytes),
                    operand_at<kPassBytes>(weights, pass, c * kOutputs * kRowBytes), c > 0);
            }
            wgmma_commit();
            wgmma_wait<0>(sum);
            if (pass + kPassStep >= kPasses && lane == 0) barrier_arrive(empty + place.stage);
            for_outputs(sum, [&](int half, int output, float (&y)[8]) {
                const int s = first + 8 * half, chunk = (pass * kOutputs + output) / 8;
                if (s < S) store_output(y, out_bias, out, (b * S + s) * N + n, chunk);
            });
        }
    }
}
