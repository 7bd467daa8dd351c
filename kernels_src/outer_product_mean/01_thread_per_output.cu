// Stage 01: one thread an output
// The plainest plan: one thread a (b,i,j,h,k) of the outer product. It reads S values of a, of b
// and of the mask from memory, so that every value of a is asked for N·C times. LayerNorm,
// projections and out_proj stay in PyTorch. Operations: 2·B·S·N²·C², at seed 33.5 M. Bytes:
// 4·B·(2·S·N·C + S·N + N²·C²), at seed 8.5 MB, nearly all of it the result; loads from the caches:
// 12·S bytes a thread. A warp has one h and 32 k (C 32): a and mask are broadcasts, b and the
// result coalesced. Predicts at seed: 15 µs for this kernel, 9 more than 04's, bound by issuing
// instructions: about 200 a thread, of which 8 are multiply-adds and more than 100 find out which
// output is whose. Outcome: 91.9 µs with PyTorch's kernels around it, 15 more than 04: the SASS
// has nearer 300 instructions on a thread's way than 200, as each of its five divisions of 64 bits
// is code of its own.
// Shapes: all.
#include "cuda.cuh"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    thread_per_output_kernel(const float* a, const float* b, const float* mask, float* outer,
                             int64_t outputs, int S, int N, int C) {
    const int64_t at = blockIdx.x * int64_t(kThreads) + threadIdx.x;
    if (at >= outputs) return;
    const int64_t pair = at / (C * C), batch = pair / N / N;
    const int i = pair / N % N, j = pair % N;
    const int h = at % (C * C) / C, k = at % C;

    float sum = 0, count = 0;
    for (int s = 0; s < S; ++s) {
        const int64_t row = (batch * S + s) * N;
        sum += a[(row + i) * C + h] * b[(row + j) * C + k];
        count += mask[row + i];
    }
    outer[at] = sum / fmaxf(count, 1.0f);
}

EXPORT cudaError_t thread_per_output(const float* a, const float* b, const float* mask,
                                     float* outer, int B, int S, int N, int C,
                                     cudaStream_t stream) {
    const int64_t outputs = int64_t(B) * N * N * C * C;
    const int64_t blocks = ceil_div(outputs, int64_t(kThreads));
    return LAUNCH(thread_per_output_kernel, dim3(blocks), dim3(kThreads), 0, stream)(
        a, b, mask, outer, outputs, S, N, C);
}
