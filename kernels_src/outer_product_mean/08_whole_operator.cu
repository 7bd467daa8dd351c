// Stage 08: the whole operator in one launch
// Against 07 nothing is left to another kernel, and no block waits for another: each makes 8 i × 32
// j × 8 p of the output, and recomputes the LayerNorm and projections that it needs (16 times over
// at seed). With few rows s it is cheaper not to form outer: T = Σ_h a[s,i,h] out_weight[p,h,k]
// first, then Σ_{s,k} T b, 4·B·S·N·C·P·(C·⌈N/32⌉ + N) operations, at seed 268 M where outer and
// out_proj take 570 M. All on tensor cores, on operands in two parts (split_operands.cuh). Bytes
// from L2: 4·(40·S·D + 8·C² + 2·C·D) a block, at seed 128 KB. Predicts at seed 7 µs in a graph.
// Outcome: 11.2. In a form that took 12.3 only 7,000 of 19,000 cycles had an instruction to issue:
// three warps a scheduler hide little; yet twice the warps for the products took 7 % more. Clusters
// of 8 that shared the projections (6 predicted) took 17.7, in two waves: the card holds 15 of the
// 16 clusters at once (cudaOccupancyMaxActiveClusters), since not every GPC has 16 multiprocessors.
// Shapes: S up to 8, D up to 64, C up to 32; all but B and N are compile-time constants.
#include "outer_product_mean/row_operands.cuh"

constexpr int kOutputs = 8;                  // p of a block
constexpr int kRows = 8;                     // s, padded with zeros
constexpr int kContractWarps = 8;            // one for 2 p and half of k
constexpr int kTilesEach = kResiduesJ / 16;  // of 16 rows of b, a row s a warp
constexpr int kWarps = kContractWarps + kRows * kResiduesI / 16;
constexpr int kThreads = kWarps * kWarpSize;
static_assert(S <= kRows && D <= 64, "a lane holds its part of two tiles of rows in registers");

struct Tiles {
    SharedProjection projections[2];               // proj_a's and proj_b's
    uint32_t a[2][kRows * kResiduesI][kRowWords];  // big and small, pairs of h
    uint32_t b[2][kRows * kResiduesJ][kRowWords];
    float weight[kOutputs][kHidden][kHidden + 4];  // out_weight[p][h][k]
    float partial[2][kOutputs][kResiduesI * (kResiduesJ + 4) + 1];
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

// sums[p][j / 16] = Σ_s Σ_k b[s,j,k] T[s,i,p,k] for the warp's two p and half of k. Returns the
// power of two that out_weight was scaled by.
__device__ int contract(const Tiles& tiles, float (&sums)[2][kResiduesJ / 16][4]) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, k_half = warp % 2;
    float raw[2][2][2][4];
    for (int at = 0; at < 32; ++at) {
        const int p = at / 16, column = at / 8 % 2, step = at / 4 % 2, e = at % 4;
        const int h = step * 16 + e / 2 * 8 + lane % 4 * 2 + e % 2;
        const int k = k_half * 16 + column * 8 + lane / 4;
        raw[p][column][step][e] = tiles.weight[warp / 2 * 2 + p][h][k];
    }
    Weights weight;
    const int shift = split_weights(raw, weight);
#pragma unroll 1  // registers
    for (int pair = 0; pair < kRows / 2; ++pair) {
        uint32_t a[2][2][4], operand[2][2][2][2];
        for (int step = 0; step < 2; ++step) load_operand(a[step], tiles.a, pair * 16, step);
        contract_channels(a, weight, operand);
        const auto load_b = [&](uint32_t (&b)[2][4], int s, int tile) {
            load_operand(b, tiles.b, (pair * 2 + s) * kResiduesJ + tile * 16, k_half);
        };
        contract_rows(load_b, 2, operand, sums);
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

    Affine affine;
    float x[kTilesEach][2][kSteps][4], present[kTilesEach][2];
#pragma unroll
    for (int tile = 0; tile < kTilesEach; ++tile) {
        if (tile > 0 && !contracts) break;
        const auto row_of = [&](int half) {  // 16 j of a row s; or all i of two rows s
            const int s = contracts ? warp : spare * 2 + half;
            const int n =
                contracts ? first_j + tile * 16 + half * 8 + lane / 4 : first_i + lane / 4;
            return s < S && n < N ? int64_t(s) * N + n : -1;
        };
        load_tile(msa, mask, row_of, x[tile], present[tile]);
    }
    copy_weight(tiles, out_weight, first_p);
    copy_async_commit();
    if (!contracts) {
        load_affine(affine, layer_norm_weight, layer_norm_bias);
        for (int matrix = 0; matrix < 2; ++matrix) {
            Projection projection;
            scale_projection(projection, channel_of(spare, lane / 4),
                             matrix == 0 ? proj_a_weight : proj_b_weight,
                             matrix == 0 ? proj_a_bias : proj_b_bias, affine);
            store_projection(tiles.projections[matrix], spare, channel_of(spare, lane / 4),
                             projection);
        }
    }
    normalize(x[0]);
    if (contracts) normalize(x[1]);
    __syncthreads();
    const SharedProjection &proj_a = tiles.projections[0], &proj_b = tiles.projections[1];
    const int a_shift = shift_of(proj_a) - kHeadroom, b_shift = shift_of(proj_b);
    if (contracts) {
        project_rows<kTilesEach>(proj_b, b_shift, x, present, tiles.b, warp * kTilesEach * 16);
    } else {
        project_rows<1>(proj_a, a_shift, x, present, tiles.a, spare * 16);
    }
    copy_async_wait<0>();
    __syncthreads();

    if (contracts) {
        float sums[2][2][4] = {};
        const int shift = a_shift + b_shift + contract(tiles, sums);
        for (int at = 0; at < 16; ++at) {
            const int p = at / 8, tile = at / 4 % 2, e = at % 4;
            const int i = lane % 4 * 2 + e % 2, j = tile * 16 + e / 2 * 8 + lane / 4;
            tiles.partial[warp % 2][warp / 2 * 2 + p][i * (kResiduesJ + 4) + j] =
                ldexpf(sums[p][tile][e], -shift);
        }
    } else if (spare == 0) {
        count_rows(mask, tiles.reciprocal, first_i, N);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kResiduesI * kResiduesJ * kOutputs; at += kThreads) {
        const int p = at % kOutputs, j = at / kOutputs % kResiduesJ, i = at / kOutputs / kResiduesJ;
        const int from = i * (kResiduesJ + 4) + j;
        if (first_i + i < N && first_j + j < N && first_p + p < P) {
            const float sum = tiles.partial[0][p][from] + tiles.partial[1][p][from];
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
