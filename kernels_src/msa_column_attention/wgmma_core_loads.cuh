// What stage 12's core holds in shared memory, and the thread that brings it: keys and values in a
// ring of tiles, and queries and gates an item ahead; an item is kQueries rows of one head. When
// each warp loaded its own queries, an item (4.3 µs at af2, 47 a block) began with a wait for DRAM,
// guessed to be about 1 µs that other warps hide in part. It was part of what holds the warps back:
// copied ahead, 21 µs of 670 less at af2 (predicted 20), but none at extra (predicted 25).
#pragma once

#include "msa_column_attention/wgmma_heads.cuh"
#include "msa_column_attention/wgmma_projections.cuh"

constexpr int kCoreWarps = kChannels < 64 ? 16 : 8;         // that multiply; one more loads
constexpr int kCoreThreads = (kCoreWarps + 4) * kWarpSize;  // registers go by warpgroups
constexpr int kCoreRegisters = kChannels < 64 ? 112 : 208;  // of a thread that multiplies
static_assert(registers_suffice(4, 24, kCoreWarps, kCoreRegisters), "they would wait for ever");
constexpr int kQueries = kCoreWarps * 16;                    // of a block, 64 a warpgroup
constexpr int kKeys = 128;                                   // in a stage of the ring
constexpr int kPieceBytes = kKeys * kRowBytes;               // one chunk of the keys
constexpr int kTileBytes = (2 * kChunks + 1) * kPieceBytes;  // K, V and the mask
constexpr int kTiles = kChannels < 64 ? 6 : 4;
constexpr int kStep = 32;                               // keys multiplied at once
constexpr int kQueryPieceBytes = kQueries * kRowBytes;  // one chunk of an item's rows
constexpr int kCoreShared = kTiles * kTileBytes + 2 * kChunks * kQueryPieceBytes;

// The queries and gates of an item, which begins at row `first` of its head.
__device__ void load_queries(const Head& head, int first, int padded, unsigned char* to,
                             Barrier* arrived) {
    const int bytes = min(kQueries, padded - first) * kRowBytes;
    barrier_arrive_expect(arrived, 2 * kChunks * bytes);
    for (int c = 0; c < kChunks; ++c) {
        const int64_t from = c * head.piece + first * 8;
        copy_bulk(to + c * kQueryPieceBytes, head.query + from, bytes, arrived);
        copy_bulk(to + (kChunks + c) * kQueryPieceBytes, head.gate + from, bytes, arrived);
    }
}

// The loading thread of the core: for each item the queries, behind the ring, and the keys, tile by
// tile. Of each pair of barriers the queries' is the last.
__device__ void load_items(bf16* projected, const bf16* key_mask, unsigned char* ring,
                           Barrier* full, Barrier* empty, int columns, int S, int items) {
    const int padded = padded_rows(S), blocks = ceil_div(S, kQueries);
    Place<kTiles> place;
    Place<1> query_place;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Head head = head_of(projected, key_mask, columns, padded, item / blocks);
        barrier_wait(empty + kTiles, query_place.parity ^ 1);
        load_queries(head, item % blocks * kQueries, padded, ring + kTiles * kTileBytes,
                     full + kTiles);
        query_place.advance();
        for (int first = 0; first < S; first += kKeys, place.advance()) {
            unsigned char* to = ring + place.stage * kTileBytes;
            Barrier* arrived = full + place.stage;
            barrier_wait(empty + place.stage, place.parity ^ 1);
            barrier_arrive_expect(arrived, kTileBytes);
            for (int c = 0; c < 2 * kChunks + 1; ++c) {
                const bf16* from = c < kChunks       ? head.key + c * head.piece
                                   : c < 2 * kChunks ? head.value + (c - kChunks) * head.piece
                                                     : head.mask;
                copy_bulk(to + c * kPieceBytes, from + first * 8, kPieceBytes, arrived);
            }
        }
    }
}
