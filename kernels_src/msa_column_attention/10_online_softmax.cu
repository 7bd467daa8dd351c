// Stage 10: online softmax, fp32-accurate on tensor cores
// As 08 in three main launches (and three small ones that prepare weights and mask), but keys and
// values stream past the queries, with the softmax's maximum and sum kept up to date: any depth S,
// and no S² anywhere. All products go to mma.m16n8k16 on pairs of fp16 numbers (fp16_pairs.cuh): at
// twice TF32's rate three of them make 22 bits. LayerNorm's x̂ is split once a block and stays in
// shared memory while all four matrices pass. P goes from the score's registers into the next
// product's.
// Bytes: 48·B·S·N·D. Operations: as 03, three times, on tensor cores; B·N·H·S² exponentials.
// Peak: 20·B·S·N·D bytes and little else (960 MiB at af2), since q lives in the output until
// out_proj.
// Predicts at af2, with mma.sync at 450 TFLOP/s: 0.7 ms projections, 0.9 attention, 0.2 out_proj.
// Shapes: any B, S, N; D ≤ 512; D/H = 8, 16, 24 … 128.
#include "msa_column_attention/fp16_pairs.cuh"

constexpr float kEpsilon = 1e-5f;
constexpr float kLog2E = 1.4426950408889634f;

// attention: a warp takes its queries past all keys of the head, kKeys at a time
constexpr int kCoreThreads = 128;
constexpr int kQueryTiles = kHeadDim <= 32 ? 2 : 1;  // 16 queries each, of a warp
constexpr int kWarpQueries = 16 * kQueryTiles;
constexpr int kQueries = kCoreThreads / kWarpSize * kWarpQueries;
constexpr int kKeys = kHeadDim <= 64 ? 32 : 16;
constexpr int kSteps = ceil_div(kHeadDim, 16);  // mma steps over a head's channels,
constexpr int kPadded = 16 * kSteps;            // the last one filled up by zeros
constexpr int kHeadStride = 2 * kPadded + 8;    // big | small of one row
constexpr int kKeyHalves = kKeys * kHeadStride;
constexpr int kCoreBytes =
    sizeof(__half) * (kQueries * kHeadStride + 4 * kKeyHalves) + sizeof(float) * 2 * kKeys;
constexpr float kWeightBits = 12;  // softmax weights reach 2^12, so that small ones keep their bits

constexpr int kBlocks = kHeadDim == 16 || kHeadDim == 32 ? 3 : kHeadDim <= 64 ? 2 : 1;  // at a time

static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128 && D <= 512, "heads of 8 to 128 channels");

// key_bias[b][n][s] = 0, or -∞ for masked keys and for those that fill up the last tile
__global__ void __launch_bounds__(kThreads)
    key_bias_kernel(const float* mask, float* key_bias, int S, int N, int64_t columns) {
    const int padded = ceil_div(S, kKeys) * kKeys;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t column = i % columns, s = i / columns;
    if (s >= padded) return;
    const bool keep = s < S && mask[(column / N * S + s) * N + column % N] != 0;
    key_bias[column * padded + s] = keep ? 0 : -INFINITY;
}

// x̂ = (x - mean) / deviation of the block's rows as pairs, four rows of a warp under way together
__device__ void normalise(const float* msa, int64_t first, int64_t rows, __half* x) {
    constexpr int kPieces = ceil_div(D, 4 * kWarpSize), kTogether = 4;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int r0 = warp * kTogether; r0 < kTileRows; r0 += kThreads / kWarpSize * kTogether) {
        float4 u[kTogether][kPieces];
        for (int i = 0; i < kTogether * kPieces; ++i) {
            const int64_t r = min(first + r0 + i / kPieces, rows - 1);
            const int c = 4 * (lane + i % kPieces * kWarpSize);
            u[i / kPieces][i % kPieces] = c < D ? load4(msa + r * D + c) : make_float4(0, 0, 0, 0);
        }
        for (int r = 0; r < kTogether; ++r) {
            float mean = 0, variance = 0;
            for (const float4& v : u[r]) mean += v.x + v.y + v.z + v.w;
            mean = warp_sum(mean) / D;
            for (int i = 0; i < kPieces; ++i) {
                float4& v = u[r][i];
                if (4 * (lane + i * kWarpSize) >= D) continue;
                v = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
                variance += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
            const float inverse = rsqrtf(warp_sum(variance) / D + kEpsilon);
            for (int i = 0; i < kPieces; ++i) {
                const int c = 4 * (lane + i * kWarpSize);
                if (c >= kChunks * kDepth) continue;  // zeros from D to there
                const float4 v = u[r][i];
                uint2 big, small;
                split(v.x * inverse, v.y * inverse, big.x, small.x);
                split(v.z * inverse, v.w * inverse, big.y, small.y);
                *reinterpret_cast<uint2*>(x + (r0 + r) * kXStride + c) = big;
                *reinterpret_cast<uint2*>(x + kXHalves + (r0 + r) * kXStride + c) = small;
            }
        }
    }
}

// A row of a head is its big values and then its small ones: q as [b][s][n][head] rows, k and v as
// [b][n][head][s]; g is laid out as msa.
__global__ void __launch_bounds__(kThreads, 1)
    projection_kernel(const float* msa, Weights weights, __half* q, __half* k, __half* v, float* g,
                      int64_t rows, int S, int N) {
    DYNAMIC_SHARED(__half, x);
    SHARED(int64_t, places, [kTileRows]);  // of head 0's row in k and v
    const int64_t first = int64_t(blockIdx.x) * kTileRows;
    for (int r = threadIdx.x; r < kTileRows; r += kThreads) {
        const int64_t n = (first + r) % N, s = (first + r) / N % S, b = (first + r) / N / S;
        places[r] = (b * N + n) * H * S + s;
    }
    normalise(msa, first, rows, x);
    const auto store = [&](int r, int output, const float (&y)[8]) {
        if (first + r >= rows) return;
        const int m = output / D, e = output % D, head = e / kHeadDim, c = e % kHeadDim;
        if (m == 3) {
            float* to = g + (first + r) * D + e;
            store4(to, make_float4(y[0], y[1], y[2], y[3]));
            store4(to + 4, make_float4(y[4], y[5], y[6], y[7]));
            return;
        }
        uint4 big, small;
        split(y[0], y[1], big.x, small.x);
        split(y[2], y[3], big.y, small.y);
        split(y[4], y[5], big.z, small.z);
        split(y[6], y[7], big.w, small.w);
        const int64_t row = m == 0 ? (first + r) * H + head : places[r] + int64_t(head) * S;
        __half* to = (m == 0 ? q : m == 1 ? k : v) + row * 2 * kHeadDim + c;
        *reinterpret_cast<uint4*>(to) = big;
        *reinterpret_cast<uint4*>(to + kHeadDim) = small;
    };
    multiply<4 * D>(weights, 0, x, [](int) {}, store);
}

// out = gated · out_weightᵀ + out_bias, in gated's place: a block has read its rows before it
// writes the first.
__global__ void __launch_bounds__(kThreads, 1)
    output_kernel(const __half* gated, Weights weights, float* out, int64_t rows) {
    DYNAMIC_SHARED(__half, x);
    const int64_t first = int64_t(blockIdx.x) * kTileRows;
    const auto load = [=](int chunk) {
#pragma unroll
        for (int piece = 0; piece < kTileRows * kDepth / 8; piece += kThreads) {  // of 16 bytes
            const int r = (piece + threadIdx.x) / (kDepth / 8);
            const int c = chunk * kDepth + threadIdx.x % (kDepth / 8) * 8;
            const bool valid = first + r < rows && c < D;
            const int64_t from = ((first + r) * H + c / kHeadDim) * 2 * kHeadDim + c % kHeadDim;
            copy_async_16(x + r * kXStride + c, gated + (valid ? from : 0), valid);
            copy_async_16(x + kXHalves + r * kXStride + c, gated + (valid ? from + kHeadDim : 0),
                          valid);
        }
    };
    const auto store = [=](int r, int e, const float (&y)[8]) {
        if (first + r >= rows) return;
        float* to = out + (first + r) * D + e;
        store4(to, make_float4(y[0], y[1], y[2], y[3]));
        store4(to + 4, make_float4(y[4], y[5], y[6], y[7]));
    };
    multiply<D>(weights, 4 * D, x, load, store);
}

// Starts the copy of kRows rows of a head, those past the first `rows` as zeros; `stride` halves
// lie from row to row.
template <int kRows>
__device__ void copy_head(__half* to, const __half* from, int64_t stride, int rows) {
    constexpr int kPieces = kRows * kPadded / 4;  // of 16 bytes
#pragma unroll
    for (int first = 0; first < kPieces; first += kCoreThreads) {
        const int i = first + threadIdx.x;
        const int row = i / (kPadded / 4), part = i / (kPadded / 8) % 2, c = i % (kPadded / 8) * 8;
        const bool valid = row < rows && c < kHeadDim;
        if (kPieces % kCoreThreads == 0 || i < kPieces) {
            copy_async_16(to + row * kHeadStride + part * kPadded + c,
                          from + (valid ? row * stride + part * kHeadDim + c : 0), valid);
        }
    }
}

// A warp's queries between key tiles; lane (g, t) has rows g and g + 8 of each 16-query tile.
struct Queries {
    uint32_t big[kQueryTiles][kSteps][4], small[kQueryTiles][kSteps][4];
    float sums[kQueryTiles][kHeadDim / 8][4];               // Σ weight · v
    float highest[kQueryTiles][2], totals[kQueryTiles][2];  // score, and this lane's Σ weight
};
using Scores = float[kQueryTiles][kKeys / 8][4];
using Pairs = uint32_t[kQueryTiles][kKeys / 16][4];
using Rows = float[kQueryTiles][2];

// d += a · (columns 8·half … of b, 16 columns from ldmatrix), for every query tile and both halves
template <int kColumns, int kASteps>
__device__ void add_products(float (&d)[kQueryTiles][kColumns][4], int first_column, int end_column,
                             const uint32_t (&a)[kQueryTiles][kASteps][4], int step,
                             const uint32_t (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2 * kQueryTiles; ++i) {
        const int half = i % 2;
        if (first_column + half >= end_column) continue;
        const uint32_t columns[2] = {b[2 * half], b[2 * half + 1]};
        mma_m16n8k16_fp16(d[i / 2][first_column + half], a[i / 2][step], columns);
    }
}

// scores = q·k for kKeys keys. The small products come first: the tensor core truncates, which
// costs less while a sum is small.
__device__ void score(const Queries& queries, const __half* keys, Scores& scores) {
    const int lane = threadIdx.x % kWarpSize;
    const __half* row = keys + (lane / 16 * 8 + lane % 8) * kHeadStride + lane / 8 % 2 * 8;
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

// big + small = 2^(score · factor + key_bias - the highest so far), laid out for the next product;
// decay is what the change of the highest does to all that was summed before.
__device__ void softmax(Queries& queries, Scores& scores, float factor, const float* key_bias,
                        Pairs& big, Pairs& small, Rows& decay) {
    Rows highest;
    for (int i = 0; i < 2 * kQueryTiles; ++i) highest[i / 2][i % 2] = queries.highest[i / 2][i % 2];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
        const float2 bias =
            *reinterpret_cast<const float2*>(key_bias + 8 * j + threadIdx.x % 4 * 2);
        for (int i = 0; i < 4 * kQueryTiles; ++i) {
            float& x = scores[i / 4][j][i % 4];
            x = fmaf(x, factor, i % 2 == 0 ? bias.x : bias.y);
            highest[i / 4][i / 2 % 2] = fmaxf(highest[i / 4][i / 2 % 2], x);
        }
    }
    for (int i = 0; i < 2 * kQueryTiles; ++i) {
        float& top = highest[i / 2][i % 2];
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            top = fmaxf(top, __shfl_xor_sync(kFullMask, top, lanes));
        }
        const float finite = top == -INFINITY ? 0 : top;  // all masked so far: weights 0, not NaN
        decay[i / 2][i % 2] = exp2_approx(queries.highest[i / 2][i % 2] - finite);
        queries.totals[i / 2][i % 2] *= decay[i / 2][i % 2];
        queries.highest[i / 2][i % 2] = top;
        top = finite - kWeightBits;
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
        for (int i = 0; i < 2 * kQueryTiles; ++i) {
            const int tile = i / 2, half = i % 2;  // row g or g + 8
            const float first = exp2_approx(scores[tile][j][2 * half] - highest[tile][half]);
            const float second = exp2_approx(scores[tile][j][2 * half + 1] - highest[tile][half]);
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

// gated = σ(g) ∘ sums / totals in q's place and form, by way of the warp's own rows in shared
// memory
__device__ void store_queries(Queries& queries, const float* g, __half* rows, __half* gated,
                              int64_t stride, int first, int S) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < 2 * kQueryTiles; ++i) {
        const int row = i * 8 + lane / 4;
        float total = queries.totals[i / 2][i % 2];
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            total += __shfl_xor_sync(kFullMask, total, lanes);
        }
        const float inverse = 1 / total;  // every key masked: 0 · 1/0 = NaN, as it must be
        const float* gate = g + min(first + row, S - 1) * (stride / 2) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
            float y[2];
            for (int e = 0; e < 2; ++e) {
                y[e] = queries.sums[i / 2][j][i % 2 * 2 + e] * inverse;
                y[e] *= __fdividef(1.0f, 1.0f + expf(-gate[8 * j + e]));
            }
            uint32_t big, small;
            split(y[0], y[1], big, small);
            __half* to = rows + row * kHeadStride + 8 * j + lane % 4 * 2;
            memcpy(to, &big, sizeof big);
            memcpy(to + kPadded, &small, sizeof small);
        }
    }
    __syncwarp();
    for (int i = lane; i < kWarpQueries * kHeadDim / 4; i += kWarpSize) {
        const int row = i / (kHeadDim / 4), part = i / (kHeadDim / 8) % 2;
        const int c = i % (kHeadDim / 8) * 8;
        if (first + row >= S) break;
        *reinterpret_cast<uint4*>(gated + (first + row) * stride + part * kHeadDim + c) =
            *reinterpret_cast<const uint4*>(rows + row * kHeadStride + part * kPadded + c);
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
    const int64_t column_head = blockIdx.x / query_tiles, column = column_head / H;
    const int head = column_head % H, first = blockIdx.x % query_tiles * kQueries;
    const int64_t row = column / N * S * N + column % N;  // of s 0 in msa
    const int64_t stride = int64_t(N) * D * 2;            // halves from s to s + 1 in q
    q += (row * H + head) * 2 * kHeadDim;
    k += column_head * S * 2 * kHeadDim;
    v += column_head * S * 2 * kHeadDim;
    key_bias += column * tiles * kKeys;

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
    copy_head<kQueries>(shared, q + first * stride, stride, S - first);
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
        Scores scores = {};
        Pairs big, small;
        Rows decay;
        score(queries, keys + tile % 2 * kKeyHalves, scores);
        softmax(queries, scores, factor, biases + tile % 2 * kKeys, big, small, decay);
        add_values(queries, values + tile % 2 * kKeyHalves, big, small, decay);
        copy_async_wait<0>();
        __syncthreads();  // the next tile is there, and this one's place is free
    }
    store_queries(queries, g + row * D + head * kHeadDim, rows, q, stride,
                  first + warp * kWarpQueries, S);
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
    cudaError_t error = LAUNCH(prepare_projections_kernel, dim3(4 * H), dim3(kThreads), 0, stream)(
        layer_norm_weight, layer_norm_bias, query_weight, key_weight, value_weight, gate_weight,
        gate_bias, weights);
    if (error) return error;
    error = LAUNCH(prepare_output_kernel, dim3(ceil_div(D * kWarpSize, kThreads)), dim3(kThreads),
                   0, stream)(out_weight, out_bias, weights);
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
