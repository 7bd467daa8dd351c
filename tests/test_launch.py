"""LAUNCH on a GPU: a block gets the shared memory that it asks for, SHARED arrays and dynamic together."""

from __future__ import annotations

import ctypes

import pytest
import torch

import jit_loader

SOURCE = """
#include "cuda.cuh"

constexpr size_t kFixedBytes = 4096;

__global__ void sum_kernel(float* y, int count) {
    SHARED(float, fixed, [kFixedBytes / sizeof(float)]);
    DYNAMIC_SHARED(float, dynamic);
    fixed[threadIdx.x] = 1;
    for (int i = threadIdx.x; i < count; i += blockDim.x) dynamic[i] = 1;
    __syncthreads();
    float sum = fixed[(threadIdx.x + 1) % blockDim.x];
    for (int i = 0; i < count; ++i) sum += dynamic[i];
    y[threadIdx.x] = sum;
}

EXPORT cudaError_t sum(float* y, int count, cudaStream_t stream) {
    return LAUNCH(sum_kernel, dim3(1), dim3(32), count * sizeof(float), stream)(y, count);
}
"""
# The runtime's rule, in place of its own functions: without being asked, a kernel's launch may have 48 KB in
# all, and after that what was asked for.
RUNTIME = """
static size_t allowed = 48 * 1024 - kFixedBytes;

extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int bytes) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
    if (bytes + kFixedBytes > 227 * 1024) return cudaErrorInvalidValue;
    allowed = bytes;
    return cudaSuccess;
}

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return config->dynamicSmemBytes > allowed ? cudaErrorInvalidValue : cudaSuccess;
}
"""
FITS = [0, 4, 44 * 1024, 44 * 1024 + 4, 48 * 1024, 48 * 1024 + 4, 223 * 1024, 4]  # bytes, one after the other
TOO_MUCH = 223 * 1024 + 4


def test_shared_memory_is_asked_for_as_the_runtime_wants():
    kernels = jit_loader.load(SOURCE + RUNTIME, name="sum").build("cuda", "9.0a")
    [library] = kernels._libraries.values()
    launch = ctypes.CDLL(str(library.build.library)).sum
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    assert {size: launch(None, size // 4, None) for size in FITS} == dict.fromkeys(FITS, 0)
    assert launch(None, TOO_MUCH // 4, None) != 0


@pytest.mark.gpu
def test_a_block_gets_its_shared_memory():
    kernels, y = jit_loader.load(SOURCE, name="sum"), torch.empty(32, device="cuda")
    for size in FITS:
        kernels.sum(y.fill_(-1), size // 4)
        assert (y == 1 + size // 4).all()
    with pytest.raises(RuntimeError, match="sum_kernel.* 228356 bytes of dynamic shared memory"):
        kernels.sum(y, TOO_MUCH // 4)
