"""Check a stage: its output against the answer, and what a right output alone does not show.

A stage passes a case when its output has the right shape and dtype, is NaN exactly where the answer is,
and is within the precision's limit (`problem.LIMITS`): near enough to the answer everywhere, and with an
error of at most so many times eager PyTorch's, at its worst over several evaluations (`problem`); when memory
that it failed to write would have shown as NaN; when a second call, on the CPU with another order of threads,
gives the same bits in other memory; when, on the CPU and in one case, no two accesses to the same memory
race; and when its inputs are as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

import jit_loader
from kernels_src.operator import Operator, Stage
from workbench.problem import CASES, Problem, exact_float32, pose

CASES_ON_CPU = ("masked column",)
CASE_FOR_RACES = "random"  # looking for races takes seven times as long as running in an order of threads
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Check(NamedTuple):
    """How one stage did in one case."""

    operator: str
    stage: str
    shape: str
    case: str
    seed: int
    max_abs_error: float  # against float64
    max_rel_error: float  # relative to the answer, or to its root mean square where the answer is smaller
    eager_error: float  # the largest absolute error of eager PyTorch that it was compared with
    tolerance: float  # the largest absolute error that this allows
    passed: bool
    message: str  # why it failed; empty when it passed


def default_device() -> str:
    """`cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_cases() -> tuple[str, ...]:
    """All cases on a GPU; one on the CPU, where a case takes seconds and runs in three orders of threads."""
    return tuple(CASES) if torch.cuda.is_available() else CASES_ON_CPU


def check(
    operator: Operator,
    stage: Stage,
    shape: str = "seed",
    *,
    device: str | None = None,
    seed: int = 0,
    cases: Iterable[str] = CASES,
) -> list[Check]:
    """Check a stage at one of its operator's named shapes, case by case.

    Raises what the stage raises: ValueError where it does not support the shape or the device.
    """
    sizes = operator.shapes[shape]
    device = device or default_device()
    posed = (
        pose(operator, sizes, case, precision=stage.precision, device=device, seed=seed) for case in cases
    )
    return [check_problem(stage, problem, shape) for problem in posed]


def check_problem(stage: Stage, problem: Problem, shape: str | None = None) -> Check:
    """Check a stage on inputs with a known answer; `shape` is the name to report the shape by."""
    output, found = _calls(stage, problem)
    judgement = judge(output, problem)
    messages = [message for message in (judgement.message, *found) if message]
    return _result(stage, problem, shape, judgement, "; ".join(messages))


def failed_check(stage: Stage, problem: Problem, shape: str | None, message: str) -> Check:
    """The result of a stage that raised an error instead of giving an output."""
    return _result(stage, problem, shape, _nothing(message, problem), message)


def _result(stage: Stage, problem: Problem, shape: str | None, judgement: Judgement, message: str) -> Check:
    return Check(
        operator=problem.operator.name,
        stage=stage.name,
        shape=shape or "x".join(map(str, problem.shape)),
        case=problem.case,
        seed=problem.seed,
        max_abs_error=judgement.max_abs_error,
        max_rel_error=judgement.max_rel_error,
        eager_error=judgement.eager_error,
        tolerance=problem.allowed_by(judgement.eager_error),
        passed=not message,
        message=message,
    )


class Judgement(NamedTuple):
    """An output against the answer."""

    max_abs_error: float
    max_rel_error: float
    eager_error: float  # that it was compared with
    message: str  # what is wrong with it, or empty


def judge(output: Tensor, problem: Problem) -> Judgement:
    """Compare an output with the answer."""
    answer = problem.answer
    expected = _whole_shape(problem)
    if output.shape != expected or output.dtype != problem.msa.dtype:
        got = f"{output.dtype} {tuple(output.shape)}"
        return _nothing(f"expected {problem.msa.dtype} {tuple(expected)}, got {got}", problem)
    known = problem.known(output)
    wrong = (known.isnan() != answer.isnan()).sum().item()
    if wrong:
        message = f"{wrong} of {answer.numel()} elements are NaN where the answer is not, or the reverse"
        return _nothing(message, problem)
    if problem.no_column_is_masked and output.isnan().any():
        return _nothing(f"{output.isnan().sum().item()} elements are NaN", problem)
    error = (known - answer).abs()
    error[answer.isnan()] = 0
    size = answer.nan_to_num().abs()
    relative = error / size.clamp(min=problem.size_of_answer or 1)
    worst, worst_relative = torch.stack([error.max(), relative.max()]).tolist()
    eager_error = problem.eager_error
    if not worst <= problem.allowed_by(eager_error):  # only then is eager at its worst needed
        eager_error = problem.eager_at_worst
    return Judgement(worst, worst_relative, eager_error, _excess(error, worst, problem, eager_error))


def _excess(error: Tensor, worst: float, problem: Problem, eager_error: float) -> str:
    """What is too large about an error, or nothing. Written so that a NaN is too large."""
    limit, allowed = problem.limit, problem.allowed_by(eager_error)
    if not worst <= allowed:
        yardstick = f"eager PyTorch's {eager_error:.2e} {problem.evaluations}"
        if allowed > limit.factor * eager_error:
            yardstick = f"{limit.floor:g} of the largest answer, more than {yardstick}"
        place = _index_of(error)
        return f"error {worst:.2e} at {place} exceeds {allowed:.2e}: {limit.factor:g} times {yardstick}"
    # Eager itself can't promise the plain limit for large logits: there the comparison alone counts.
    if problem.case != "large" and not bool((error <= limit.allowed(problem.answer)).all()):
        plain = f"{limit.absolute:g} + {limit.relative:g}·|answer|"
        return f"error {worst:.2e}, the largest at {_index_of(error)}, exceeds {plain}"
    return ""


def _nothing(message: str, problem: Problem) -> Judgement:
    return Judgement(float("nan"), float("nan"), problem.eager_error, message)


def _index_of(error: Tensor) -> tuple[int, ...]:
    """Where the largest error is, as an index into the part with a known answer."""
    return tuple(index.item() for index in torch.unravel_index(error.argmax(), error.shape))


def _whole_shape(problem: Problem) -> torch.Size:
    """The output's shape; the answer may be that of some residues only."""
    sizes = list(problem.answer.shape)
    for axis in problem.operator.residue_axes:
        sizes[axis] = problem.msa.shape[2]
    return torch.Size(sizes)


def _calls(stage: Stage, problem: Problem) -> tuple[Tensor, list[str]]:
    """The first call's output, and what comparing it with further calls and with the inputs brings up."""
    inputs = {"msa": problem.msa, "mask": problem.mask, **dict(problem.module.named_parameters())}
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    run = _run_on_cpu if problem.msa.device.type == "cpu" else _run_on_cuda
    outputs, found = run(stage, problem)
    for name, copy in copies.items():
        if not same_bits(copy, inputs[name]):
            found.append(f"{name} was modified")
            inputs[name].copy_(copy)  # for eager, and for other stages on the same problem
    names = list(outputs)
    for name in names[1:]:
        if not same_bits(outputs[names[0]], outputs[name]):
            found.append(f"{name} and {names[0]} give different results")
        elif outputs[names[0]].data_ptr() == outputs[name].data_ptr():
            found.append(f"{name} and {names[0]} return the same memory")
    return outputs[names[0]], found


def _run_on_cpu(stage: Stage, problem: Problem) -> tuple[dict[str, Tensor], list[str]]:
    """One output for each order in which the CPU runs the threads of a block, and the errors of all but one.

    The first order's error is raised: there is nothing to judge then.
    """
    orders = {"threads in order": "forward", "in reverse": "reverse", f"shuffled by {problem.seed}": "random"}
    if problem.case == CASE_FOR_RACES:
        orders["looking for races"] = "races"
    outputs: dict[str, Tensor] = {}
    found = []
    for name, order in orders.items():
        try:
            with jit_loader.cpu_schedule(order, seed=problem.seed):
                outputs[name] = _call(stage, problem)
        except RuntimeError as error:
            if not outputs:
                raise
            found.append(f"{name}: {error}")
    return outputs, found


def _run_on_cuda(stage: Stage, problem: Problem) -> tuple[dict[str, Tensor], list[str]]:
    """The outputs of two calls: a race or an uninitialised read rarely falls out alike twice."""
    outputs = {name: _call(stage, problem) for name in ("the first call", "the second call")}
    torch.cuda.synchronize()
    return outputs, []


def _call(stage: Stage, problem: Problem) -> Tensor:
    with poisoned_memory(), exact_float32():
        return stage(problem.module, problem.msa, problem.mask)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory from torch.empty starts as NaN (integers: the largest), so that what is left unwritten shows."""
    mode = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determinis")
        # use_deterministic_algorithms would import torch's compiler first, which takes seconds
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fills


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in every bit; one NaN is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(_bits_agree(a, b))


def _bits_agree(a: Tensor, b: Tensor) -> Tensor:
    """Whether tensors of one shape and dtype agree in every bit, as a tensor: reading it waits for a GPU."""
    if not a.is_floating_point():
        return (a == b).all()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    return same.all()
