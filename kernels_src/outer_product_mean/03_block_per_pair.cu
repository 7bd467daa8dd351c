// Stage 03: one block a pair
// Against 02 a block of C×C threads takes a pair, one thread an (h,k), with the rows of a and b in
// shared memory: each is read from memory once a pair instead of C times. Known fault, kept to be
// measured: h is the thread's fastest index while k is memory's, so that a warp writes 4·C bytes
// apart and its store touches 32 sectors where 4 would do (04 mends it). Each thread still counts
// the mask by itself. Operations: 2·B·S·N²·C². Bytes: a and b from L2, 8·B·N²·S·C; the result,
// 4·B·N²·C², in 8 times as many sector writes as needed. Predicts at seed: 14 µs for this kernel, 8
// more than 04's, the uncoalesced stores most of it. Outcome: 104 µs with PyTorch's kernels, 27
// more than 04. Its 262,144 sectors, each written in 8 pieces, must cost L2 more than the bytes
// that were reckoned with (a guess).
// Shapes: C up to 32 (a thread each), and 8·S·C bytes of shared memory within a block's 227 KB.
#include "cuda.cuh"

__global__ void __launch_bounds__(1024)
    block_per_pair_kernel(const float* a, const float* b, const float* mask, float* outer, int S,
                          int N, int C) {
    DYNAMIC_SHARED(float, shared);
    float* a_rows = shared;          // S rows of C channels of residue i
    float* b_rows = a_rows + S * C;  // of residue j
    const int64_t pair = blockIdx.x, batch = pair / N / N;
    const int i = pair / N % N, j = pair % N;
    const int h = threadIdx.x, k = threadIdx.y;  // the source's order

    for (int s = k; s < S; s += C) {
        const int64_t row = (batch * S + s) * N;
        a_rows[s * C + h] = a[(row + i) * C + h];
        b_rows[s * C + h] = b[(row + j) * C + h];
    }
    __syncthreads();

    float sum = 0, count = 0;
    for (int s = 0; s < S; ++s) {
        sum += a_rows[s * C + h] * b_rows[s * C + k];
        count += mask[(batch * S + s) * N + i];
    }
    outer[pair * C * C + h * C + k] = sum / fmaxf(count, 1.0f);
}

EXPORT cudaError_t block_per_pair(const float* a, const float* b, const float* mask, float* outer,
                                  int B, int S, int N, int C, cudaStream_t stream) {
    const size_t shared_bytes = sizeof(float) * 2 * size_t(S) * C;
    const int64_t pairs = int64_t(B) * N * N;
    return LAUNCH(block_per_pair_kernel, dim3(pairs), dim3(C, C), shared_bytes, stream)(
        a, b, mask, outer, S, N, C);
}
