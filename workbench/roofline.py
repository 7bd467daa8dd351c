"""How fast a card could be at most: its measured ceilings, and an operator's bound below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import jit_loader
from kernels_src.operator import Operator, Precision
from workbench.problem import exact_float32
from workbench.timing import events_us, percentiles

COPY_BYTES = 2**30
MATRIX = 8192
EXPONENTIALS = 256  # in a row, by each thread

EXPONENTIALS_SOURCE = """
#include "cuda.cuh"

constexpr int kThreads = 256;

// Four independent chains a thread, so that the latency of one exponential is hidden.
__global__ void exponentials_kernel(float* out, int count) {
    float x[4];
    for (int k = 0; k < 4; ++k) x[k] = -0.001f * (threadIdx.x + k);
    for (int n = 0; n < count; n += 4) {
        for (int k = 0; k < 4; ++k) x[k] = __expf(-x[k]);
    }
    out[blockIdx.x * kThreads + threadIdx.x] = x[0] + x[1] + x[2] + x[3];
}

EXPORT cudaError_t exponentials(float* out, int blocks, int count, cudaStream_t stream) {
    return LAUNCH(exponentials_kernel, blocks, kThreads, 0, stream)(out, count);
}
"""


class Ceilings(NamedTuple):
    """What a card reached in the simplest programs that use one thing only."""

    copy_gb_per_s: float  # bytes read plus bytes written
    fp32_tflops: float  # matrix product on CUDA cores
    tf32_tflops: float
    bf16_tflops: float
    exp_per_us: float  # exponentials by the special-function units

    def matrix_tflops(self, precision: Precision) -> float:
        """The fastest matrix product of a precision.

        fp32 accuracy is to be had from CUDA cores, or from tensor cores on operands split in two, which takes
        three products for one: of TF32, or of fp16, which is as fast as bf16.
        """
        if precision == "fp32":
            return max(self.fp32_tflops, self.tf32_tflops / 3, self.bf16_tflops / 3)
        return {"tf32": self.tf32_tflops, "bf16": self.bf16_tflops}[precision]


class Bound(NamedTuple):
    """The time that an operator takes at least, in µs, by what limits it."""

    memory_us: float
    matrix_us: float
    exponential_us: float

    @property
    def us(self) -> float:
        """The largest of the three, as if all else were hidden behind it."""
        return max(self)


def work(operator: Operator, shape: Any) -> tuple[int, int]:
    """Operations of the matrix products, and exponentials, of all parts together."""
    costs = operator.costs(shape).values()
    return sum(cost.matrix_operations for cost in costs), sum(cost.exponentials for cost in costs)


def element_bytes(precision: Precision) -> int:
    """Bytes of an element of msa, parameters and output."""
    return 2 if precision == "bf16" else 4


def intensity(operator: Operator, shape: Any, precision: Precision) -> float:
    """Operations a byte, if every input and output moves once."""
    return work(operator, shape)[0] / operator.least_bytes(shape, element_bytes(precision))


def bound(operator: Operator, shape: Any, precision: Precision, ceilings: Ceilings) -> Bound:
    """The time below which an operator cannot get with these ceilings.

    Exponentials count as if special-function units made them all; polynomials on the FMA units may take a
    share, so that a stage whose bound they are can pass it.
    """
    operations, exponentials = work(operator, shape)
    return Bound(
        operator.least_bytes(shape, element_bytes(precision)) / ceilings.copy_gb_per_s / 1e3,
        operations / ceilings.matrix_tflops(precision) / 1e6,
        exponentials / ceilings.exp_per_us,
    )


def measure_ceilings() -> Ceilings:
    """Measure this card, in about a second. Raises RuntimeError where there is no GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("ceilings are measured on a GPU, and none was found")
    return Ceilings(
        copy_gb_per_s=_copy_gb_per_s(),
        fp32_tflops=_matrix_tflops(torch.float32, tf32=False),
        tf32_tflops=_matrix_tflops(torch.float32, tf32=True),
        bf16_tflops=_matrix_tflops(torch.bfloat16, tf32=False),
        exp_per_us=_exp_per_us(),
    )


def _fastest_us(work: Callable[[], object], samples: int = 8) -> float:
    """The 20th percentile of a few samples: the rest wait for a clock that is still rising."""
    work()
    return percentiles([events_us(work) for _ in range(samples)])[0]


def _copy_gb_per_s() -> float:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _fastest_us(lambda: target.copy_(source)) / 1e3


def _matrix_tflops(dtype: torch.dtype, *, tf32: bool) -> float:
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    with exact_float32():
        if tf32:
            torch.set_float32_matmul_precision("high")
        return 2 * MATRIX**3 / _fastest_us(lambda: torch.mm(a, b, out=out)) / 1e6


def _exp_per_us() -> float:
    blocks = 64 * torch.cuda.get_device_properties().multi_processor_count
    out = torch.empty(blocks * 256, device="cuda")
    kernels = jit_loader.load(EXPONENTIALS_SOURCE, name="exponentials")
    us = _fastest_us(lambda: kernels.exponentials(out, blocks, EXPONENTIALS))
    return out.numel() * EXPONENTIALS / us
