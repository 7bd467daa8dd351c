// Models of mma.sync and ldmatrix: whole warps, the layouts of tensor_core.cuh, products exact and
// every sum rounded to float. (The GPU's sums are a little coarser: it aligns and truncates the
// products it adds.)
#pragma once

#include "warp.h"

namespace [[gnu::visibility("hidden")]] cpu {

// The lanes of a whole warp meet; mma and ldmatrix have no mask.
template <typename Data, typename Operation>
UNSEEN void meet_warp(const char* name, Site site, Data& data, Operation operation) {
    const Warp& warp = current_block->warps[current_thread->number / kLanes];
    if (warp.existing != 0xFFFFFFFF) {
        current_block->fail(*current_thread, site,
                            "%s takes a whole warp, and the block ends within this one", name);
    }
    meet(0xFFFFFFFF, name, site, data, operation);
}

// Four elements of an operand, the lowest bits of four words, as floats.
typedef uint32_t Words __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));

UNSEEN inline Floats tf32_values(Words bits) {
    return Floats(bits & 0xFFFFE000);
}  // the GPU reads no more
UNSEEN inline Floats bf16_values(Words bits) { return Floats(bits << 16); }
// What is below 2^-14 is read with 2^-14 on top, which is then taken away.
UNSEEN inline Floats fp16_values(Words bits) {
    typedef int32_t Signed __attribute__((vector_size(16)));
    const Words size = (bits & 0x7FFF) << 13;
    const Words endless = Words(Signed(size) >= 31 << 23) & 112 << 23;
    const Words small = Words(Floats(size + (113 << 23)) - 0x1p-14f);
    const Words finite = Signed(size) < 1 << 23 ? small : size + (112 << 23);
    return Floats((finite + endless) | (bits & 0x8000) << 16);
}

struct MmaOperands {
    float* d;
    const uint32_t *a, *b;
};

// Operands of 16 bits, or of 32, from the registers of lane 4 * g + t.
UNSEEN inline void gather(uint32_t (&left)[16][16], uint32_t (&right)[16][8], const uint32_t* a,
                          const uint32_t* b, int g, int t) {
    for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
        left[row][column] = a[i] & 0xFFFF;
        left[row][column + 1] = a[i] >> 16;
    }
    for (int i = 0; i < 2; ++i) {
        const int row = 2 * t + i * 8;
        right[row][g] = b[i] & 0xFFFF;
        right[row + 1][g] = b[i] >> 16;
    }
}
UNSEEN inline void gather(uint32_t (&left)[16][8], uint32_t (&right)[8][8], const uint32_t* a,
                          const uint32_t* b, int g, int t) {
    for (int i = 0; i < 4; ++i) left[g + i % 2 * 8][t + i / 2 * 4] = a[i];
    for (int i = 0; i < 2; ++i) right[t + i * 4][g] = b[i];
}

template <Floats (*kValues)(Words), int kRows, int kColumns>
UNSEEN void convert(const uint32_t (&words)[kRows][kColumns], float (&values)[kRows][kColumns]) {
    for (int i = 0; i < kRows * kColumns; i += 4) {
        Words four;
        memcpy(&four, words[0] + i, sizeof four);
        const Floats converted = kValues(four);
        memcpy(values[0] + i, &converted, sizeof converted);
    }
}

// d += a · b with a of 16 x kDepth and b of kDepth x 8.
template <int kDepth, Floats (*kValues)(Words)>
UNSEEN void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* name,
                Site site) {
    MmaOperands operands{d, a, b};
    meet_warp(name, site, operands, [](const Lanes& lanes) UNSEEN {
        uint32_t left_words[16][kDepth], right_words[kDepth][8];
        float left[16][kDepth], right[kDepth][8], sums[16][8];
        for (int lane = 0; lane < kLanes; ++lane) {
            const MmaOperands& of = lanes.data<MmaOperands>(lane);
            const int g = lane / 4, t = lane % 4;
            gather(left_words, right_words, of.a, of.b, g, t);
            memcpy(&sums[g][2 * t], of.d, 8);
            memcpy(&sums[g + 8][2 * t], of.d + 2, 8);
        }
        convert<kValues>(left_words, left);
        convert<kValues>(right_words, right);
        for (int row = 0; row < 16; ++row) {
            Floats sum[2], factors[2];  // four sums side by side
            memcpy(sum, sums[row], sizeof sum);
            for (int k = 0; k < kDepth; ++k) {
                memcpy(factors, right[k], sizeof factors);
                for (int i = 0; i < 2; ++i) sum[i] += left[row][k] * factors[i];
            }
            memcpy(sums[row], sum, sizeof sum);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            float* d = lanes.data<MmaOperands>(lane).d;
            memcpy(d, &sums[lane / 4][lane % 4 * 2], 8);
            memcpy(d + 2, &sums[lane / 4 + 8][lane % 4 * 2], 8);
        }
    });
}

struct MatrixLoad {
    const void* row;
    uint32_t* registers;
};

template <int kMatrices>
UNSEEN void ldmatrix(uint32_t (&registers)[kMatrices], const void* row, bool transposed,
                     const char* name, Site site) {
    const SharedMemory& shared = current_block->shared;
    // Only the first 8 * kMatrices lanes' addresses are used.
    if (current_thread->lane() < 8 * kMatrices &&
        (!shared.contains(row) || shared.offset_of(row) % 16 != 0)) {
        current_block->fail(*current_thread, site,
                            "%s: %p is not an address in shared memory that 16 divides", name, row);
    }
    MatrixLoad load{row, registers};
    meet_warp(name, site, load, [transposed](const Lanes& lanes) UNSEEN {
        for (int matrix = 0; matrix < kMatrices; ++matrix) {
            uint16_t values[8][8];
            for (int i = 0; i < 8; ++i) {
                const int lane = matrix * 8 + i;
                memcpy(values[i], lanes.data<MatrixLoad>(lane).row, sizeof values[i]);
                IN_RACES(Races& races = *lanes.block.races;
                         races.access(races.by(lanes.thread(lane), Kind::Read, lanes.site),
                                      lanes.data<MatrixLoad>(lane).row, sizeof values[i]);)
            }
            for (int lane = 0; lane < kLanes; ++lane) {
                const int g = lane / 4, t = lane % 4;
                const uint32_t first = transposed ? values[2 * t][g] : values[g][2 * t];
                const uint32_t second = transposed ? values[2 * t + 1][g] : values[g][2 * t + 1];
                lanes.data<MatrixLoad>(lane).registers[matrix] = first | second << 16;
            }
        }
    });
}

}  // namespace cpu

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             cpu::Site site = cpu::Site::here()) {
    cpu::mma<8, cpu::tf32_values>(d, a, b, "mma_m16n8k8_tf32", site);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              cpu::Site site = cpu::Site::here()) {
    cpu::mma<16, cpu::bf16_values>(d, a, b, "mma_m16n8k16_bf16", site);
}
inline void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], uint32_t b,
                             cpu::Site site = cpu::Site::here()) {
    const uint32_t wide_a[4] = {a[0], a[1], 0, 0}, wide_b[2] = {b, 0};
    cpu::mma<16, cpu::bf16_values>(d, wide_a, wide_b, "mma_m16n8k8_bf16", site);
}
inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              cpu::Site site = cpu::Site::here()) {
    cpu::mma<16, cpu::fp16_values>(d, a, b, "mma_m16n8k16_fp16", site);
}

#define CPU_LDMATRIX(count, suffix, transposed)                                      \
    inline void ldmatrix_x##count##suffix(uint32_t (&r)[count], const void* row,     \
                                          cpu::Site site = cpu::Site::here()) {      \
        cpu::ldmatrix<count>(r, row, transposed, "ldmatrix_x" #count #suffix, site); \
    }
CPU_LDMATRIX(1, , false)
CPU_LDMATRIX(2, , false)
CPU_LDMATRIX(4, , false)
CPU_LDMATRIX(1, _trans, true)
CPU_LDMATRIX(2, _trans, true)
CPU_LDMATRIX(4, _trans, true)
#undef CPU_LDMATRIX

// Round to nearest, ties away from zero, to 10 bits of fraction.
inline uint32_t to_tf32(float x) {
    if (x != x) return 0x7FFFFFFF;
    return (__float_as_uint(x) + 0x1000) & 0xFFFFE000;
}
inline float exp2_approx(float x) {
    const float result = exp2f(x);
    return result < 0x1p-126f ? 0.0f : result;
}
