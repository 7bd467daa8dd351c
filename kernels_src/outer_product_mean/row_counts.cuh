// The divisor of the mean, for every stage that counts the mask once a residue.
#pragma once

#include "cuda.cuh"

// reciprocal[b][n] = 1 / max(1, Σ_s mask[b][s][n]) for 32 residues n, one a lane, by a block of
// kWarps warps
template <int kWarps>
__device__ void count_rows(const float* mask, float* reciprocal, int64_t batch, int first_n, int S,
                           int N) {
    SHARED(float, partial, [kWarps][kWarpSize]);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, n = first_n + lane;
    float count = 0;
    for (int s = warp; s < S && n < N; s += kWarps) count += mask[(batch * S + s) * N + n];
    partial[warp][lane] = count;
    __syncthreads();
    if (warp == 0 && n < N) {
        for (int w = 1; w < kWarps; ++w) count += partial[w][lane];
        reciprocal[batch * N + n] = 1.0f / fmaxf(count, 1.0f);
    }
}
