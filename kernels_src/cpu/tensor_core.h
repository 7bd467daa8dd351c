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

// An operand of mma as floats: the elements of its words, which are neighbours along k if a word
// has two of them. What has been converted is not converted again: a kernel multiplies one A by
// several B.
template <int kRows, int kHalves, Floats (*kValues)(Words)>
struct MmaOperand {
    Words words[2 * kRows];  // two fours a row
    Floats values[kHalves][2 * kRows];
    Words changed;  // bits, of any word since the last conversion

    UNSEEN void put(int four, Words bits) {
        changed |= words[four] ^ bits;
        words[four] = bits;
    }
    UNSEEN void convert() {
        if ((changed[0] | changed[1] | changed[2] | changed[3]) == 0) return;
        changed = Words{};
        for (int four = 0; four < 2 * kRows; ++four) {
            const Words bits = words[four];
            values[0][four] = kValues(kHalves == 2 ? bits & 0xFFFF : bits);
            if (kHalves == 2) values[kHalves - 1][four] = kValues(bits >> 16);
        }
    }
    UNSEEN float at(int row, int word, int half) const {
        return values[half][2 * row + word / 4][word % 4];
    }
};

// Two neighbours of a row from each of two lanes.
UNSEEN inline Floats join(const float* first, const float* second) {
    typedef double Pairs __attribute__((vector_size(16)));
    double left, right;
    memcpy(&left, first, sizeof left);
    memcpy(&right, second, sizeof right);
    return Floats(Pairs{left, right});
}

// d += a · b with a of 16 x kDepth and b of kDepth x 8.
template <int kDepth, Floats (*kValues)(Words)>
UNSEEN void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* name,
                Site site) {
    MmaOperands operands{d, a, b};
    meet_warp(name, site, operands, [](const Lanes& lanes) UNSEEN {
        constexpr int kHalves = kDepth / 8;
        static thread_local MmaOperand<16, kHalves, kValues> left;
        static thread_local MmaOperand<8, kHalves, kValues> right;
        MmaOperands of[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) of[lane] = lanes.data<MmaOperands>(lane);
        for (int g = 0; g < 8; ++g) {
            const MmaOperands* quad = of + 4 * g;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                left.put(2 * (g + i % 2 * 8) + i / 2,
                         Words{quad[0].a[i], quad[1].a[i], quad[2].a[i], quad[3].a[i]});
            }
        }
        for (int t = 0; t < 4; ++t) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const MmaOperands* column = of + i % 2 * 16 + t;
                right.put(2 * (t + i / 2 * 4) + i % 2,
                          Words{column[0].b[i / 2], column[4].b[i / 2], column[8].b[i / 2],
                                column[12].b[i / 2]});
            }
        }
        left.convert();
        right.convert();
        for (int g = 0; g < 8; ++g) {
            const MmaOperands* quad = of + 4 * g;
            Floats upper[2] = {join(quad[0].d, quad[1].d), join(quad[2].d, quad[3].d)};
            Floats lower[2] = {join(quad[0].d + 2, quad[1].d + 2),
                               join(quad[2].d + 2, quad[3].d + 2)};
            for (int word = 0; word < 8; ++word) {
#pragma GCC unroll 2
                for (int half = 0; half < kHalves; ++half) {
                    const Floats* factors = &right.values[half][2 * word];
                    upper[0] += left.at(g, word, half) * factors[0];
                    upper[1] += left.at(g, word, half) * factors[1];
                    lower[0] += left.at(g + 8, word, half) * factors[0];
                    lower[1] += left.at(g + 8, word, half) * factors[1];
                }
            }
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) {
                memcpy(quad[t].d, reinterpret_cast<const char*>(upper) + 8 * t, 8);
                memcpy(quad[t].d + 2, reinterpret_cast<const char*>(lower) + 8 * t, 8);
            }
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
