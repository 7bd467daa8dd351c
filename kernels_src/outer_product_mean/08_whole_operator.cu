// Stage 08: the whole operator in one launch
// Against 07 nothing is left to another kernel, and no block waits for another: each makes 8 i × 32
// j × 8 p of the output, and recomputes the LayerNorm and projections that it needs (16 times over
// at seed). With few rows s it is cheaper not to form outer: T = Σ_h a[s,i,h] out_weight[p,h,k]
// first, then Σ_{s,k} T b, 4·B·S·N·C·P·(C·⌈N/32⌉ + N) operations, at seed 268 M where outer and
// out_proj take 570 M. All on tensor cores, on operands in two parts (split_operands.cuh). Bytes
// from L2: 4·(40·S·D + 8·C² + 2·C·D) a block, at seed 128 KB. Predicts at seed 7 µs in a graph.
// Outcome: 12.1, in a run that results/ does not have: 20,000 cycles, a third of them issuing, as
// three warps a scheduler hide little.
// Clusters of 8 that shared the projections (6 predicted) took 17.7, very likely in two waves: a
// card with a GPC of less than 16 multiprocessors holds 15 of the 16 clusters (a guess).
// Shapes: S up to 8, D up to 64, C up to 32; all but B and N are compile-time constants.
#include "outer_product_mean/row_operands.cuh"

#ifndef ROW_PARTS
#define ROW_PARTS 1  // 2: twice the warps, half the rows s each; not timed yet, spills two words
#endif

constexpr int kResiduesI = 8, kResiduesJ = 32, kOutputs = 8;          // i, j, p of a block
constexpr int kRows = 8;                                              // s, padded with zeros
constexpr int kContractWarps = 8 * ROW_PARTS;                         // one for 2 p and half of k
constexpr int kTilesEach = kRows * kResiduesJ / 16 / kContractWarps;  // of 16 rows of b
constexpr int kParts = 2 * ROW_PARTS;  // sums of an output, by halves of k and parts of s
constexpr int kWarps = kContractWarps + kRows * kResiduesI / 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kProductShift = 20;  // T is the sum of 32 products below 2^30; 2^35 · 2^-20 = 2^15
static_assert(ROW_PARTS == 1 || ROW_PARTS == 2);
static_assert(S <= kRows && D <= 64, "a lane holds its part of two tiles of rows in registers");

struct Tiles {
    Projections projections;
    uint32_t a[2][kRows * kResiduesI][kRowWords];  // big and small, pairs of h
    uint32_t b[2][kRows * kResiduesJ][kRowWords];
    float weight[kOutputs][kHidden][kHidden + 4];  // out_weight[p][h][k]
    float partial[kParts][kOutputs][kResiduesI * (kResiduesJ + 4) + 1];
    float reciprocal[kResiduesI];
};

// Starts the copy of out_weight's kOutputs channels from first_p on; zeros in the padding.
__device__ void copy_weight(Tiles& tiles, const float* out_weight, int first_p) {
    constexpr int kPiece = C % 4 == 0 ? 4 : 1;  // floats: is each row of k 16-byte aligned?
    for (int at = threadIdx.x * kPiece; at < kOutputs * kHidden * kHidden;
         at += kThreads * kPiece) {
        const int p = at / (kHidden * kHidden), h = at / kHidden % kHidden, k = at % kHidden;
        const bool valid = first_p + p < P && h < C && k < C;
        const float* from = out_weight + (valid ? ((first_p + p) * C + h) * int64_t(C) + k : 0);
        if (kPiece == 4) {
            copy_async_16(&tiles.weight[p][h][k], from, valid);
        } else {
            copy_async_4(&tiles.weight[p][h][k], from, valid);
        }
    }
}

// sums[p][j / 16] = Σ_s Σ_k b[s,j,k] T[s,i,p,k], T = Σ_h a[s,i,h] out_weight[p,h,k], for two p, one
// half of k and one part of s; mma's rows are j, its columns i. T goes from result to operand in
// registers: both have i in lane / 4 and k in lane % 4. Returns the power of two that out_weight
// was scaled by.
__device__ int contract(const Tiles& tiles, float (&sums)[2][2][4]) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, k_half = warp % 2;
    float raw[2][2][2][4];  // [p][k / 8][h / 16]
    float largest = 0;
    for (int at = 0; at < 32; ++at) {
        const int p = at / 16, column = at / 8 % 2, step = at / 4 % 2, e = at % 4;
        const int h = step * 16 + e / 2 * 8 + lane % 4 * 2 + e % 2;
        const int k = k_half * 16 + column * 8 + lane / 4;
        raw[p][column][step][e] = tiles.weight[warp / 2 % 4 * 2 + p][h][k];
        largest = fmaxf(largest, fabsf(raw[p][column][step][e]));
    }
    const int shift = shift_of(warp_max(largest));
    uint32_t weight[2][2][2][2][2];  // [p][k / 8][h / 16][big, small]
    for (int at = 0; at < 16; ++at) {
        const int p = at / 8, column = at / 4 % 2, step = at / 2 % 2, e = at % 2;
        const float* pair = &raw[p][column][step][2 * e];
        split(pair[0] * power_of_two(shift), pair[1] * power_of_two(shift),
              weight[p][column][step][0][e], weight[p][column][step][1][e]);
    }

    constexpr int kPairs = kRows / 2 / ROW_PARTS;  // two rows s are one tile of (s,i)
    const int first = warp / 8 % ROW_PARTS * kPairs;
#pragma unroll 1  // registers
    for (int pair = first; pair < first + kPairs; ++pair) {
        float t[2][2][4] = {}, t_small[2][2][4] = {};
        for (int step = 0; step < 2; ++step) {
            uint32_t a[2][4];
            load_operand(a, tiles.a, pair * 16, step);
            for (int p = 0; p < 2; ++p) {
                for (int column = 0; column < 2; ++column) {
                    multiply(t[p][column], t_small[p][column], a, weight[p][column][step]);
                }
            }
        }
        uint32_t operand[2][2][2][2];  // [s][p][big, small][k / 8]
        for (int at = 0; at < 8; ++at) {
            const int s = at / 4, p = at / 2 % 2, column = at % 2;
            float value[2];
            for (int e = 0; e < 2; ++e) {
                value[e] = (t[p][column][2 * s + e] + t_small[p][column][2 * s + e]) *
                           power_of_two(-kProductShift);
            }
            split(value[0], value[1], operand[s][p][0][column], operand[s][p][1][column]);
        }
        for (int tile = 0; tile < 2; ++tile) {
            float sum[2][4] = {}, sum_small[2][4] = {};
            for (int s = 0; s < 2; ++s) {
                uint32_t b[2][4];
                load_operand(b, tiles.b, (pair * 2 + s) * kResiduesJ + tile * 16, k_half);
                for (int p = 0; p < 2; ++p) multiply(sum[p], sum_small[p], b, operand[s][p]);
            }
            for (int at = 0; at < 8; ++at) {
                sums[at / 4][tile][at % 4] += sum[at / 4][at % 4] + sum_small[at / 4][at % 4];
            }
        }
    }
    return shift;
}

// 1 / max(1, Σ_s mask[s,i]) of the block's residues i, by one warp
__device__ void count_rows(const float* mask, float* reciprocal, int first_i, int N) {
    const int lane = threadIdx.x % kWarpSize, i = first_i + lane % kResiduesI;
    float count = 0;
    for (int s = lane / kResiduesI; s < S && i < N; s += kWarpSize / kResiduesI) {
        count += mask[int64_t(s) * N + i];
    }
    count += __shfl_xor_sync(kFullMask, count, 8);
    count += __shfl_xor_sync(kFullMask, count, 16);
    if (lane < kResiduesI) reciprocal[lane] = 1.0f / fmaxf(count, 1.0f);
}

__global__ void __launch_bounds__(kThreads, 1)
    whole_operator_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                          const float* layer_norm_bias, const float* proj_a_weight,
                          const float* proj_a_bias, const float* proj_b_weight,
                          const float* proj_b_bias, const float* out_weight, const float* out_bias,
                          float* out, int N) {
    DYNAMIC_SHARED(Tiles, shared);
    Tiles& tiles = *shared;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const bool contracts = warp < kContractWarps;  // and projects b; the others project a
    const int spare = warp - kContractWarps;
    const int p_tiles = ceil_div(P, kOutputs), j_tiles = ceil_div(N, kResiduesJ);
    const int i_tiles = ceil_div(N, kResiduesI), block = blockIdx.x / p_tiles;
    const int first_p = blockIdx.x % p_tiles * kOutputs, first_j = block % j_tiles * kResiduesJ;
    const int first_i = block / j_tiles % i_tiles * kResiduesI;
    const int64_t batch = block / j_tiles / i_tiles;
    msa += batch * S * N * D;
    mask += batch * S * N;

    copy_weight(tiles, out_weight, first_p);
    copy_async_commit();
    Affine affine;
    const auto prepare = [&](int matrix, int tile) {
        Projection projection;
        scale_projection(projection, tile, matrix == 0 ? proj_a_weight : proj_b_weight,
                         matrix == 0 ? proj_a_bias : proj_b_bias, affine);
        store_projection(tiles.projections, matrix, tile, projection);
    };
    float x[kTilesEach][2][kSteps][4], present[kTilesEach][2];
    if (contracts) {  // 16 j of a row s a tile
#pragma unroll
        for (int tile = 0; tile < kTilesEach; ++tile) {
            const int s = warp / ROW_PARTS, at = warp % ROW_PARTS * kTilesEach + tile;
            const auto row_of = [&](int half) {
                const int n = first_j + at * 16 + half * 8 + lane / 4;
                return s < S && n < N ? int64_t(s) * N + n : -1;
            };
            load_tile(msa, mask, row_of, x[tile], present[tile]);
        }
        if (ROW_PARTS == 2 && warp < kColumnTiles) {
            load_affine(affine, layer_norm_weight, layer_norm_bias);
            prepare(1, warp);
        }
#pragma unroll
        for (int tile = 0; tile < kTilesEach; ++tile) normalize(x[tile]);
    } else {  // two rows s, all i
        const auto row_of = [&](int half) {
            const int s = spare * 2 + half, n = first_i + lane / 4;
            return s < S && n < N ? int64_t(s) * N + n : -1;
        };
        load_tile(msa, mask, row_of, x[0], present[0]);
        load_affine(affine, layer_norm_weight, layer_norm_bias);
        prepare(0, spare);
        if (ROW_PARTS == 1) prepare(1, spare);
        normalize(x[0]);
    }
    __syncthreads();
    if (contracts) {
        project_rows<kTilesEach>(tiles.projections, 1, x, present, tiles.b, warp * kTilesEach * 16);
    } else {
        project_rows<1>(tiles.projections, 0, x, present, tiles.a, spare * 16);
    }
    copy_async_wait<0>();
    __syncthreads();

    if (contracts) {
        float sums[2][2][4] = {};
        const int weight_shift = contract(tiles, sums);
        const int shift = shift_of(tiles.projections, 0) + shift_of(tiles.projections, 1) +
                          weight_shift - kProductShift;
        for (int at = 0; at < 16; ++at) {
            const int p = at / 8, tile = at / 4 % 2, e = at % 4;
            const int i = lane % 4 * 2 + e % 2, j = tile * 16 + e / 2 * 8 + lane / 4;
            tiles.partial[warp / 8 % ROW_PARTS * 2 + warp % 2][warp / 2 % 4 * 2 + p]
                         [i * (kResiduesJ + 4) + j] = ldexpf(sums[p][tile][e], -shift);
        }
    } else if (spare == 0) {
        count_rows(mask, tiles.reciprocal, first_i, N);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kResiduesI * kResiduesJ * kOutputs; at += kThreads) {
        const int p = at % kOutputs, j = at / kOutputs % kResiduesJ, i = at / kOutputs / kResiduesJ;
        const int from = i * (kResiduesJ + 4) + j;
        if (first_i + i < N && first_j + j < N && first_p + p < P) {
            float sum = tiles.partial[0][p][from];
            for (int part = 1; part < kParts; ++part) sum += tiles.partial[part][p][from];
            out[((batch * N + first_i + i) * N + first_j + j) * P + first_p + p] =
                sum * tiles.reciprocal[i] + out_bias[first_p + p];
        }
    }
}

EXPORT cudaError_t whole_operator(const float* msa, const float* mask,
                                  const float* layer_norm_weight, const float* layer_norm_bias,
                                  const float* proj_a_weight, const float* proj_a_bias,
                                  const float* proj_b_weight, const float* proj_b_bias,
                                  const float* out_weight, const float* out_bias, float* out, int B,
                                  int N, cudaStream_t stream) {
    const int64_t blocks =
        int64_t(B) * ceil_div(N, kResiduesI) * ceil_div(N, kResiduesJ) * ceil_div(P, kOutputs);
    return LAUNCH(whole_operator_kernel, dim3(blocks), dim3(kThreads), sizeof(Tiles), stream)(
        msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias, proj_b_weight,
        proj_b_bias, out_weight, out_bias, out, N);
}
