// Stage 05: LayerNorm, projections, mask and divisor in one kernel
// Against 04 the seven kernels that PyTorch ran before the outer product become one (inputs.cuh):
// 32 rows (b,s,n) a block, a warp a row for mean and deviation, then both projections as one
// product in register tiles; x never reaches memory. Further blocks of that launch count the mask,
// once a residue and not once a pair. out_proj stays in PyTorch. Operations: 4·B·S·N·D·C and
// 2·B·S·N²·C². Bytes: 4·B·S·N·(D + 2·C), 8·D·C of weights a block from L2, and 04's 8·B·N²·S·C and
// 4·B·N²·C². Predicts at seed: inputs' kernel 5 µs (16 blocks: latency alone), in a graph 20 µs
// less than 04 and a call down by seven launches, about 30 µs; at af2 0.4 ms for the inputs'
// kernel. Outcome: 45.8 µs, 31 less than 04, so PyTorch's seven take some 5 µs each (a guess); and
// a call of 89 µs, 80 less: with each goes PyTorch's work on the host, 11 µs and not the 4 of a
// launch.
// Shapes: as 04; C is a compile-time constant from here on.
#include "outer_product_mean/inputs.cuh"

__global__ void __launch_bounds__(kThreads)
    block_per_pair_looped_kernel(const float* a, const float* b, const float* reciprocal,
                                 float* outer, int S, int N) {
    DYNAMIC_SHARED(float, shared);
    float* a_rows = shared;          // S rows of C channels of residue i
    float* b_rows = a_rows + S * C;  // of residue j
    const int64_t pair = blockIdx.x, batch = pair / N / N;
    const int i = pair / N % N, j = pair % N;

    for (int at = threadIdx.x; at < S * C; at += kThreads) {
        const int64_t row = (batch * S + at / C) * N;
        a_rows[at] = a[(row + i) * C + at % C];
        b_rows[at] = b[(row + j) * C + at % C];
    }
    __syncthreads();

    for (int at = threadIdx.x; at < C * C; at += kThreads) {
        const int h = at / C, k = at % C;
        float sum = 0;
        for (int s = 0; s < S; ++s) sum += a_rows[s * C + h] * b_rows[s * C + k];
        outer[pair * C * C + at] = sum * reciprocal[batch * N + i];
    }
}

EXPORT cudaError_t fused_inputs(const float* msa, const float* mask, const float* layer_norm_weight,
                                const float* layer_norm_bias, const float* proj_a_weight,
                                const float* proj_a_bias, const float* proj_b_weight,
                                const float* proj_b_bias, float* a, float* b, float* reciprocal,
                                float* outer, int B, int S, int N, int D, cudaStream_t stream) {
    if (cudaError_t error =
            launch_inputs(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                          proj_b_weight, proj_b_bias, a, b, reciprocal, B, S, N, D, stream)) {
        return error;
    }
    const size_t shared_bytes = sizeof(float) * 2 * size_t(S) * C;
    const int64_t pairs = int64_t(B) * N * N;
    return LAUNCH(block_per_pair_looped_kernel, dim3(pairs), dim3(kThreads), shared_bytes, stream)(
        a, b, reciprocal, outer, S, N);
}
