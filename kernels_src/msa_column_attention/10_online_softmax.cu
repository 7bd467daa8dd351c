// Stage 10: online softmax, fp32-accurate on tensor cores
// As 08 in three main launches (and three small ones that prepare weights and mask), but keys and
// values stream past the queries, with the softmax's maximum and sum kept up to date: any depth S,
// and no S² anywhere. All products go to mma.m16n8k16 on pairs of fp16 numbers (fp16_pairs.cuh): at
// twice TF32's rate three of them make 22 bits. LayerNorm's x̂ is split once a block and stays in
// shared memory while all four matrices pass. P goes from the score's registers into the next
// product's. Bytes: 48·B·S·N·D. Operations: as 03, three times, on tensor cores; B·N·H·S²
// exponentials. Peak: 16·B·S·N·D bytes (768 MiB at af2): q lives in the output until out_proj.
// Predicts at af2, with mma.sync at 450 TFLOP/s: 0.7 ms projections, 0.9 attention, 0.2 out_proj.
// Outcome: af2 2.42 ms; 2.51 before scores started at their key's bias (51 µs, 50 predicted) and
// copies of weights started late (33, 90 predicted). Seed 30.5 µs, of six launches.
// Shapes: any B, S, N; D ≤ 512; D/H = 8, 16, 24 … 128.
#include "msa_column_attention/pair_heads.cuh"
#include "msa_column_attention/pair_projections.cuh"

constexpr float kLog2E = 1.4426950408889634f;

// A block of the core takes kQueries queries past all keys of their head, kKeys at a time.
constexpr int kQueries = kCoreThreads / kWarpSize * kWarpQueries;
constexpr int kKeyHalves = kKeys * kHeadStride;
constexpr int kCoreBytes =
    sizeof(__half) * (kQueries * kHeadStride + 4 * kKeyHalves) + sizeof(float) * 2 * kKeys;
constexpr int kBlocks = kHeadDim == 16 || kHeadDim == 32 ? 3 : kHeadDim <= 64 ? 2 : 1;  // at a time
constexpr float kWeightBits = 12;  // softmax weights reach 2^12, so that small ones keep their bits

static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128 && D <= 512, "heads of 8 to 128 channels");

using Scores = float[kQueryTiles][kKeys / 8][4];
using Pairs = uint32_t[kQueryTiles][kKeys / 16][4];
using Rows = float[kQueryTiles][2];

// scores = q·k + key_bias for kKeys keys: sums that start at the bias need no instruction to add
// it. The small products come first: the tensor core truncates, which costs less while a sum is
// small.
__device__ void score(const Queries& queries, const __half* keys, const float* key_bias,
                      Scores& scores) {
    const int lane = threadIdx.x % kWarpSize;
    const __half* row = keys + (lane / 16 * 8 + lane % 8) * kHeadStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
        const float2 bias =
            *reinterpret_cast<const float2*>(key_bias + 8 * j + lane % 4 * 2);  // of two keys
        for (int i = 0; i < 4 * kQueryTiles; ++i) {
            scores[i / 4][j][i % 4] = i % 2 == 0 ? bias.x : bias.y;
        }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; j += 2) {
        uint32_t big[kSteps][4], small[4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            ldmatrix_x4(big[step], row + j * 8 * kHeadStride + step * 16);
            ldmatrix_x4(small, row + j * 8 * kHeadStride + step * 16 + kPadded);
            add_products(scores, j, kKeys / 8, queries.big, step, small);
            add_products(scores, j, kKeys / 8, queries.small, step, big[step]);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            add_products(scores, j, kKeys / 8, queries.big, step, big[step]);
        }
    }
}

// big + small = 2^(factor · (score - the highest so far)), laid out for the next product; decay is
// what the change of the highest does to all that was summed before.
__device__ void softmax(Queries& queries, const Scores& scores, float factor, Pairs& big,
                        Pairs& small, Rows& decay) {
    Rows highest;
    for (int i = 0; i < 2 * kQueryTiles; ++i) highest[i / 2][i % 2] = queries.highest[i / 2][i % 2];
#pragma unroll
    for (int i = 0; i < kKeys / 8 * 4 * kQueryTiles; ++i) {
        const int j = i / (4 * kQueryTiles), tile = i / 4 % kQueryTiles, half = i / 2 % 2;
        highest[tile][half] = fmaxf(highest[tile][half], scores[tile][j][i % 4]);
    }
    for (int i = 0; i < 2 * kQueryTiles; ++i) {
        float& top = highest[i / 2][i % 2];
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            top = fmaxf(top, __shfl_xor_sync(kFullMask, top, lanes));
        }
        const float finite = top == -INFINITY ? 0 : top;  // all masked so far: weights 0, not NaN
        decay[i / 2][i % 2] = exp2_approx((queries.highest[i / 2][i % 2] - finite) * factor);
        queries.totals[i / 2][i % 2] *= decay[i / 2][i % 2];
        queries.highest[i / 2][i % 2] = top;
        top = finite * factor - kWeightBits;
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
        for (int i = 0; i < 2 * kQueryTiles; ++i) {
            const int tile = i / 2, half = i % 2;  // row g or g + 8
            const float (&score)[4] = scores[tile][j];
            const float first = exp2_approx(fmaf(score[2 * half], factor, -highest[tile][half]));
            const float second =
                exp2_approx(fmaf(score[2 * half + 1], factor, -highest[tile][half]));
            queries.totals[tile][half] += first + second;
            split(first, second, big[tile][j / 2][j % 2 * 2 + half],
                  small[tile][j / 2][j % 2 * 2 + half]);
        }
    }
}

// sums = decay · sums + weights · v. The tile's own sum is made apart, small products first, and
// added with rounding.
__device__ void add_values(Queries& queries, const __half* values, const Pairs& big,
                           const Pairs& small, const Rows& decay) {
    constexpr int kColumns = kHeadDim / 8;
    const int lane = threadIdx.x % kWarpSize;
    const __half* row = values + lane % 16 * kHeadStride + lane / 16 * 8;
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
        float sums[kQueryTiles][2][4] = {};
        uint32_t big_v[kKeys / 16][4], small_v[4];
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            ldmatrix_x4_trans(big_v[step], row + step * 16 * kHeadStride + column * 8);
            ldmatrix_x4_trans(small_v, row + step * 16 * kHeadStride + column * 8 + kPadded);
            add_products(sums, 0, kColumns - column, big, step, small_v);
            add_products(sums, 0, kColumns - column, small, step, big_v[step]);
        }
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            add_products(sums, 0, kColumns - column, big, step, big_v[step]);
        }
#pragma unroll
        for (int i = 0; i < 8 * kQueryTiles; ++i) {
            if (column + i / 4 % 2 >= kColumns) continue;
            float& sum = queries.sums[i / 8][column + i / 4 % 2][i % 4];
            sum = fmaf(sum, decay[i / 8][i % 4 / 2], sums[i / 8][i / 4 % 2][i % 4]);
        }
    }
}

// A block kQueries queries of one head of one column. Keys and values arrive a tile ahead.
__global__ void __launch_bounds__(kCoreThreads, kBlocks)
    attention_kernel(__half* q, const __half* k, const __half* v, const float* g,
                     const float* key_bias, const float* scales, int S, int N) {
    DYNAMIC_SHARED(__half, shared);
    __half* keys = shared + kQueries * kHeadStride;  // two tiles
    __half* values = keys + 2 * kKeyHalves;          // two tiles
    float* biases = reinterpret_cast<float*>(values + 2 * kKeyHalves);
    const int query_tiles = ceil_div(S, kQueries), tiles = ceil_div(S, kKeys);
    const int column_head = blockIdx.x / query_tiles, column = column_head / H;
    const int head = column_head % H, first = blockIdx.x % query_tiles * kQueries;
    const int64_t row = int64_t(column / N) * S * N + column % N;  // of s 0 in msa
    const int64_t stride = int64_t(N) * D * 2;                     // halves from s to s + 1 in q
    __half* own = q + (row * H + head) * 2 * kHeadDim;             // the block's column and head
    k += int64_t(column_head) * S * 2 * kHeadDim;
    v += int64_t(column_head) * S * 2 * kHeadDim;
    key_bias += int64_t(column) * tiles * kKeys;

    const auto load = [=](int tile) {
        const int s = tile * kKeys, place = tile % 2;
        copy_head<kKeys>(keys + place * kKeyHalves, k + int64_t(s) * 2 * kHeadDim, 2 * kHeadDim,
                         S - s);
        copy_head<kKeys>(values + place * kKeyHalves, v + int64_t(s) * 2 * kHeadDim, 2 * kHeadDim,
                         S - s);
        const int key = threadIdx.x * 4;
        if (key < kKeys) copy_async_16(biases + place * kKeys + key, key_bias + s + key);
        copy_async_commit();
    };
    copy_head<kQueries>(shared, own + first * stride, stride, S - first);
    load(0);
    copy_async_wait<0>();
    __syncthreads();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    __half* rows = shared + warp * kWarpQueries * kHeadStride;
    Queries queries = {};
#pragma unroll
    for (int i = 0; i < kQueryTiles * kSteps; ++i) {
        const __half* at =
            rows + (i / kSteps * 16 + lane % 16) * kHeadStride + i % kSteps * 16 + lane / 16 * 8;
        ldmatrix_x4(queries.big[i / kSteps][i % kSteps], at);
        ldmatrix_x4(queries.small[i / kSteps][i % kSteps], at + kPadded);
    }
    for (int i = 0; i < 2 * kQueryTiles; ++i) queries.highest[i / 2][i % 2] = -INFINITY;
    const float factor = kLog2E / sqrtf(kHeadDim) / scales[head] / scales[H + head];
    for (int tile = 0; tile < tiles; ++tile) {
        if (tile + 1 < tiles) load(tile + 1);
        Scores scores;
        Pairs big, small;
        Rows decay;
        score(queries, keys + tile % 2 * kKeyHalves, biases + tile % 2 * kKeys, scores);
        softmax(queries, scores, factor, big, small, decay);
        add_values(queries, values + tile % 2 * kKeyHalves, big, small, decay);
        copy_async_wait<0>();
        __syncthreads();  // the next tile is there, and this one's place is free
    }
    store_queries(queries, g + (own - q) / 2, rows, own, stride, first + warp * kWarpQueries, S);
}

// workspace: 3·B·S·N·D floats for k, v and g; key_bias: B·N·(S filled up to a multiple of 32)
// floats; split_weights: 5·D² floats; factors: 10·D + 3·H floats. q lives in out until out_proj
// overwrites it.
EXPORT cudaError_t online_softmax(const float* msa, const float* mask,
                                  const float* layer_norm_weight, const float* layer_norm_bias,
                                  const float* query_weight, const float* key_weight,
                                  const float* value_weight, const float* gate_weight,
                                  const float* gate_bias, const float* out_weight,
                                  const float* out_bias, float* workspace, float* key_bias,
                                  float* split_weights, float* factors, float* out, int B, int S,
                                  int N, cudaStream_t stream) {
    const int64_t rows = int64_t(B) * S * N, columns = int64_t(B) * N;
    const unsigned row_blocks = ceil_div(rows, kTileRows);
    const unsigned key_blocks = ceil_div(columns * ceil_div(S, kKeys) * kKeys, kThreads);
    const unsigned core_blocks = columns * H * ceil_div(S, kQueries);
    __half* q = reinterpret_cast<__half*>(out);
    __half* k = reinterpret_cast<__half*>(workspace);
    __half* v = k + 2 * rows * D;
    float* g = workspace + 2 * rows * D;
    __half* big = reinterpret_cast<__half*>(split_weights);
    const Weights weights = {big, big + 5 * D * D, factors, factors + 5 * D, factors + 10 * D};
    cudaError_t error =
        prepare_weights(layer_norm_weight, layer_norm_bias, query_weight, key_weight, value_weight,
                        gate_weight, gate_bias, out_weight, out_bias, weights, stream);
    if (error) return error;
    error = LAUNCH(key_bias_kernel, dim3(key_blocks), dim3(kThreads), 0, stream)(mask, key_bias, S,
                                                                                 N, columns);
    if (error) return error;
    error = LAUNCH(projection_kernel, dim3(row_blocks), dim3(kThreads), kMultiplyBytes, stream)(
        msa, weights, q, k, v, g, rows, S, N);
    if (error) return error;
    error = LAUNCH(attention_kernel, dim3(core_blocks), dim3(kCoreThreads), kCoreBytes, stream)(
        q, k, v, g, key_bias, weights.scales, S, N);
    if (error) return error;
    return LAUNCH(output_kernel, dim3(row_blocks), dim3(kThreads), kMultiplyBytes, stream)(
        q, weights, out, rows);
}
