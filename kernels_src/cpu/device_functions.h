// CUDA's device functions that <math.h> lacks. What is approximate on the GPU is exact here.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "scheduler.h"

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline int __float2int_rn(float x) { return static_cast<int>(lrintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

// Of a number and a NaN, the number, as in CUDA.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#define DEFINE_MIN_AND_MAX(type)                              \
    inline type min(type a, type b) { return a < b ? a : b; } \
    inline type max(type a, type b) { return a < b ? b : a; }
DEFINE_MIN_AND_MAX(int)
DEFINE_MIN_AND_MAX(unsigned)
DEFINE_MIN_AND_MAX(long)
DEFINE_MIN_AND_MAX(unsigned long)
DEFINE_MIN_AND_MAX(long long)
DEFINE_MIN_AND_MAX(unsigned long long)
#undef DEFINE_MIN_AND_MAX

namespace [[gnu::visibility("hidden")]] cpu {

template <typename To, typename From>
UNSEEN To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "both must have the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Blocks run on several OS threads. Returns what was there before.
template <typename Value, typename Change>
Value change_atomically(Value* at, Change change, Site site) {
    IN_RACES(const Quiet quiet; Races& races = *current_block->races;
             races.access(races.by(*current_thread, Kind::Atomic, site), at, sizeof(Value));)
    Value before, after;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    do {
        after = change(before);
    } while (
        !__atomic_compare_exchange(at, &before, &after, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return before;
}

template <typename Type>
struct Same {
    using type = Type;  // a parameter of this type is converted to what other parameters determine
};
template <typename Value>
using SameAs = typename Same<Value>::type;

}  // namespace cpu

inline unsigned __float_as_uint(float x) { return cpu::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return cpu::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return cpu::bits_as<float>(x); }
inline float __int_as_float(int x) { return cpu::bits_as<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}

// Loads and stores that only differ in what they leave in the caches.
template <typename Value>
Value __ldg(const Value* from) {
    return *from;
}
template <typename Value>
Value __ldcg(const Value* from) {
    return *from;
}
template <typename Value>
Value __ldcs(const Value* from) {
    return *from;
}
template <typename Value>
void __stcg(Value* to, cpu::SameAs<Value> value) {
    *to = value;
}
template <typename Value>
void __stcs(Value* to, cpu::SameAs<Value> value) {
    *to = value;
}

template <typename Value>
Value atomicAdd(Value* at, cpu::SameAs<Value> value, cpu::Site site = cpu::Site::here()) {
    return cpu::change_atomically(
        at, [=](Value old) { return static_cast<Value>(old + value); }, site);
}
template <typename Value>
Value atomicMax(Value* at, cpu::SameAs<Value> value, cpu::Site site = cpu::Site::here()) {
    return cpu::change_atomically(at, [=](Value old) { return old < value ? value : old; }, site);
}
template <typename Value>
Value atomicMin(Value* at, cpu::SameAs<Value> value, cpu::Site site = cpu::Site::here()) {
    return cpu::change_atomically(at, [=](Value old) { return value < old ? value : old; }, site);
}
template <typename Value>
Value atomicExch(Value* at, cpu::SameAs<Value> value, cpu::Site site = cpu::Site::here()) {
    return cpu::change_atomically(at, [=](Value) { return value; }, site);
}
template <typename Value>
Value atomicCAS(Value* at, cpu::SameAs<Value> expected, cpu::SameAs<Value> value,
                cpu::Site site = cpu::Site::here()) {
    return cpu::change_atomically(
        at, [=](Value old) { return old == expected ? value : old; }, site);
}
inline void __threadfence() {
    IN_RACES(const cpu::Quiet quiet; cpu::current_block->races->fence_threads();)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
