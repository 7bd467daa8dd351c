// Stage 09: weights in registers, split for the tensor cores
// As 07 in one launch, but the weights never see shared memory: mma.m16n8k8 takes 16 outputs × 8
// rows, so with weights on its left a column of 8 rows fills it, and each lane loads the weights
// that its fragments hold, all of them before anything waits. Every warp normalises x in registers.
// Two barriers remain. fp32 accuracy comes from three TF32 products of split operands.
// Bytes and operations: as 03, the projections' operations three times but on tensor cores.
// Predicts at seed: 4 µs in a graph: 0.9 launch, 0.4 for the first loads, 0.8 for 80 KB at 64 bytes
// a cycle, 0.6 attention, 0.3 out_proj, the rest to store and end. BLOCKS 2, a cluster for each
// column, halves the 0.8 and splits the instructions, for two cluster barriers: 0.3 less.
// Outcome: 3.77 µs with BLOCKS 1.
// Shapes: S ≤ 8, D = 16·H ≤ 64: a warp holds three matrices' tiles, 3·D/2 registers.
#include "hopper.cuh"

constexpr float kEpsilon = 1e-5f;
constexpr int kHeadDim = 16;               // a head's channels are the 16 outputs of a tile
constexpr int kRows = 8;                   // rows of x in a tile; those past S repeat the last
constexpr int kSteps = D / 16;             // a tile's 16 channels at a time are two mma deep
constexpr int kHeadStride = kHeadDim + 4;  // floats from row to row of a head's q, k, v and g
constexpr int kStride = D + 16;            // and of the attended rows
constexpr int kHeads = H / BLOCKS;         // of a block: BLOCKS of them, a cluster, share a column
constexpr int kThreads = 2 * kHeads * kWarpSize;  // a head: one warp for q and k, one for v and g

static_assert(S <= kRows && D == H * kHeadDim && D <= 64, "seed-size columns only");
static_assert(H % BLOCKS == 0, "whole heads a block");

// 16 rows of a weight matrix, or 8 rows of x, in registers. Lane (g = lane / 4, t = lane % 4) has
// channels 16·j + 4·t to 16·j + 4·t + 3 of row g, one 16-byte load. To the tensor core they are
// channels t and t + 4 of two steps: a sum may go in any order that weights and x agree on.
struct WeightTile {
    float4 low[kSteps], high[kSteps];  // rows g and g + 8
};
struct RowTile {
    uint32_t big[kSteps][4], small[kSteps][4];  // x = big + small
};

__device__ void load_weights(WeightTile& tile, const float* rows) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    for (int j = 0; j < kSteps; ++j) {
        tile.low[j] = load4(rows + g * D + 16 * j + 4 * t);
        tile.high[j] = load4(rows + (g + 8) * D + 16 * j + 4 * t);
    }
}

// x = big + small, as split_tf32 but in three instructions, not nine: it leaves out the care for
// infinities, and leaves it to the tensor core to drop small's bits past TF32's (2^-22 of x at
// most).
__device__ void split(float x, uint32_t& big, uint32_t& small) {
    big = (__float_as_uint(x) + 0x1000) & 0xFFFFE000;
    small = __float_as_uint(x - __uint_as_float(big));
}

__device__ void split_rows(RowTile& tile, const float4 (&x)[kSteps]) {
    for (int j = 0; j < kSteps; ++j) {
        split(x[j].x, tile.big[j][0], tile.small[j][0]);
        split(x[j].y, tile.big[j][1], tile.small[j][1]);
        split(x[j].z, tile.big[j][2], tile.small[j][2]);
        split(x[j].w, tile.big[j][3], tile.small[j][3]);
    }
}

// x = (x - mean) / deviation · weight + bias in registers, four lanes a row
__device__ void layer_norm(float4 (&x)[kSteps], const float4 (&weight)[kSteps],
                           const float4 (&bias)[kSteps]) {
    float mean = 0, variance = 0;
    for (int j = 0; j < kSteps; ++j) mean += x[j].x + x[j].y + x[j].z + x[j].w;
    for (int step = 1; step < 4; step *= 2) mean += __shfl_xor_sync(kFullMask, mean, step);
    mean /= D;
    for (int j = 0; j < kSteps; ++j) {
        x[j] = make_float4(x[j].x - mean, x[j].y - mean, x[j].z - mean, x[j].w - mean);
        variance += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
    }
    for (int step = 1; step < 4; step *= 2) variance += __shfl_xor_sync(kFullMask, variance, step);
    const float inverse = rsqrtf(variance / D + kEpsilon);
    for (int j = 0; j < kSteps; ++j) {
        x[j].x = x[j].x * inverse * weight[j].x + bias[j].x;
        x[j].y = x[j].y * inverse * weight[j].y + bias[j].y;
        x[j].z = x[j].z * inverse * weight[j].z + bias[j].z;
        x[j].w = x[j].w * inverse * weight[j].w + bias[j].w;
    }
}

// y = weights · rowsᵀ: lane (g, t) gets outputs g (y[0], y[1]) and g + 8 (y[2], y[3]) of rows 2·t
// and 2·t + 1. Three sums, so that the small terms are not rounded to the big one's last bit and
// three mma are under way; small·small is below fp32's rounding.
__device__ void project(float (&y)[4], const WeightTile& weights, const RowTile& rows) {
    float small_big[4] = {}, big_small[4] = {};
    for (int e = 0; e < 4; ++e) y[e] = 0;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        const float4 low = weights.low[j], high = weights.high[j];
        const float w[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t big[4], small[4];
            for (int e = 0; e < 4; ++e) split(w[half][e], big[e], small[e]);
            const uint32_t x_big[2] = {rows.big[j][2 * half], rows.big[j][2 * half + 1]};
            const uint32_t x_small[2] = {rows.small[j][2 * half], rows.small[j][2 * half + 1]};
            mma_m16n8k8_tf32(small_big, small, x_big);
            mma_m16n8k8_tf32(big_small, big, x_small);
            mma_m16n8k8_tf32(y, big, x_big);
        }
    }
    for (int e = 0; e < 4; ++e) y[e] += small_big[e] + big_small[e];
}

// A head's projection from the tensor core's layout to rows in shared memory.
__device__ void store_rows(float* rows, const float (&y)[4], int stride) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    for (int e = 0; e < 4; ++e) rows[(2 * t + e % 2) * stride + g + e / 2 * 8] = y[e];
}

// weights[s][t] = softmax_t(q[s]·k[t]/√d) for one head by one warp: four lanes a query, two keys a
// lane
__device__ void softmax(const float* q, const float* k, float2 key_mask, float* weights) {
    const int s = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4 * 2;
    float2 score = make_float2(0, 0);
    for (int c = 0; c < kHeadDim; c += 4) {
        const float4 a = load4(q + s * kHeadStride + c);
        const float4 b = load4(k + t * kHeadStride + c), e = load4(k + (t + 1) * kHeadStride + c);
        score.x += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        score.y += a.x * e.x + a.y * e.y + a.z * e.z + a.w * e.w;
    }
    const float scale = 1.0f / sqrtf(kHeadDim);
    score.x = key_mask.x != 0 ? score.x * scale : -INFINITY;
    score.y = key_mask.y != 0 ? score.y * scale : -INFINITY;
    float highest = fmaxf(score.x, score.y);
    for (int step = 1; step < 4; step *= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
    }
    const float2 weight = make_float2(expf(score.x - highest), expf(score.y - highest));
    float total = weight.x + weight.y;
    for (int step = 1; step < 4; step *= 2) total += __shfl_xor_sync(kFullMask, total, step);
    const float inverse = 1 / total;
    weights[s * kRows + t] = weight.x * inverse;
    weights[s * kRows + t + 1] = weight.y * inverse;
}

// attended[s][c] = g[s][c] Σ_t weights[s][t] v[t][c], for 8 of a head's channels by one warp, to
// each block of the column
__device__ void attend(const float* weights, const float* v, const float* g, float* attended) {
    const int s = threadIdx.x % kWarpSize / 4, c = threadIdx.x % 4 * 2;
    float2 sum = make_float2(0, 0);
    for (int t = 0; t < kRows; ++t) {
        const float weight = weights[s * kRows + t];
        sum.x += weight * v[t * kHeadStride + c];
        sum.y += weight * v[t * kHeadStride + c + 1];
    }
    sum.x *= g[s * kHeadStride + c];
    sum.y *= g[s * kHeadStride + c + 1];
    for (int block = 0; block < BLOCKS; ++block) {
        float* to = BLOCKS == 1 ? attended : cluster_pointer(attended, block);
        to[s * kStride + c] = sum.x;
        to[s * kStride + c + 1] = sum.y;
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    column_kernel(const float* msa, const float* mask, const float* layer_norm_weight,
                  const float* layer_norm_bias, const float* query_weight, const float* key_weight,
                  const float* value_weight, const float* gate_weight, const float* gate_bias,
                  const float* out_weight, const float* out_bias, float* out, int N) {
    SHARED(float, q, [kHeads][kRows * kHeadStride]);
    SHARED(float, k, [kHeads][kRows * kHeadStride]);
    SHARED(float, v, [kHeads][kRows * kHeadStride]);
    SHARED(float, g, [kHeads][kRows * kHeadStride]);
    SHARED(float, weights, [kHeads][kRows * kRows]);
    SHARED(float, attended, [kRows * kStride]);
    const int64_t b = blockIdx.x / BLOCKS / N, n = blockIdx.x / BLOCKS % N;
    const int head = threadIdx.x / kWarpSize % kHeads;  // of this block's
    const int channel = (blockIdx.x % BLOCKS * kHeads + head) * kHeadDim;
    const bool first_warp = threadIdx.x < kThreads / 2;  // the head's warp for query and key
    const int row = threadIdx.x % kWarpSize / 4, lane4 = threadIdx.x % 4;

    // Every load of the kernel is issued here, before anything waits for one.
    float4 x[kSteps], norm_weight[kSteps], norm_bias[kSteps];
    for (int j = 0; j < kSteps; ++j) {
        const int c = 16 * j + 4 * lane4;
        x[j] = load4(msa + ((b * S + min(row, S - 1)) * N + n) * D + c);
        norm_weight[j] = load4(layer_norm_weight + c);
        norm_bias[j] = load4(layer_norm_bias + c);
    }
    WeightTile first, second, last;
    load_weights(first, (first_warp ? query_weight : value_weight) + channel * D);
    load_weights(second, (first_warp ? key_weight : gate_weight) + channel * D);
    float2 key_mask = make_float2(0, 0), bias;
    const float* bias_source = first_warp ? out_bias : gate_bias;
    bias.x = bias_source[channel + row];
    bias.y = bias_source[channel + row + 8];
    if (first_warp) {
        load_weights(last, out_weight + channel * D);
        if (2 * lane4 < S) key_mask.x = mask[(b * S + 2 * lane4) * N + n];
        if (2 * lane4 + 1 < S) key_mask.y = mask[(b * S + 2 * lane4 + 1) * N + n];
    }

    if (BLOCKS > 1) cluster_sync();  // every block has begun: its shared memory may be written

    layer_norm(x, norm_weight, norm_bias);
    RowTile rows;
    split_rows(rows, x);
    float y[4];
    project(y, first, rows);
    store_rows(first_warp ? q[head] : v[head], y, kHeadStride);
    project(y, second, rows);
    if (first_warp) {
        store_rows(k[head], y, kHeadStride);
        __syncwarp();
        softmax(q[head], k[head], key_mask, weights[head]);
    } else {
        for (int e = 0; e < 4; ++e) y[e] = 1 / (1 + expf(-y[e] - (e < 2 ? bias.x : bias.y)));
        store_rows(g[head], y, kHeadStride);
    }
    __syncthreads();
    const int half = first_warp ? 0 : 8;  // each of the head's warps takes half of its channels
    attend(weights[head], v[head] + half, g[head] + half, attended + channel + half);
    BLOCKS == 1 ? __syncthreads() : cluster_sync();
    if (first_warp) {  // 16 outputs a warp
        for (int j = 0; j < kSteps; ++j)
            x[j] = load4(attended + row * kStride + 16 * j + 4 * lane4);
        split_rows(rows, x);
        project(y, last, rows);
        for (int e = 0; e < 4; ++e) {
            const int s = 2 * lane4 + e % 2, c = channel + row + e / 2 * 8;
            if (s < S) out[((b * S + s) * N + n) * D + c] = y[e] + (e < 2 ? bias.x : bias.y);
        }
    }
}

EXPORT cudaError_t split_tensor_cores(const float* msa, const float* mask,
                                      const float* layer_norm_weight, const float* layer_norm_bias,
                                      const float* query_weight, const float* key_weight,
                                      const float* value_weight, const float* gate_weight,
                                      const float* gate_bias, const float* out_weight,
                                      const float* out_bias, float* out, int B, int N,
                                      cudaStream_t stream) {
    return LAUNCH_CLUSTER(column_kernel, dim3(B * N * BLOCKS), dim3(kThreads), dim3(BLOCKS), 0,
                          stream)(msa, mask, layer_norm_weight, layer_norm_bias, query_weight,
                                  key_weight, value_weight, gate_weight, gate_bias, out_weight,
                                  out_bias, out, N);
}
