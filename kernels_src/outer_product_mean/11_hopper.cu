// Stage 11: wgmma, bulk copies and clusters
// As 10, with Hopper's own instructions. Two warpgroups multiply 64 × 256 each by wgmma, straight
// from shared memory; one warp keeps a ring of stages full with bulk copies of contiguous pieces;
// two blocks of a cluster work on 8 i × 8 j and share, by multicast, b and out_proj's weights.
// Blocks are persistent: while a tile is projected, the next one's rows already arrive. Operations:
// as 10. A tile of 4 i × 8 j takes 16·S tensor cycles, its projection 3,000 (256 KB of weights and
// twice 64 KB of products leave shared memory at 128 bytes a cycle) and 1,000 without products.
// Bytes from L2: 512·S a tile, and out_proj's weights again for every tile of a cluster, 256 KB for
// each 128 of P: at extra 2.4 + 0.6 GB. Predicts: extra 0.48 ms, 30 µs of it the inputs; af2 0.32
// ms; extra_long 1.9 ms. Outcome: extra 0.55, af2 0.38, extra_long 2.03 ms: at 10's 6 TB/s L2 needs
// 0.5 by itself, and cannot always be hidden (a guess).
// Shapes: any B, S, N; C up to 32 (padded to 32), D up to 512, P below 2^19.
#ifndef DEPTH
#define DEPTH 64  // fewer and larger steps than stage 10's 32: fewer barriers, 2 to 3 % less time
#endif
#include "outer_product_mean/bf16_tiles.cuh"
#include "outer_product_mean/tile_ring.cuh"

#ifndef TILES
#define TILES 1  // neighbours in j that are projected together: 1, or 2 with a ring of 84 KB
#endif

constexpr int kRowBytes = kTileI * kHidden * kDepth * 2;     // of a in one stage of the ring
constexpr int kColumnBytes = kTileJ * kHidden * kDepth * 2;  // of b
constexpr int kStageBytes = kRowBytes + kColumnBytes;
constexpr int kStages = (TILES == 1 ? 192 : 112) / kDepth;    // 144 KB
constexpr int kWeightStepBytes = kOutputs * 16 * 2;           // of 16 positions (h, k)
constexpr int kWeightSteps = kStageBytes / kWeightStepBytes;  // in one stage
constexpr int kPassBytes = kProduct / 16 * kWeightStepBytes;
constexpr int kPairBytes = kProduct * kTileJ * 2;       // the outer products of one i and 8 j
constexpr int kConsumers = 8;                           // warps that multiply; one more loads
constexpr int kThreads = (kConsumers + 4) * kWarpSize;  // roles go by warpgroups
static_assert(registers_suffice(4, 40, kConsumers, 232), "they would wait for ever");
constexpr int kSharedBytes =
    kStages * kStageBytes + TILES * kTileI * kPairBytes + kConsumers * kOutElements * 2;

// sums (64 rows (i, h) × 256 columns (j, k) a warpgroup) = Σ_s a b
__device__ void multiply(float (&sums)[128], const unsigned char* ring, Barrier* full,
                         Barrier* empty, Place<kStages>& place, int steps, int group) {
    constexpr int kStride = kDepth / 8 * 128;  // bytes from 8 channels to the next 8
    for (int step = 0; step < steps; ++step) {
        const unsigned char* stage = ring + place.stage * kStageBytes;
        barrier_wait(full + place.stage, place.parity);
        wgmma_fence();
        for (int s = 0; s < kDepth; s += 16) {
            const int past = s / 8 * 128;
            wgmma<Bf16, Major::MN, Major::MN>(
                sums, wgmma_operand(stage + group * (kRowBytes / 2) + past, 128, kStride),
                wgmma_operand(stage + kRowBytes + past, 128, kStride), step + s > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the step before this one
        if (step > 0) release(empty, (place.stage + kStages - 1) % kStages);
        place.advance();
    }
    wgmma_wait<0>();
    release(empty, (place.stage + kStages - 1) % kStages);
}

// outer: for each i, position (h, k) and j, so that what a lane holds for 8 j is one 16-byte row
// of a core matrix (8 positions × 8 j) and a warp writes 512 bytes in one piece.
__device__ void store_outer(const float (&sums)[128], unsigned char* outer, float reciprocal,
                            int warp, int lane) {
    for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 4; ++k) {  // 8 of them each
            for (int e = 0; e < 2; ++e) {
                const int block = (warp % 2 * 2 + half) * 8 + k * 2 + e;
                uint32_t pairs[4];
                for (int j = 0; j < kTileJ; j += 2) {
                    pairs[j / 2] = pack_bf16(sums[4 * (4 * j + k) + 2 * half + e] * reciprocal,
                                             sums[4 * (4 * j + 4 + k) + 2 * half + e] * reciprocal);
                }
                unsigned char* row = outer + warp / 2 * kPairBytes + block * 512 + lane * 16;
                *reinterpret_cast<uint4*>(row) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
            }
        }
    }
}

// projected (64 outputs × 32 pairs of each tile a warpgroup) = Σ_(h, k) weight · outer, a stage's
// kCount · 16 positions; added to what it is if accumulate.
template <int kCount>
__device__ void project_steps(float (&projected)[16 * TILES], const unsigned char* weight,
                              const unsigned char* outer, bool accumulate) {
    constexpr int kStride = kOutputs / 8 * 128;  // bytes from 8 positions to the next 8
    const uint64_t a = wgmma_operand(weight, kStride, 128);
    const uint64_t b = wgmma_operand(outer, 128, kPairBytes);
    wgmma_fence();
    for (int step = 0; step < kCount; ++step) {
        wgmma<Bf16, Major::K, Major::MN>(projected, wgmma_advance(a, step * kWeightStepBytes),
                                         wgmma_advance(b, step * (16 / 8 * 128)),
                                         accumulate || step > 0);
    }
    wgmma_commit();
}

__device__ void project_outer(float (&projected)[16 * TILES], const unsigned char* ring,
                              const unsigned char* outer, Barrier* full, Barrier* empty,
                              Place<kStages>& place, int group) {
    constexpr int kWhole = kPassBytes / (kWeightSteps * kWeightStepBytes);
    constexpr int kRest = kProduct / 16 % kWeightSteps;
    for (int count = 0; count <= kWhole; ++count, place.advance()) {
        const unsigned char* weight = ring + place.stage * kStageBytes + group * (kOutputs * 8);
        const unsigned char* pairs = outer + count * (kWeightSteps * 16 / 8 * 128);
        barrier_wait(full + place.stage, place.parity);
        if (count < kWhole) {
            project_steps<kWeightSteps>(projected, weight, pairs, count > 0);
        } else {
            project_steps<kRest>(projected, weight, pairs, true);
        }
        wgmma_wait<1>();
        if (count > 0) release(empty, (place.stage + kStages - 1) % kStages);
    }
    wgmma_wait<0>();
    release(empty, (place.stage + kStages - 1) % kStages);
}

__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const Bf16* a, const Bf16* b, const Bf16* weight, const float* reciprocal,
                   const Bf16* out_bias, Bf16* out, int N, int P, int tiles, int steps, int tiles_i,
                   int tiles_j) {
    DYNAMIC_SHARED(unsigned char, ring);
    SHARED(Barrier, full, [kStages]);
    SHARED(Barrier, empty, [kStages]);
    unsigned char* outer = ring + kStages * kStageBytes;
    Bf16* rows = reinterpret_cast<Bf16*>(outer + TILES * kTileI * kPairBytes);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, group = warp / 4;
    const int passes = ceil_div(P, kOutputs), rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(full + stage, 1);
            barrier_init(empty + stage, CLUSTER * kConsumers);
        }
        barrier_init_fence();
    }
    cluster_sync();
    wait_for_previous_kernel();

    if (group == kConsumers / 4) {
        registers_decrease<40>();
        if (warp == kConsumers && lane == 0) {
            load<kRowBytes, kColumnBytes, kWeightSteps * kWeightStepBytes, kPassBytes, kStages,
                 TILES>(a, b, weight, ring, full, empty, tiles, steps, passes, tiles_i, tiles_j);
        }
        __syncwarp();
    } else {
        registers_increase<232>();
        Place<kStages> place;
        for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
            const Tile tile = tile_of(index, tiles_i, tiles_j);
            const int i = (tile.i * CLUSTER + rank) * kTileI, j = tile.j * TILES * kTileJ;
            const float scale = reciprocal[tile.batch * tiles_i * CLUSTER * kTileI + i + warp / 2];
            for (int t = 0; t < TILES; ++t) {
                float sums[128];
                multiply(sums, ring, full, empty, place, steps, group);
                // both have read the tile before's products
                if (t == 0) named_barrier(1, kConsumers * kWarpSize);
                store_outer(sums, outer + t * kTileI * kPairBytes, scale, warp, lane);
            }
            fence_async_proxy();
            named_barrier(1, kConsumers * kWarpSize);
            for (int pass = 0; pass < passes; ++pass) {
                float projected[16 * TILES];
                project_outer(projected, ring, outer, full, empty, place, group);
                for (int t = 0; t < TILES; ++t) {
                    store_out(projected + 16 * t, rows + warp * kOutElements, out_bias, out,
                              tile.batch, i, j + t * kTileJ, pass * kOutputs + warp * 16, N, P);
                }
            }
        }
    }
    cluster_sync();  // a block must not end while others may still arrive at its barriers
}

EXPORT cudaError_t hopper(const __nv_bfloat16* msa, const __nv_bfloat16* mask,
                          const __nv_bfloat16* layer_norm_weight,
                          const __nv_bfloat16* layer_norm_bias, const __nv_bfloat16* proj_a_weight,
                          const __nv_bfloat16* proj_a_bias, const __nv_bfloat16* proj_b_weight,
                          const __nv_bfloat16* proj_b_bias, const __nv_bfloat16* out_weight,
                          const __nv_bfloat16* out_bias, __nv_bfloat16* a, __nv_bfloat16* b,
                          __nv_bfloat16* weight, float* reciprocal, __nv_bfloat16* out, int B,
                          int S, int N, int C, int P, cudaStream_t stream) {
    if (cudaError_t error =
            write_inputs(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                         proj_b_weight, proj_b_bias, out_weight, a, b, weight, reciprocal, B, S, N,
                         C, P, stream)) {
        return error;
    }
    const int padded_n = ceil_div(N, kPadN) * kPadN, steps = ceil_div(S, kPadS) * kPadS / kDepth;
    const int tiles_i = padded_n / (kTileI * CLUSTER), tiles_j = padded_n / (kTileJ * TILES);
    static const int resident = resident_clusters(product_kernel, CLUSTER, kThreads, kSharedBytes);
    const int tiles = B * tiles_i * tiles_j, blocks = min(tiles, resident) * CLUSTER;
    return LAUNCH_CLUSTER(product_kernel, dim3(blocks), dim3(kThreads), dim3(CLUSTER), kSharedBytes,
                          stream)
        .early(EARLY)(a, b, weight, reciprocal, out_bias, out, N, P, tiles, steps, tiles_i,
                      tiles_j);
}
