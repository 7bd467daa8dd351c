// The orders that stages 10 to 12 share: of tiles in time, of a pair's (h, k) in out_proj's sum.
#pragma once

#include "cuda.cuh"

#ifndef EARLY
#define EARLY 1  // whether a kernel may start before the kernel before it has ended
#endif

constexpr int kTileI = 4, kTileJ = 8;  // residues of a block's tile: 32 pairs
constexpr int kProduct = 32 * 32;      // (h, k) of a pair, 32 of each with the padding
constexpr int kOutputs = 128;          // pair channels of one pass over out_proj's weights
constexpr int kPadN = 16;  // a and b are padded to multiples of this: 4 blocks in i, 2 tiles in j
constexpr int kCore = 64;  // elements of a core matrix
constexpr int kGroup = 8;  // tiles that run at a time span about this many tiles of i

// Position 32 · block + lane is what a lane holds when a warp has multiplied, for 8 h (block / 8),
// 8 k (block / 2 % 4) and every other k (block % 2). Returns the column of out_weight, or -1 in the
// padding of `hidden` channels.
__device__ inline int product_channel(int position, int hidden) {
    const int block = position / 32, lane = position % 32;
    const int h = block / 8 * 8 + lane / 4, k = block / 2 % 4 * 8 + lane % 4 * 2 + block % 2;
    return h < hidden && k < hidden ? h * hidden + k : -1;
}

struct Tile {
    int64_t batch;
    int i, j;  // in tiles
};

// Keeps the tiles that run at a time close together, so that L2 serves them.
__device__ inline Tile tile_of(int index, int tiles_i, int tiles_j) {
    const int within = index % (tiles_i * tiles_j), in_group = within % (kGroup * tiles_j);
    const int first = within / (kGroup * tiles_j) * kGroup, width = min(kGroup, tiles_i - first);
    return {index / (tiles_i * tiles_j), first + in_group % width, in_group / width};
}
