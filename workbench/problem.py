"""Inputs with the known answer: what a stage is checked against.

The answer is the reference's, in float64, on inputs and parameters of the precision under test. Eager
PyTorch's own error against it is the yardstick for how much error a stage may have. On a small problem that
error is a matter of luck, so that it is taken at its worst over several evaluations: in float32 over orders
of summation, which do not change the answer; in bfloat16, where it comes from rounding the results of layers,
which no order changes, over like inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels_src.operator import Operator, Precision
from workbench.orders import AnotherOrder

CASES = {
    "random": "msa and mask random, row 0 kept",
    "masked": "half of the mask zero, anywhere; a boolean mask",
    "masked column": "one column masked throughout; a mask of integers",
    "large": "a LayerNorm scale 16 times as large, so that logits reach hundreds",
}
LARGE = 16
MANY_OPERATIONS = 10**12  # beyond this the answer is known for some residues only
SOME_RESIDUES = 64
FEW = 2**18  # elements; the largest error of fewer is a matter of luck …
ORDERS = 8  # … so that eager's is taken over as many further orders of its sums …
LIKE_INPUTS = 4  # … or, in bfloat16, over as many further random inputs


class Limit(NamedTuple):
    """How far from the answer an output of some precision may be."""

    absolute: float  # an element may be off by absolute + relative · |answer| …
    relative: float
    eager: torch.dtype  # … and the largest error at most `factor` times eager PyTorch's in this dtype
    factor: float
    floor: float  # eager's error counts as at least this part of the largest answer

    def allowed(self, answer: Tensor) -> Tensor:
        """How far each element may be from its answer; an answer of NaN counts as 0."""
        return self.absolute + self.relative * answer.nan_to_num().abs()


LIMITS: dict[Precision, Limit] = {
    "fp32": Limit(1e-4, 1e-4, torch.float32, 4, 1e-6),
    "tf32": Limit(1e-2, 1e-2, torch.bfloat16, 1, 1e-3),
    "bf16": Limit(1e-2, 1e-2, torch.bfloat16, 2, 4e-3),  # the floor is half a unit in the last place
}


@dataclass(frozen=True)
class Problem:
    """One case's inputs with the answer, all on one device."""

    operator: Operator
    shape: Any
    case: str
    precision: Precision
    seed: int
    module: nn.Module
    msa: Tensor
    mask: Tensor
    residues: Tensor | None  # those whose answer is known; None: all
    answer: Tensor  # float64
    eager_error: float  # the largest of eager PyTorch in the limit's dtype, on these inputs

    @property
    def limit(self) -> Limit:
        """How far from the answer an output may be."""
        return LIMITS[self.precision]

    @property
    def tolerance(self) -> float:
        """The largest error that an output may have anywhere."""
        return self.allowed_by(self.eager_at_worst)

    def allowed_by(self, eager_error: float) -> float:
        """The largest error that an output may have anywhere if eager PyTorch's is this."""
        return self.limit.factor * max(eager_error, self.limit.floor * self.largest_answer)

    # What is read from the GPU is kept: reading waits for it, and many stages are judged by one problem.

    @cached_property
    def largest_answer(self) -> float:
        """The largest magnitude in the answer."""
        return largest(self.answer)

    @cached_property
    def size_of_answer(self) -> float:
        """The answer's root mean square, NaN counting as 0."""
        return self.answer.nan_to_num().square().mean().sqrt().item()

    @cached_property
    def no_column_is_masked(self) -> bool:
        """Whether each residue is present in some row, so that no operator has a reason to give NaN."""
        return bool((self.mask != 0).any(1).all())

    @property
    def evaluations(self) -> str:
        """What `eager_at_worst` is the largest over."""
        if self.answer.numel() >= FEW:
            return "on these inputs"
        if self._order_matters:
            return f"at its worst in {ORDERS + 1} orders of its sums"
        return f"at its worst on {LIKE_INPUTS + 1} like inputs"

    @cached_property
    def eager_at_worst(self) -> float:
        """Eager PyTorch's largest error over several evaluations, where one is a matter of luck."""
        if self.answer.numel() >= FEW:
            return self.eager_error
        further = self._in_other_orders() if self._order_matters else self._on_like_inputs()
        return max(self.eager_error, *further)

    @property
    def _order_matters(self) -> bool:
        return self.limit.eager == torch.float32

    def _in_other_orders(self) -> Iterator[float]:
        msa, mask = _take(self.msa, self.residues, (2,)), _take(self.mask, self.residues, (2,))
        for order in range(ORDERS):
            with AnotherOrder(self.seed + order):
                eager = reference_output(self.module, msa, mask, self.limit.eager)
            yield largest(_error(eager, self.answer))

    def _on_like_inputs(self) -> Iterator[float]:
        kind = {"device": self.msa.device, "dtype": self.msa.dtype}
        for seed in range(self.seed + 1, self.seed + 1 + LIKE_INPUTS):
            generator = torch.Generator().manual_seed(seed)
            inputs = _inputs(self.operator, self.shape, self.case, self.module, generator, seed, **kind)
            msa, mask = (_take(each, self.residues, (2,)) for each in inputs)
            yield largest(_answer_and_error(self.module, self.limit, msa, mask)[1])

    def known(self, output: Tensor) -> Tensor:
        """The part of an output that has a known answer, in float64."""
        return _take(output, self.residues, self.operator.residue_axes).double()


def pose(
    operator: Operator,
    shape: Any,
    case: str = "random",
    *,
    precision: Precision = "fp32",
    device: str = "cpu",
    seed: int = 0,
    module: nn.Module | None = None,
) -> Problem:
    """Make a case's inputs and find its answer. Raises KeyError for a case that does not exist.

    `module` has the parameters to use, on the device and in the precision; None: random ones. Where the
    device's memory or MANY_OPERATIONS forbid the whole answer, it is found for random residues.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module = module or operator.module(shape, seed, device=device, dtype=dtype)
    if case == "large" and hasattr(module, "layer_norm"):
        module = copy.deepcopy(module)
        module.layer_norm.weight.data *= LARGE
    generator = torch.Generator().manual_seed(seed)
    msa, mask = _inputs(operator, shape, case, module, generator, seed, device=device, dtype=dtype)
    limit = LIMITS[precision]
    residues = _residues_to_know(operator, shape, mask, generator)
    while True:
        try:
            answer, error = _answer_and_error(
                module, limit, _take(msa, residues, (2,)), _take(mask, residues, (2,))
            )
            break
        except torch.OutOfMemoryError:
            count = shape.N if residues is None else len(residues)
            if count == 1 or not operator.residue_axes:
                raise
            residues = _random_residues(mask, count // 2, generator)
            torch.cuda.empty_cache()
    return Problem(
        operator, shape, case, precision, seed, module, msa, mask, residues, answer, largest(error)
    )


def _inputs(
    operator: Operator,
    shape: Any,
    case: str,
    module: nn.Module,
    generator: torch.Generator,
    seed: int,
    **device_and_dtype: Any,
) -> tuple[Tensor, Tensor]:
    """A case's msa and mask."""
    msa, mask = operator.inputs(shape, seed, **device_and_dtype)
    if case == "large" and not hasattr(module, "layer_norm"):
        msa *= LARGE  # nothing takes its scale out again
    return msa, _mask(case, mask, generator)


def _answer_and_error(module: nn.Module, limit: Limit, msa: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The answer, and the error of eager PyTorch against it; 0 where both are NaN."""
    answer = reference_output(module, msa, mask, torch.float64)
    return answer, _error(reference_output(module, msa, mask, limit.eager), answer)


def _error(eager: Tensor, answer: Tensor) -> Tensor:
    """The error of an output of eager PyTorch; 0 where both are NaN."""
    return (eager.double() - answer).abs().nan_to_num(nan=0.0, posinf=float("inf"))


def reference_output(module: nn.Module, msa: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference's output with parameters and msa cast to a dtype, and no TF32."""
    parameters = {name: tensor.to(dtype) for name, tensor in module.state_dict().items()}
    with torch.no_grad(), exact_float32():
        return torch.func.functional_call(module, parameters, (msa.to(dtype), mask))


@contextmanager
def exact_float32() -> Iterator[None]:
    """Matrix products of float32 are computed in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def largest(x: Tensor) -> float:
    """The largest magnitude of the elements that are not NaN; 0 when there is none."""
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf")).max().item()


def _mask(case: str, mask: Tensor, generator: torch.Generator) -> Tensor:
    cases: dict[str, Callable[[], Tensor]] = {
        "random": lambda: mask,
        "large": lambda: mask,
        "masked": lambda: (torch.rand(mask.shape, generator=generator) < 0.5).to(mask.device),
        "masked column": lambda: _without_column(mask, generator),
    }
    return cases[case]()


def _without_column(mask: Tensor, generator: torch.Generator) -> Tensor:
    """The mask as integers, with every row of one random residue masked."""
    mask = mask.to(torch.int32)
    mask[-1, :, torch.randint(mask.shape[2], (), generator=generator)] = 0
    return mask


def _residues_to_know(
    operator: Operator, shape: Any, mask: Tensor, generator: torch.Generator
) -> Tensor | None:
    operations = sum(cost.matrix_operations for cost in operator.costs(shape).values())
    if operations <= MANY_OPERATIONS or not operator.residue_axes:
        return None
    return _random_residues(mask, min(SOME_RESIDUES, shape.N), generator)


def _random_residues(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices of random residues; those masked throughout come first, since their answer is special."""
    kept = (mask != 0).any(1).all(0).cpu()  # (N,): not masked throughout in any batch
    order = torch.randperm(len(kept), generator=generator)
    order = order[kept[order].int().argsort(stable=True)]
    return order[:count].sort().values.to(mask.device)


def _take(x: Tensor, residues: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """Some residues of a tensor whose `axes` run over residues."""
    if residues is None:
        return x
    for axis in axes:
        x = x.index_select(axis, residues)
    return x
