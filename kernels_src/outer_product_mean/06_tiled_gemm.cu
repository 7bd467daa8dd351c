// Stage 06: the outer product as one tiled matrix product
// Against 05 the outer product is seen as what it is, (N·C) × S times S × (N·C), and tiled as such:
// a block of 256 threads makes 128 × 128 values, a thread 8 × 8 in registers, 4 residues i by 4 j
// (C 32) instead of one pair. A value of a that a block loads serves 128 products instead of 32,
// and four 16-byte shared loads serve 64 multiply-adds. The next rows of the alignment are fetched
// while these are multiplied. Operations: 2·B·S·N²·C². Bytes: the result, 4·B·N²·C²; a and b from
// L2, 8·B·N²·C²·S/128, at af2 4.8 GB where 05 has 38 GB. Predicts at seed: 3 µs for this kernel,
// half of it the stores, and 3 less than 05; at af2 (154.6 G operations) 4 ms, 75 % of what cuBLAS
// reaches in fp32, where 05 takes 40 ms. Outcome: 43.3 µs, 2.5 less than 05, as predicted; af2 5.0
// ms, out_proj by PyTorch included.
// Shapes: all.
#include "outer_product_mean/inputs.cuh"
#include "tensor_core.cuh"

constexpr int kTile = 128;  // (i,h) and (j,k) of a block's part of the outer product
constexpr int kSteps = 16;  // s of one stage
constexpr int kStages = 3;  // one is multiplied while two are on their way
constexpr int kPiece = C % 4 == 0 ? 4 : 1;  // floats of one copy: is each row of a 16-byte aligned?

// Starts the copy of rows first_s … of a (or b, both S × width) into a stage; zeros past the edges.
__device__ void copy_rows(float (&tile)[kSteps][kTile], const float* from, int first_s, int first,
                          int S, int width) {
    for (int at = threadIdx.x * kPiece; at < kSteps * kTile; at += kThreads * kPiece) {
        const int s = first_s + at / kTile, column = first + at % kTile;
        const bool valid = s < S && column < width;
        const float* source = from + (valid ? int64_t(s) * width + column : 0);
        if (kPiece == 4) {
            copy_async_16(&tile[at / kTile][at % kTile], source, valid);
        } else {
            copy_async_4(&tile[at / kTile][at % kTile], source, valid);
        }
    }
}

// A block's tile of outer, the product of a's rows (i,h) and b's columns (j,k) over s
__global__ void __launch_bounds__(kThreads, 2)
    tiled_gemm_kernel(const float* a, const float* b, const float* reciprocal, float* outer, int S,
                      int N, int tiles) {
    SHARED(float, a_tile, [kStages][kSteps][kTile]);
    SHARED(float, b_tile, [kStages][kSteps][kTile]);
    const int64_t batch = blockIdx.x / tiles / tiles;
    const int tile_row = blockIdx.x / tiles % tiles, tile_column = blockIdx.x % tiles;
    const int first_row = tile_row * kTile, first_column = tile_column * kTile, width = N * C;
    const int y = threadIdx.x / kGrid * 4, z = threadIdx.x % kGrid * 4;  // and 64 further on

    const auto copy = [&](int step) {  // one group each, empty past the end
        if (step * kSteps < S) {
            const int64_t start = batch * S * width;
            copy_rows(a_tile[step % kStages], a + start, step * kSteps, first_row, S, width);
            copy_rows(b_tile[step % kStages], b + start, step * kSteps, first_column, S, width);
        }
        copy_async_commit();
    };
    float sum[8][8] = {};
    copy(0);
    copy(1);
    for (int step = 0; step * kSteps < S; ++step) {
        copy_async_wait<1>();
        __syncthreads();  // this step's rows are there, and the stage before is done with
        copy(step + 2);
#pragma unroll 4
        for (int s = 0; s < kSteps; ++s) {
            const float* a_row = a_tile[step % kStages][s];
            const float* b_row = b_tile[step % kStages][s];
            alignas(16) float rows[8], columns[8];
            for (int half = 0; half < 2; ++half) {
                store4(rows + 4 * half, load4(a_row + y + 64 * half));
                store4(columns + 4 * half, load4(b_row + z + 64 * half));
            }
            for (int r = 0; r < 8; ++r) {
                for (int c = 0; c < 8; ++c) sum[r][c] += rows[r] * columns[c];
            }
        }
    }

    for (int r = 0; r < 8; ++r) {
        const int row = first_row + y + r / 4 * 64 + r % 4, i = row / C, h = row % C;
        if (row >= width) continue;
        const float scale = reciprocal[batch * N + i];
        for (int c = 0; c < 8; c += kPiece) {
            const int column = first_column + z + c / 4 * 64 + c % 4, j = column / C;
            if (column >= width) continue;
            float* to = outer + ((batch * N + i) * N + j) * (C * C) + h * C + column % C;
            if (kPiece == 4) {
                store4(to, make_float4(sum[r][c] * scale, sum[r][c + 1] * scale,
                                       sum[r][c + 2] * scale, sum[r][c + 3] * scale));
            } else {
                to[0] = sum[r][c] * scale;
            }
        }
    }
}

EXPORT cudaError_t tiled_gemm(const float* msa, const float* mask, const float* layer_norm_weight,
                              const float* layer_norm_bias, const float* proj_a_weight,
                              const float* proj_a_bias, const float* proj_b_weight,
                              const float* proj_b_bias, float* a, float* b, float* reciprocal,
                              float* outer, int B, int S, int N, int D, cudaStream_t stream) {
    if (cudaError_t error =
            launch_inputs(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                          proj_b_weight, proj_b_bias, a, b, reciprocal, B, S, N, D, stream)) {
        return error;
    }
    const int tiles = ceil_div(N * C, kTile);
    return LAUNCH(tiled_gemm_kernel, dim3(int64_t(B) * tiles * tiles), dim3(kThreads), 0, stream)(
        a, b, reciprocal, outer, S, N, tiles);
}
