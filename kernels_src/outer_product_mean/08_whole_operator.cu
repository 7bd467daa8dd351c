// Stage 08: the whole operator in one launch
// Against 07 nothing is left to another kernel. A cluster of 8 blocks has 32 i × 32 j × 16 p of the
// output; block s projects row s of msa for these i and j and writes it into the others' shared
// memory, then each makes 8 i × 32 j × 8 p. With few rows s it is cheaper not to form outer: T =
// Σ_h a[s,i,h] out_weight[p,h,k] first, then Σ_{s,k} T b, 4·B·S·N·C·P·(C·⌈N/32⌉ + N) operations, at
// seed 268 M where outer and out_proj take 570 M. All products run on tensor cores, on operands in
// two parts (split_operands.cuh). Bytes from L2: 4·(64·D + 8·C² + 2·C·D) a block, at seed 64 KB.
// Without clusters, each block projecting all rows that it needs, it took 12.6 µs: three quarters
// of the instructions were LayerNorm and projections done 16 times over. Predicts at seed 4.5 µs.
// Shapes: S up to 8, D up to 64, C up to 32; all but B and N are compile-time constants.
#include "hopper.cuh"
#include "outer_product_mean/split_operands.cuh"

constexpr int kThreads = 256;
constexpr int kCluster = 8;   // blocks; block s projects row s
constexpr int kTile = 32;     // i and j of a cluster
constexpr int kResidues = 8;  // i of a block
constexpr int kOutputs = 8;   // p of a block
constexpr int kClusterOutputs = kOutputs * kCluster / (kTile / kResidues);
constexpr int kProductShift = 20;  // T is the sum of 32 products below 2^30; 2^35 · 2^-20 = 2^15
constexpr int kRowWords = kHidden / 2 + 4;  // of a row of a or b: 80 bytes, no bank conflicts
static_assert(S <= kCluster && D <= 64);

struct Tiles {
    float bound[2][kColumnTiles];           // of |a| and |b|
    uint32_t mine[2][2][kTile][kRowWords];  // a and b of the block's row s: big, small; pairs of h
    uint32_t a[2][kCluster * kResidues][kRowWords];    // of the block's i, rows (s,i)
    uint32_t b[2][kCluster * kTile][kRowWords];        // (s,j)
    float partial[2][kOutputs][kResidues][kTile + 4];  // out, by halves of k; no bank conflicts
    float reciprocal[kResidues];
};

// d += a · b with operands in two parts; the products with a small part have a sum of their own,
// so that chains of dependent mma are short and lose little.
__device__ void multiply(float (&d)[4], float (&d_small)[4], const uint32_t (&a)[2][4],
                         const uint32_t (&b)[2][2]) {
    mma_m16n8k16_fp16(d_small, a[0], b[1]);
    mma_m16n8k16_fp16(d_small, a[1], b[0]);
    mma_m16n8k16_fp16(d, a[0], b[0]);
}

__device__ int shift_of(const Tiles& tiles, int matrix) {
    float bound = 0;
    for (int tile = 0; tile < kColumnTiles; ++tile) bound = fmaxf(bound, tiles.bound[matrix][tile]);
    return shift_of(bound);
}

// Channels of a (warps 0 to 3) or b of 16 residues of row s, two of the projection's tiles: the
// block's `mine`. The bounds and the other blocks must be there before the result is used.
__device__ void project_row(Tiles& tiles, const float* msa, const float* mask, const float* weight,
                            const float* bias, const float* layer_norm_weight,
                            const float* layer_norm_bias, int s, int first_n, int N) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int matrix = warp / 4, first_tile = warp / 2 % 2 * 2, first_row = warp % 2 * 16;
    const auto row_of = [&](int half) {
        const int n = first_n + first_row + half * 8 + lane / 4;
        return s < S && n < N ? int64_t(s) * N + n : -1;
    };
    float x[2][kSteps][4], present[2];
    load_tile(msa, mask, row_of, x, present);
    Affine affine;
    load_affine(affine, layer_norm_weight, layer_norm_bias);
    Projection projection[2];
    for (int tile = 0; tile < 2; ++tile) {
        scale_projection(projection[tile], first_tile + tile, weight, bias, affine);
        if (lane == 0) tiles.bound[matrix][first_tile + tile] = projection[tile].bound;
    }
    normalize(x);
    float sums[2][4] = {}, sums_small[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t rows[2][4];
        split_tile(x, step, rows[0], rows[1]);
        for (int tile = 0; tile < 2; ++tile) {
            const uint32_t (&big)[2] = projection[tile].big[step];
            const uint32_t (&small)[2] = projection[tile].small[step];
            multiply(sums[tile], sums_small[tile], rows, {{big[0], big[1]}, {small[0], small[1]}});
        }
    }
    cluster_sync();  // all bounds are there, and all blocks run

    const float scale = power_of_two(shift_of(tiles, matrix));
    uint32_t words[2][2][2];  // [half][big, small][tile]
    for (int tile = 0; tile < 2; ++tile) {
        float factor[2], constant[2];  // of columns 2t, 2t + 1: lanes 8t, 8t + 4 have them
        for (int e = 0; e < 2; ++e) {
            const int from = lane % 4 * 8 + e * 4;
            factor[e] = __shfl_sync(kFullMask, projection[tile].factor, from);
            constant[e] = __shfl_sync(kFullMask, projection[tile].constant, from);
        }
        for (int half = 0; half < 2; ++half) {
            float value[2];
            for (int e = 0; e < 2; ++e) {
                const float sum = sums[tile][half * 2 + e] + sums_small[tile][half * 2 + e];
                value[e] = (sum * factor[e] + constant[e]) * (present[half] * scale);
            }
            split(value[0], value[1], words[half][0][tile], words[half][1][tile]);
        }
    }
    for (int half = 0; half < 2; ++half) {
        for (int part = 0; part < 2; ++part) {  // channels 8t + 2 · first_tile to 3 further on
            uint32_t* row = tiles.mine[matrix][part][first_row + half * 8 + lane / 4];
            *reinterpret_cast<uint2*>(row + lane % 4 * 4 + first_tile) =
                make_uint2(words[half][part][0], words[half][part][1]);
        }
    }
}

// Writes the block's row s of b to every block of the cluster, and of a to those that have the i.
__device__ void hand_out(Tiles& tiles, int s) {
    const int piece = threadIdx.x % 4 * 4, n = threadIdx.x / 4 % kTile,
              part = threadIdx.x / 4 / kTile;
    static_assert(kThreads == 4 * kTile * 2);
    const uint4 b = *reinterpret_cast<const uint4*>(&tiles.mine[1][part][n][piece]);
    for (int rank = 0; rank < kCluster; ++rank) {
        uint32_t* to = &tiles.b[part][s * kTile + n][piece];
        *reinterpret_cast<uint4*>(cluster_pointer(to, rank)) = b;
    }
    const uint4 a = *reinterpret_cast<const uint4*>(&tiles.mine[0][part][n][piece]);
    for (int rank = n / kResidues; rank < kCluster; rank += kTile / kResidues) {
        uint32_t* to = &tiles.a[part][s * kResidues + n % kResidues][piece];
        *reinterpret_cast<uint4*>(cluster_pointer(to, rank)) = a;
    }
}

// A 16 × 16 operand (big, small) of a or b: rows from `row` on, h or k from 16·step on
template <int kRowsOf>
__device__ void load_operand(uint32_t (&operand)[2][4],
                             const uint32_t (&from)[2][kRowsOf][kHidden / 2 + 4], int row,
                             int step) {
    const int lane = threadIdx.x % kWarpSize;
    for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(operand[part], &from[part][row + lane % 16][step * 8 + lane / 16 * 4]);
    }
}

// out_weight[p][h][k] as mma's b for T, two p and one half of k a warp: [p][k / 8][h / 16][element]
__device__ void load_weight(float (&raw)[2][2][2][4], const float* out_weight, int first_p) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int at = 0; at < 32; ++at) {
        const int column = at / 8 % 2, step = at / 4 % 2, e = at % 4;
        const int p = first_p + warp / 2 * 2 + at / 16, k = warp % 2 * 16 + column * 8 + lane / 4;
        const int h = step * 16 + e / 2 * 8 + lane % 4 * 2 + e % 2;
        const bool valid = p < P && h < C && k < C;
        raw[at / 16][column][step][e] = valid ? out_weight[(int64_t(p) * C + h) * C + k] : 0;
    }
}

// The weights in two parts; returns the power of two that they are scaled by.
__device__ int split_weight(uint32_t (&weight)[2][2][2][2][2], const float (&raw)[2][2][2][4]) {
    float largest = 0;
#pragma unroll
    for (int at = 0; at < 32; ++at) {
        largest = fmaxf(largest, fabsf(raw[at / 16][at / 8 % 2][at / 4 % 2][at % 4]));
    }
    const int shift = shift_of(warp_max(largest));
#pragma unroll
    for (int at = 0; at < 16; ++at) {
        const int p = at / 8, column = at / 4 % 2, step = at / 2 % 2, e = at % 2;
        const float* pair = &raw[p][column][step][2 * e];
        split(pair[0] * power_of_two(shift), pair[1] * power_of_two(shift),
              weight[p][column][step][0][e], weight[p][column][step][1][e]);
    }
    return shift;
}

// sums[p][j / 16] = Σ_s Σ_k b[s,j,k] T[s,i,p,k], T = Σ_h a[s,i,h] out_weight[p,h,k], for two p and
// one half of k; mma's rows are j, its columns i. T goes from result to operand in registers: both
// have i in lane / 4 and k in lane % 4.
__device__ void contract(const Tiles& tiles, const uint32_t (&weight)[2][2][2][2][2],
                         float (&sums)[2][2][4]) {
    const int k_half = threadIdx.x / kWarpSize % 2;
#pragma unroll 1                                       // registers
    for (int pair = 0; pair < kCluster / 2; ++pair) {  // two rows s are one tile of (s,i)
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
                load_operand(b, tiles.b, (pair * 2 + s) * kTile + tile * 16, k_half);
                for (int p = 0; p < 2; ++p) multiply(sum[p], sum_small[p], b, operand[s][p]);
            }
            for (int at = 0; at < 8; ++at) {
                sums[at / 4][tile][at % 4] += sum[at / 4][at % 4] + sum_small[at / 4][at % 4];
            }
        }
    }
}

// 1 / max(1, Σ_s mask[s,i]) of the block's residues i, by one warp
__device__ void count_rows(const float* mask, float* reciprocal, int first_i, int N) {
    const int lane = threadIdx.x % kWarpSize, i = first_i + lane % kResidues;
    float count = 0;
    for (int s = lane / kResidues; s < S && i < N; s += kWarpSize / kResidues) {
        count += mask[int64_t(s) * N + i];
    }
    count += __shfl_xor_sync(kFullMask, count, 8);
    count += __shfl_xor_sync(kFullMask, count, 16);
    if (lane < kResidues) reciprocal[lane] = 1.0f / fmaxf(count, 1.0f);
}

// Each thread adds the halves of one pair and stores its channels p.
__device__ void store_pair(const Tiles& tiles, const float* out_bias, float* out, int64_t batch,
                           int first_i, int first_j, int first_p, int N) {
    static_assert(kThreads == kResidues * kTile);
    const int i = threadIdx.x / kTile, j = threadIdx.x % kTile;
    if (first_i + i >= N || first_j + j >= N) return;
    float* to = out + ((batch * N + first_i + i) * N + first_j + j) * P + first_p;
    alignas(16) float value[kOutputs];
    for (int p = 0; p < kOutputs; ++p) {
        const float sum = tiles.partial[0][p][i][j] + tiles.partial[1][p][i][j];
        value[p] = sum * tiles.reciprocal[i] + (first_p + p < P ? out_bias[first_p + p] : 0);
    }
    if (P % 4 == 0) {
        for (int p = 0; p < kOutputs && first_p + p < P; p += 4) store4(to + p, load4(value + p));
    } else {
        for (int p = 0; p < kOutputs && first_p + p < P; ++p) to[p] = value[p];
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    whole_operator_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                          const float* layer_norm_bias, const float* proj_a_weight,
                          const float* proj_a_bias, const float* proj_b_weight,
                          const float* proj_b_bias, const float* out_weight, const float* out_bias,
                          float* out, int N) {
    DYNAMIC_SHARED(Tiles, shared);
    Tiles& tiles = *shared;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, s = cluster_rank();
    const int p_tiles = ceil_div(P, kClusterOutputs), n_tiles = ceil_div(N, kTile);
    const int cluster = blockIdx.x / kCluster, tile = cluster / p_tiles;
    const int first_p = cluster % p_tiles * kClusterOutputs + s / (kTile / kResidues) * kOutputs;
    const int first_j = tile % n_tiles * kTile, tile_i = tile / n_tiles % n_tiles * kTile;
    const int first_i = tile_i + s % (kTile / kResidues) * kResidues;
    const int64_t batch = tile / n_tiles / n_tiles;
    msa += batch * S * N * D;
    mask += batch * S * N;

    float raw[2][2][2][4];
    load_weight(raw, out_weight, first_p);
    const bool is_a = warp < 4;
    project_row(tiles, msa, mask, is_a ? proj_a_weight : proj_b_weight,
                is_a ? proj_a_bias : proj_b_bias, layer_norm_weight, layer_norm_bias, s,
                is_a ? tile_i : first_j, N);
    __syncthreads();
    hand_out(tiles, s);
    uint32_t weight[2][2][2][2][2];  // [p][k / 8][h / 16][big, small]
    const int weight_shift = split_weight(weight, raw);
    if (warp == 0) count_rows(mask, tiles.reciprocal, first_i, N);
    cluster_sync();

    float sums[2][2][4] = {};
    contract(tiles, weight, sums);
    const int shift = shift_of(tiles, 0) + shift_of(tiles, 1) + weight_shift - kProductShift;
    for (int at = 0; at < 16; ++at) {
        const int p = at / 8, tile = at / 4 % 2, e = at % 4;
        const int i = lane % 4 * 2 + e % 2, j = tile * 16 + e / 2 * 8 + lane / 4;
        tiles.partial[warp % 2][warp / 2 * 2 + p][i][j] = scale_by(sums[p][tile][e], -shift);
    }
    __syncthreads();
    store_pair(tiles, out_bias, out, batch, first_i, first_j, first_p, N);
}

EXPORT cudaError_t whole_operator(const float* msa, const float* mask,
                                  const float* layer_norm_weight, const float* layer_norm_bias,
                                  const float* proj_a_weight, const float* proj_a_bias,
                                  const float* proj_b_weight, const float* proj_b_bias,
                                  const float* out_weight, const float* out_bias, float* out, int B,
                                  int N, cudaStream_t stream) {
    const int64_t tiles = int64_t(ceil_div(N, kTile)) * ceil_div(N, kTile);
    const int64_t blocks = B * tiles * ceil_div(P, kClusterOutputs) * kCluster;
    return LAUNCH_CLUSTER(whole_operator_kernel, dim3(blocks), dim3(kThreads), dim3(kCluster),
                          sizeof(Tiles), stream)(msa, mask, layer_norm_weight, layer_norm_bias,
                                                 proj_a_weight, proj_a_bias, proj_b_weight,
                                                 proj_b_bias, out_weight, out_bias, out, N);
}
