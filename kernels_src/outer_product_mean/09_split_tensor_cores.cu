// Stage 09: fp32 accuracy on tensor cores
// As 07, with both products on tensor cores: operands in two parts of fp16 (split_operands.cuh),
// three mma for each product. A block takes 8 i × 4 j: 8 warps multiply 64 × 64 each, then a warp
// projects all 32 pairs over an eighth of the channels, with weights that go from L2 to registers
// as operands. mma truncates what it adds, so sums over s are added 16 by 16 in fp32. Operations:
// 2·B·S·N²·C² + 2·B·N²·C²·P, three times: 580 G at af2. Bytes: 4·B·S·N·D, 4·B·N²·P; from L2 1,536·S
// + 4·C²·P a block, at af2 4,608 blocks of 0.8 + 0.5 MB: 6 GB. Predicts at af2: 1.3 ms, 0.97 of it
// mma at 600 TFLOP/s; peak 0.13 GB beside the inputs. Outcome: 1.85, as two warps a scheduler, that
// wait for each other every 96 mma, reach half of that (12 mends it); at seed, which it is not
// meant for, 23.7 µs in three launches.
// Shapes: D up to 256, C up to 32 (padded to 32), any other size.
#include "outer_product_mean/split_inputs.cuh"

constexpr int kResiduesI = 8, kResiduesJ = 4;  // of a block's tile
constexpr int kPairs = kResiduesI * kResiduesJ;
constexpr int kDepth = 16;                           // s of one stage: one step of mma
constexpr int kStages = 6;                           // one is multiplied while five arrive
constexpr int kPitchI = kResiduesI * kRowWords + 4;  // words of one s in a stage; 16 bytes past a
constexpr int kPitchJ = kResiduesJ * kRowWords + 4;  // multiple of the banks: no conflicts
constexpr int kStageWords = kDepth * (kPitchI + kPitchJ);
constexpr int kPairPitch = kChannels / 2 + 4;        // words of a pair's big (or small) parts
constexpr int kWarpSteps = kChannels / 16 / kWarps;  // of 16 channels, of a warp's eighth
constexpr int kPartialPitch = kOutputs + 8;          // floats of a pair's sums
constexpr int kGroup = 8;                            // tiles of i that blocks at work share
constexpr int kOuterShift = 15;  // |outer| / rows < 2^30 as scaled; 2^-15 takes it into fp16
constexpr int kSharedBytes = sizeof(uint32_t) * kStages * kStageWords;
static_assert(2 * kPairs * kPairPitch <= kStages * kStageWords);
static_assert(kWarps * kPairs * kPartialPitch <= kStages * kStageWords);

// Starts the copy of a stage, kDepth rows s of kResidues residues of a or b, of which the thread
// begins at `from` and then moves on; zeros past the edges.
template <int kResidues>
__device__ void copy_rows(uint32_t* stage, const uint32_t*& from, int first_s, bool inside, int S,
                          int N) {
    constexpr int kPieces = kResidues * kRowWords / 4;  // of 16 bytes, of one s
    constexpr int kTogether = kThreads / kPieces;       // s that all threads copy at once
    constexpr int kPitch = kResidues * kRowWords + 4;
    stage += threadIdx.x / kPieces * kPitch + threadIdx.x % kPieces * 4;
#pragma unroll
    for (int s = 0; s < kDepth; s += kTogether) {
        const bool valid = inside && first_s + int(threadIdx.x) / kPieces + s < S;
        copy_async_16(stage + s * kPitch, from, valid);
        from += int64_t(kTogether) * N * kRowWords;
    }
}

// sums[m][n] += a · b over 16 rows s: 64 (i,h), m · 16 on, by 64 (j,k), n · 8 on
__device__ void multiply(const uint32_t* a_rows, const uint32_t* b_rows, float (&sums)[4][8][4]) {
    const int lane = threadIdx.x % kWarpSize;
    // The row of eight 16-bit values that the lane gives to ldmatrix, see tensor_core.cuh
    a_rows += (lane % 8 + lane / 16 * 8) * kPitchI + lane / 8 % 2 * 4;
    b_rows += lane % 16 * kPitchJ + lane / 16 * 4;
    uint32_t a[2][4][4];
    for (int at = 0; at < 8; ++at) {
        const int part = at / 4, m = at % 4;
        ldmatrix_x4_trans(a[part][m],
                          a_rows + m / 2 * kRowWords + part * kRowWords / 2 + m % 2 * 8);
    }
    for (int pair = 0; pair < 4; ++pair) {  // of columns' tiles
        uint32_t b[2][4];
        for (int part = 0; part < 2; ++part) {
            ldmatrix_x4_trans(b[part],
                              b_rows + pair / 2 * kRowWords + part * kRowWords / 2 + pair % 2 * 8);
        }
        for (int sub = 0; sub < 2; ++sub) {
            float sum[4][4] = {};
            for (int product = 0; product < 3; ++product) {  // small · big, big · small, big · big
                for (int at = 0; at < 4; ++at) {
                    const uint32_t* column = &b[product == 1][sub * 2];
                    mma_m16n8k16_fp16(sum[at], a[product == 0][at], {column[0], column[1]});
                }
            }
            for (int at = 0; at < 16; ++at) {
                sums[at / 4][pair * 2 + sub][at % 4] += sum[at / 4][at % 4];
            }
        }
    }
}

// The warp's outer products over rows, as operands of the projection: outer[part][pair][position]
__device__ void store_outer(uint32_t* outer, const float (&sums)[4][8][4], const float* reciprocal,
                            int first_i, int N) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int at = 0; at < 16; ++at) {
        const int m = at / 4, half = at / 2 % 2, j = warp % 2 * 2 + at % 2;
        const int i = warp / 2 * 2 + m / 2, h = m % 2 * 16 + half * 8 + lane / 4;
        const float scale =
            (first_i + i < N ? reciprocal[first_i + i] : 0) * power_of_two(-kOuterShift);
        uint32_t big[4], small[4];
        for (int n = 0; n < 4; ++n) {
            const float* pair = &sums[m][at % 2 * 4 + n][half * 2];
            split(pair[0] * scale, pair[1] * scale, big[n], small[n]);
        }
        uint32_t* to = outer + (i * kResiduesJ + j) * kPairPitch + h * kHidden / 2 + lane % 4 * 4;
        *reinterpret_cast<uint4*>(to) = make_uint4(big[0], big[1], big[2], big[3]);
        *reinterpret_cast<uint4*>(to + kPairs * kPairPitch) =
            make_uint4(small[0], small[1], small[2], small[3]);
    }
}

// sums[m][n] += outer · weight over the warp's eighth of the positions, for pairs m · 16 on and p
// n · 8 on; half of the weights' tiles are loaded while the other half is multiplied.
__device__ void project_pairs(const uint32_t* outer, const uint4* weight, float (&sums)[2][16][4]) {
    constexpr int kHalf = kOutputTiles / 2;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    weight += warp * kWarpSteps * kOutputTiles * kWarpSize + lane;
    outer += lane % 16 * kPairPitch + (warp * kWarpSteps * 16 + lane / 16 * 8) / 2;
    uint4 w[2][kHalf];
    for (int n = 0; n < kHalf; ++n) w[0][n] = weight[n * kWarpSize];
#pragma unroll 1
    for (int step = 0; step < kWarpSteps; ++step) {
        uint32_t pairs[2][2][4];
        for (int at = 0; at < 4; ++at) {
            const int part = at / 2, m = at % 2;
            ldmatrix_x4(pairs[part][m], outer + (part * kPairs + m * 16) * kPairPitch + step * 8);
        }
        for (int half = 0; half < 2; ++half) {
            const int next = step * 2 + half + 1;
            for (int n = 0; n < kHalf && next < kWarpSteps * 2; ++n) {
                w[1 - half][n] = weight[(next * kHalf + n) * kWarpSize];
            }
            for (int n = 0; n < kHalf; ++n) {
                const uint32_t big[2] = {w[half][n].x, w[half][n].y};
                const uint32_t small[2] = {w[half][n].z, w[half][n].w};
                for (int m = 0; m < 2; ++m) {
                    float (&sum)[4] = sums[m][half * kHalf + n];
                    mma_m16n8k16_fp16(sum, pairs[1][m], big);
                    mma_m16n8k16_fp16(sum, pairs[0][m], small);
                    mma_m16n8k16_fp16(sum, pairs[0][m], big);
                }
            }
        }
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    split_tensor_cores_kernel(const uint32_t* a, const uint32_t* b, const float* reciprocal,
                              const uint4* weight, const float* shifts, const float* out_bias,
                              float* out, int S, int N, int P) {
    DYNAMIC_SHARED(uint32_t, shared);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    // Blocks that run together take tiles near each other: kGroup tiles of i, j by j.
    const int i_tiles = ceil_div(N, kResiduesI), j_tiles = ceil_div(N, kResiduesJ);
    const int batch = blockIdx.x / (i_tiles * j_tiles), tile = blockIdx.x % (i_tiles * j_tiles);
    const int first_p = blockIdx.y * kOutputs, group = tile / (kGroup * j_tiles);
    const int height = min(kGroup, i_tiles - group * kGroup), at = tile % (kGroup * j_tiles);
    const int first_i = (group * kGroup + at % height) * kResiduesI;
    const int first_j = at / height * kResiduesJ;
    const int piece_i = threadIdx.x % (kResiduesI * 8), piece_j = threadIdx.x % (kResiduesJ * 8);
    const int s_i = threadIdx.x / (kResiduesI * 8), s_j = threadIdx.x / (kResiduesJ * 8);
    a += ((int64_t(batch) * S + s_i) * N + first_i) * kRowWords + piece_i * 4;
    b += ((int64_t(batch) * S + s_j) * N + first_j) * kRowWords + piece_j * 4;
    const bool inside_i = first_i + piece_i / 8 < N, inside_j = first_j + piece_j / 8 < N;

    const auto copy = [&](int stage) {  // one group each, empty past the end
        if (stage * kDepth < S) {
            uint32_t* to = shared + stage % kStages * kStageWords;
            copy_rows<kResiduesI>(to, a, stage * kDepth, inside_i, S, N);
            copy_rows<kResiduesJ>(to + kDepth * kPitchI, b, stage * kDepth, inside_j, S, N);
        }
        copy_async_commit();
    };
    {
        float sums[4][8][4] = {};
        for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
        for (int stage = 0; stage * kDepth < S; ++stage) {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this stage is there, and the one before is done with
            copy(stage + kStages - 1);
            const uint32_t* a_rows =
                shared + stage % kStages * kStageWords + warp / 2 * 2 * kRowWords;
            const uint32_t* b_rows = shared + stage % kStages * kStageWords + kDepth * kPitchI +
                                     warp % 2 * 2 * kRowWords;
            multiply(a_rows, b_rows, sums);
        }
        __syncthreads();
        store_outer(shared, sums, reciprocal + int64_t(batch) * N, first_i, N);
    }
    __syncthreads();

    float* partial = reinterpret_cast<float*>(shared);  // [warp][pair][p]
    {
        float sums[2][kOutputTiles][4] = {};
        project_pairs(shared, weight + int64_t(first_p) * kChannels / 4, sums);
        __syncthreads();
        for (int at = 0; at < 4 * kOutputTiles; ++at) {
            const int m = at / 2 / kOutputTiles, n = at / 2 % kOutputTiles, half = at % 2;
            const int pair = m * 16 + half * 8 + lane / 4, p = n * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(partial + (warp * kPairs + pair) * kPartialPitch + p) =
                make_float2(sums[m][n][half * 2], sums[m][n][half * 2 + 1]);
        }
    }
    __syncthreads();
    const int p = first_p + threadIdx.x % kOutputs;
    if (p >= P) return;
    const int shift = int(shifts[0]) + int(shifts[1]) - kOuterShift + int(shifts[2 + p]);
    for (int pair = threadIdx.x / kOutputs; pair < kPairs; pair += kThreads / kOutputs) {
        const int64_t i = first_i + pair / kResiduesJ, j = first_j + pair % kResiduesJ;
        if (i >= N || j >= N) continue;
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) {
            sum += partial[(w * kPairs + pair) * kPartialPitch + p - first_p];
        }
        out[((batch * N + i) * N + j) * P + p] = scale_by(sum, -shift) + out_bias[p];
    }
}

// With P' = ⌈P/128⌉·128, a, b are (B,S,N,32), reciprocal (B,N), weight (P',1024), shifts (2 + P').
EXPORT cudaError_t split_tensor_cores(const float* msa, const float* mask,
                                      const float* layer_norm_weight, const float* layer_norm_bias,
                                      const float* proj_a_weight, const float* proj_a_bias,
                                      const float* proj_b_weight, const float* proj_b_bias,
                                      const float* out_weight, const float* out_bias, float* a,
                                      float* b, float* reciprocal, float* weight, float* shifts,
                                      float* out, int B, int S, int N, int P, cudaStream_t stream) {
    const int passes = ceil_div(P, kOutputs), weight_blocks = passes * kOutputs / kWarps;
    if (cudaError_t error = LAUNCH(prepare_kernel, dim3(weight_blocks + B * ceil_div(N, kWarpSize)),
                                   dim3(kThreads), 0, stream)(mask, out_weight, reciprocal, weight,
                                                              shifts + 2, S, N, P, weight_blocks)) {
        return error;
    }
    uint32_t *a_words = reinterpret_cast<uint32_t*>(a), *b_words = reinterpret_cast<uint32_t*>(b);
    const int64_t rows = int64_t(B) * S * N, row_blocks = ceil_div(rows, kWarps * 16);
    if (cudaError_t error = LAUNCH(inputs_kernel, dim3(min(row_blocks, int64_t(kInputBlocks))),
                                   dim3(kThreads), 2 * sizeof(SharedProjection), stream)(
            msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
            proj_b_weight, proj_b_bias, a_words, b_words, shifts, rows)) {
        return error;
    }
    const dim3 grid(int64_t(B) * ceil_div(N, kResiduesI) * ceil_div(N, kResiduesJ), passes);
    return LAUNCH(split_tensor_cores_kernel, grid, dim3(kThreads), kSharedBytes, stream)(
        a_words, b_words, reciprocal, reinterpret_cast<const uint4*>(weight), shifts, out_bias, out,
        S, N, P);
}
