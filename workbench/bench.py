"""Measure stages and baselines against each other and turn what they took into result rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels_src.operator import Operator, Precision, Stage
from workbench import baselines as pytorch
from workbench.check import judge
from workbench.problem import Problem, exact_float32, pose
from workbench.results import Row, is_baseline
from workbench.roofline import Ceilings, bound, element_bytes, work
from workbench.selection import why_not
from workbench.timing import Candidate, Timing, batch_us, compare
from workbench.versions import FUSED, fused_module

DTYPES: tuple[Precision, ...] = ("fp32", "bf16")
INPUT_SETS = 4  # of a shape small enough for CUDA graphs
SLOW_SECONDS = 0.25  # a stage whose call takes longer is left out: dozens of calls would take minutes
GROUP_SECONDS = (35, 45)  # a group with baselines on an H200, most of it torch.compile's autotuning
Report = Callable[[str], None]


class Group(NamedTuple):
    """What is measured in one run with interleaved samples."""

    operator: Operator
    shape: str
    dtype: Precision  # fp32 or bf16: that of msa, parameters and output
    stages: tuple[Stage, ...]

    @property
    def sizes(self) -> Any:
        """The shape itself."""
        return self.operator.shapes[self.shape]


def groups(
    operator: Operator, stages: Iterable[Stage], shapes: Iterable[str], dtypes: Iterable[Precision] = DTYPES
) -> Iterator[Group]:
    """The groups that these stages, shapes and dtypes make, without stages that do not support a shape."""
    stages = tuple(stages)
    for shape in shapes:
        for dtype in dtypes:
            fitting = tuple(
                stage
                for stage in stages
                if (stage.precision == "bf16") == (dtype == "bf16")
                and not why_not(stage, operator.shapes[shape], "cuda")
            )
            if fitting:
                yield Group(operator, shape, dtype, fitting)


def measure(
    group: Group,
    ceilings: Ceilings,
    *,
    baselines: bool = True,
    report: Report = print,
    progress: bool = False,
) -> list[Row]:
    """Result rows of a group's stages and, if asked for, of the baselines and the fused module.

    What fails, is wrong after it was timed, or takes longer than SLOW_SECONDS a call is left out and
    reported. Raises RuntimeError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("times are measured on a GPU, and none was found")
    in_graph = _is_small(group)
    problems = _problems(group, INPUT_SETS if in_graph else 1)
    inputs = [(problem.msa, problem.mask) for problem in problems]
    module = problems[0].module
    with exact_float32(), torch.no_grad():
        candidates = [
            *(pytorch.baselines(group.operator, module, inputs, report) if baselines else ()),
            *_working(_calls(group, module, fused=baselines), inputs, report),
        ]
        timings = compare(candidates, inputs, in_graph=in_graph, progress=progress)
    precisions = {stage.name: stage.precision for stage in group.stages}
    rows = []
    for candidate in candidates:
        timing = timings[candidate.name]
        if candidate.body:  # a graph keeps its memory between calls, so that none is seen to be allocated
            timing = timing._replace(peak_mib=float("nan"))
        precision = precisions.get(candidate.name, group.dtype)
        error = _error(candidate.name, timing.outputs, _posed_for(problems, precision), report)
        if error is not None:
            rows.append(_row(group, candidate.name, precision, timing, error, ceilings))
    torch.cuda.empty_cache()
    return rows


def _is_small(group: Group) -> bool:
    """Whether all sets of inputs stay in a quarter of the L2 cache, so that latency and launches decide."""
    least = group.operator.least_bytes(group.sizes, element_bytes(group.dtype))
    return INPUT_SETS * least < torch.cuda.get_device_properties().L2_cache_size / 4


def _problems(group: Group, count: int) -> list[Problem]:
    """Sets of inputs for the same parameters."""
    first = pose(group.operator, group.sizes, precision=group.dtype, device="cuda")
    return [first] + [
        pose(
            group.operator, group.sizes, precision=group.dtype, device="cuda", seed=seed, module=first.module
        )
        for seed in range(1, count)
    ]


def _posed_for(problems: list[Problem], precision: Precision) -> list[Problem]:
    """The same problems with the limit of another precision that takes the same inputs (fp32, tf32)."""
    if problems[0].precision == precision:
        return problems
    return [
        pose(p.operator, p.shape, precision=precision, device="cuda", seed=p.seed, module=p.module)
        for p in problems
    ]


def _calls(group: Group, module: nn.Module, *, fused: bool) -> dict[str, Callable[..., Tensor]]:
    """The group's stages and, if asked for, the fused module: what is called, by its name."""
    calls: dict[str, Callable[..., Tensor]] = {stage.name: partial(stage, module) for stage in group.stages}
    kind = fused_module(group.operator) if fused else None
    return calls | ({FUSED: kind.of(module)} if kind else {})


def _working(
    calls: Mapping[str, Callable[..., Tensor]], inputs: Sequence[tuple[Tensor, ...]], report: Report
) -> Iterator[Candidate]:
    """Those that run, and not too slowly; `report` is told about the others."""
    for name, call in calls.items():
        try:
            seconds = batch_us(call, inputs, 1) / 1e6
            if seconds > SLOW_SECONDS:  # once more, since a first call loads what it needs
                seconds = batch_us(call, inputs, 1) / 1e6
        except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
            report(f"FAILED {name}: {error}")
            torch.cuda.empty_cache()
            continue
        if seconds > SLOW_SECONDS:
            report(f"{name}: left out, since a call takes {seconds:.2g} s")
            continue
        yield Candidate(name, call)


def _error(name: str, outputs: list[Tensor], problems: list[Problem], report: Report) -> float | None:
    """The largest error of the outputs; NaN for what ignores the mask, None for what is wrong."""
    if name.endswith(pytorch.IGNORES_MASK):
        return float("nan")
    judged = [judge(output, problem) for output, problem in zip(outputs, problems, strict=True)]
    worst = torch.tensor([judgement.max_abs_error for judgement in judged]).max().item()  # NaN if one is
    messages = [judgement.message for judgement in judged if judgement.message]
    if not messages:
        return worst
    if is_baseline(name):
        report(f"{name}: {messages[0]}")
        return None if math.isnan(worst) else worst
    report(f"FAILED {name} after timing: {messages[0]}")
    return None


def _row(
    group: Group, name: str, precision: Precision, timing: Timing, error: float, ceilings: Ceilings
) -> dict[str, Any]:
    operations, _ = work(group.operator, group.sizes)
    least = group.operator.least_bytes(group.sizes, element_bytes(precision))
    return {
        "operator": group.operator.name,
        "stage": name,
        "shape": group.shape,
        "dtype": group.dtype,
        "precision": precision,
        **{key: value for key, value in timing._asdict().items() if key != "outputs"},
        "tflops": operations / timing.p50_us / 1e6,
        "gb_per_s": least / timing.p50_us / 1e3,
        "percent_of_bound": 100 * bound(group.operator, group.sizes, precision, ceilings).us / timing.p50_us,
        "max_error": error,
    }
