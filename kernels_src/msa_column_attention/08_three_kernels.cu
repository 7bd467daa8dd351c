// Stage 08: three kernels
// One block a column holds all of a column, so S is limited and every block reads every weight.
// Here LayerNorm with the projections, attention and out_proj are kernels of their own: the first
// and last multiply tiles (fp32_projections.cuh); attention keeps only keys and values of one head
// in shared memory, and a warp takes 4 queries past them. Bytes: 48·B·S·N·D: q, k, v and g (and the
// attended rows in q's place) pass through memory. Operations: as 03. Peak: 24·B·S·N·D bytes, 1.2
// GB at af2. Predicts: loses at seed (12 µs: three launches, 16 blocks in the first); wins at af2,
// which no block of 03 to 07 could hold: 2.9 ms projections at 45 TFLOP/s, 3.5 attention, whose 8
// reads of shared memory for 16 multiply-adds bound it. Outcome: af2 11.2 ms; seed 25.4 µs. SASS
// shows 20 trips to memory in a row in the first kernel, 8 of them LayerNorm's, with no other warp
// to hide them.
// Shapes: D/H = 4, 8 … 128, S while a head's keys, values and 32 rows of scores fit 227 KB.
#include "msa_column_attention/fp32_projections.cuh"

constexpr int kHeadDim = D / H;
constexpr int kKeyStride = kHeadDim + 4;     // floats from row to row of k and v in shared memory
constexpr int kQueries = 4;                  // queries that a warp takes through attention together
constexpr int kLanes = kHeadDim / 4;         // lanes that share a row of v, 4 channels each
constexpr int kGroups = kWarpSize / kLanes;  // rows of v that a warp reads at a time
constexpr int kSharedFloats =
    2 * S * kKeyStride + ceil_div(S, 4) * 4 + kWarps * kQueries * (kHeadDim + S);

static_assert(D % (4 * H) == 0 && kHeadDim <= 128, "16 bytes of a head a lane");

__device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// attended[c] = Σ_t weights[t] values[t][c] of kQueries queries, 4 channels c a lane: kGroups keys
// at a time, whose sums are then added up into the first group.
__device__ void sum_values(const float* weights, const float* values, float (&sums)[kQueries][4]) {
    const int lane = threadIdx.x % kWarpSize, c = lane % kLanes * 4;
    float parts[kQueries][4] = {};
    for (int t = lane / kLanes; t < S && lane < kGroups * kLanes; t += kGroups) {
        const float4 w = load4(weights + t * kQueries), v = load4(values + t * kKeyStride + c);
        const float weight[kQueries] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int r = 0; r < kQueries; ++r) {
            parts[r][0] += weight[r] * v.x;
            parts[r][1] += weight[r] * v.y;
            parts[r][2] += weight[r] * v.z;
            parts[r][3] += weight[r] * v.w;
        }
    }
    for (int r = 0; r < kQueries; ++r) {
        for (int i = 0; i < 4; ++i) sums[r][i] = parts[r][i];
    }
#pragma unroll 1
    for (int group = 1; group < kGroups; ++group) {
        for (int r = 0; r < kQueries; ++r) {
            for (int i = 0; i < 4; ++i) {
                sums[r][i] += __shfl_down_sync(kFullMask, parts[r][i], group * kLanes);
            }
        }
    }
}

// q = σ(g) ∘ softmax(q kᵀ/√d) v in q's place, a block one head of one column: its keys and values
// stay in shared memory, and a warp takes kQueries queries past them.
__global__ void __launch_bounds__(kThreads)
    attend_kernel(float* q, const float* k, const float* v, const float* g, const float* mask,
                  int N) {
    DYNAMIC_SHARED(float, shared);
    float* keys = shared;                   // S rows of the head's channels
    float* values = keys + S * kKeyStride;  // likewise
    float* key_mask = values + S * kKeyStride;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    float* queries = key_mask + ceil_div(S, 4) * 4 + warp * kQueries * (kHeadDim + S);
    float* weights = queries + kQueries * kHeadDim;  // [key][query]
    const int head = blockIdx.x % H;
    const int64_t b = blockIdx.x / H / N, n = blockIdx.x / H % N;
    const auto at = [=](int s) { return ((b * S + s) * N + n) * D + head * kHeadDim; };

    for (int i = threadIdx.x; i < S * kLanes; i += kThreads) {
        const int s = i / kLanes, c = i % kLanes * 4;
        store4(keys + s * kKeyStride + c, load4(k + at(s) + c));
        store4(values + s * kKeyStride + c, load4(v + at(s) + c));
    }
    for (int s = threadIdx.x; s < S; s += kThreads) key_mask[s] = mask[(b * S + s) * N + n];
    __syncthreads();
    const float scale = 1.0f / sqrtf(kHeadDim);
    for (int first = warp * kQueries; first < S; first += kWarps * kQueries) {
        for (int i = lane; i < kQueries * kLanes; i += kWarpSize) {
            const int s = min(first + i / kLanes, S - 1);  // past the end: repeat the last query
            store4(queries + 4 * i, load4(q + at(s) + i % kLanes * 4));
        }
        __syncwarp();
        float highest[kQueries], totals[kQueries] = {};
        for (int r = 0; r < kQueries; ++r) highest[r] = -INFINITY;
        for (int t = lane; t < S; t += kWarpSize) {
            float scores[kQueries] = {};
#pragma unroll
            for (int c = 0; c < kHeadDim; c += 4) {
                const float4 key = load4(keys + t * kKeyStride + c);
                for (int r = 0; r < kQueries; ++r) {
                    scores[r] += dot(load4(queries + r * kHeadDim + c), key);
                }
            }
            for (int r = 0; r < kQueries; ++r) {
                scores[r] = key_mask[t] != 0 ? scores[r] * scale : -INFINITY;
                highest[r] = fmaxf(highest[r], scores[r]);
            }
            store4(weights + t * kQueries, make_float4(scores[0], scores[1], scores[2], scores[3]));
        }
        for (int r = 0; r < kQueries; ++r) highest[r] = warp_max(highest[r]);
        for (int t = lane; t < S; t += kWarpSize) {
            for (int r = 0; r < kQueries; ++r) {
                float& weight = weights[t * kQueries + r];
                totals[r] += weight = expf(weight - highest[r]);
            }
        }
        __syncwarp();  // the lanes have been keys, and become channels
        float sums[kQueries][4];
        sum_values(weights, values, sums);
        for (int r = 0; r < kQueries; ++r) {
            const float inverse = __fdividef(1.0f, warp_sum(totals[r]));
            if (lane >= kLanes || first + r >= S) continue;
            const int64_t to = at(first + r) + 4 * lane;
            const float4 gate = load4(g + to);
            store4(q + to, make_float4(sums[r][0] * inverse * sigmoid(gate.x),
                                       sums[r][1] * inverse * sigmoid(gate.y),
                                       sums[r][2] * inverse * sigmoid(gate.z),
                                       sums[r][3] * inverse * sigmoid(gate.w)));
        }
        __syncwarp();  // the next queries overwrite these
    }
}

// workspace: 4·B·S·N·D floats for q, k, v and g, each laid out as msa
EXPORT cudaError_t three_kernels(const float* msa, const float* mask,
                                 const float* layer_norm_weight, const float* layer_norm_bias,
                                 const float* query_weight, const float* key_weight,
                                 const float* value_weight, const float* gate_weight,
                                 const float* gate_bias, const float* out_weight,
                                 const float* out_bias, float* workspace, float* out, int B, int N,
                                 cudaStream_t stream) {
    const int64_t rows = int64_t(B) * S * N;
    const unsigned row_tiles = ceil_div(rows, kTileRows), output_tiles = ceil_div(D, kTileOutputs);
    float *q = workspace, *k = q + rows * D, *v = k + rows * D, *g = v + rows * D;
    if (cudaError_t error =
            LAUNCH(linear_kernel<true>, dim3(row_tiles, 4 * output_tiles), dim3(kThreads), 0,
                   stream)(msa, layer_norm_weight, layer_norm_bias, query_weight, key_weight,
                           value_weight, gate_weight, gate_bias, workspace, rows)) {
        return error;
    }
    if (cudaError_t error = LAUNCH(attend_kernel, dim3(B * N * H), dim3(kThreads),
                                   sizeof(float) * kSharedFloats, stream)(q, k, v, g, mask, N)) {
        return error;
    }
    return LAUNCH(linear_kernel<false>, dim3(row_tiles, output_tiles), dim3(kThreads), 0, stream)(
        q, nullptr, nullptr, out_weight, nullptr, nullptr, nullptr, out_bias, out, rows);
}
