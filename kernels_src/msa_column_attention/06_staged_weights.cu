// Stage 06: weights staged in shared memory
// As 05 at 256 threads, but each weight matrix passes through shared memory, 64 rows at a time: a
// warp's load is 128 neighbouring bytes, 4 sectors in place of 32, and made once a block, not once
// a row of x. Rows in shared memory lie an odd number of floats apart, so that lanes which read a
// column of the tile hit different banks. Transposed weights would cost a copy on every call.
// Bytes and operations: as 03.
// Predicts at seed: 12–15 µs, a fifth of 05. What is left is five exposed trips to L2, one a
// matrix, and two shared-memory reads for every multiply-add.
// Outcome: 21.2 µs. The compiler starts 4 loads and stores them before it starts the next 4 (SASS),
// so 20 trips are exposed, not five; a block's 10,240 reads of shared memory take another 5 µs.
// Shapes: any with 4·((6·S + min(64, D))·(D|1) + 9·S) bytes of shared memory within 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;
constexpr int kTileRows = 64;  // weight rows in shared memory at a time
constexpr float kEpsilon = 1e-5f;

// Floats from one row in shared memory to the next: odd, so that a column's entries lie in
// different banks.
__host__ __device__ constexpr int row_stride(int D) { return D | 1; }

// x[s] = (x[s] - mean) / deviation · weight + bias, one warp a row
__device__ void layer_norm(float* x, const float* weight, const float* bias, int S, int D) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int s = warp; s < S; s += kThreads / kWarpSize) {
        float* row = x + s * row_stride(D);
        float mean = 0, variance = 0;
        for (int c = lane; c < D; c += kWarpSize) mean += row[c];
        mean = warp_sum(mean) / D;
        for (int c = lane; c < D; c += kWarpSize) variance += (row[c] - mean) * (row[c] - mean);
        const float inverse = 1.0f / sqrtf(warp_sum(variance) / D + kEpsilon);
        for (int c = lane; c < D; c += kWarpSize) {
            row[c] = (row[c] - mean) * inverse * weight[c] + bias[c];
        }
    }
}

// y[s][e] = Σ_c x[s][c] weight[e][c] (+ bias[e]), the weights through shared memory a tile of rows
// at a time
__device__ void project(const float* x, const float* weight, const float* bias, float* tile,
                        float* y, int S, int D) {
    const int stride = row_stride(D);
    for (int first = 0; first < D; first += kTileRows) {
        const int rows = min(kTileRows, D - first);
        __syncthreads();  // x is complete, and nobody reads the tile
        for (int i = threadIdx.x; i < rows * D; i += kThreads) {
            tile[i / D * stride + i % D] = weight[first * D + i];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < S * rows; i += kThreads) {
            const int s = i / rows, e = i % rows;  // e: output channel, a row of the tile
            float sum = bias ? bias[first + e] : 0;
            for (int c = 0; c < D; ++c) sum += x[s * stride + c] * tile[e * stride + c];
            y[s * stride + first + e] = sum;
        }
    }
}

// attended[s][c] = σ(g[s][c]) Σ_t softmax_t(q[s]·k[t]/√d) v[t][c] for every head, one warp a (head,
// query); all arrays in shared memory, `weights` S floats of this warp's own
__device__ void attend(const float* q, const float* k, const float* v, const float* g,
                       const float* key_mask, float* weights, float* attended, int S, int D,
                       int H) {
    const int d = D / H, stride = row_stride(D);
    const float scale = 1.0f / sqrtf(d);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int r = warp; r < H * S; r += kThreads / kWarpSize) {
        const int s = r % S, first = r / S * d;  // first: the head's first channel
        float highest = -INFINITY, total = 0;
        for (int t = lane; t < S; t += kWarpSize) {
            float sum = 0;
            for (int c = first; c < first + d; ++c) sum += q[s * stride + c] * k[t * stride + c];
            weights[t] = key_mask[t] != 0 ? sum * scale : -INFINITY;
            highest = fmaxf(highest, weights[t]);
        }
        highest = warp_max(highest);
        for (int t = lane; t < S; t += kWarpSize) total += weights[t] = expf(weights[t] - highest);
        total = warp_sum(total);
        __syncwarp();  // the lanes have been keys, and become channels
        for (int c = first + lane; c < first + d; c += kWarpSize) {
            float sum = 0;
            for (int t = 0; t < S; ++t) sum += weights[t] * v[t * stride + c];
            attended[s * stride + c] = sum / total / (1 + expf(-g[s * stride + c]));
        }
        __syncwarp();  // the next row overwrites the weights
    }
}

__global__ void __launch_bounds__(kThreads)
    column_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* query_weight, const float* key_weight,
                  const float* value_weight, const float* gate_weight, const float* gate_bias,
                  const float* out_weight, const float* out_bias, float* out, int S, int N, int D,
                  int H) {
    const int stride = row_stride(D);
    DYNAMIC_SHARED(float, shared);
    float* x = shared;  // S rows of D channels, as q, k, v and g
    float* q = x + S * stride;
    float* k = q + S * stride;
    float* v = k + S * stride;
    float* g = v + S * stride;
    float* attended = g + S * stride;        // S rows of D channels, heads side by side
    float* weights = attended + S * stride;  // S keys for each warp
    float* key_mask = weights + kThreads / kWarpSize * S;  // S
    float* tile = key_mask + S;                            // kTileRows rows of weights
    const int64_t b = blockIdx.x / N, n = blockIdx.x % N;

    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        x[i / D * stride + i % D] = msa[((b * S + i / D) * N + n) * D + i % D];
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();
    layer_norm(x, layer_norm_weight, layer_norm_bias, S, D);
    project(x, query_weight, nullptr, tile, q, S, D);
    project(x, key_weight, nullptr, tile, k, S, D);
    project(x, value_weight, nullptr, tile, v, S, D);
    project(x, gate_weight, gate_bias, tile, g, S, D);
    __syncthreads();
    attend(q, k, v, g, key_mask, weights + threadIdx.x / kWarpSize * S, attended, S, D, H);
    project(attended, out_weight, out_bias, tile, x, S, D);
    __syncthreads();
    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        out[((b * S + i / D) * N + n) * D + i % D] = x[i / D * stride + i % D];
    }
}

EXPORT cudaError_t staged_weights(const float* msa, const float* mask,
                                  const float* layer_norm_weight, const float* layer_norm_bias,
                                  const float* query_weight, const float* key_weight,
                                  const float* value_weight, const float* gate_weight,
                                  const float* gate_bias, const float* out_weight,
                                  const float* out_bias, float* out, int B, int S, int N, int D,
                                  int H, cudaStream_t stream) {
    const size_t rows = 6 * size_t(S) + min(kTileRows, D);
    const size_t shared_bytes =
        sizeof(float) * (rows * row_stride(D) + (kThreads / kWarpSize + 1) * size_t(S));
    return LAUNCH(column_kernel, dim3(B * N), dim3(kThreads), shared_bytes, stream)(
        msa, mask, layer_norm_weight, layer_norm_bias, query_weight, key_weight, value_weight,
        gate_weight, gate_bias, out_weight, out_bias, out, S, N, D, H);
}
