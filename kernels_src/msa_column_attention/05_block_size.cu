// Stage 05: a warp a query, and the block size as a constant
// As 04, but a warp carries one (head, query) through scores, softmax and ·V on its own: two of the
// three barriers go, and a warp holds S scores at a time, not H·S². With the warp as the unit
// THREADS is free: 128 (a warp a head at H 4), 256 or 512, to be swept against occupancy.
// Bytes and operations: as 03.
// Predicts at seed: 64 blocks leave no SM a second block whatever their size, so only more warps
// hide the latency of the weights: 512 threads win, and 128 lose to them by nearly three.
// Outcome: 95.8 µs at 512, 3 % less than 04 at 256: the weights' 83 µs (03) are L1's throughput,
// which more warps do not raise. No other size is recorded.
// Shapes: any with 4·S·(6·D + THREADS/32 + 1) bytes of shared memory within a block's 227 KB.
#include "cuda.cuh"

static_assert(THREADS % kWarpSize == 0 && THREADS <= 1024, "THREADS must be whole warps");
constexpr float kEpsilon = 1e-5f;

// x[s] = (x[s] - mean) / deviation · weight + bias, one warp a row
__device__ void layer_norm(float* x, const float* weight, const float* bias, int S, int D) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int s = warp; s < S; s += THREADS / kWarpSize) {
        float* row = x + s * D;
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

// y[s][e] = Σ_c x[s][c] weight[e][c] (+ bias[e])
__device__ void project(const float* x, const float* weight, const float* bias, float* y, int S,
                        int D) {
    for (int i = threadIdx.x; i < S * D; i += THREADS) {
        const int s = i / D, e = i % D;  // e: output channel, a row of the weights
        float sum = bias ? bias[e] : 0;
        for (int c = 0; c < D; ++c) sum += x[s * D + c] * weight[e * D + c];
        y[i] = sum;
    }
}

// attended[s][c] = σ(g[s][c]) Σ_t softmax_t(q[s]·k[t]/√d) v[t][c] for every head, one warp a (head,
// query); all arrays in shared memory, `weights` S floats of this warp's own
__device__ void attend(const float* q, const float* k, const float* v, const float* g,
                       const float* key_mask, float* weights, float* attended, int S, int D,
                       int H) {
    const int d = D / H;
    const float scale = 1.0f / sqrtf(d);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int r = warp; r < H * S; r += THREADS / kWarpSize) {
        const int s = r % S, first = r / S * d;  // first: the head's first channel
        float highest = -INFINITY, total = 0;
        for (int t = lane; t < S; t += kWarpSize) {
            float sum = 0;
            for (int c = first; c < first + d; ++c) sum += q[s * D + c] * k[t * D + c];
            weights[t] = key_mask[t] != 0 ? sum * scale : -INFINITY;
            highest = fmaxf(highest, weights[t]);
        }
        highest = warp_max(highest);
        for (int t = lane; t < S; t += kWarpSize) total += weights[t] = expf(weights[t] - highest);
        total = warp_sum(total);
        __syncwarp();  // the lanes have been keys, and become channels
        for (int c = first + lane; c < first + d; c += kWarpSize) {
            float sum = 0;
            for (int t = 0; t < S; ++t) sum += weights[t] * v[t * D + c];
            attended[s * D + c] = sum / total / (1 + expf(-g[s * D + c]));
        }
        __syncwarp();  // the next row overwrites the weights
    }
}

__global__ void __launch_bounds__(THREADS)
    column_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* query_weight, const float* key_weight,
                  const float* value_weight, const float* gate_weight, const float* gate_bias,
                  const float* out_weight, const float* out_bias, float* out, int S, int N, int D,
                  int H) {
    DYNAMIC_SHARED(float, shared);
    float* x = shared;  // S rows of D channels, as q, k, v and g
    float* q = x + S * D;
    float* k = q + S * D;
    float* v = k + S * D;
    float* g = v + S * D;
    float* attended = g + S * D;        // S rows of D channels, heads side by side
    float* weights = attended + S * D;  // S keys for each warp
    float* key_mask = weights + THREADS / kWarpSize * S;  // S
    const int64_t b = blockIdx.x / N, n = blockIdx.x % N;

    for (int i = threadIdx.x; i < S * D; i += THREADS) {
        x[i] = msa[((b * S + i / D) * N + n) * D + i % D];
    }
    for (int s = threadIdx.x; s < S; s += THREADS) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();
    layer_norm(x, layer_norm_weight, layer_norm_bias, S, D);
    __syncthreads();
    project(x, query_weight, nullptr, q, S, D);
    project(x, key_weight, nullptr, k, S, D);
    project(x, value_weight, nullptr, v, S, D);
    project(x, gate_weight, gate_bias, g, S, D);
    __syncthreads();
    attend(q, k, v, g, key_mask, weights + threadIdx.x / kWarpSize * S, attended, S, D, H);
    __syncthreads();
    project(attended, out_weight, out_bias, x, S, D);
    for (int i = threadIdx.x; i < S * D; i += THREADS) {  // what it projected itself
        out[((b * S + i / D) * N + n) * D + i % D] = x[i];
    }
}

EXPORT cudaError_t block_size(const float* msa, const float* mask, const float* layer_norm_weight,
                              const float* layer_norm_bias, const float* query_weight,
                              const float* key_weight, const float* value_weight,
                              const float* gate_weight, const float* gate_bias,
                              const float* out_weight, const float* out_bias, float* out, int B,
                              int S, int N, int D, int H, cudaStream_t stream) {
    const size_t shared_bytes = sizeof(float) * (6 * size_t(D) + THREADS / kWarpSize + 1) * S;
    return LAUNCH(column_kernel, dim3(B * N), dim3(THREADS), shared_bytes, stream)(
        msa, mask, layer_norm_weight, layer_norm_bias, query_weight, key_weight, value_weight,
        gate_weight, gate_bias, out_weight, out_bias, out, S, N, D, H);
}
