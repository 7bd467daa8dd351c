// Stage 02: core, gate and output projection
// As 01, and the gate and out_proj join the kernel: the attended rows are still in shared memory,
// so three more of PyTorch's kernels and their trips through memory go.
// Known fault, kept to be measured: neighbouring threads read rows of out_weight, 4·D bytes apart,
// so a warp's load touches 32 sectors where 4 would do (06 mends it).
// Bytes: 20·B·S·N·D, and 4·D² of out_weight a block from L2.
// Operations: 01's and 2·B·S·N·D².
// Predicts at seed: the kernel up by 10 µs of uncoalesced weights, the call down by three launches.
// Outcome: 46.5 µs in a graph, 11 more than 01, though three kernels went; a call 148 µs, 38 less.
// At one line a cycle in L1, a block's 1,024 loads of 32 lines each take 17 µs.
// Shapes: any with 4·(4·S·D + S² + S) bytes of shared memory within a block's 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;

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
    core_and_projection_kernel(const float* query, const float* key, const float* value,
                               const float* gate, const float* mask, const float* out_weight,
                               const float* out_bias, float* out, int S, int N, int D, int H) {
    DYNAMIC_SHARED(float, shared);
    float* q = shared;  // S rows of D channels, as k, v and g
    float* k = q + S * D;
    float* v = k + S * D;
    float* g = v + S * D;
    float* scores = g + S * D;         // S queries × S keys of one head
    float* key_mask = scores + S * S;  // S
    const int64_t b = blockIdx.x / N, n = blockIdx.x % N;

    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        const int64_t at = ((b * S + i / D) * N + n) * D + i % D;
        q[i] = query[at];
        k[i] = key[at];
        v[i] = value[at];
        g[i] = gate[at];
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();

    float* attended = q;  // a head's channels of q are done with once its scores are there
    attend(q, k, v, g, key_mask, scores, attended, S, D, H);

    for (int i = threadIdx.x; i < S * D; i += kThreads) {
        const int s = i / D, e = i % D;  // e: output channel, a row of the weights
        float sum = out_bias[e];
        for (int c = 0; c < D; ++c) sum += attended[s * D + c] * out_weight[e * D + c];
        out[((b * S + s) * N + n) * D + e] = sum;
    }
}

EXPORT cudaError_t core_and_projection(const float* query, const float* key, const float* value,
                                       const float* gate, const float* mask,
                                       const float* out_weight, const float* out_bias, float* out,
                                       int B, int S, int N, int D, int H, cudaStream_t stream) {
    const size_t shared_bytes = sizeof(float) * (4 * size_t(S) * D + size_t(S) * S + S);
    return LAUNCH(core_and_projection_kernel, dim3(B * N), dim3(kThreads), shared_bytes, stream)(
        query, key, value, gate, mask, out_weight, out_bias, out, S, N, D, H);
}
