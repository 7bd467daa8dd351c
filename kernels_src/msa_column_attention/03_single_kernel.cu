// Stage 03: the whole operator in a single kernel
// As 02, and LayerNorm and the four projections join: one launch, msa read once, only the result
// written. A call no longer pays for launches; the kernel pays for every weight as 02 does.
// Known faults, kept to be measured: weights uncoalesced and read again for every row of x; one
// thread a row in LayerNorm and softmax, so that at S 8 they leave 248 of 256 threads idle.
// Bytes: 8·B·S·N·D, and 20·D² of weights a block from L2 (at seed 80 KB for a column of 2 KB).
// Operations: 10·B·S·N·D² + 4·B·N·S²·D.
// Predicts at seed: 60–100 µs for the kernel, more than eager's own kernels take; a call of about
// the same, a seventh of eager's 700 µs.
// Outcome: 114 µs, a call 115. A block's 5,120 loads of 32 lines each take 83 µs, at one line a
// cycle in L1; most of the rest are the idle threads (04 saves 15 µs).
// Shapes: any with 4·(6·S·D + S² + S) bytes of shared memory (13 KB at seed) within 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;
constexpr float kEpsilon = 1e-5f;

// x[s] = (x[s] - mean) / deviation · weight + bias, one thread a row
__device__ void layer_norm(float* x, const float* weight, const float* bias, int S, int D) {
    for (int s = threadIdx.x; s < S; s += kThreads) {
        float* row = x + s * D;
        float mean = 0, variance = 0;
        for (int c = 0; c < D; ++c) mean += row[c] / D;
        for (int c = 0; c < D; ++c) variance += (row[c] - mean) * (row[c] - mean) / D;
        const float inverse = 1.0f / sqrtf(variance + kEpsilon);
        for (int c = 0; c < D; ++c) row[c] = (row[c] - mean) * inverse * weight[c] + bias[c];
    }
}

// y[s][e] = Σ_c x[s][c] weight[e][c] (+ bias[e])
__device__ void project(const float* x, const float* weight, const float* bias, float* y, int S,
                        int D) {
    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        const int s = i / D, e = i % D;  // e: output channel, a row of the weights
        float sum = bias ? bias[e] : 0;
        for (int c = 0; c < D; ++c) sum += x[s * D + c] * weight[e * D + c];
        y[i] = sum;
    }
}

// attended[s][c] = σ(g[s][c]) Σ_t softmax_t(q[s]·k[t]/√d) v[t][c] for every head; all arrays in
// shared memory
__device__ void attend(const float* q, const float* k, const float* v, const float* g,
                       const float* key_mask, float* scores, float* attended, int S, int D, int H) {
    const int d = D / H;
    const float scale = 1.0f / sqrtf(d);
    for (int head = 0; head < H; ++head) {
        const int first = head * d;  // the head's first channel
        for (int i = threadIdx.x; i < S * S; i += kThreads) {
            const int s = i / S, t = i % S;
            float sum = 0;
            for (int c = first; c < first + d; ++c) sum += q[s * D + c] * k[t * D + c];
            scores[i] = key_mask[t] != 0 ? sum * scale : -INFINITY;
        }
        __syncthreads();
        for (int s = threadIdx.x; s < S; s += kThreads) {  // one thread a row of the softmax
            float* row = scores + s * S;
            float highest = -INFINITY, total = 0;
            for (int t = 0; t < S; ++t) highest = fmaxf(highest, row[t]);
            for (int t = 0; t < S; ++t) total += row[t] = expf(row[t] - highest);
            for (int t = 0; t < S; ++t) row[t] /= total;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < S * d; i += kThreads) {
            const int s = i / d, c = first + i % d;
            float sum = 0;
            for (int t = 0; t < S; ++t) sum += scores[s * S + t] * v[t * D + c];
            attended[s * D + c] = sum / (1 + expf(-g[s * D + c]));
        }
        __syncthreads();  // the next head overwrites the scores
    }
}

__global__ void __launch_bounds__(kThreads)
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
    float* attended = g + S * D;       // S rows of D channels, heads side by side
    float* scores = attended + S * D;  // S queries × S keys of one head
    float* key_mask = scores + S * S;  // S
    const int64_t b = blockIdx.x / N, n = blockIdx.x % N;

    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        x[i] = msa[((b * S + i / D) * N + n) * D + i % D];
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();
    layer_norm(x, layer_norm_weight, layer_norm_bias, S, D);
    __syncthreads();
    project(x, query_weight, nullptr, q, S, D);
    project(x, key_weight, nullptr, k, S, D);
    project(x, value_weight, nullptr, v, S, D);
    project(x, gate_weight, gate_bias, g, S, D);
    __syncthreads();
    attend(q, k, v, g, key_mask, scores, attended, S, D, H);
    project(attended, out_weight, out_bias, x, S, D);
    for (int i = threadIdx.x; i < S * D; i += kThreads) {  // what it projected itself
        out[((b * S + i / D) * N + n) * D + i % D] = x[i];
    }
}

EXPORT cudaError_t single_kernel(const float* msa, const float* mask,
                                 const float* layer_norm_weight, const float* layer_norm_bias,
                                 const float* query_weight, const float* key_weight,
                                 const float* value_weight, const float* gate_weight,
                                 const float* gate_bias, const float* out_weight,
                                 const float* out_bias, float* out, int B, int S, int N, int D,
                                 int H, cudaStream_t stream) {
    const size_t shared_bytes = sizeof(float) * (6 * size_t(S) * D + size_t(S) * S + S);
    return LAUNCH(column_kernel, dim3(B * N), dim3(kThreads), shared_bytes, stream)(
        msa, mask, layer_norm_weight, layer_norm_bias, query_weight, key_weight, value_weight,
        gate_weight, gate_bias, out_weight, out_bias, out, S, N, D, H);
}
