// Stage 01: attention core in one kernel
// PyTorch runs a kernel each for scores, mask, softmax and the product with v, and sends B·N·H·S²
// scores through memory between them. Here one block of 256 threads takes a column (b,n) with its
// q, k and v in shared memory, heads one after another. LayerNorm, projections, gate and out_proj
// stay in PyTorch.
// Bytes: 16·B·S·N·D (q, k, v read, the result written).
// Operations: 4·B·N·S²·D, and B·N·H·S² exponentials.
// Predicts at seed: 4 µs for this kernel, nearly all barriers and latency; a call gains only the
// launches that it replaces, since PyTorch still makes as many.
// Outcome: with PyTorch's kernels 35.3 µs in a graph, 15 less than eager's; a call 185 for 473 µs.
// Shapes: any with 4·(3·S·D + S² + S) bytes of shared memory within a block's 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;

// attended[s][c] = Σ_t softmax_t(q[s]·k[t]/√d) v[t][c] for every head; all arrays in shared memory
__device__ void attend(const float* q, const float* k, const float* v, const float* key_mask,
                       float* scores, float* attended, int S, int D, int H) {
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
            attended[s * D + c] = sum;
        }
        __syncthreads();  // the next head overwrites the scores
    }
}

__global__ void __launch_bounds__(kThreads)
    attention_core_kernel(const float* query, const float* key, const float* value,
                          const float* mask, float* out, int S, int N, int D, int H) {
    DYNAMIC_SHARED(float, shared);
    float* q = shared;  // S rows of D channels, as k and v
    float* k = q + S * D;
    float* v = k + S * D;
    float* scores = v + S * D;         // S queries × S keys of one head
    float* key_mask = scores + S * S;  // S
    const int64_t b = blockIdx.x / N, n = blockIdx.x % N;

    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        const int64_t at = ((b * S + i / D) * N + n) * D + i % D;
        q[i] = query[at];
        k[i] = key[at];
        v[i] = value[at];
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();

    float* attended = q;  // a head's channels of q are done with once its scores are there
    attend(q, k, v, key_mask, scores, attended, S, D, H);

    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        out[((b * S + i / D) * N + n) * D + i % D] = attended[i];
    }
}

EXPORT cudaError_t attention_core(const float* query, const float* key, const float* value,
                                  const float* mask, float* out, int B, int S, int N, int D, int H,
                                  cudaStream_t stream) {
    const size_t shared_bytes = sizeof(float) * (3 * size_t(S) * D + size_t(S) * S + S);
    return LAUNCH(attention_core_kernel, dim3(B * N), dim3(kThreads), shared_bytes, stream)(
        query, key, value, mask, out, S, N, D, H);
}
