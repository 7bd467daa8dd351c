// Stage 04: one block a pair, 256 threads looping
// Against 03 k is the fastest index, so that a warp writes 128 contiguous bytes; 256 threads loop
// over the C² outputs, so that several blocks share a multiprocessor (two did), and one's loads run
// under another's arithmetic; the first warp counts the mask, once a block. Operations:
// 2·B·S·N²·C². Bytes: a and b from L2, 8·B·N²·S·C; the result, 4·B·N²·C², at last in full sectors:
// at seed 8.4 MB, 2 µs at 4.3 TB/s. Predicts at seed: 6 µs for this kernel: 2,048 blocks in two
// waves of about 2 µs latency, and the stores. Still two shared loads a multiply-add, so at af2 it
// is bound by shared memory, at 1/8 of the arithmetic's rate. Outcome: 76.8 µs with PyTorch's
// kernels, which are most of it: see 05. Three waves, not two: 40 registers a thread leave six
// blocks, where eight were reckoned with.
// Shapes: 8·S·C bytes of shared memory within a block's 227 KB.
#include "cuda.cuh"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    block_per_pair_looped_kernel(const float* a, const float* b, const float* mask, float* outer,
                                 int S, int N, int C) {
    DYNAMIC_SHARED(float, shared);
    SHARED(float, divisor, );
    float* a_rows = shared;          // S rows of C channels of residue i
    float* b_rows = a_rows + S * C;  // of residue j
    const int64_t pair = blockIdx.x, batch = pair / N / N;
    const int i = pair / N % N, j = pair % N;

    for (int at = threadIdx.x; at < S * C; at += kThreads) {
        const int64_t row = (batch * S + at / C) * N;
        a_rows[at] = a[(row + i) * C + at % C];
        b_rows[at] = b[(row + j) * C + at % C];
    }
    if (threadIdx.x < kWarpSize) {
        float count = 0;
        for (int s = threadIdx.x; s < S; s += kWarpSize) count += mask[(batch * S + s) * N + i];
        count = warp_sum(count);
        if (threadIdx.x == 0) divisor = fmaxf(count, 1.0f);
    }
    __syncthreads();

    for (int at = threadIdx.x; at < C * C; at += kThreads) {
        const int h = at / C, k = at % C;
        float sum = 0;
        for (int s = 0; s < S; ++s) sum += a_rows[s * C + h] * b_rows[s * C + k];
        outer[pair * C * C + at] = sum / divisor;
    }
}

EXPORT cudaError_t block_per_pair_looped(const float* a, const float* b, const float* mask,
                                         float* outer, int B, int S, int N, int C,
                                         cudaStream_t stream) {
    const size_t shared_bytes = sizeof(float) * 2 * size_t(S) * C;
    const int64_t pairs = int64_t(B) * N * N;
    return LAUNCH(block_per_pair_looped_kernel, dim3(pairs), dim3(kThreads), shared_bytes, stream)(
        a, b, mask, outer, S, N, C);
}
