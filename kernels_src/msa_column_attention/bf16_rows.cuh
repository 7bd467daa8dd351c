// What the bf16 stages share: rows of bf16 in chunks of 8 elements (16 bytes), LayerNorm, and the
// softmax's functions of one element.
#pragma once

#include "tensor_core.cuh"

using bf16 = __nv_bfloat16;

constexpr float kLog2E = 1.44269504f;
constexpr int kChannels = D / H;        // d
constexpr int kChunks = kChannels / 8;  // of a head's row
static_assert(D % H == 0 && kChannels % 8 == 0, "heads must have a multiple of 8 channels");

#ifndef PAD  // the workspace pads S to a multiple: that of the largest tile of rows or keys
#define PAD 128
#endif
// Rows of a column in the workspace: those past S are zero in K and V, and masked.
__host__ __device__ inline int padded_rows(int S) { return ceil_div(S, PAD) * PAD; }

__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000); }

__device__ inline void unpack(uint4 chunk, float (&y)[8]) {
    const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    for (int i = 0; i < 4; ++i) y[2 * i] = low_half(pairs[i]), y[2 * i + 1] = high_half(pairs[i]);
}
__device__ inline uint4 pack(const float (&y)[8]) {
    return make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
                      pack_bf16(y[6], y[7]));
}
// Chunk i of an array. Counting in chunks shows the compiler that 16 bytes are aligned.
__device__ inline uint4 load8(const bf16* from, int64_t i) {
    return reinterpret_cast<const uint4*>(from)[i];
}
__device__ inline void store8(bf16* to, int64_t i, uint4 chunk) {
    reinterpret_cast<uint4*>(to)[i] = chunk;
}

// body(i) for every i < kCount, spread over the first kThreads threads of the block
template <int kCount, int kThreads, typename Body>
__device__ inline void spread(Body body) {
#pragma unroll
    for (int first = 0; first < kCount; first += kThreads) {
        const int i = first + threadIdx.x;
        if (first + kThreads <= kCount || i < kCount) body(i);
    }
}

// LayerNorm of one warp's kRows rows of kWidth channels, chunk i of row r at `rows` + r · stride +
// i chunks: chunk place(r, i) of x gets it for r = first, first + 1 … Rows from `end` on, and
// chunks from kWidth up to kPadded channels, become zero.
template <int kRows, int kWidth, int kPadded, typename Place>
__device__ inline void layer_norm(const bf16* rows, int64_t stride, int first, int end,
                                  const bf16* weight, const bf16* bias, bf16* x, Place place) {
    constexpr int kLanes = kPadded > 128 ? 32 : kPadded > 64 ? 16 : kPadded > 32 ? 8 : 4;  // a row
    constexpr int kAtOnce = 32 / kLanes, kSteps = kRows / kAtOnce;
    constexpr int kBatch = kSteps < kRows / 4 ? kSteps : kRows / 4;  // loads in flight a lane
    const int chunk = threadIdx.x % kLanes, row0 = first + threadIdx.x % 32 / kLanes;
    const bool real = kWidth == 8 * kLanes || chunk < kWidth / 8;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 packed_scale = real ? load8(weight, chunk) : zero;
    const uint4 packed_shift = real ? load8(bias, chunk) : zero;
    for (int i = 0; i < kSteps; i += kBatch) {
        uint4 raw[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int row = row0 + (i + j) * kAtOnce;
            raw[j] = zero;
            if (real && row < end) raw[j] = load8(rows, row * stride + chunk);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int row = row0 + (i + j) * kAtOnce;
            float y[8], scale[8], shift[8], sum = 0, squares = 0;
            unpack(raw[j], y);
            for (int c = 0; c < 8; ++c) sum += y[c];
            for (int m = 1; m < kLanes; m *= 2) sum += __shfl_xor_sync(kFullMask, sum, m);
            for (int c = 0; c < 8; ++c) y[c] -= sum * (1.0f / kWidth);
            for (int c = 0; c < 8; ++c) squares += real ? y[c] * y[c] : 0;
            for (int m = 1; m < kLanes; m *= 2) squares += __shfl_xor_sync(kFullMask, squares, m);
            const float inverse = rsqrtf(squares * (1.0f / kWidth) + 1e-5f);
            unpack(packed_scale, scale);
            unpack(packed_shift, shift);
            for (int c = 0; c < 8; ++c) y[c] = fmaf(y[c], inverse * scale[c], shift[c]);
            const uint4 normal = row < end ? pack(y) : zero;
            if (chunk < kPadded / 8) store8(x, place(row, chunk), normal);
        }
    }
}

// Weights lie in shared memory in slots, so that of 32 outputs a thread's sums are 8 neighbours: in
// tile j of 8 slots a thread's mma result is slots 2 t and 2 t + 1, outputs 8 t + 2 j and the next.
__device__ inline int output_of_slot(int slot) {
    return slot / 32 * 32 + slot % 8 / 2 * 8 + slot / 8 % 4 * 2 + slot % 2;
}

__device__ inline float sigmoid(float x) { return __fdividef(1, 1 + exp2_approx(-kLog2E * x)); }

// 2^x to 1.8e-3 on the FMA units, which is less than rounding it to bf16 does (2e-3); x beyond ±126
// counts as ±126. With n = round(x) and f = x - n, 2^f is a polynomial and n is added to its
// exponent.
__device__ inline float exp2_polynomial(float x) {
    constexpr float kRange = 126, kRound = 12582912 - kRange;   // 1.5·2^23: adding it rounds
    const float t = __saturatef(fmaf(x, 0.5f / kRange, 0.5f));  // (x + kRange) / 2 kRange
    const float rounded = fmaf(t, 2 * kRange, kRound);          // its lowest bits are n
    const float f = fmaf(t, 2 * kRange, kRound - rounded);
    const float power = fmaf(fmaf(0.23842914f, f, 0.70344841f), f, 1.00044316f);
    return __uint_as_float(__float_as_uint(power) + (__float_as_uint(rounded) << 23));
}

// Of two n8 tiles of scores (16 keys): those of masked keys become -inf, and the largest of the row
// so far is subtracted. Where that has grown, what was summed before shrinks. Of a thread's rows
// lane / 4 + 8 · half, `sums` are columns as score's.
template <int kTiles>
__device__ inline void raise_reference(const bool (&keep)[4], float (&score)[2][4],
                                       float (&highest)[2], float (&sums)[kTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = highest[half];
        for (int i = 0; i < 4; ++i) {
            float& s = score[i / 2][2 * half + i % 2];
            if (!keep[i]) s = -INFINITY;
            most = fmaxf(most, s);
        }
        for (int m = 1; m < 4; m *= 2) most = fmaxf(most, __shfl_xor_sync(kFullMask, most, m));
        const float reference = most == -INFINITY ? 0 : most;
        for (int i = 0; i < 4; ++i) score[i / 2][2 * half + i % 2] -= reference;
        if (__any_sync(kFullMask, most > highest[half])) {
            const float shrink = exp2_approx(highest[half] - reference);
            for (int j = 0; j < kTiles; ++j) {
                for (int i = 2 * half; i < 2 * half + 2; ++i) sums[j][i] *= shrink;
            }
            highest[half] = most;
        }
    }
}
