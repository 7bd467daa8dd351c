// Stage 12: wgmma, bulk copies, warp specialisation
// As 11, with Hopper's own instructions. Workspace and weights lie in wgmma's core matrices, chunks
// of 8 channels one after the other, so that every copy is one piece for the copy engine. In each
// kernel that multiplies one warp copies ahead of the others: weights stream past rows, keys and
// values past 256 queries, rows past out_proj's weights. In the core P is in registers, V and mask
// are one operand, and a warp whose Σ leaves 2^±60 repeats its 16 rows. Bytes and operations as in
// 11; K and V leave L2 half as often. Predicts: af2 240 + 230 + 85 µs; extra 75 + 800 + 35 µs. It
// took 675 µs and 1.02 ms, with cheaper offsets and polynomials 670 and 960 µs. Since then, in µs
// less at af2 and extra, predicted and (seen): kernels that overlap 15, 7 (21, 5); queries copied
// an item ahead 20, 25 (21, 0); out_proj's weights kept 25, 5 (12, 0); all three 55, 35 (49, 5).
// Outcome: af2 0.62 ms, extra 0.96 ms.
// Shapes: any B, S, N; D = 64, 128, 192, 256; d = 8, 16, 32, 64.
#include "msa_column_attention/wgmma_core_loads.cuh"
#include "msa_column_attention/wgmma_epilogue.cuh"

#include <algorithm>

#ifndef POLYNOMIALS  // so many of 8 exponentials go to the FMA units
#define POLYNOMIALS (D / H < 64 ? 3 : 2)
#endif
static_assert(D % 64 == 0 && D <= 256, "D must be 64, 128, 192 or 256");
static_assert(kChunks == 1 || kChunks == 2 || kChunks == 4 || kChunks == 8, "d: 8, 16, 32 or 64");

// p = 2^score, 16 keys after the other as wgmma takes A. That polynomials are of degree 2 spared 14
// µs at af2 and 29 at extra (predicted 5 % of the core).
__device__ void exponentiate(const float (&score)[kStep / 2], uint32_t (&p)[kStep / 16][4]) {
#pragma unroll
    for (int i = 0; i < kStep / 2; i += 2) {
        float e[2];
        for (int j = 0; j < 2; ++j) {
            const bool polynomial = (i + j) * POLYNOMIALS % 8 < POLYNOMIALS;
            e[j] = polynomial ? exp2_polynomial(score[i + j]) : exp2_approx(score[i + j]);
        }
        p[i / 8][i % 8 / 2] = pack_bf16(e[0], e[1]);
    }
}

// A warpgroup's 64 queries: sums = Σ_t 2^(score_t) [v_t, mask_t] over all keys, kStep at a time.
// While a step's scores become weights, tensor cores make the next one's and sum the last one's: a
// group of wgmma is weights · V of one step and the scores of the second next.
__device__ void attend(const unsigned char* ring, Barrier* full, Barrier* empty,
                       Place<kTiles>& place, int tiles, const uint32_t (&query)[kSteps][4],
                       float (&sums)[4 * (kChunks + 1)]) {
    // d 8: wgmma's second chunk is the first again, where the query is 0
    const uint64_t keys = wgmma_operand(ring, kChunks == 1 ? 0 : kPieceBytes, 128);
    const uint64_t values = wgmma_operand(ring + kChunks * kPieceBytes, 128, kPieceBytes);
    const bool leader = threadIdx.x % kWarpSize == 0;
    float score[2][kStep / 2];
    uint32_t p[2][kStep / 16][4];
    const auto multiply = [&](float (&to)[kStep / 2], int stage, int t) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int offset = 2 * step * kPieceBytes + t * kRowBytes;
            wgmma<bf16, Major::K>(to, query[step], operand_at<kTileBytes>(keys, stage, offset),
                                  step > 0);
        }
    };
    for (int i = 0; i < 4 * (kChunks + 1); ++i) sums[i] = 0;
    for (int tile = 0; tile < tiles; ++tile, place.advance()) {
        barrier_wait(full + place.stage, place.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            multiply(score[i], place.stage, i * kStep);
            wgmma_commit();
        }
#pragma unroll
        for (int t = 0; t < kKeys; t += kStep) {
            const int buffer = t / kStep % 2;
            wgmma_wait<1>(score[buffer]);
            exponentiate(score[buffer], p[buffer]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kStep / 16; ++i) {
                const int offset = (t + 16 * i) * kRowBytes;
                wgmma<bf16, Major::MN>(sums, p[buffer][i],
                                       operand_at<kTileBytes>(values, place.stage, offset), true);
            }
            if (t + 2 * kStep < kKeys) multiply(score[buffer], place.stage, t + 2 * kStep);
            wgmma_commit();
        }
        wgmma_wait<0>(sums);
        if (leader) barrier_arrive(empty + place.stage);
    }
}

// projected[0] = σ(gate) · softmax(q kᵀ) v in place of q; an item is kQueries rows of one head.
__global__ void __launch_bounds__(kCoreThreads, 1)
    core_kernel(bf16* projected, const bf16* key_mask, int columns, int S, int items) {
    DYNAMIC_SHARED(unsigned char, ring);
    SHARED(Barrier, full, [kTiles + 1]);
    SHARED(Barrier, empty, [kTiles + 1]);
    const int warp = uniform_warp(), lane = threadIdx.x % kWarpSize;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kTiles + 1; ++stage) {
            barrier_init(full + stage, 1);
            barrier_init(empty + stage, stage < kTiles ? kCoreWarps : kCoreWarps * kWarpSize);
        }
        barrier_init_fence();
    }
    __syncthreads();
    start_in_turn();
    if (warp >= kCoreWarps) {
        registers_decrease<24>();
        if (warp == kCoreWarps && lane == 0) {
            load_items(projected, key_mask, ring, full, empty, columns, S, items);
        }
        return;
    }
    registers_increase<kCoreRegisters>();
    const int blocks = ceil_div(S, kQueries), padded = padded_rows(S);
    const int at = lane / 4 * 8 + lane % 4 * 2;  // a lane's pair in 8 rows of a chunk
    // of the warp's rows all chunks of the queries, then of the gates
    const bf16* copied = reinterpret_cast<const bf16*>(ring + kTiles * kTileBytes) + warp * 128;
    Place<kTiles> place;
    Place<1> query_place;
    uint32_t query[kSteps][4] = {};
    for (int item = blockIdx.x; item < items; item += gridDim.x, query_place.advance()) {
        const Head head = head_of(projected, key_mask, columns, padded, item / blocks);
        const int row0 = item % blocks * kQueries + warp * 16;  // the warp's first
        uint32_t gate[2 * kChunks];
        barrier_wait(full + kTiles, query_place.parity);
#pragma unroll
        for (int i = 0; i < 4 * kChunks; ++i) {
            uint32_t& pair = i < 2 * kChunks ? query[i / 4][i % 4] : gate[i - 2 * kChunks];
            const bf16* from = copied + i / 2 * (kQueries * 8) + at + i % 2 * 64;
            pair = row0 < S ? load_pair(from) : 0;
        }
        barrier_arrive(empty + kTiles);  // each lane, of what it has read itself
        float sums[4 * (kChunks + 1)];
        attend(ring, full, empty, place, ceil_div(S, kKeys), query, sums);
        if (row0 >= S) continue;
        bool fine = true;
        for (int half = 0; half < 2; ++half) {
            const float total = sums[4 * kChunks + 2 * half];
            fine &= total > 0x1p-60f && total < 0x1p60f;
        }
        if (!__all_sync(kFullMask, fine)) attend_again(head, S, query, sums);
        const float inverse[2] = {__fdividef(1, sums[4 * kChunks]),  // no keys: 0 · ∞ is NaN
                                  __fdividef(1, sums[4 * kChunks + 2])};
#pragma unroll
        for (int i = 0; i < 2 * kChunks; ++i) {
            const int sum = i / 2 * 4 + i % 2 * 2;
            const float low = sums[sum] * inverse[i % 2] * low_half(gate[i]);
            const float high = sums[sum + 1] * inverse[i % 2] * high_half(gate[i]);
            bf16* to = head.query + i / 2 * head.piece + row0 * 8 + at + i % 2 * 64;
            *reinterpret_cast<uint32_t*>(to) = pack_bf16(low, high);
        }
    }
}

// `workspace` holds 5 D² elements and (4 D + 8) · columns · padded_rows(S): the columns of the
// batch, B · N of them, are worked on so many at a time. As many as L2 holds between kernels do not
// pay: 33 at af2, 35 MB, took 909 µs, not 621 (predicted 0 to 40 less). They make 30 launches more,
// of 132 blocks each.
// early(): barriers, LayerNorm and out_proj's weights are under way before the last blocks of the
// kernel before have ended.
EXPORT cudaError_t attention_hopper(
    const __nv_bfloat16* msa, const __nv_bfloat16* mask, const __nv_bfloat16* layer_norm_weight,
    const __nv_bfloat16* layer_norm_bias, const __nv_bfloat16* query_weight,
    const __nv_bfloat16* key_weight, const __nv_bfloat16* value_weight,
    const __nv_bfloat16* gate_weight, const __nv_bfloat16* gate_bias,
    const __nv_bfloat16* out_weight, const __nv_bfloat16* out_bias, __nv_bfloat16* workspace,
    __nv_bfloat16* out, int B, int S, int N, int columns, cudaStream_t stream) {
    const int padded = padded_rows(S);
    const auto persistent = [](int parts) { return dim3(std::min(parts, multiprocessors())); };
    bf16 *packed = workspace, *projected = packed + 5 * D * D;
    // behind the largest part's matrices: the next prologue writes it while an epilogue still reads
    bf16* key_mask = projected + int64_t(4) * columns * padded * D;
    if (cudaError_t error =
            LAUNCH(pack_kernel, dim3(ceil_div(5 * D * D / 8, 256)), dim3(256), 0, stream)(
                query_weight, key_weight, value_weight, gate_weight, out_weight, packed)) {
        return error;
    }
    for (int first = 0; first < B * N; first += columns) {
        const int count = std::min(columns, B * N - first);
        if (cudaError_t error = LAUNCH(prologue_kernel, dim3(count * padded / kRows),
                                       dim3(kGemmThreads), kGemmShared, stream)
                                    .early()(msa, mask, layer_norm_weight, layer_norm_bias, packed,
                                             gate_bias, projected, key_mask, first, count, S, N)) {
            return error;
        }
        const int items = count * H * ceil_div(S, kQueries);
        if (cudaError_t error =
                LAUNCH(core_kernel, persistent(items), dim3(kCoreThreads), kCoreShared, stream)
                    .early()(projected, key_mask, count, S, items)) {
            return error;
        }
        const int tiles = count * padded / kTileRows;
        if (cudaError_t error =
                LAUNCH(epilogue_kernel, persistent(tiles), dim3(kOutThreads), kOutShared, stream)
                    .early()(projected, packed + 4 * D * D, out_bias, out, first, count, S, N)) {
            return error;
        }
    }
    return cudaSuccess;
}
