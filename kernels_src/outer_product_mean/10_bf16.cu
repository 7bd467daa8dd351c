// Stage 10: bf16, mma.sync with cp.async
// As 09 in bf16, one product instead of three: a block multiplies 4 i × 8 j, 128 × 256 of the (N·C)
// × S × (N·C) product, in registers; cp.async fills a ring of 4 steps of 32 rows while 8 warps
// multiply, 64 × 64 each. A warp's 64 columns are 8 k of all 8 j, so that a lane holds 8 j of one
// (h, k): one 16-byte row of the second product's operand. out_proj follows at once in the block;
// (N,N,C²) exists only as the 64 KB of a tile, which take the ring's place. Operations: 2·B·S·N²·C²
// + 2·B·N²·C²·P, at extra 309 + 39 G. Bytes from L2: 768·S + 256 K a tile, B·N²/32 tiles: 4.8 GB at
// extra, of them 1.2 GB for out_weight, which every tile reads again. Predicts: extra 0.9 ms at 6
// TB/s from L2 and 60 % of the tensor cores' rate; af2 0.55 ms. Outcome: extra 1.29 ms, af2 0.79.
// 218 registers leave one block, two warps a scheduler: nothing runs under out_proj, which waits
// for L2 16 times a tile (a guess).
// Shapes: any B, S, N, P; C up to 32 (padded to 32), D up to 512.
#include "outer_product_mean/bf16_tiles.cuh"

constexpr int kThreads = 256;
constexpr int kRowCores = kTileI * kHidden * kDepth / kCore;     // of a in one step
constexpr int kColumnCores = kTileJ * kHidden * kDepth / kCore;  // of b
constexpr int kStepCores = kRowCores + kColumnCores;
constexpr int kStages = 128 / kDepth;
constexpr int kPairCores = kProduct * kTileJ / kCore;  // the outer products of one i and 8 j
constexpr int kSharedBytes = kStages * kStepCores * kCore * 2;  // 96 KB
static_assert(kTileI * kPairCores * kCore + kThreads / kWarpSize * kOutElements <=
              kStages * kStepCores * kCore);

// A step's rows of a and b, contiguous as they are; always one commit, so that waits can count.
__device__ void load(Bf16* ring, const Bf16* a, const Bf16* b, int step, int steps) {
    if (step < steps) {
        Bf16* stage = ring + step % kStages * (kStepCores * kCore);
        const Bf16* rows = a + int64_t(step) * (kRowCores * kCore);
        const Bf16* columns = b + int64_t(step) * (kColumnCores * kCore);
        for (int i = threadIdx.x * 8; i < kStepCores * kCore; i += kThreads * 8) {
            const int column = i - kRowCores * kCore;
            copy_async_16(stage + i, column < 0 ? rows + i : columns + column);
        }
    }
    copy_async_commit();
}

// sums[m][j] (16 rows (i, h) × 8 k) += a b over one step, for the warp's 4 m and 8 j
__device__ void multiply(float (&sums)[4][kTileJ][4], const Bf16* stage, int row_warp, int k_warp) {
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8;  // the row that ldmatrix takes
    for (int s = 0; s < kDepth / 8; s += 2) {
        uint32_t rows[4][4], columns[kTileJ][2];
        for (int m = 0; m < 4; ++m) {
            const int h = row_warp * 8 + m * 2 + matrix % 2;  // 8 channels
            const int core = h * (kDepth / 8) + s + matrix / 2;
            ldmatrix_x4_trans(rows[m], stage + core * kCore + lane % 8 * 8);
        }
        for (int j = 0; j < kTileJ; j += 2) {
            const int k = (j + matrix / 2) * (kHidden / 8) + k_warp;
            const int core = kRowCores + k * (kDepth / 8) + s + matrix % 2;
            uint32_t both[4];
            ldmatrix_x4_trans(both, stage + core * kCore + lane % 8 * 8);
            columns[j][0] = both[0], columns[j][1] = both[1];
            columns[j + 1][0] = both[2], columns[j + 1][1] = both[3];
        }
        for (int m = 0; m < 4; ++m) {
            for (int j = 0; j < kTileJ; ++j) mma_m16n8k16_bf16(sums[m][j], rows[m], columns[j]);
        }
    }
}

// outer: for each i, position (h, k) and j, in the order of product_channel
__device__ void store_outer(const float (&sums)[4][kTileJ][4], Bf16* outer, const float* reciprocal,
                            int row_warp, int k_warp) {
    for (int m = 0; m < 4; ++m) {
        const int i = row_warp * 2 + m / 2;
        for (int half = 0; half < 2; ++half) {
            for (int e = 0; e < 2; ++e) {
                const int block = (m % 2 * 2 + half) * 8 + k_warp * 2 + e;
                uint32_t pairs[4];
                for (int j = 0; j < kTileJ; j += 2) {
                    pairs[j / 2] = pack_bf16(sums[m][j][2 * half + e] * reciprocal[i],
                                             sums[m][j + 1][2 * half + e] * reciprocal[i]);
                }
                const int row = (i * kPairCores + block * 4) * 8 + threadIdx.x % kWarpSize;
                *reinterpret_cast<uint4*>(outer + row * 8) =
                    uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
            }
        }
    }
}

// projected (the warp's 16 outputs × 32 pairs) = Σ_(h, k) weight · outer; weight comes from L2
__device__ void project_outer(float (&projected)[16], const Bf16* weight, const Bf16* outer) {
    const int lane = threadIdx.x % kWarpSize, matrix = lane / 8;
    float sums[kTileI][4] = {};
#pragma unroll 4
    for (int position = 0; position < kProduct / 8; position += 2) {
        uint32_t outputs[4];
        for (int e = 0; e < 4; ++e) {  // core matrices: 8 outputs, 8 more, the same 8 positions on
            const int core = (position + e / 2) * (kOutputs / 8) + e % 2;
            outputs[e] = __ldg(reinterpret_cast<const uint32_t*>(weight + core * kCore) + lane);
        }
        for (int i = 0; i < kTileI; i += 2) {
            const int core = (i + matrix / 2) * kPairCores + position + matrix % 2;
            uint32_t both[4];
            ldmatrix_x4_trans(both, outer + core * kCore + lane % 8 * 8);
            mma_m16n8k16_bf16(sums[i], outputs, {both[0], both[1]});
            mma_m16n8k16_bf16(sums[i + 1], outputs, {both[2], both[3]});
        }
    }
    for (int e = 0; e < 16; ++e) projected[e] = sums[e / 4][e % 4];
}

__global__ void __launch_bounds__(kThreads)
    product_kernel(const Bf16* a, const Bf16* b, const Bf16* weight, const float* reciprocal,
                   const Bf16* out_bias, Bf16* out, int N, int P, int steps, int tiles_i,
                   int tiles_j) {
    DYNAMIC_SHARED(Bf16, ring);
    Bf16* outer = ring;
    const int warp = threadIdx.x / kWarpSize, row_warp = warp / 4, k_warp = warp % 4;
    const Tile tile = tile_of(blockIdx.x, tiles_i, tiles_j);
    const int i = tile.i * kTileI, j = tile.j * kTileJ;
    a += (tile.batch * tiles_i + tile.i) * steps * (kRowCores * kCore);
    b += (tile.batch * tiles_j + tile.j) * steps * (kColumnCores * kCore);

    float sums[4][kTileJ][4] = {};
    for (int step = 0; step < kStages - 1; ++step) load(ring, a, b, step, steps);
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<kStages - 2>();  // this step's copies are there, this thread's at least
        __syncthreads();                 // everyone's; and everyone has read the step before
        load(ring, a, b, step + kStages - 1, steps);
        multiply(sums, ring + step % kStages * (kStepCores * kCore), row_warp, k_warp);
    }
    copy_async_wait<0>();
    __syncthreads();  // the ring is free
    store_outer(sums, outer, reciprocal + tile.batch * tiles_i * kTileI + i, row_warp, k_warp);
    __syncthreads();
    Bf16* rows = outer + kTileI * kPairCores * kCore + warp * kOutElements;
    for (int p = warp * 16; p < P; p += kOutputs) {
        float projected[16];
        project_outer(projected,
                      weight + p / kOutputs * (int64_t(kOutputs) * kProduct) + warp * (2 * kCore),
                      outer);
        store_out(projected, rows, out_bias, out, tile.batch, i, j, p, N, P);
    }
}

EXPORT cudaError_t bf16(const __nv_bfloat16* msa, const __nv_bfloat16* mask,
                        const __nv_bfloat16* layer_norm_weight,
                        const __nv_bfloat16* layer_norm_bias, const __nv_bfloat16* proj_a_weight,
                        const __nv_bfloat16* proj_a_bias, const __nv_bfloat16* proj_b_weight,
                        const __nv_bfloat16* proj_b_bias, const __nv_bfloat16* out_weight,
                        const __nv_bfloat16* out_bias, __nv_bfloat16* a, __nv_bfloat16* b,
                        __nv_bfloat16* weight, float* reciprocal, __nv_bfloat16* out, int B, int S,
                        int N, int C, int P, cudaStream_t stream) {
    if (cudaError_t error =
            write_inputs(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                         proj_b_weight, proj_b_bias, out_weight, a, b, weight, reciprocal, B, S, N,
                         C, P, stream)) {
        return error;
    }
    const int padded_n = ceil_div(N, kPadN) * kPadN, steps = ceil_div(S, kPadS) * kPadS / kDepth;
    const int tiles_i = padded_n / kTileI, tiles_j = padded_n / kTileJ;
    return LAUNCH(product_kernel, dim3(B * tiles_i * tiles_j), dim3(kThreads), kSharedBytes,
                  stream)(a, b, weight, reciprocal, out_bias, out, N, P, steps, tiles_i, tiles_j);
}
