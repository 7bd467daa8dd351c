// Heads as stage 12's core finds them in the workspace, in chunks of 8 channels, and the softmax
// for the few rows that the core's own cannot hold.
#pragma once

#include "msa_column_attention/bf16_rows.cuh"

constexpr int kSteps = (kChunks + 1) / 2;  // of 16 channels of a head

// One head of one column, as the core sees it: pointers to its first chunk, `padded` rows long.
struct Head {
    bf16* query;  // becomes σ(gate) · attended
    const bf16 *key, *value, *gate, *mask;
    int64_t piece;  // elements from a chunk to the next
};

__device__ Head head_of(bf16* projected, const bf16* key_mask, int columns, int padded, int index) {
    const int64_t piece = int64_t(padded) * 8, matrix = int64_t(columns) * (D / 8) * piece;
    bf16* query = projected + int64_t(index) * kChunks * piece;
    return {
        query, query + matrix, query + 2 * matrix, query + 3 * matrix, key_mask + index / H * piece,
        piece};
}

__device__ uint32_t load_pair(const bf16* from) { return *reinterpret_cast<const uint32_t*>(from); }

// A warp's 16 queries once more, with a running maximum and straight from global memory: for scores
// so large that 2^score leaves the range of fp32, or for a column without keys.
__device__ void attend_again(const Head& head, int S, const uint32_t (&query)[kSteps][4],
                             float (&sums)[4 * (kChunks + 1)]) {
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    float tiles[kChunks + 1][4] = {}, highest[2] = {-INFINITY, -INFINITY};
    for (int first = 0; first < S; first += 16) {
        float score[2][4] = {};
        for (int j = 0; j < 2; ++j) {
            for (int c = 0; c < kChunks; ++c) {
                const bf16* key = head.key + c * head.piece + (first + 8 * j + row) * 8 + pair;
                const uint32_t (&q)[4] = query[c / 2];
                mma_m16n8k8_bf16(score[j], {q[c % 2 * 2], q[c % 2 * 2 + 1]}, load_pair(key));
            }
        }
        bool keep[4];
        for (int i = 0; i < 4; ++i) {
            keep[i] = __bfloat162float(head.mask[(first + i / 2 * 8 + pair + i % 2) * 8]) != 0;
        }
        raise_reference(keep, score, highest, tiles);
        uint32_t p[4];
        for (int i = 0; i < 4; ++i) {
            p[i] = pack_bf16(exp2_approx(score[i / 2][i % 2 * 2]),
                             exp2_approx(score[i / 2][i % 2 * 2 + 1]));
        }
        for (int c = 0; c < kChunks + 1; ++c) {
            const bf16* value = c < kChunks ? head.value + c * head.piece : head.mask;
            uint32_t b[2];
            for (int half = 0; half < 2; ++half) {
                const bf16* from = value + (first + 8 * half + pair) * 8 + row;
                b[half] = pack_bf16(__bfloat162float(from[0]), __bfloat162float(from[8]));
            }
            mma_m16n8k16_bf16(tiles[c], p, b);
        }
    }
    for (int i = 0; i < 4 * (kChunks + 1); ++i) sums[i] = tiles[i / 4][i % 4];
}
