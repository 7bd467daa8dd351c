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
# all, and after that, on the same device, what was last asked for.
RUNTIME = (
    """
#include <cuda_runtime.h>

static int current = 0, times_asked = 0;
static cudaError_t current_device(int* device) {
    *device = current;
    return cudaSuccess;
}
#define cudaGetDevice current_device
"""
    + SOURCE
    + """
static size_t allowed[2] = {48 * 1024 - kFixedBytes, 48 * 1024 - kFixedBytes};

EXPORT void set_device(int device) { current = device; }
EXPORT int asked() { return times_asked; }

extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int bytes) {
    ++times_asked;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
    if (bytes + kFixedBytes > 227 * 1024) return cudaErrorInvalidValue;
    allowed[current] = bytes;
    return cudaSuccess;
}

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return config->dynamicSmemBytes > allowed[current] ? cudaErrorInvalidValue : cudaSuccess;
}
"""
)
FITS = [0, 4, 44 * 1024, 44 * 1024 + 4, 48 * 1024, 48 * 1024 + 4, 223 * 1024, 4]  # bytes, one after the other
TOO_MUCH = 223 * 1024 + 4


@pytest.fixture
def library(request):
    """A library of its own for each test, with that runtime in it and nothing asked for yet."""
    kernels = jit_loader.load(f"// {request.node.name}\n{RUNTIME}", name="sum").build("cuda", "9.0a")
    [built] = kernels._libraries.values()
    functions = ctypes.CDLL(str(built.build.library))
    functions.sum.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return functions


def launch(library: ctypes.CDLL, size: int) -> int:
    """The code of a launch with so many bytes of dynamic shared memory."""
    return library.sum(None, size // 4, None)


def test_shared_memory_is_asked_for_as_the_runtime_wants(library):
    assert [launch(library, size) for size in FITS] == [0] * len(FITS)
    assert launch(library, TOO_MUCH) != 0
    assert launch(library, FITS[-2]) == 0


def test_shared_memory_is_asked_for_once_on_each_device(library):
    for device in (0, 1, 0, 1):
        library.set_device(device)
        assert [launch(library, size) for size in (200 * 1024, 100 * 1024, 200 * 1024)] == [0, 0, 0]
    assert library.asked() == 2


@pytest.mark.gpu
def test_a_block_gets_its_shared_memory():
    kernels, y = jit_loader.load(SOURCE, name="sum"), torch.empty(32, device="cuda")
    for size in FITS:
        kernels.sum(y.fill_(-1), size // 4)
        assert (y == 1 + size // 4).all()
    with pytest.raises(RuntimeError, match="sum_kernel.* 228356 bytes of dynamic shared memory"):
        kernels.sum(y, TOO_MUCH // 4)
