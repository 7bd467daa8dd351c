// Stage 08: the whole operator in one launch
// Against 07 nothing is left to another kernel. A cluster of 8 blocks has 32 i × 32 j × 16 p of the
// output; block s projects row s of msa for these i and j and writes it into the others' shared
// memory, then each makes 8 i × 32 j × 8 p. With few rows s it is cheaper not to form outer: T =
// Σ_h a[s,i,h] out_weight[p,h,k] first, then Σ_{s,k} T b, 4·B·S·N·C·P·(C·⌈N/32⌉ + N) operations, at
// seed 268 M where outer and out_proj take 570 M. All products run on tensor cores, on operands in
// two parts (split_operands.cuh). Bytes from L2: 4·(64·D + 8·C² + 2·C·D) a block, at seed 64 KB.
// Without clusters, each block projecting all rows that it needs, it took 12.1 µs: 20,000 cycles,
// a third of them issuing, most of that LayerNorm and projections done 16 times over. Predicts at
// seed 6 µs. Shapes: S up to 8, D up to 64, C up to 32; all but B and N are compile-time
// constants.
#include "hopper.cuh"
#include "outer_product_mean/row_operands.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kCluster = 8;   // blocks; block s projects row s
constexpr int kTile = 32;     // i and j of a cluster
constexpr int kResidues = 8;  // i of a block
constexpr int kGroups = kTile / kResidues;
constexpr int kOutputs = 8;  // p of a block
constexpr int kClusterOutputs = kOutputs * kCluster / kGroups;
constexpr int kWidth = 64;                     // D, padded with zeros
constexpr int kWidthWords = kWidth / 2 + 4;    // 144-byte rows: no bank conflicts
constexpr int kHiddenWords = kHidden / 2 + 4;  // 80-byte rows: likewise
constexpr int kPairPitch = kTile + 4, kOutputPitch = kResidues * kPairPitch + 4;
constexpr int kNarrower =
    10;  // a and out_weight stay below 2^5: T, the sum of 32 products, below 2^15
static_assert(S <= kCluster && D <= kWidth && C <= kHidden);
static_assert(2 * kTile == 4 * kWarps && 2 * kHidden == 4 * kWarps, "four rows each a warp");

// Operands are [big, small][row][pairs of values].
struct alignas(16) Tiles {
    uint32_t x[2][2 * kTile][kWidthWords];                 // row s normalised: the i, then the j
    uint32_t projection[2][2 * kHidden][kWidthWords];      // proj_a's channels, then proj_b's
    uint32_t mine[2][2][kTile][kHiddenWords];              // a and b of row s
    uint32_t a[2][kCluster * kResidues][kHiddenWords];     // of the block's i, rows (s,i)
    uint32_t b[2][kCluster * kTile][kHiddenWords];         // rows (s,j)
    uint32_t weight[2][kOutputs * kHidden][kHiddenWords];  // out_weight, rows (p,h)
    float partial[4][kOutputs * kOutputPitch];             // out [p][i][j] by halves of s and of k
    float2 channel[2 * kHidden];                           // a sum's factor, and what is added then
    float present[2 * kTile];                              // the mask
    float bound[kWarps];                                   // of |a|, |b|, four channels each
    float reciprocal[kResidues];
    int shift[2], weight_shift[kOutputs][2];  // powers of two: of a and b; for each half of k
};
static_assert(sizeof(Tiles::x) % 16 == 0 && sizeof(Tiles::mine) % 16 == 0);

// x = LayerNorm(msa)·2^power of a row of msa, a lane's four d
__device__ void store_x(Tiles& tiles, int row, float4 v, float4 scale, float4 shift, int power) {
    const int d = threadIdx.x % 16 * 4;
    const float mean = row_sum(sum_of(v)) / D;
    v = make_float4(d < D ? v.x - mean : 0, d + 1 < D ? v.y - mean : 0, d + 2 < D ? v.z - mean : 0,
                    d + 3 < D ? v.w - mean : 0);
    const float inverse = rsqrtf(row_sum(sum_of(product(v, v))) / D + kEpsilon);
    v = product(scaled(v, inverse), scale);
    v = make_float4(v.x + shift.x, v.y + shift.y, v.z + shift.z, v.w + shift.w);
    store_four(tiles.x, row, d, scaled(v, power_of_two(power)));
}

// The power of two for a (or b) with the largest |a_h| ≤ ‖x‖ ‖weight_h‖ + |bias_h|, by Cauchy and
// Schwarz: ‖x‖ ≤ √D (|scale| + |shift|), ‖weight_h‖ ≤ √D |weight|, each |·| the largest element.
__device__ int shift_of(const Tiles& tiles, int matrix) {
    float bound = 0;
    for (int w = 0; w < kWarps / 2; ++w) bound = fmaxf(bound, tiles.bound[matrix * kWarps / 2 + w]);
    return shift_of(bound) - (matrix == 0 ? kNarrower : 0);
}

// a (warps 0 to 7) or b of row s, 16 residues by 8 channels a warp: `mine`
__device__ void project(Tiles& tiles) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int matrix = warp / 8, channel = warp / 2 % 4 * 8, residue = warp % 2 * 16;
    float sums[2][4] = {};  // of even and of odd steps: shorter chains of dependent mma
    for (int pair = 0; pair < ceil_div(kSteps, 2); ++pair) {
        uint32_t weight[2][4];
        for (int part = 0; part < 2; ++part) {
            ldmatrix_x4(weight[part], &tiles.projection[part][matrix * kHidden + channel + lane % 8]
                                                       [pair * 16 + lane / 8 * 4]);
        }
        for (int step = 0; step < 2; ++step) {
            uint32_t x[2][4];
            load_rows(x, tiles.x, matrix * kTile + residue, pair * 2 + step);
            multiply(sums[step], x, weight[0] + 2 * step, weight[1] + 2 * step);
        }
    }
    const int power = shift_of(tiles, matrix);
    if (threadIdx.x % 256 == 0) tiles.shift[matrix] = power;
    const float scale = power_of_two(power);
    const float2* channels = &tiles.channel[matrix * kHidden + channel + lane % 4 * 2];
    for (int half = 0; half < 2; ++half) {
        const int row = residue + half * 8 + lane / 4;
        const float by = tiles.present[matrix * kTile + row] * scale;
        float value[2];
        for (int e = 0; e < 2; ++e) {
            const float sum = sums[0][half * 2 + e] + sums[1][half * 2 + e];
            value[e] = (sum * channels[e].x + channels[e].y) * by;
        }
        const int at = channel / 2 + lane % 4;
        split(value[0], value[1], tiles.mine[matrix][0][row][at], tiles.mine[matrix][1][row][at]);
    }
}

// Writes row s of b to every block of the cluster, and of a to those that have the i.
__device__ void hand_out(Tiles& tiles, int s) {
    const int piece = threadIdx.x % 4 * 4, n = threadIdx.x / 4 % kTile;
    const int part = threadIdx.x / 128 % 2, turn = threadIdx.x / 256;
    const uint4 b = *reinterpret_cast<const uint4*>(&tiles.mine[1][part][n][piece]);
#pragma unroll
    for (int rank = turn; rank < kCluster; rank += 2) {
        uint32_t* to = &tiles.b[part][s * kTile + n][piece];
        *reinterpret_cast<uint4*>(cluster_pointer(to, rank)) = b;
    }
    uint32_t* to = &tiles.a[part][s * kResidues + n % kResidues][piece];
    *reinterpret_cast<uint4*>(cluster_pointer(to, n / kResidues + turn * kGroups)) =
        *reinterpret_cast<const uint4*>(&tiles.mine[0][part][n][piece]);
    static_assert(kThreads == 512 && kCluster == 2 * kGroups);
}

// sums[p][j / 16] = Σ_s Σ_k b[s,j,k] T[s,i,p,k], T = Σ_h a[s,i,h] out_weight[p,h,k], for two p,
// four s and one half of k; mma's rows are j, its columns i. T goes from result to operand in
// registers: both have i in lane / 4 and k in lane % 4.
__device__ void contract(const Tiles& tiles, float (&sums)[2][2][4]) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int k_half = warp % 2, first_p = warp / 2 % 4 * 2, s_half = warp / 8;
    uint32_t weight[2][2][2][4];  // [p][k / 8][big, small], 32 h
    for (int at = 0; at < 8; ++at) {
        const int p = at / 4, column = at / 2 % 2, part = at % 2;
        ldmatrix_x4_trans(
            weight[p][column][part],
            &tiles.weight[part][(first_p + p) * kHidden + lane][k_half * 8 + column * 4]);
    }
#pragma unroll 1
    for (int pair = s_half * 2; pair < s_half * 2 + 2; ++pair) {  // two s are one tile of (s,i)
        float t[2][2][4] = {};
        for (int step = 0; step < 2; ++step) {
            uint32_t a[2][4];
            load_rows(a, tiles.a, pair * 16, step);
            for (int at = 0; at < 4; ++at) {
                const auto& w = weight[at / 2][at % 2];
                multiply(t[at / 2][at % 2], a, w[0] + 2 * step, w[1] + 2 * step);
            }
        }
        uint32_t operand[2][2][2][2];  // [s][p][big, small][k / 8]
        for (int at = 0; at < 8; ++at) {
            const int s = at / 4, p = at / 2 % 2, column = at % 2;
            const float* value = &t[p][column][2 * s];
            split(value[0], value[1], operand[s][p][0][column], operand[s][p][1][column]);
        }
        for (int tile = 0; tile < 2; ++tile) {
            float sum[2][4] = {};
            for (int s = 0; s < 2; ++s) {
                uint32_t b[2][4];
                load_rows(b, tiles.b, (pair * 2 + s) * kTile + tile * 16, k_half);
                for (int p = 0; p < 2; ++p) {
                    multiply(sum[p], b, operand[s][p][0], operand[s][p][1]);
                }
            }
            for (int at = 0; at < 8; ++at) sums[at / 4][tile][at % 4] += sum[at / 4][at % 4];
        }
    }
}

// 1 / max(1, Σ_s mask[s,i]) of the block's residues i, by one warp
__device__ void count_rows(const float* mask, float* reciprocal, int first_i, int N) {
    const int lane = threadIdx.x % kWarpSize, i = first_i + lane % kResidues;
    float count = 0;
#pragma unroll
    for (int first_s = 0; first_s < S; first_s += kWarpSize / kResidues) {
        const int s = first_s + lane / kResidues;
        if (s < S && i < N) count += mask[int64_t(s) * N + i];
    }
    count += __shfl_xor_sync(kFullMask, count, 8);
    count += __shfl_xor_sync(kFullMask, count, 16);
    if (lane < kResidues) reciprocal[lane] = 1.0f / fmaxf(count, 1.0f);
}

// A thread adds the four parts of one pair's sums for four p and stores them.
__device__ void store_out(const Tiles& tiles, const float* out_bias, float* out, int64_t first_pair,
                          int first_i, int first_j, int first_p, int N) {
    const int quad = threadIdx.x % 2 * 4, j = threadIdx.x / 2 % kTile, i = threadIdx.x / 2 / kTile;
    if (first_i + i >= N || first_j + j >= N) return;
    float value[4];
    for (int e = 0; e < 4; ++e) {
        float sum = 0;
        for (int part = 0; part < 4; ++part) {
            sum += tiles.partial[part][(quad + e) * kOutputPitch + i * kPairPitch + j];
        }
        const int p = first_p + quad + e;
        value[e] = sum * tiles.reciprocal[i] + (p < P ? out_bias[p] : 0);
    }
    float* to = out + (first_pair + int64_t(i) * N + j) * P + first_p + quad;
    if (P % 4 == 0) {
        if (first_p + quad < P) store4(to, make_float4(value[0], value[1], value[2], value[3]));
    } else {
        for (int e = 0; e < 4 && first_p + quad + e < P; ++e) to[e] = value[e];
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
    const int first_p = cluster % p_tiles * kClusterOutputs + s / kGroups * kOutputs;
    const int first_j = tile % n_tiles * kTile, tile_i = tile / n_tiles % n_tiles * kTile;
    const int first_i = tile_i + s % kGroups * kResidues;
    const int64_t batch = tile / n_tiles / n_tiles;
    mask += batch * S * N;

    // All loads first: two rows of msa, two of the projections and four of out_weight at a time
    const int matrix = warp / 8, first_n = matrix == 0 ? tile_i : first_j, d = lane % 16 * 4;
    const float* proj_weight = matrix == 0 ? proj_a_weight : proj_b_weight;
    const float* proj_bias = matrix == 0 ? proj_a_bias : proj_b_bias;
    float4 x[2], w[2], out_row[4];
    float bias[2], present[2];
    for (int turn = 0; turn < 2; ++turn) {
        const int at = warp % 8 * 4 + turn * 2 + lane / 16, n = first_n + at, h = at;
        const bool valid = s < S && n < N;
        const int64_t row = valid ? int64_t(s) * N + n : 0;
        x[turn] = load_four<D>(msa + (batch * S * N + row) * D, d, valid);
        w[turn] = load_four<D>(proj_weight + h * D, d, h < C);
        bias[turn] = h < C ? proj_bias[h] : 0;
        present[turn] = valid ? mask[row] : 0;
    }
    const float4 scale = load_four<D>(layer_norm_weight, d, true);
    const float4 shift = load_four<D>(layer_norm_bias, d, true);
    const int out_p = first_p + warp / 2, k = warp % 2 * 16 + lane % 4 * 4;
    for (int turn = 0; turn < 4; ++turn) {
        const int h = turn * 8 + lane / 4;
        out_row[turn] =
            load_four<C>(out_weight + (int64_t(out_p) * C + h) * C, k, out_p < P && h < C);
    }
    if (warp == 0) count_rows(mask, tiles.reciprocal, first_i, N);

    const float x_most = row_max(largest_of(scale)) + row_max(largest_of(shift));
    const float w_most = warp_max(fmaxf(largest_of(w[0]), largest_of(w[1])));
    const float bias_most = warp_max(fmaxf(fabsf(bias[0]), fabsf(bias[1])));
    const int x_power = shift_of(x_most * sqrtf(float(D))), w_power = shift_of(w_most);
    for (int turn = 0; turn < 2; ++turn) {
        const int row = warp * 4 + turn * 2 + lane / 16;
        store_x(tiles, row, x[turn], scale, shift, x_power);
        store_four(tiles.projection, row, d, scaled(w[turn], power_of_two(w_power)));
        if (lane % 16 == 0) {
            tiles.channel[row] = make_float2(scale_by(1, -x_power - w_power), bias[turn]);
            tiles.present[row] = present[turn];
        }
    }
    if (lane == 0) tiles.bound[warp] = D * x_most * w_most + bias_most;
    cluster_sync();  // all that is there, and the other blocks run
    project(tiles);
    __syncthreads();
    hand_out(tiles, s);
    {
        float largest = 0;
        for (int turn = 0; turn < 4; ++turn) largest = fmaxf(largest, largest_of(out_row[turn]));
        const int power = shift_of(warp_max(largest)) - kNarrower;
        if (lane == 0) tiles.weight_shift[warp / 2][warp % 2] = power;
        for (int turn = 0; turn < 4; ++turn) {
            store_four(tiles.weight, warp / 2 * kHidden + turn * 8 + lane / 4, k,
                       scaled(out_row[turn], power_of_two(power)));
        }
    }
    cluster_sync();

    float sums[2][2][4] = {};
    contract(tiles, sums);
    const int own_p = warp / 2 % 4 * 2, row = lane % 4 * 2 * kPairPitch + lane / 4;
    float* partial = tiles.partial[warp / 8 * 2 + warp % 2] + own_p * kOutputPitch + row;
    int power[2];
    for (int p = 0; p < 2; ++p) {
        power[p] = -tiles.shift[0] - tiles.shift[1] - tiles.weight_shift[own_p + p][warp % 2];
    }
    for (int at = 0; at < 16; ++at) {
        const int p = at / 8, i = at % 2, j = at / 4 % 2 * 16 + at / 2 % 2 * 8;
        partial[p * kOutputPitch + i * kPairPitch + j] =
            scale_by(sums[p][at / 4 % 2][at % 4], power[p]);
    }
    __syncthreads();
    store_out(tiles, out_bias, out, (batch * N + first_i) * N + first_j, first_i, first_j, first_p,
              N);
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
