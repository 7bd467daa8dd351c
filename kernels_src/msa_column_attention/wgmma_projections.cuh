// Stage 12's kernels before the core: weights packed, then LayerNorm and the four projections, with
// wgmma. A block multiplies kRows rows of one column, which stay in shared memory, by all weights,
// which one warp streams past in slabs. Bytes: 2·(1 + 4)·B·N·S·D, and 2·4·D² of weights a block
// from L2. Clusters of two blocks that shared the weights by multicast spared L2 half of those, and
// cost 8 µs at af2 and 13 at extra. Blocks of 256 rows spare as much (predicted 0 to 20 µs less at
// af2), and took 617 µs, not 621: one stage measured twice differs by 4.
//
// Rows and weights lie in core matrices of wgmma: chunks of 8 channels, in each all rows.
#pragma once

#include "hopper.cuh"
#include "msa_column_attention/bf16_rows.cuh"

constexpr int kRowBytes = 16;  // of a chunk; 8 rows are a core matrix
constexpr int kRows = 128;     // of a column in a block, 64 a warpgroup
static_assert(PAD % kRows == 0, "PAD must be a multiple of a block's rows");
constexpr int kGemmWarps = kRows / 16;  // that multiply; one more loads
constexpr int kGemmThreads = (kGemmWarps + 1) * kWarpSize;
constexpr int kGemmBlocks = D > 64 ? 2 : 3;        // on a multiprocessor
constexpr int kXStride = kRows * kRowBytes + 16;   // from a chunk of x to the next: no conflict
constexpr int kSlab = 32;                          // channels of the weights in a stage of the ring
constexpr int kOutputs = D % 128 == 0 ? 128 : 64;  // of a pass over x
constexpr int kPasses = D / kOutputs;              // a weight matrix
constexpr int kProjectionPasses = 4 * kPasses;     // q, k, v and the gate
constexpr int kSlabBytes = kOutputs * kSlab * sizeof(bf16);
constexpr int kSlabs = 5;
constexpr int kGemmShared = D / 8 * kXStride + kSlabs * kSlabBytes;

// The operand `bytes` on in a stage of a ring whose first stage has the operand `first`; addresses
// in an operand count 16 bytes, and so do these offsets from the start: none is divided, which
// spared 4 µs at af2 and 11 at extra (predicted 3 % of the core).
template <int kStageBytes>
__device__ uint64_t operand_at(uint64_t first, int stage, int bytes) {
    return first + unsigned(stage * (kStageBytes / 16) + bytes / 16);
}

// A warp's place in a ring of kStages; `parity` flips each time around.
template <int kStages>
struct Place {
    int stage = 0, parity = 0;
    __device__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// A kernel's start may overlap the end of the kernel before it, up to here. As the next one starts
// only then, it finds all but the kernel before it ended.
__device__ void start_in_turn() {
    wait_for_previous_kernel();
    next_kernel_may_start();
}

// packed: 5 weight matrices as slab after slab of kSlab / 8 chunks of kOutputs slots
__global__ void pack_kernel(const bf16* query, const bf16* key, const bf16* value, const bf16* gate,
                            const bf16* out, bf16* packed) {
    next_kernel_may_start();                              // which waits before it reads weights
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // chunk
    const int slot = i % kOutputs, chunk = i / kOutputs % (D / 8), pass = i / kOutputs / (D / 8);
    const int matrix = pass / kPasses, output = pass % kPasses * kOutputs + output_of_slot(slot);
    const bf16* weight = matrix == 0   ? query
                         : matrix == 1 ? key
                         : matrix == 2 ? value
                         : matrix == 3 ? gate
                                       : out;
    if (matrix < 5) store8(packed, i, load8(weight, output * (D / 8) + chunk));
}

// The loading thread: slabs one after the other.
__device__ void load_weights(const bf16* packed, unsigned char* ring, Barrier* full,
                             Barrier* empty) {
    Place<kSlabs> place;
    for (int slab = 0; slab < kProjectionPasses * (D / kSlab); ++slab, place.advance()) {
        Barrier* arrived = full + place.stage;
        barrier_wait(empty + place.stage, place.parity ^ 1);
        barrier_arrive_expect(arrived, kSlabBytes);
        copy_bulk(ring + place.stage * kSlabBytes, packed + slab * (kSlabBytes / sizeof(bf16)),
                  kSlabBytes, arrived);
    }
}

// The index of the caller's warp, known to be the same for all lanes: what depends on it, wgmma's
// operands among it, then stays in uniform registers.
__device__ int uniform_warp() { return __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0); }

// A warp has read a stage: tell the one that copies into it.
__device__ void release_weights(Barrier* empty, Place<kSlabs>& read) {
    if (threadIdx.x % kWarpSize == 0) barrier_arrive(empty + read.stage);
    read.advance();
}

// finish(half, output, y) for what a thread's sums of a pass are: rows lane / 4 + 8 · half of its
// warp's, and 8 neighbouring outputs.
template <typename Finish>
__device__ void for_outputs(const float (&sum)[kOutputs / 2], Finish finish) {
#pragma unroll
    for (int i = 0; i < kOutputs / 32; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float y[8];
            for (int c = 0; c < 8; ++c) y[c] = sum[4 * (4 * i + c / 2) + 2 * half + c % 2];
            finish(half, 32 * i + threadIdx.x % 4 * 8, y);
        }
    }
}

// A multiplying warp: finish(matrix, row, output, y) for its rows of x · weightsᵀ and 8
// neighbouring outputs.
template <typename Finish>
__device__ void multiply(const unsigned char* x, const unsigned char* ring, Barrier* full,
                         Barrier* empty, Finish finish) {
    const int warp = uniform_warp(), lane = threadIdx.x % kWarpSize, row0 = warp * 16 + lane / 4;
    const uint64_t rows = wgmma_operand(x + warp / 4 * 64 * kRowBytes, kXStride, 128);
    const uint64_t weights = wgmma_operand(ring, kOutputs * kRowBytes, 128);
    Place<kSlabs> place, read;  // the slab that comes, and the one to give back
    for (int pass = 0; pass < kProjectionPasses; ++pass) {
        float sum[kOutputs / 2];
#pragma unroll
        for (int slab = 0; slab < D / kSlab; ++slab, place.advance()) {
            barrier_wait(full + place.stage, place.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSlab / 8; k += 2) {
                wgmma<bf16, Major::K, Major::K>(
                    sum, rows + (slab * (kSlab / 8) + k) * kXStride / 16,
                    operand_at<kSlabBytes>(weights, place.stage, k * kOutputs * kRowBytes),
                    slab + k > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();  // the slab before this one
            if (slab > 0) release_weights(empty, read);
        }
        wgmma_wait<0>();
        release_weights(empty, read);
        for_outputs(sum, [&](int half, int output, float (&y)[8]) {
            finish(pass / kPasses, row0 + 8 * half, pass % kPasses * kOutputs + output, y);
        });
    }
}

// Barriers of the ring of weights, ready for the whole block.
__device__ void start_ring(Barrier* full, Barrier* empty) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kSlabs; ++stage) {
            barrier_init(full + stage, 1);
            barrier_init(empty + stage, kGemmWarps);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

// projected (4, columns, D / 8, padded, 8) = q·log2(e)/√d, k, v (0 where masked) and σ(gate), and
// key_mask (columns, padded, 8); a block takes kRows rows of one column, all outputs.
__global__ void __launch_bounds__(kGemmThreads, kGemmBlocks)
    prologue_kernel(const bf16* msa, const bf16* mask, const bf16* layer_norm_weight,
                    const bf16* layer_norm_bias, const bf16* packed, const bf16* gate_bias,
                    bf16* projected, bf16* key_mask, int first_column, int columns, int S, int N) {
    DYNAMIC_SHARED(unsigned char, x);
    SHARED(Barrier, full, [kSlabs]);
    SHARED(Barrier, empty, [kSlabs]);
    SHARED(float, kept, [kRows]);
    unsigned char* ring = x + D / 8 * kXStride;
    const int padded = padded_rows(S), blocks = padded / kRows, warp = uniform_warp();
    const int local = blockIdx.x / blocks, first = blockIdx.x % blocks * kRows;
    const int64_t column = first_column + local, b = column / N, n = column % N;
    start_ring(full, empty);
    if (warp == kGemmWarps) {
        if (threadIdx.x % kWarpSize == 0) {
            start_in_turn();  // others write the workspace only after weights have come
            load_weights(packed, ring, full, empty);
        }
    } else {
        if (threadIdx.x % kWarpSize < 16) {
            const int row = warp * 16 + threadIdx.x % kWarpSize, s = first + row;
            const float keep = s < S && __bfloat162float(mask[(b * S + s) * N + n]) != 0;
            const uint32_t pair = pack_bf16(keep, keep);
            kept[row] = keep;
            store8(key_mask, int64_t(local) * padded + s, make_uint4(pair, pair, pair, pair));
        }
        const auto place = [](int row, int chunk) { return chunk * (kXStride / kRowBytes) + row; };
        layer_norm<16, D, D>(msa + ((b * S + first) * N + n) * D, int64_t(N) * (D / 8), warp * 16,
                             S - first, layer_norm_weight, layer_norm_bias,
                             reinterpret_cast<bf16*>(x), place);
        fence_async_proxy();
        named_barrier(1 + warp / 4, 4 * kWarpSize);  // the warpgroup, whose rows these are
        const float query_scale = kLog2E * rsqrtf(kChannels);
        multiply(x, ring, full, empty, [&](int matrix, int row, int output, float (&y)[8]) {
            const int piece = (matrix * columns + local) * (D / 8) + output / 8;
            if (matrix == 3) {
                float bias[8];
                unpack(load8(gate_bias, output / 8), bias);
                for (int c = 0; c < 8; ++c) y[c] = sigmoid(y[c] + bias[c]);
                store8(projected, piece * padded + first + row, pack(y));
            } else {
                const float factor = matrix == 0 ? query_scale : matrix == 1 ? 1 : kept[row];
                for (int c = 0; c < 8; ++c) y[c] *= factor;
                store8(projected, piece * padded + first + row, pack(y));
            }
        });
    }
}
