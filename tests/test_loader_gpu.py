"""Calls on a GPU: the current stream, graph capture, another device, and errors in CUDA's words."""

from __future__ import annotations

import pytest
import torch
from processes import SCALE, factor_of, write_scale

import jit_loader

pytestmark = pytest.mark.gpu

SLOW_THEN_WRITE = """
#include "cuda.cuh"

__global__ void late_kernel(float* y, float value, int64_t clocks) {
    const int64_t start = clock64();
    while (clock64() - start < clocks) {
    }
    y[threadIdx.x] = value;
}

EXPORT cudaError_t late(float* y, float value, int64_t clocks, cudaStream_t stream) {
    return LAUNCH(late_kernel, dim3(1), dim3(32), 0, stream)(y, value, clocks);
}

EXPORT cudaError_t too_wide(float* y, cudaStream_t stream) {
    return LAUNCH(late_kernel, dim3(1), dim3(2048), 0, stream)(y, 1.f, 0);
}

EXPORT cudaError_t too_much_shared(float* y, cudaStream_t stream) {
    return LAUNCH(late_kernel, dim3(1), dim3(32), 1 << 20, stream)(y, 1.f, 0);
}
"""
CLOCKS = 200_000_000  # a tenth of a second


@pytest.fixture(scope="module")
def kernels():
    return jit_loader.load(SLOW_THEN_WRITE, name="late")


def test_the_right_result(tmp_path):
    source = write_scale(tmp_path)
    assert factor_of(source, "cuda") == 3
    assert factor_of(source, "cpu") == 3  # the same object does both
    assert factor_of(source, "cuda", defines={"FACTOR": 5}) == 5
    assert factor_of(source, "cuda") == 3


def test_a_call_runs_on_the_current_stream(kernels):
    """It does not wait for another stream, and another stream does not wait for it."""
    y = torch.zeros(32, device="cuda")
    kernels.late(y, 1.0, 0)
    y.clone().unique()  # loads torch's kernels, which may wait for all streams
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kernels.late(y, 2.0, CLOCKS)
    copy = y.clone()
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the call ran on the current stream's predecessor, or the clock is too fast"
    assert copy.unique().item() == 1
    side.synchronize()
    assert y.unique().item() == 2


def test_a_call_is_asynchronous_and_ordered(kernels):
    y = torch.zeros(32, device="cuda")
    kernels.late(y, 3.0, CLOCKS)
    assert not torch.cuda.current_stream().query()
    assert (y + 1).unique().item() == 4


def test_a_call_can_be_captured_in_a_graph(tmp_path):
    kernels = jit_loader.load(write_scale(tmp_path))
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    kernels.scale(x, y, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.scale(x, y, 8)
        kernels.scale(y, x, 8)
    for value in (1.0, -4.0):
        x.fill_(value)
        graph.replay()
        assert y.unique().item() == 3 * value and x.unique().item() == 9 * value


@pytest.mark.parametrize("function", ["too_wide", "too_much_shared"])
def test_a_launch_that_fails_says_so_in_cudas_words(kernels, function):
    y = torch.zeros(32, device="cuda")
    with pytest.raises(RuntimeError, match=f"^{function}: invalid (configuration argument|argument)"):
        getattr(kernels, function)(y)
    kernels.late(y, 1.0, 0)  # the error does not stick
    assert y.unique().item() == 1


def test_tensors_on_two_devices_are_refused(tmp_path):
    kernels = jit_loader.load(write_scale(tmp_path))
    with pytest.raises(ValueError, match="^scale: y: expected on cuda:0, where x is, got cpu"):
        kernels.scale(torch.ones(8, device="cuda"), torch.ones(8), 8)
    with pytest.raises(ValueError, match="^scale: y: expected on cpu, where x is, got cuda:0"):
        kernels.scale(torch.ones(8), torch.ones(8, device="cuda"), 8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_on_a_device_that_is_not_current(tmp_path):
    source = write_scale(tmp_path)
    assert torch.cuda.current_device() == 0
    assert factor_of(source, "cuda:1") == 3
    assert torch.cuda.current_device() == 0
    kernels = jit_loader.load(source)
    with pytest.raises(ValueError, match="expected on cuda:0, where x is, got cuda:1"):
        kernels.scale(torch.ones(8, device="cuda:0"), torch.ones(8, device="cuda:1"), 8)


def test_equal_names_in_two_libraries_stay_apart():
    """Both have a kernel, a template and a function of the same name."""
    texts = [SCALE.replace('#include "factor.h"', f"#define FACTOR {factor}") for factor in (2, 7)]
    for _ in range(2):
        assert [factor_of(text, "cuda", name="same") for text in texts] == [2, 7]


def test_resources_are_of_the_build_that_ran(tmp_path):
    kernels = jit_loader.load(write_scale(tmp_path))
    x = torch.ones(8, device="cuda")
    kernels.scale(x, x.clone(), 8)
    assert list(kernels.resources.kernel) == ["scale_kernel"]
    assert f"sm_{jit_loader.present_arch().replace('.', '')}" in kernels.sass()
