// Stage 07: constant shapes, register tiles, 16-byte accesses
// As 06, but S, D and H are compile-time constants: divisions become shifts, and loops unroll. All
// five matrices are staged at once, 16 bytes an access, so the trip to L2 is paid once; the four
// projections are one product, in which a thread keeps 8 rows of one output in registers; only as
// many lanes share a query as it has keys. Rows lie an odd number of 16-byte words apart.
// Bytes and operations: as 03.
// Predicts at seed: 6–7 µs. Shared memory feeds 32 multiply-adds with 9 reads, so the projections
// need some 1,500 cycles of its bandwidth; L2 needs 1,300 for 80 KB of weights; the rest is
// latency. Outcome: 7.10 µs.
// Shapes: D/H a multiple of 4, and 4·((6·S + 5·D)·(D + 4) + (256/lanes + 1)·S) bytes of shared
// memory (97 KB at seed) within a block's 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;
constexpr float kEpsilon = 1e-5f;
constexpr int kHeadDim = D / H;
constexpr int kStride = D % 8 == 0 ? D + 4 : D;  // an odd number of 16-byte words from row to row
constexpr int kLanes = S > 16 ? 32 : S > 8 ? 16 : S > 4 ? 8 : 4;  // lanes that share a query
constexpr int kQueries = kThreads / kLanes;                       // queries at a time
constexpr int kSharedFloats = (6 * S + 5 * D) * kStride + (kQueries + 1) * S;

static_assert(D % (4 * H) == 0, "16-byte accesses need a head of a multiple of 4 channels");

// One matrix of D rows into shared memory, 16 bytes a thread and access.
__device__ void stage_weight(const float* weight, float* tile) {
#pragma unroll 4
    for (int i = threadIdx.x; i < D * D / 4; i += kThreads) {
        store4(tile + i / (D / 4) * kStride + i % (D / 4) * 4, load4(weight + 4 * i));
    }
}

// x[s] = (x[s] - mean) / deviation · weight + bias, one warp a row
__device__ void layer_norm(float* x, const float* weight, const float* bias) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int s = warp; s < S; s += kThreads / kWarpSize) {
        float* row = x + s * kStride;
        float mean = 0, variance = 0;
        for (int c = lane; c < D; c += kWarpSize) mean += row[c];
        mean = warp_sum(mean) / D;
        for (int c = lane; c < D; c += kWarpSize) variance += (row[c] - mean) * (row[c] - mean);
        const float inverse = rsqrtf(warp_sum(variance) / D + kEpsilon);
        for (int c = lane; c < D; c += kWarpSize) {
            row[c] = (row[c] - mean) * inverse * weight[c] + bias[c];
        }
    }
}

// y[m][s][e] = Σ_c x[s][c] tile[m][e][c]. A thread keeps kRows rows s of one output e of one matrix
// m in registers: 16 bytes of weights from shared memory serve 4·kRows multiply-adds.
template <int kMatrices, int kRows>
__device__ void project(const float* x, const float* tile, float* y) {
    constexpr int kOutputs = kMatrices * D;
    for (int i = threadIdx.x; i < kOutputs * ceil_div(S, kRows); i += kThreads) {
        const int output = i % kOutputs, first = i / kOutputs * kRows;
        float sums[kRows] = {};
#pragma unroll 4
        for (int c = 0; c < D; c += 4) {
            const float4 w = load4(tile + output * kStride + c);
            for (int r = 0; r < kRows; ++r) {
                const float4 u = load4(x + min(first + r, S - 1) * kStride + c);
                sums[r] += u.x * w.x + u.y * w.y + u.z * w.z + u.w * w.w;
            }
        }
        for (int r = 0; r < kRows; ++r) {
            const int s = first + r;
            if (s < S) y[(output / D * S + s) * kStride + output % D] = sums[r];
        }
    }
}

// attended[s][c] = σ(g[s][c]) Σ_t softmax_t(q[s]·k[t]/√d) v[t][c] for every head, kLanes lanes a
// (head, query); all arrays in shared memory, `weights` S floats of this query's own
__device__ void attend(const float* q, const float* k, const float* v, const float* g,
                       const float* gate_bias, const float* key_mask, float* weights,
                       float* attended) {
    const float scale = 1.0f / sqrtf(kHeadDim);
    const int lane = threadIdx.x % kLanes;
    for (int i = threadIdx.x / kLanes; i < ceil_div(H * S, kQueries) * kQueries; i += kQueries) {
        const int r =
            min(i, H * S - 1);  // past the end: repeat the last, since shuffles need every lane
        const int s = r % S, first = r / S * kHeadDim;  // first: the head's first channel
        float highest = -INFINITY, total = 0;
        for (int t = lane; t < S; t += kLanes) {
            float sum = 0;
            for (int c = first; c < first + kHeadDim; c += 4) {
                const float4 a = load4(q + s * kStride + c), b = load4(k + t * kStride + c);
                sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
            weights[t] = key_mask[t] != 0 ? sum * scale : -INFINITY;
            highest = fmaxf(highest, weights[t]);
        }
        for (int step = kLanes / 2; step > 0; step /= 2) {
            highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
        }
        for (int t = lane; t < S; t += kLanes) total += weights[t] = expf(weights[t] - highest);
        for (int step = kLanes / 2; step > 0; step /= 2) {
            total += __shfl_xor_sync(kFullMask, total, step);
        }
        __syncwarp();  // the lanes have been keys, and become channels
        for (int c = first + lane; c < first + kHeadDim; c += kLanes) {
            float sum = 0;
            for (int t = 0; t < S; ++t) sum += weights[t] * v[t * kStride + c];
            const float gate = g[s * kStride + c] + gate_bias[c];
            attended[s * kStride + c] = sum / total / (1 + expf(-gate));
        }
        __syncwarp();  // the next query overwrites the weights
    }
}

__global__ void __launch_bounds__(kThreads)
    column_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* query_weight, const float* key_weight,
                  const float* value_weight, const float* gate_weight, const float* gate_bias,
                  const float* out_weight, const float* out_bias, float* out, int N) {
    DYNAMIC_SHARED(float, shared);
    float* x = shared;  // S rows of D channels, as q, k, v and g
    float* q = x + S * kStride;
    float* k = q + S * kStride;
    float* v = k + S * kStride;
    float* g = v + S * kStride;
    float* attended = g + S * kStride;         // S rows of D channels, heads side by side
    float* tile = attended + S * kStride;      // five matrices of D rows
    float* weights = tile + 5 * D * kStride;   // S keys for each query in flight
    float* key_mask = weights + kQueries * S;  // S
    const int64_t b = blockIdx.x / N, n = blockIdx.x % N;

    for (int i = threadIdx.x; i < S * (D / 4); i += kThreads) {
        const int s = i / (D / 4), c = i % (D / 4) * 4;
        store4(x + s * kStride + c, load4(msa + ((b * S + s) * N + n) * D + c));
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    stage_weight(query_weight, tile);
    stage_weight(key_weight, tile + D * kStride);
    stage_weight(value_weight, tile + 2 * D * kStride);
    stage_weight(gate_weight, tile + 3 * D * kStride);
    stage_weight(out_weight, tile + 4 * D * kStride);
    __syncthreads();
    layer_norm(x, layer_norm_weight, layer_norm_bias);
    __syncthreads();
    project<4, 8>(x, tile, q);  // q, k, v and g lie end to end
    __syncthreads();
    attend(q, k, v, g, gate_bias, key_mask, weights + threadIdx.x / kLanes * S, attended);
    __syncthreads();
    project<1, 2>(attended, tile + 4 * D * kStride, x);
    __syncthreads();
    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        const int s = i / D, e = i % D;
        out[((b * S + s) * N + n) * D + e] = x[s * kStride + e] + out_bias[e];
    }
}

EXPORT cudaError_t constant_shapes(const float* msa, const float* mask,
                                   const float* layer_norm_weight, const float* layer_norm_bias,
                                   const float* query_weight, const float* key_weight,
                                   const float* value_weight, const float* gate_weight,
                                   const float* gate_bias, const float* out_weight,
                                   const float* out_bias, float* out, int B, int N,
                                   cudaStream_t stream) {
    return LAUNCH(column_kernel, dim3(B * N), dim3(kThreads), sizeof(float) * kSharedFloats,
                  stream)(msa, mask, layer_norm_weight, layer_norm_bias, query_weight, key_weight,
                          value_weight, gate_weight, gate_bias, out_weight, out_bias, out, N);
}
