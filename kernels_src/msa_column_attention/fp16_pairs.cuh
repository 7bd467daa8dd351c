// Products as accurate as fp32's on fp16 tensor cores, which stage 10 is made of.
//
// A pair is two fp16 numbers that stand for one of fp32: big is the value rounded to fp16, small is
// what the rounding left out, again in fp16. Each has 11 significant bits, so that big + small has
// 22, and fp32 itself has 24.
//
// A product of two pairs is four products of fp16, which tensor cores multiply exactly and add up
// in fp32. Three are enough: big·big, big·small and small·big. small·small is 2^-22 of the first or
// less, below what the pairs left out themselves.
//
// fp16 goes from 2^-24 to 2^16 only, and below 2^-14 it has ever fewer bits. A value of 1 or more
// keeps all of small; one of 2^16 is infinite. Hence weights, queries, keys and values are first
// multiplied by powers of two that bring the largest of them near the upper end (softmax's weights
// by 2^12; LayerNorm's x̂ is about 1 as it is). That shifts exponents, no bit is lost, and sums are
// multiplied by the inverse. What is far smaller than the largest loses bits of small, but in a sum
// with the largest they would not count. The weights alone bound queries, keys and values, so that
// all powers are known before the data are (pair_weights.cuh): no pass looks for a maximum.
#pragma once

#include <cuda_fp16.h>
#include "tensor_core.cuh"

// Two values as pairs, packed for the tensor core.
__device__ inline void split(float first, float second, uint32_t& big, uint32_t& small) {
    const __half2 rounded = __floats2half2_rn(first, second);
    const float2 back = __half22float2(rounded);
    const __half2 rest = __floats2half2_rn(first - back.x, second - back.y);
    memcpy(&big, &rounded, sizeof big);
    memcpy(&small, &rest, sizeof small);
}

// The power of two that takes a magnitude into [2^exponent, 2^(exponent + 1)); 1 for zero.
__device__ inline float scale_to(float magnitude, int exponent) {
    if (magnitude == 0) return 1;
    const int biased = __float_as_uint(magnitude) >> 23;
    return __uint_as_float(uint32_t(min(max(254 + exponent - biased, 1), 254)) << 23);
}
