// Stage 02: one thread a pair
// Against 01 a thread takes a whole pair (b,i,j): it counts the mask once instead of C² times. That
// is a bad trade, kept to be measured: B·N² threads are too few (2,048 at seed, 15 a
// multiprocessor, where 2,048 fit), neighbouring threads write 4·C² bytes apart, so that a warp's
// store touches 32 sectors where 4 would do, and all of a's and b's rows are read again for each
// (h,k). Operations: 2·B·S·N²·C². Bytes: 4·B·(2·S·N·C + S·N + N²·C²), the result in partly filled
// sectors. Predicts at seed: 250 µs for this kernel, 244 more than 04's: one warp at most on a
// scheduler hides no latency, and 1,024 outputs one after another take about 0.25 µs each.
// Outcome: 495 µs with PyTorch's kernels, 418 more than 04, 0.41 µs an output: the loads of b
// touch 32 sectors too, 8 times an output, which the prediction forgot (a guess).
// Shapes: all.
#include "cuda.cuh"

constexpr int kThreads = 32;  // small blocks spread over the most multiprocessors

__global__ void __launch_bounds__(kThreads)
    thread_per_pair_kernel(const float* a, const float* b, const float* mask, float* outer,
                           int64_t pairs, int S, int N, int C) {
    const int64_t pair = blockIdx.x * int64_t(kThreads) + threadIdx.x, batch = pair / N / N;
    if (pair >= pairs) return;
    const int i = pair / N % N, j = pair % N;

    float count = 0;
    for (int s = 0; s < S; ++s) count += mask[(batch * S + s) * N + i];
    const float divisor = fmaxf(count, 1.0f);

    for (int h = 0; h < C; ++h) {
        for (int k = 0; k < C; ++k) {
            float sum = 0;
            for (int s = 0; s < S; ++s) {
                const int64_t row = (batch * S + s) * N;
                sum += a[(row + i) * C + h] * b[(row + j) * C + k];
            }
            outer[pair * C * C + h * C + k] = sum / divisor;
        }
    }
}

EXPORT cudaError_t thread_per_pair(const float* a, const float* b, const float* mask, float* outer,
                                   int B, int S, int N, int C, cudaStream_t stream) {
    const int64_t pairs = int64_t(B) * N * N;
    const int64_t blocks = ceil_div(pairs, int64_t(kThreads));
    return LAUNCH(thread_per_pair_kernel, dim3(blocks), dim3(kThreads), 0, stream)(
        a, b, mask, outer, pairs, S, N, C);
}
