// Stage 13: two kernels that overlap
// Against 08 rows are projected once, not 16 times over, by a first kernel of small blocks that
// leaves them as the lanes of the second one's mma hold them: a block fetches its rows in a few
// bulk copies. Both launch early (hopper.cuh): while the first runs, the second's blocks fetch and
// split out_weight and count the mask, and then wait. Operations as in 08, but the projections'
// 16th part. Bytes from L2: 4·D·(16 + C) a row tile, then 4·(40·S·C + 8·C²) a block, at seed 72 KB.
// Predicts at seed, from samples of 08 (two products an eighth of them, loads and projections two
// thirds): 6.5 µs in a graph, 2.3 of it the first kernel, 3 what the second does after it.
// Outcome: 7.3. The second launched early takes 0.7 off 8.8, the first 0.8; before its blocks were
// kept one to a multiprocessor, two sat on each that the first left free, and it took 1.6 more.
// Shapes: S up to 32, D up to 64, C up to 32; all but B and N are compile-time constants.
#include "outer_product_mean/row_tiles.cuh"

#ifndef EARLY
#define EARLY 1  // 0: a kernel starts when the one before it has ended
#endif
constexpr int kOutputs = 8;              // p of a block
constexpr int kThreads = 8 * kWarpSize;  // a warp for 2 p and half of k
// More than half of what a multiprocessor has, so that no two blocks share one where the first
// kernel leaves it free.
constexpr int kSharedAtLeast = 120 * 1024;
static_assert(S <= 32, "a block holds its rows of a and b in shared memory");

struct Tiles {
    RowTile a[kRowPairs];
    RowTile b[S][kResiduesJ / 16];
    float partial[2][kOutputs][kResiduesI * (kResiduesJ + 4) + 1];  // of each half of k
    float reciprocal[kResiduesI];
    Barrier arrived[kRowPairs];
};

// out_weight of the warp's two p and half of k, its channels as row tiles have them. Returns the
// power of two that it is scaled by.
__device__ int load_weights(Weights& weight, const float* out_weight, int first_p, int k_half) {
    const int lane = threadIdx.x % kWarpSize, k = k_half * 16 + lane / 4 * 2;
    float raw[2][2][2][4];
#pragma unroll
    for (int at = 0; at < 16; ++at) {
        const int p = first_p + at / 8, step = at / 4 % 2, e = at % 4;
        const int h = channel_at(step * 2 + e / 2, lane % 4 * 2 + e % 2);
        const float* from = out_weight + (int64_t(p) * C + h) * C + k;
        const bool valid = p < P && h < C;
        if (C % 2 == 0) {
            const float2 pair = valid && k < C ? *reinterpret_cast<const float2*>(from) : float2{};
            raw[at / 8][0][step][e] = pair.x, raw[at / 8][1][step][e] = pair.y;
        } else {
            raw[at / 8][0][step][e] = valid && k < C ? from[0] : 0;
            raw[at / 8][1][step][e] = valid && k + 1 < C ? from[1] : 0;
        }
    }
    return split_weights(raw, weight);
}

__device__ void load_fragment(uint32_t (&fragment)[2][4], const RowTile& tile, int half) {
    for (int part = 0; part < 2; ++part) {
        reinterpret_cast<uint4&>(fragment[part]) =
            reinterpret_cast<const uint4&>(tile.lane[half][part][threadIdx.x % kWarpSize]);
    }
}

// Starts the copies of the block's rows, one pair of s after the other.
__device__ void copy_tiles(Tiles& tiles, const RowTile* a, const RowTile* b) {
    for (int pair = 0; pair < kRowPairs; ++pair) {
        const int rows = min(2, S - pair * 2);
        Barrier* arrived = &tiles.arrived[pair];
        barrier_arrive_expect(arrived, sizeof *tiles.a + rows * sizeof *tiles.b);
        copy_bulk(&tiles.a[pair], a + pair, sizeof *tiles.a, arrived);
        copy_bulk(&tiles.b[pair * 2], b + pair * 4, rows * sizeof *tiles.b, arrived);
    }
}

// out of the block from the sums of both halves of k.
__device__ void store_out(const Tiles& tiles, const float* out_bias, float* out, int first_i,
                          int first_j, int first_p, int N) {
    constexpr int kPiece = P % 4 == 0 ? 4 : 1;  // neighbouring p, stored together
    for (int at = threadIdx.x * kPiece; at < kResiduesI * kResiduesJ * kOutputs;
         at += kThreads * kPiece) {
        const int p = at % kOutputs, j = at / kOutputs % kResiduesJ, i = at / kOutputs / kResiduesJ;
        if (first_i + i >= N || first_j + j >= N || first_p + p >= P) continue;
        float value[kPiece];
        for (int e = 0; e < kPiece; ++e) {
            const int from = i * (kResiduesJ + 4) + j;
            const float sum = tiles.partial[0][p + e][from] + tiles.partial[1][p + e][from];
            value[e] = sum * tiles.reciprocal[i] + out_bias[first_p + p + e];
        }
        float* to = out + (int64_t(first_i + i) * N + first_j + j) * P + first_p + p;
        if constexpr (kPiece == 4) {
            store4(to, make_float4(value[0], value[1], value[2], value[3]));
        } else {
            *to = value[0];
        }
    }
}

__global__ void __launch_bounds__(kThreads)
    product_kernel(const RowTile* a, const RowTile* b, const int* shifts, const float* mask,
                   const float* out_weight, const float* out_bias, float* out, int N) {
    DYNAMIC_SHARED(Tiles, shared);
    Tiles& tiles = *shared;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, k_half = warp % 2;
    const int p_tiles = ceil_div(P, kOutputs), j_tiles = ceil_div(N, kResiduesJ);
    const int i_tiles = ceil_div(N, kResiduesI), block = blockIdx.x / p_tiles;
    const int first_p = blockIdx.x % p_tiles * kOutputs;
    const int j_tile = block % j_tiles, i_tile = block / j_tiles % i_tiles;
    const int first_i = i_tile * kResiduesI, first_j = j_tile * kResiduesJ;
    const int64_t batch = block / j_tiles / i_tiles;

    next_kernel_may_start();
    if (threadIdx.x < kRowPairs) barrier_init(&tiles.arrived[threadIdx.x], 1);
    if (threadIdx.x < kWarpSize) barrier_init_fence();
    if (threadIdx.x < kResiduesI) {
        const int i = first_i + threadIdx.x;
        float count = 0;
        for (int s = 0; s < S && i < N; ++s) count += mask[(batch * S + s) * N + i];
        tiles.reciprocal[threadIdx.x] = 1.0f / fmaxf(count, 1.0f);
    }
    Weights weight;
    const int weight_shift = load_weights(weight, out_weight, first_p + warp / 2 * 2, k_half);
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        copy_tiles(tiles, a + (batch * i_tiles + i_tile) * kRowPairs,
                   b + (batch * j_tiles + j_tile) * S * 2);
    }
    const int shift = shifts[0] + shifts[1] + weight_shift;

    float sums[2][kResiduesJ / 16][4] = {};
#pragma unroll 1  // it gains nothing
    for (int pair = 0; pair < kRowPairs; ++pair) {
        barrier_wait(&tiles.arrived[pair], 0);
        uint32_t fragments[2][2][4], operand[2][2][2][2];
        for (int half = 0; half < 2; ++half) load_fragment(fragments[half], tiles.a[pair], half);
        contract_channels(fragments, weight, operand);
        const auto load_b = [&](uint32_t (&fragment)[2][4], int s, int tile) {
            load_fragment(fragment, tiles.b[pair * 2 + s][tile], k_half);
        };
        contract_rows(load_b, min(2, S - pair * 2), operand, sums);
    }
    for (int at = 0; at < 16; ++at) {
        const int p = at / 8, tile = at / 4 % 2, e = at % 4;
        const int i = lane % 4 * 2 + e % 2, j = tile * 16 + e / 2 * 8 + lane / 4;
        tiles.partial[k_half][warp / 2 * 2 + p][i * (kResiduesJ + 4) + j] =
            scale_by(sums[p][tile][e], -shift);
    }
    __syncthreads();
    store_out(tiles, out_bias, out + batch * N * N * P, first_i, first_j, first_p, N);
}

// a (B,⌈N/8⌉,⌈S/2⌉,512), b (B,⌈N/32⌉,S,1024) and shifts (2): what the second kernel gets.
EXPORT cudaError_t overlapping_kernels(const float* msa, const float* mask,
                                       const float* layer_norm_weight, const float* layer_norm_bias,
                                       const float* proj_a_weight, const float* proj_a_bias,
                                       const float* proj_b_weight, const float* proj_b_bias,
                                       const float* out_weight, const float* out_bias, float* a,
                                       float* b, float* shifts, float* out, int B, int N,
                                       cudaStream_t stream) {
    const int64_t i_tiles = int64_t(B) * ceil_div(N, kResiduesI);
    const int64_t j_tiles = ceil_div(N, kResiduesJ);
    const int64_t a_tiles = i_tiles * kRowPairs, b_tiles = B * j_tiles * S * 2;
    RowTile *a_parts = reinterpret_cast<RowTile*>(a), *b_parts = reinterpret_cast<RowTile*>(b);
    int* powers = reinterpret_cast<int*>(shifts);
    if (cudaError_t error =
            LAUNCH(project_kernel, dim3(a_tiles + b_tiles), dim3(kProjectThreads), 0, stream)
                .early(EARLY)(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight,
                              proj_a_bias, proj_b_weight, proj_b_bias, a_parts, b_parts, powers, N,
                              a_tiles)) {
        return error;
    }
    const int64_t blocks = i_tiles * j_tiles * ceil_div(P, kOutputs);
    return LAUNCH(product_kernel, dim3(blocks), dim3(kThreads),
                  max(int(sizeof(Tiles)), kSharedAtLeast), stream)
        .early(EARLY)(a_parts, b_parts, powers, mask, out_weight, out_bias, out, N);
}
