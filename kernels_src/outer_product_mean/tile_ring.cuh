// The pipeline of stages 11 and 12: one thread keeps a ring of stages in shared memory full by bulk
// copies of contiguous pieces, warps that multiply empty it. The blocks of a cluster, neighbours in
// i, share b and out_proj's weights: each copies its part of them to all.
#pragma once

#include "hopper.cuh"
#include "outer_product_mean/tile_order.cuh"

#ifndef CLUSTER
#define CLUSTER 2  // blocks of a cluster
#endif

// The ring's stage that a warp is at; `parity` flips each time around.
template <int kStages>
struct Place {
    int stage = 0, parity = 0;
    __device__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// A consumer warp has read the stage: tell the blocks that copy into it.
__device__ inline void release(Barrier* empty, int stage) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < CLUSTER) barrier_arrive_remote(empty + stage, lane);
}

// One thread: for each kTiles tiles that are neighbours in j their rows of a and b step by step,
// then the weights, kPassBytes a pass. kRowBytes of a and kColumnBytes of b are one stage, and so
// are kWeightBytes of weights, or what is left of a pass.
template <int kRowBytes, int kColumnBytes, int kWeightBytes, int kPassBytes, int kStages,
          int kTiles>
__device__ void load(const void* a, const void* b, const void* weight, unsigned char* ring,
                     Barrier* full, Barrier* empty, int tiles, int steps, int passes, int tiles_i,
                     int tiles_j) {
    const int rank = cluster_rank();
    constexpr uint16_t kEveryBlock = (1 << CLUSTER) - 1;
    constexpr int kStageBytes = kRowBytes + kColumnBytes, kColumnShare = kColumnBytes / CLUSTER;
    Place<kStages> place;
    for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
        const Tile tile = tile_of(index, tiles_i, tiles_j);
        const int64_t tile_a = (tile.batch * tiles_i + tile.i) * CLUSTER + rank;
        const int64_t tile_b = (tile.batch * tiles_j + tile.j) * kTiles;
        const char* rows = static_cast<const char*>(a) + tile_a * steps * kRowBytes;
        const char* columns = static_cast<const char*>(b) + tile_b * steps * kColumnBytes;
        for (int step = 0; step < kTiles * steps; ++step, place.advance()) {
            unsigned char* stage = ring + place.stage * kStageBytes;
            Barrier* arrived = full + place.stage;
            barrier_wait(empty + place.stage, place.parity ^ 1);
            barrier_arrive_expect(arrived, kStageBytes);
            copy_bulk(stage, rows + int64_t(step % steps) * kRowBytes, kRowBytes, arrived);
            copy_bulk_multicast(stage + kRowBytes + rank * kColumnShare,
                                columns + int64_t(step) * kColumnBytes + rank * kColumnShare,
                                kColumnShare, arrived, kEveryBlock);
        }
        for (int first = 0; first < passes * kPassBytes; place.advance()) {
            Barrier* arrived = full + place.stage;
            const int bytes = min(kWeightBytes, kPassBytes - first % kPassBytes);
            const int share = bytes / CLUSTER;
            barrier_wait(empty + place.stage, place.parity ^ 1);
            barrier_arrive_expect(arrived, bytes);
            copy_bulk_multicast(ring + place.stage * kStageBytes + rank * share,
                                static_cast<const char*>(weight) + first + rank * share, share,
                                arrived, kEveryBlock);
            first += bytes;
        }
    }
}
