// Stage 08: three kernels
// One block a column holds all of a column, so S is limited and every block reads every weight.
// Here LayerNorm with the projections, attention and out_proj are kernels of their own: tiles of
// 128 rows × 64 outputs share their weights, each thread with 8 × 4 sums in registers; attention
// keeps only keys and values of one head in shared memory, and a warp takes 4 queries past them.
// Bytes: 48·B·S·N·D, since q, k, v and g (and the attended rows in q's place) pass through memory.
// Operations: as 03. Peak: 24·B·S·N·D bytes, 1.2 GB at af2.
// Predicts: loses at seed (three launches, 16 blocks in the first: 12 µs); wins at af2, which no
// block of 03 to 07 could hold: 2.9 ms for the projections at 45 TFLOP/s, 3.5 ms for attention,
// whose 8 reads of shared memory for 16 multiply-adds bound it, so 6.5 ms, ahead of compile's 10.2.
// Shapes: D/H a multiple of 4 up to 128, S while a head's keys, values and 32 rows of scores fit
// 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kEpsilon = 1e-5f;

constexpr int kTileRows = 128;    // rows of x that a block of linear_kernel projects
constexpr int kTileOutputs = 64;  // to these many outputs; a thread has 8 × 4 of them in registers
constexpr int kTileDepth = 16;    // channels in shared memory at a time

constexpr int kHeadDim = D / H;
constexpr int kKeyStride = kHeadDim + 4;     // floats from row to row of k and v in shared memory
constexpr int kQueries = 4;                  // queries that a warp takes through attention together
constexpr int kLanes = kHeadDim / 4;         // lanes that share a row of v, 4 channels each
constexpr int kGroups = kWarpSize / kLanes;  // rows of v that a warp reads at a time
constexpr int kSharedFloats =
    2 * S * kKeyStride + ceil_div(S, 4) * 4 + kWarps * kQueries * (kHeadDim + S);

static_assert(D % (4 * H) == 0 && kHeadDim <= 128, "16 bytes of a head a lane");

// Means and inverse deviations of kTileRows rows, one warp a row, two passes over registers.
__device__ void row_statistics(const float* x, int64_t first, int64_t rows, float* means,
                               float* inverses) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll 2
    for (int r = warp; r < kTileRows; r += kWarps) {
        const float* row = x + min(first + r, rows - 1) * D;
        float values[ceil_div(D, kWarpSize)], mean = 0, variance = 0;
        for (int i = 0; i < ceil_div(D, kWarpSize); ++i) {
            const int c = lane + i * kWarpSize;
            values[i] = c < D ? row[c] : 0;
            mean += values[i];
        }
        mean = warp_sum(mean) / D;
        for (int i = 0; i < ceil_div(D, kWarpSize); ++i) {
            if (lane + i * kWarpSize < D) variance += (values[i] - mean) * (values[i] - mean);
        }
        variance = warp_sum(variance) / D;
        means[r] = mean;
        inverses[r] = rsqrtf(variance + kEpsilon);
    }
}

// A tile's kTileDepth channels of kTileRows rows from c0, normalised, channels first in shared
// memory.
template <bool kLayerNorm>
__device__ void load_x(const float* x, const float* norm_weight, const float* norm_bias,
                       const float* means, const float* inverses, int64_t first, int64_t rows,
                       int c0, float (*tile)[kTileRows + 4]) {
    for (int i = threadIdx.x; i < kTileRows * kTileDepth / 4; i += kThreads) {
        const int r = i / (kTileDepth / 4), c = i % (kTileDepth / 4) * 4;
        float4 u = make_float4(0, 0, 0, 0);
        if (c0 + c < D) u = load4(x + min(first + r, rows - 1) * D + c0 + c);
        if (kLayerNorm && c0 + c < D) {
            const float4 w = load4(norm_weight + c0 + c), bias = load4(norm_bias + c0 + c);
            u.x = (u.x - means[r]) * inverses[r] * w.x + bias.x;
            u.y = (u.y - means[r]) * inverses[r] * w.y + bias.y;
            u.z = (u.z - means[r]) * inverses[r] * w.z + bias.z;
            u.w = (u.w - means[r]) * inverses[r] * w.w + bias.w;
        }
        tile[c][r] = u.x;
        tile[c + 1][r] = u.y;
        tile[c + 2][r] = u.z;
        tile[c + 3][r] = u.w;
    }
}

// y[m][r][e] = Σ_c f(x[r][c]) weight_m[e][c] (+ bias[e] for the last m), f LayerNorm or nothing.
// The grid's x is a tile of rows, its y a matrix m and a tile of its outputs.
template <bool kLayerNorm>
__global__ void __launch_bounds__(kThreads)
    linear_kernel(const float* x, const float* norm_weight, const float* norm_bias,
                  const float* weight_0, const float* weight_1, const float* weight_2,
                  const float* weight_3, const float* last_bias, float* y, int64_t rows) {
    SHARED(float, x_tile, [kTileDepth][kTileRows + 4]);
    SHARED(float, weight_tile, [kTileDepth][kTileOutputs + 4]);
    SHARED(float, means, [kTileRows]);
    SHARED(float, inverses, [kTileRows]);
    const int64_t first = int64_t(blockIdx.x) * kTileRows;
    const int tiles = ceil_div(D, kTileOutputs), m = blockIdx.y / tiles;
    const int first_output = blockIdx.y % tiles * kTileOutputs;
    const float* weight = m == 0 ? weight_0 : m == 1 ? weight_1 : m == 2 ? weight_2 : weight_3;

    if (kLayerNorm) row_statistics(x, first, rows, means, inverses);
    const int row0 = threadIdx.x / 16 * 8, output0 = threadIdx.x % 16 * 4;
    float sums[8][4] = {};
    for (int c0 = 0; c0 < D; c0 += kTileDepth) {
        __syncthreads();
        load_x<kLayerNorm>(x, norm_weight, norm_bias, means, inverses, first, rows, c0, x_tile);
        const int e = threadIdx.x / (kTileDepth / 4), c = threadIdx.x % (kTileDepth / 4) * 4;
        float4 w = make_float4(0, 0, 0, 0);
        if (c0 + c < D) w = load4(weight + min(first_output + e, D - 1) * D + c0 + c);
        weight_tile[c][e] = w.x;
        weight_tile[c + 1][e] = w.y;
        weight_tile[c + 2][e] = w.z;
        weight_tile[c + 3][e] = w.w;
        __syncthreads();
#pragma unroll
        for (int depth = 0; depth < kTileDepth; ++depth) {
            const float4 low = load4(&x_tile[depth][row0]), high = load4(&x_tile[depth][row0 + 4]);
            const float4 w = load4(&weight_tile[depth][output0]);
            const float u[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                sums[r][0] += u[r] * w.x;
                sums[r][1] += u[r] * w.y;
                sums[r][2] += u[r] * w.z;
                sums[r][3] += u[r] * w.w;
            }
        }
    }
    const int e = first_output + output0;
    if (e >= D) return;
    float4 bias = make_float4(0, 0, 0, 0);
    if (blockIdx.y / tiles + 1 == gridDim.y / tiles) bias = load4(last_bias + e);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const float4 sum = make_float4(sums[r][0] + bias.x, sums[r][1] + bias.y,
                                       sums[r][2] + bias.z, sums[r][3] + bias.w);
        if (first + row0 + r < rows) store4(y + (m * rows + first + row0 + r) * D + e, sum);
    }
}

__device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// attended[c] = Σ_t weights[t] values[t][c] of kQueries queries, 4 channels c a lane: kGroups keys
// at a time, whose sums are then added up into the first group.
__device__ void sum_values(const float* weights, const float* values, float (&sums)[kQueries][4]) {
    const int lane = threadIdx.x % kWarpSize, c = lane % kLanes * 4;
    float parts[kQueries][4] = {};
    for (int t = lane / kLanes; t < S && lane < kGroups * kLanes; t += kGroups) {
        const float4 w = load4(weights + t * kQueries), v = load4(values + t * kKeyStride + c);
        const float weight[kQueries] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int r = 0; r < kQueries; ++r) {
            parts[r][0] += weight[r] * v.x;
            parts[r][1] += weight[r] * v.y;
            parts[r][2] += weight[r] * v.z;
            parts[r][3] += weight[r] * v.w;
        }
    }
    for (int r = 0; r < kQueries; ++r) {
        for (int i = 0; i < 4; ++i) sums[r][i] = parts[r][i];
    }
#pragma unroll 1
    for (int group = 1; group < kGroups; ++group) {
        for (int r = 0; r < kQueries; ++r) {
            for (int i = 0; i < 4; ++i) {
                sums[r][i] += __shfl_down_sync(kFullMask, parts[r][i], group * kLanes);
            }
        }
    }
}

// q = σ(g) ∘ softmax(q kᵀ/√d) v in q's place, a block one head of one column: its keys and values
// stay in shared memory, and a warp takes kQueries queries past them.
__global__ void __launch_bounds__(kThreads)
    attend_kernel(float* q, const float* k, const float* v, const float* g, const float* mask,
                  int N) {
    DYNAMIC_SHARED(float, shared);
    float* keys = shared;                   // S rows of the head's channels
    float* values = keys + S * kKeyStride;  // likewise
    float* key_mask = values + S * kKeyStride;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    float* queries = key_mask + ceil_div(S, 4) * 4 + warp * kQueries * (kHeadDim + S);
    float* weights = queries + kQueries * kHeadDim;  // [key][query]
    const int head = blockIdx.x % H;
    const int64_t b = blockIdx.x / H / N, n = blockIdx.x / H % N;
    const auto at = [=](int s) { return ((b * S + s) * N + n) * D + head * kHeadDim; };

    for (int i = threadIdx.x; i < S * kLanes; i += kThreads) {
        const int s = i / kLanes, c = i % kLanes * 4;
        store4(keys + s * kKeyStride + c, load4(k + at(s) + c));
        store4(values + s * kKeyStride + c, load4(v + at(s) + c));
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();
    const float scale = 1.0f / sqrtf(kHeadDim);
    for (int first = warp * kQueries; first < S; first += kWarps * kQueries) {
        for (int i = lane; i < kQueries * kLanes; i += kWarpSize) {
            const int s = min(first + i / kLanes, S - 1);  // past the end: repeat the last query
            store4(queries + 4 * i, load4(q + at(s) + i % kLanes * 4));
        }
        __syncwarp();
        float highest[kQueries], totals[kQueries] = {};
        for (int r = 0; r < kQueries; ++r) highest[r] = -INFINITY;
        for (int t = lane; t < S; t += kWarpSize) {
            float scores[kQueries] = {};
#pragma unroll
            for (int c = 0; c < kHeadDim; c += 4) {
                const float4 key = load4(keys + t * kKeyStride + c);
                for (int r = 0; r < kQueries; ++r) {
                    scores[r] += dot(load4(queries + r * kHeadDim + c), key);
                }
            }
            for (int r = 0; r < kQueries; ++r) {
                scores[r] = key_mask[t] != 0 ? scores[r] * scale : -INFINITY;
                highest[r] = fmaxf(highest[r], scores[r]);
            }
            store4(weights + t * kQueries, make_float4(scores[0], scores[1], scores[2], scores[3]));
        }
        for (int r = 0; r < kQueries; ++r) highest[r] = warp_max(highest[r]);
        for (int t = lane; t < S; t += kWarpSize) {
            for (int r = 0; r < kQueries; ++r) {
                float& weight = weights[t * kQueries + r];
                totals[r] += weight = expf(weight - highest[r]);
            }
        }
        __syncwarp();  // the lanes have been keys, and become channels
        float sums[kQueries][4];
        sum_values(weights, values, sums);
        for (int r = 0; r < kQueries; ++r) {
            const float inverse = __fdividef(1.0f, warp_sum(totals[r]));
            if (lane >= kLanes || first + r >= S) continue;
            const int64_t to = at(first + r) + 4 * lane;
            const float4 gate = load4(g + to);
            store4(q + to, make_float4(sums[r][0] * inverse * sigmoid(gate.x),
                                       sums[r][1] * inverse * sigmoid(gate.y),
                                       sums[r][2] * inverse * sigmoid(gate.z),
                                       sums[r][3] * inverse * sigmoid(gate.w)));
        }
        __syncwarp();  // the next queries overwrite these
    }
}

// workspace: 4·B·S·N·D floats for q, k, v and g, each laid out as msa
EXPORT cudaError_t three_kernels(const float* msa, const float* mask,
                                 const float* layer_norm_weight, const float* layer_norm_bias,
                                 const float* query_weight, const float* key_weight,
                                 const float* value_weight, const float* gate_weight,
                                 const float* gate_bias, const float* out_weight,
                                 const float* out_bias, float* workspace, float* out, int B, int N,
                                 cudaStream_t stream) {
    const int64_t rows = int64_t(B) * S * N;
    const unsigned row_tiles = ceil_div(rows, kTileRows), output_tiles = ceil_div(D, kTileOutputs);
    float *q = workspace, *k = q + rows * D, *v = k + rows * D, *g = v + rows * D;
    if (cudaError_t error =
            LAUNCH(linear_kernel<true>, dim3(row_tiles, 4 * output_tiles), dim3(kThreads), 0,
                   stream)(msa, layer_norm_weight, layer_norm_bias, query_weight, key_weight,
                           value_weight, gate_weight, gate_bias, workspace, rows)) {
        return error;
    }
    if (cudaError_t error = LAUNCH(attend_kernel, dim3(B * N * H), dim3(kThreads),
                                   sizeof(float) * kSharedFloats, stream)(q, k, v, g, mask, N)) {
        return error;
    }
    return LAUNCH(linear_kernel<false>, dim3(row_tiles, output_tiles), dim3(kThreads), 0, stream)(
        q, nullptr, nullptr, out_weight, nullptr, nullptr, nullptr, out_bias, out, rows);
}
