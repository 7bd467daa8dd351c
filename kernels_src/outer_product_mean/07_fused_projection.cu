// Stage 07: division and out_proj in the same kernel
// Against 06 a block keeps its tile of outer, 4 i × 4 j: 16 pairs × C² in shared memory, and
// multiplies it by out_weight at once, so that outer, 604 MB at af2, never exists. Each of 8 warps
// sums over an eighth of the channels for all pairs and 128 outputs, so that weights go from L2 to
// registers once a block; the eighths are added at the end. A kernel turns out_weight to (C²,P)
// before, so that a warp reads 512 contiguous bytes. Operations: 06's and 2·B·N²·C²·P. Bytes: the
// result, 4·B·N²·P; from L2 8·B·N²·C²·S/128 and 4·C²·P a block, at af2 4.8 + 4.8 GB. Predicts at
// af2: 5.2 ms, as much as eager's products, with 0.13 GB where eager has 1.46; at seed 18 µs: 128
// blocks want 64 MB of weights from L2 (08 mends it). Outcome: af2 5.5 ms; seed 42.4 µs. With one
// block on a multiprocessor, two warps a scheduler, nobody works while a warp waits for L2: 64
// times, as it takes its 128 channels two by two. That alone is some 20 µs (a guess).
// Shapes: C up to 32 (padded to 32), any other size.
#include "outer_product_mean/inputs.cuh"
#include "tensor_core.cuh"

constexpr int kHidden = 32;   // C, padded with zeros
constexpr int kResidues = 4;  // i, and j, of a block
constexpr int kPairs = kResidues * kResidues;
constexpr int kTile = kResidues * kHidden;  // (i,h) and (j,k) of a block's part of outer
constexpr int kSteps = 16;                  // s of one stage
constexpr int kStages = 3;                  // one is multiplied while two are on their way
constexpr int kPiece = C % 4 == 0 ? 4 : 1;  // floats of one copy: is each row of a 16-byte aligned?
constexpr int kPairStride = kPairs + 4;     // against bank conflicts
constexpr int kOutputs = 4 * kWarpSize;     // pair channels of one pass, 4 a lane
constexpr int kOuterBytes = sizeof(float) * kHidden * kHidden * kPairStride;
constexpr int kPartialBytes = sizeof(float) * kWarps / 2 * kPairs * kOutputs;
static_assert(C <= kHidden && 2 * kStages * kSteps * kTile * sizeof(float) <= kOuterBytes);

// weight[channel][p] = out_weight[p][channel], 32 × 32 of it a block; zeros from P on
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const float* out_weight, float* weight, int P, int padded_p) {
    SHARED(float, tile, [kWarpSize][kWarpSize + 1]);
    const int tiles = padded_p / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int first_p = blockIdx.x % tiles * kWarpSize, first = blockIdx.x / tiles * kWarpSize;
    for (int r = threadIdx.x / kWarpSize; r < kWarpSize; r += kWarps) {
        const int p = first_p + r, channel = first + lane;
        tile[r][lane] = p < P && channel < C * C ? out_weight[int64_t(p) * C * C + channel] : 0;
    }
    __syncthreads();
    for (int r = threadIdx.x / kWarpSize; r < kWarpSize; r += kWarps) {
        const int channel = first + r;
        if (channel < C * C) weight[int64_t(channel) * padded_p + first_p + lane] = tile[lane][r];
    }
}

// Starts the copy of rows first_s … of a (or b), residues first_n …, into a stage: (i,h) or (j,k).
// Zeros where there is no such row, residue or channel.
__device__ void copy_rows(float* tile, const float* from, int first_s, int first_n, int S, int N) {
    for (int at = threadIdx.x * kPiece; at < kSteps * kTile; at += kThreads * kPiece) {
        const int s = first_s + at / kTile, n = first_n + at % kTile / kHidden, h = at % kHidden;
        const bool valid = s < S && n < N && h < C;
        const float* source = from + (valid ? (int64_t(s) * N + n) * C + h : 0);
        if (kPiece == 4) {
            copy_async_16(tile + at, source, valid);
        } else {
            copy_async_4(tile + at, source, valid);
        }
    }
}

// out of the block's pairs for kOutputs channels p, from outer[h·32 + k][pair] in shared memory
__device__ void project_pairs(const float* outer, const float* weight, const float* out_bias,
                              float* partial, float* out, int64_t batch, int first_i, int first_j,
                              int first_p, int N, int P, int padded_p) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    float sum[kPairs][4] = {};  // of the warp's channels, for p = first_p + 4·lane + …
#pragma unroll 2
    for (int channel = warp; channel < C * C; channel += kWarps) {
        const float4 w = load4(weight + int64_t(channel) * padded_p + first_p + 4 * lane);
        const float* values = outer + (channel / C * kHidden + channel % C) * kPairStride;
        for (int pair = 0; pair < kPairs; pair += 4) {
            alignas(16) float value[4];
            store4(value, load4(values + pair));
            for (int q = 0; q < 4; ++q) {
                sum[pair + q][0] += value[q] * w.x;
                sum[pair + q][1] += value[q] * w.y;
                sum[pair + q][2] += value[q] * w.z;
                sum[pair + q][3] += value[q] * w.w;
            }
        }
    }

    // Half of the warps hand their sums to the others; then each thread adds what is left.
    float* mine = partial + (warp % (kWarps / 2) * kPairs) * kOutputs + 4 * lane;
    for (int turn = 1; turn >= 0; --turn) {
        if (warp / (kWarps / 2) == turn) {
            for (int pair = 0; pair < kPairs; ++pair) {
                float4 total = make_float4(sum[pair][0], sum[pair][1], sum[pair][2], sum[pair][3]);
                if (turn == 0) {
                    const float4 other = load4(mine + pair * kOutputs);
                    total = make_float4(total.x + other.x, total.y + other.y, total.z + other.z,
                                        total.w + other.w);
                }
                store4(mine + pair * kOutputs, total);
            }
        }
        __syncthreads();
    }
    for (int at = threadIdx.x; at < kPairs * kOutputs; at += kThreads) {
        const int pair = at / kOutputs, p = first_p + at % kOutputs;
        const int i = first_i + pair / kResidues, j = first_j + pair % kResidues;
        float total = 0;
        for (int w = 0; w < kWarps / 2; ++w) total += partial[w * kPairs * kOutputs + at];
        if (i < N && j < N && p < P) {
            out[((batch * N + i) * N + j) * P + p] = total + out_bias[p];
        }
    }
    __syncthreads();  // the next pass overwrites the sums
}

__global__ void __launch_bounds__(kThreads, 2)
    fused_projection_kernel(const float* a, const float* b, const float* reciprocal,
                            const float* weight, const float* out_bias, float* out, int S, int N,
                            int P, int padded_p, int tiles) {
    DYNAMIC_SHARED(float, shared);
    float* a_tile = shared;  // kStages × kSteps × kTile, as b_tile
    float* b_tile = a_tile + kStages * kSteps * kTile;
    float* outer = shared;  // in their place, once they are done with
    float* partial = outer + kOuterBytes / sizeof(float);
    const int64_t batch = blockIdx.x / tiles / tiles;
    const int first_i = blockIdx.x / tiles % tiles * kResidues;
    const int first_j = blockIdx.x % tiles * kResidues;
    const int y = threadIdx.x / kGrid * 4, z = threadIdx.x % kGrid * 4;  // and 64 further on

    const auto copy = [&](int step) {  // one group each, empty past the end
        if (step * kSteps < S) {
            const int64_t start = batch * S * N * C;
            const int stage = step % kStages * kSteps * kTile;
            copy_rows(a_tile + stage, a + start, step * kSteps, first_i, S, N);
            copy_rows(b_tile + stage, b + start, step * kSteps, first_j, S, N);
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
#pragma unroll 2
        for (int s = 0; s < kSteps; ++s) {
            const float* a_row = a_tile + (step % kStages * kSteps + s) * kTile;
            const float* b_row = b_tile + (step % kStages * kSteps + s) * kTile;
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
    __syncthreads();

    for (int r = 0; r < 8; ++r) {
        const int row = y + r / 4 * 64 + r % 4, i = row / kHidden, h = row % kHidden;
        const float scale = first_i + i < N ? reciprocal[batch * N + first_i + i] : 0;
        for (int c = 0; c < 8; ++c) {
            const int column = z + c / 4 * 64 + c % 4, j = column / kHidden, k = column % kHidden;
            outer[(h * kHidden + k) * kPairStride + i * kResidues + j] = sum[r][c] * scale;
        }
    }
    __syncthreads();
    for (int first_p = 0; first_p < P; first_p += kOutputs) {
        project_pairs(outer, weight, out_bias, partial, out, batch, first_i, first_j, first_p, N, P,
                      padded_p);
    }
}

EXPORT cudaError_t fused_projection(const float* msa, const float* mask,
                                    const float* layer_norm_weight, const float* layer_norm_bias,
                                    const float* proj_a_weight, const float* proj_a_bias,
                                    const float* proj_b_weight, const float* proj_b_bias,
                                    const float* out_weight, const float* out_bias, float* a,
                                    float* b, float* reciprocal, float* weight, float* out, int B,
                                    int S, int N, int D, int P, int padded_p, cudaStream_t stream) {
    if (cudaError_t error =
            launch_inputs(msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
                          proj_b_weight, proj_b_bias, a, b, reciprocal, B, S, N, D, stream)) {
        return error;
    }
    const int64_t transpose_blocks = ceil_div(C * C, kWarpSize) * int64_t(padded_p / kWarpSize);
    if (cudaError_t error = LAUNCH(transpose_kernel, dim3(transpose_blocks), dim3(kThreads), 0,
                                   stream)(out_weight, weight, P, padded_p)) {
        return error;
    }
    const int tiles = ceil_div(N, kResidues);
    return LAUNCH(fused_projection_kernel, dim3(int64_t(B) * tiles * tiles), dim3(kThreads),
                  kOuterBytes + kPartialBytes,
                  stream)(a, b, reciprocal, weight, out_bias, out, S, N, P, padded_p, tiles);
}
