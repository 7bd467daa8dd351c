// Stage 12: fp32 accuracy on Hopper
// As 11, for fp32: a, b, outer and out_weight are in two parts of fp16 (split_operands.cuh), and of
// each product three are made: small · big, big · small, big · big. wgmma truncates what it adds,
// so every PROMOTE s the sums move to where outer will be, to be added in fp32. The big weights
// multiply both parts of outer at once, and each stage's sums are added in fp32 too. Operations: 3
// · (2·B·S·N²·C² + 2·B·N²·C²·P), at af2 464 + 116 G. A tile of 4 i × 8 j takes 48·S tensor cycles,
// 7,200 or more for its projection (896 KB leave shared memory at 128 bytes a cycle; a ring of 96
// KB rather allows 10,000), 1,500 to split outer, 2,000 each time that sums move. Bytes from L2:
// 1024·S + 256 K a tile. Predicts at af2, 35 tiles for each block: 0.8 ms and 0.07 for the inputs;
// peak 0.13 GB beside them. Outcome: 1.01 ms; at seed, which it is not meant for, 26.8 µs.
// Shapes: D up to 256, C up to 32 (padded to 32), any B, S, N, P below 2^19.
#include "outer_product_mean/split_tiles.cuh"
#include "outer_product_mean/tile_ring.cuh"

#ifndef PROMOTE
#define PROMOTE 256  // s after which sums leave the tensor cores, which truncate what they add
#endif

constexpr int kRowBytes = kTileI * 2 * kPartElements * 2;     // of a in one stage of the ring
constexpr int kColumnBytes = kTileJ * 2 * kPartElements * 2;  // of b
constexpr int kStageBytes = kRowBytes + kColumnBytes;
constexpr int kStages = 4;                                    // 96 KB
constexpr int kWeightStepBytes = kWeightElements * 2;         // of 16 positions (h, k)
constexpr int kWeightSteps = kStageBytes / kWeightStepBytes;  // in one stage
constexpr int kPassBytes = kProduct / kDepth * kWeightStepBytes;
constexpr int kPairBytes = kProduct * kTileJ * 2;  // the outer products of one i and 8 j, a part
constexpr int kPartBytes = kTileI * kPairBytes;
constexpr int kConsumers = 8;                           // warps that multiply; one more loads
constexpr int kThreads = (kConsumers + 4) * kWarpSize;  // roles go by warpgroups
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kPartBytes;
constexpr int kPromoteSteps = PROMOTE / kDepth;
constexpr int kOuterShift = 15;  // |outer| / rows < 2^30 as scaled; 2^-15 takes it into fp16
static_assert(registers_suffice(4, 40, kConsumers, 232), "they would wait for ever");

// Calls visit(row, at) for each position of a lane: sums[at(j)] are its 8 j, and row is where 16
// bytes of outer's first part hold them (of the second: kPartBytes on).
template <typename Visit>
__device__ void each_position(unsigned char* outer, Visit visit) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 4; ++k) {  // 8 of them each
            for (int e = 0; e < 2; ++e) {
                const int block = (warp % 2 * 2 + half) * 8 + k * 2 + e;
                visit(outer + warp / 2 * kPairBytes + block * 512 + lane * 16,
                      [=](int j) { return 4 * (4 * j + k) + 2 * half + e; });
            }
            __syncwarp();  // else the compiler begins with all at once, and registers run out
        }
    }
}

// Adds what a lane has set aside of its sums, in the same place that outer will have.
__device__ void add_promoted(float (&sums)[128], unsigned char* outer) {
    each_position(outer, [&](unsigned char* row, auto at) {
        for (int part = 0; part < 2; ++part) {
            const float4 before = *reinterpret_cast<const float4*>(row + part * kPartBytes);
            sums[at(4 * part)] += before.x;
            sums[at(4 * part + 1)] += before.y;
            sums[at(4 * part + 2)] += before.z;
            sums[at(4 * part + 3)] += before.w;
        }
    });
}
__device__ void promote(const float (&sums)[128], unsigned char* outer) {
    each_position(outer, [&](unsigned char* row, auto at) {
        for (int part = 0; part < 2; ++part) {
            *reinterpret_cast<float4*>(row + part * kPartBytes) =
                float4{sums[at(4 * part)], sums[at(4 * part + 1)], sums[at(4 * part + 2)],
                       sums[at(4 * part + 3)]};
        }
    });
}

// sums (64 rows (i, h) × 256 columns (j, k) a warpgroup) = Σ_s a b
__device__ void multiply(float (&sums)[128], const unsigned char* ring, unsigned char* outer,
                         Barrier* full, Barrier* empty, Place<kStages>& place, int steps,
                         int group) {
    constexpr int kStride = kDepth / 8 * 128;  // bytes from 8 channels to the next 8
    for (int first = 0; first < steps; first += kPromoteSteps) {
        const int end = min(first + kPromoteSteps, steps);
        for (int step = first; step < end; ++step) {
            const unsigned char* rows = ring + place.stage * kStageBytes + group * (kRowBytes / 4);
            const unsigned char* columns = ring + place.stage * kStageBytes + kRowBytes;
            barrier_wait(full + place.stage, place.parity);
            wgmma_fence();
            for (int product = 0; product < 3; ++product) {  // small · big, big · small, big · big
                wgmma<__half, Major::MN, Major::MN>(
                    sums, wgmma_operand(rows + (product == 0) * (kRowBytes / 2), 128, kStride),
                    wgmma_operand(columns + (product == 1) * (kColumnBytes / 2), 128, kStride),
                    step - first + product > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();  // the step before this one
            if (step > first) release(empty, (place.stage + kStages - 1) % kStages);
            place.advance();
        }
        wgmma_wait<0>();
        release(empty, (place.stage + kStages - 1) % kStages);
        if (first == 0) {
            named_barrier(1, kConsumers * kWarpSize);  // both have read the tile before's products
        } else {
            add_promoted(sums, outer);
        }
        if (end < steps) promote(sums, outer);
    }
}

// outer: for each part, i, position (h, k) and j, so that what a lane holds for 8 j is one 16-byte
// row of a core matrix (8 positions × 8 j) and a warp writes 512 bytes in one piece.
__device__ void store_outer(const float (&sums)[128], unsigned char* outer, float scale) {
    each_position(outer, [&](unsigned char* row, auto at) {
        uint32_t big[4], small[4];
        for (int j = 0; j < kTileJ; j += 2) {
            split(sums[at(j)] * scale, sums[at(j + 1)] * scale, big[j / 2], small[j / 2]);
        }
        *reinterpret_cast<uint4*>(row) = uint4{big[0], big[1], big[2], big[3]};
        *reinterpret_cast<uint4*>(row + kPartBytes) = uint4{small[0], small[1], small[2], small[3]};
    });
}

// projected (64 outputs × 32 pairs a warpgroup) += Σ weight · outer over kCount · 16 positions. The
// big weights multiply both parts of outer at once, 64 columns.
template <int kCount>
__device__ void project_steps(float (&projected)[16], const unsigned char* weight,
                              const unsigned char* outer) {
    constexpr int kStride = kOutputs / 8 * 128;  // bytes from 8 positions to the next 8
    const uint64_t a = wgmma_operand(weight, kStride, 128);
    const uint64_t b = wgmma_operand(outer, 128, kPairBytes);
    float both[32], last[16];
    wgmma_fence();
    for (int step = 0; step < kCount; ++step) {
        const uint64_t big = wgmma_advance(a, step * kWeightStepBytes);
        const uint64_t small = wgmma_advance(big, kWeightStepBytes / 2);
        const uint64_t pairs = wgmma_advance(b, step * (kDepth / 8) * 128);
        wgmma<__half, Major::K, Major::MN>(both, big, pairs, step > 0);
        wgmma<__half, Major::K, Major::MN>(last, small, pairs, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int at = 0; at < 16; ++at) projected[at] += both[at] + (both[16 + at] + last[at]);
}

// projected = Σ_(h, k) weight · outer, each stage's sums added in fp32
__device__ void project_outer(float (&projected)[16], const unsigned char* ring,
                              const unsigned char* outer, Barrier* full, Barrier* empty,
                              Place<kStages>& place, int group) {
    constexpr int kWhole = kProduct / kDepth / kWeightSteps,
                  kRest = kProduct / kDepth % kWeightSteps;
    for (float& sum : projected) sum = 0;
    for (int count = 0; count <= kWhole; ++count, place.advance()) {
        const unsigned char* weight = ring + place.stage * kStageBytes + group * (kOutputs * 8);
        const unsigned char* pairs = outer + count * (kWeightSteps * kDepth / 8 * 128);
        barrier_wait(full + place.stage, place.parity);
        if (count < kWhole) {
            project_steps<kWeightSteps>(projected, weight, pairs);
        } else {
            project_steps<kRest>(projected, weight, pairs);
        }
        release(empty, place.stage);
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __half* a, const __half* b, const __half* weight, const float* reciprocal,
                   const float* shifts, const float* out_bias, float* out, int N, int P, int tiles,
                   int steps, int tiles_i, int tiles_j) {
    DYNAMIC_SHARED(unsigned char, ring);
    SHARED(Barrier, full, [kStages]);
    SHARED(Barrier, empty, [kStages]);
    unsigned char* outer = ring + kStages * kStageBytes;
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
            load<kRowBytes, kColumnBytes, kWeightSteps * kWeightStepBytes, kPassBytes, kStages, 1>(
                a, b, weight, ring, full, empty, tiles, steps, passes, tiles_i, tiles_j);
        }
        __syncwarp();
    } else {
        registers_increase<232>();
        Place<kStages> place;
        const int shift = int(shifts[0]) + int(shifts[1]) - kOuterShift;
        for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
            const Tile tile = tile_of(index, tiles_i, tiles_j);
            const int i = (tile.i * CLUSTER + rank) * kTileI, j = tile.j * kTileJ;
            float sums[128];
            multiply(sums, ring, outer, full, empty, place, steps, group);
            const float mean = i + warp / 2 < N ? reciprocal[tile.batch * N + i + warp / 2] : 0;
            store_outer(sums, outer, mean * power_of_two(-kOuterShift));
            fence_async_proxy();
            named_barrier(1, kConsumers * kWarpSize);
            for (int pass = 0; pass < passes; ++pass) {
                float projected[16];
                project_outer(projected, ring, outer, full, empty, place, group);
                store_out(projected, shifts + 2, out_bias, out, tile.batch, i, j,
                          pass * kOutputs + warp * 16, shift, N, P);
            }
        }
    }
    cluster_sync();  // a block must not end while others may still arrive at its barriers
}

// With N' and S' multiples of 16 and P' of 128, a, b are (B,N',S',32), weight (P',1024), reciprocal
// (B,N), shifts (2 + P').
EXPORT cudaError_t hopper_split(const float* msa, const float* mask, const float* layer_norm_weight,
                                const float* layer_norm_bias, const float* proj_a_weight,
                                const float* proj_a_bias, const float* proj_b_weight,
                                const float* proj_b_bias, const float* out_weight,
                                const float* out_bias, float* a, float* b, float* weight,
                                float* reciprocal, float* shifts, float* out, int B, int S, int N,
                                int P, cudaStream_t stream) {
    const int padded_n = ceil_div(N, kPadN) * kPadN, steps = ceil_div(S, kDepth);
    __half *a_parts = reinterpret_cast<__half*>(a), *b_parts = reinterpret_cast<__half*>(b);
    __half* weight_parts = reinterpret_cast<__half*>(weight);
    if (cudaError_t error =
            write_inputs(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                         proj_b_weight, proj_b_bias, out_weight, a_parts, b_parts, weight_parts,
                         reciprocal, shifts, B, S, N, P, steps, padded_n, stream)) {
        return error;
    }
    const int tiles_i = padded_n / (kTileI * CLUSTER), tiles_j = padded_n / kTileJ;
    const int tiles = B * tiles_i * tiles_j;
    static const int resident = resident_clusters(product_kernel, CLUSTER, kThreads, kSharedBytes);
    return LAUNCH_CLUSTER(product_kernel, dim3(min(tiles, resident) * CLUSTER), dim3(kThreads),
                          dim3(CLUSTER), kSharedBytes, stream)
        .early(EARLY)(a_parts, b_parts, weight_parts, reciprocal, shifts, out_bias, out, N, P,
                      tiles, steps, tiles_i, tiles_j);
}
