// Stage 09: fp32 accuracy on tensor cores
// As 07, with both products on tensor cores: operands in two parts of fp16 (split_operands.cuh),
// three mma for each product, at 600 TFLOP/s 200 T of fp32's operations a second where CUDA cores
// have 51. A block takes 8 i × 4 j: 8 warps multiply 64 × 64 each, then a warp projects all 32
// pairs over an eighth of the channels, with weights that go from L2 to registers as operands.
// mma truncates what it adds, so sums over s are added 16 by 16 in fp32.
// Operations: 2·B·S·N²·C² + 2·B·N²·C²·P, three times. Bytes: 4·B·S·N·D, 4·B·N²·P; from L2 (12 ·
// 128·S + 4·C²·P) a block, at af2 4.608 blocks of 0.8 + 0.5 MB: 6 GB, as long as the products.
// Predicts at af2: 1.3 ms: 0.08 for the inputs' kernel, 0.97 of tensor cores (L2 1.0 beside it),
// 0.2 in which a block fills its first stages or stores. Peak 0.13 GB beside the inputs.
// Shapes: D up to 256, C up to 32 (padded to 32), any other size.
#include "outer_product_mean/split_operands.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kResiduesI = 8, kResiduesJ = 4;  // of a block's tile
constexpr int kPairs = kResiduesI * kResiduesJ;
constexpr int kDepth = 32;                           // s of one stage
constexpr int kStages = 3;                           // one is multiplied while two arrive
constexpr int kRowWords = kHidden;                   // big, then small parts of a row of a or b
constexpr int kPitchI = kResiduesI * kRowWords + 4;  // words of one s in a stage; 16 bytes past a
constexpr int kPitchJ = kResiduesJ * kRowWords + 4;  // multiple of the banks: no conflicts
constexpr int kStageWords = kDepth * (kPitchI + kPitchJ);
constexpr int kChannels = kHidden * kHidden;         // (h,k) of a pair, in the order of channel_at
constexpr int kPairPitch = kChannels / 2 + 4;        // words of a pair's big (or small) parts
constexpr int kOutputs = 128;                        // p of a block
constexpr int kOutputTiles = kOutputs / 8;           // as mma has them
constexpr int kWarpSteps = kChannels / 16 / kWarps;  // of 16 channels, of a warp's eighth
constexpr int kPartialPitch = kOutputs + 8;          // floats of a pair's sums
constexpr int kGroup = 8;                            // tiles of i that blocks at work share
constexpr int kInputBlocks = 132;                    // the H200's multiprocessors
constexpr int kOuterShift = 15;  // |outer| / rows < 2^30 as scaled; 2^-15 takes it into fp16
constexpr int kSharedBytes = sizeof(uint32_t) * kStages * kStageWords;
static_assert(D <= 256, "a lane holds its part of two rows of msa in registers");
static_assert(2 * kPairs * kPairPitch <= kStages * kStageWords);
static_assert(kWarps * kPairs * kPartialPitch <= kStages * kStageWords);

// The channel h·C + k at a position of the projection's order, -1 in the padding. A lane has, of a
// pair and an h, k = 2t, 2t+1 of four tiles: here they are 8 neighbours.
__device__ int channel_at(int position) {
    const int h = position / kHidden,
              k = position % 8 / 2 * 8 + position % kHidden / 8 * 2 + position % 2;
    return h < C && k < C ? h * C + k : -1;
}

// out_weight's channels p as operands in two parts, a warp each, and the powers of two that they
// are scaled by. weight[p / 128][step of 16 channels][p / 8 % 16][lane]
__device__ void split_weight(const float* out_weight, uint4* weight, float* shifts, int p, int P) {
    const int lane = threadIdx.x % kWarpSize;
    const float* row = out_weight + int64_t(p) * C * C;
    float largest = 0;
    for (int at = lane; at < C * C && p < P; at += kWarpSize)
        largest = fmaxf(largest, fabsf(row[at]));
    const int shift = shift_of(warp_max(largest));
    for (int at = lane; at < kChannels / 4; at += kWarpSize) {
        const int step = at / 4, t = at % 4;
        float value[4];
        for (int e = 0; e < 4; ++e) {
            const int channel = channel_at(step * 16 + e / 2 * 8 + t * 2 + e % 2);
            value[e] = p < P && channel >= 0 ? row[channel] * power_of_two(shift) : 0;
        }
        uint4 words;
        split(value[0], value[1], words.x, words.z);
        split(value[2], value[3], words.y, words.w);
        const int64_t tile = (int64_t(p / kOutputs) * (kChannels / 16) + step) * kOutputTiles;
        weight[(tile + p % kOutputs / 8) * kWarpSize + p % 8 * 4 + t] = words;
    }
    if (lane == 0) shifts[p] = shift;
}

// reciprocal[b][n] = 1 / max(1, Σ_s mask[b][s][n]) for 32 residues n, one a lane
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

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const float* mask, const float* out_weight, float* reciprocal, float* weight,
                   float* shifts, int S, int N, int P, int weight_blocks) {
    const int block = blockIdx.x - weight_blocks, residue_tiles = ceil_div(N, kWarpSize);
    if (block < 0) {
        split_weight(out_weight, reinterpret_cast<uint4*>(weight), shifts,
                     blockIdx.x * kWarps + threadIdx.x / kWarpSize, P);
    } else {
        count_rows(mask, reciprocal, block / residue_tiles, block % residue_tiles * kWarpSize, S,
                   N);
    }
}

// a and b of all rows (b,s,n), 16 a warp at a time, as they enter the product: (row, big or small,
// 32 channels) of fp16. shifts[0], shifts[1]: the powers of two that they are scaled by
__global__ void __launch_bounds__(kThreads, 1)
    inputs_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* proj_a_weight,
                  const float* proj_a_bias, const float* proj_b_weight, const float* proj_b_bias,
                  uint32_t* a, uint32_t* b, float* shifts, int64_t rows) {
    DYNAMIC_SHARED(Projections, shared);
    Projections& projections = *shared;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    {
        Affine affine;
        load_affine(affine, layer_norm_weight, layer_norm_bias);
        const bool is_a = warp < kColumnTiles;
        prepare_projection(projections, is_a ? 0 : 1, warp % kColumnTiles,
                           is_a ? proj_a_weight : proj_b_weight, is_a ? proj_a_bias : proj_b_bias,
                           affine);
    }
    __syncthreads();
    const int shift[2] = {shift_of(projections, 0), shift_of(projections, 1)};
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        shifts[0] = shift[0];
        shifts[1] = shift[1];
    }

    const int64_t stride = int64_t(gridDim.x) * kWarps * 16;
    for (int64_t first = (int64_t(blockIdx.x) * kWarps + warp) * 16; first < rows;
         first += stride) {
        const auto row_of = [&](int half) {
            const int64_t row = first + half * 8 + lane / 4;
            return row < rows ? row : -1;
        };
        float x[1][2][kSteps][4], present[2];
        load_tile(msa, mask, row_of, x[0], present);
        normalize(x[0]);
        float sums[2][1][kColumnTiles][4] = {};
        project(projections, 0, x, sums);
        for (int half = 0; half < 2; ++half) {
            if (row_of(half) < 0) continue;
            const int64_t at = row_of(half) * kRowWords + lane % 4 * 4;
            for (int matrix = 0; matrix < 2; ++matrix) {
                uint32_t* to = (matrix == 0 ? a : b) + at;
                finish(projections, matrix, sums[matrix][0], half,
                       present[half] * power_of_two(shift[matrix]), to, to + kRowWords / 2);
            }
        }
    }
}

// Starts the copy of kDepth rows s of kResidues residues of a or b; zeros past the edges.
template <int kResidues>
__device__ void copy_rows(uint32_t* tile, const uint32_t* from, int first_s, int first_n, int S,
                          int N) {
    constexpr int kPieces = kResidues * kRowWords / 4;  // of 16 bytes, of one s
    constexpr int kTogether = kThreads / kPieces;       // s that all threads copy at once
    const int piece = threadIdx.x % kPieces, s = threadIdx.x / kPieces;
    const bool inside = first_n + piece / (kRowWords / 4) < N;
    const uint32_t* source = from + (int64_t(first_s + s) * N + first_n) * kRowWords + piece * 4;
    tile += s * (kResidues * kRowWords + 4) + piece * 4;
#pragma unroll
    for (int turn = 0; turn < kDepth / kTogether; ++turn) {
        const bool valid = inside && first_s + s + turn * kTogether < S;
        copy_async_16(tile + turn * kTogether * (kResidues * kRowWords + 4), source, valid);
        source += int64_t(kTogether) * N * kRowWords;
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
    a += int64_t(batch) * S * N * kRowWords;
    b += int64_t(batch) * S * N * kRowWords;

    const auto copy = [&](int stage) {  // one group each, empty past the end
        if (stage * kDepth < S) {
            uint32_t* to = shared + stage % kStages * kStageWords;
            copy_rows<kResiduesI>(to, a, stage * kDepth, first_i, S, N);
            copy_rows<kResiduesJ>(to + kDepth * kPitchI, b, stage * kDepth, first_j, S, N);
        }
        copy_async_commit();
    };
    {
        float sums[4][8][4] = {};
        copy(0);
        copy(1);
        for (int stage = 0; stage * kDepth < S; ++stage) {
            copy_async_wait<1>();
            __syncthreads();  // this stage is there, and the one before is done with
            copy(stage + 2);
            const uint32_t* a_rows =
                shared + stage % kStages * kStageWords + warp / 2 * 2 * kRowWords;
            const uint32_t* b_rows = shared + stage % kStages * kStageWords + kDepth * kPitchI +
                                     warp % 2 * 2 * kRowWords;
            for (int s = 0; s < kDepth && stage * kDepth + s < S; s += 16) {
                multiply(a_rows + s * kPitchI, b_rows + s * kPitchJ, sums);
            }
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
        out[((batch * N + i) * N + j) * P + p] = ldexpf(sum, -shift) + out_bias[p];
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
                                   dim3(kThreads), sizeof(Projections), stream)(
            msa, mask, layer_norm_weight, layer_norm_bias, proj_a_weight, proj_a_bias,
            proj_b_weight, proj_b_bias, a_words, b_words, shifts, rows)) {
        return error;
    }
    const dim3 grid(int64_t(B) * ceil_div(N, kResiduesI) * ceil_div(N, kResiduesJ), passes);
    return LAUNCH(split_tensor_cores_kernel, grid, dim3(kThreads), kSharedBytes, stream)(
        a_words, b_words, reciprocal, reinterpret_cast<const uint4*>(weight), shifts, out_bias, out,
        S, N, P);
}
