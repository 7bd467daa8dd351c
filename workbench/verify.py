"""Everything that can be checked on a GPU: `python -m workbench verify`.

Beyond `check`: many seeds; grids larger than 65,535 blocks and more than 2³¹ elements; a side stream; a CUDA
graph replayed with changed inputs; guard bands around outputs; and NVIDIA's compute-sanitizer. What could not
run is shown as such, and is no pass.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

import jit_loader
from kernels_src import OPERATORS
from kernels_src.msa_column_attention import Shape as AttentionShape
from kernels_src.operator import Operator, Stage
from kernels_src.outer_product_mean import Shape as PairShape
from workbench.check import check_problem
from workbench.guard import GuardedMemory
from workbench.problem import CASES, Problem, pose
from workbench.results import lock_of, replace_file
from workbench.sanitizer import OUTCOMES, TOOLS, Outcome, run_each_under
from workbench.selection import named_shapes
from workbench.timing import capture

PARTS = ("check", "trials", *TOOLS)
SMALL = ("seed", "odd")
SANITIZED_AT_ONCE = 4  # programs; each has PyTorch in its memory
FURTHER_SHAPES: dict[str, tuple[Any, ...]] = {
    "msa_column_attention": (
        AttentionShape(1, 16, 5, 64, 8),
        AttentionShape(1, 3, 9001, 32, 8),  # B·N·H over 65,535
        AttentionShape(3, 2, 22001, 16, 1),  # B·N over 65,535
    ),
    "outer_product_mean": (
        PairShape(1, 3, 2881, 16, 8, 8),  # N² blocks do not fit in a grid's y and z
        PairShape(1, 128, 2048, 64, 32, 128),  # (N,N,C²) has 2³² elements
        PairShape(1, 2, 4096, 16, 32, 128),  # the output has 2³¹ elements
    ),
}


class Tried(NamedTuple):
    """One thing that was tried with one stage."""

    kind: str
    operator: str
    stage: str
    what: str
    outcome: Outcome
    message: str = ""


def verify(
    operator: Operator, stages: Sequence[Stage], part: str, *, seeds: int = 20, progress: bool = True
) -> list[Tried]:
    """Try everything of one of PARTS with some stages of an operator. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("verify needs an NVIDIA GPU, and none was found; `check --device cpu` needs none")
    reasons = {stage.name: stage.unfit("cuda") for stage in stages}
    tests = [Tried(part, operator.name, name, "", "not run", why) for name, why in reasons.items() if why]
    stages = [stage for stage in stages if not reasons[stage.name]]
    if part in TOOLS:
        _prebuild(stages, small_shapes(operator).values(), progress)
        return tests + sanitize(operator, stages, part)
    plan = list(_pairs(operator, stages) if part == "trials" else _problems(operator, seeds))
    _prebuild(stages, [shape for _, shape, *_ in plan], progress)
    with tqdm(plan, f"{operator.name} {part}", disable=not progress) as bar:
        for each in bar:
            attempts = _trials(operator, *each) if part == "trials" else _checks(operator, stages, *each)
            for kind, stage, what, attempt in attempts:
                bar.set_postfix_str(f"{stage.name}, {what}")  # names a kernel that hangs
                tests.append(Tried(kind, operator.name, stage.name, what, *_outcome(attempt)))
    return tests


def summary(tests: Sequence[Tried]) -> pd.DataFrame:
    """For each stage and kind of test, how many passed, failed and could not run."""
    table = pd.DataFrame(tests).groupby(["operator", "stage", "kind", "outcome"]).size().unstack(fill_value=0)
    return table.reindex(columns=list(OUTCOMES), fill_value=0)


def record(path: Path, name: str, tests: Sequence[Tried], run: dict[str, Any]) -> None:
    """Put a part's summary, and every test that did not pass, into verify.json in place of its older ones."""
    others = [test._asdict() for test in tests if test.outcome != "passed"]
    table = summary(tests).reset_index().to_dict(orient="records")
    with lock_of(path.parent):
        parts = json.loads(path.read_text()) if path.exists() else {}
        parts[name] = {"run": run, "summary": table, "not passed": others}
        replace_file(path, json.dumps(parts, indent=1) + "\n")


def _prebuild(stages: Sequence[Stage], shapes: Any, progress: bool) -> None:
    """Compile on all cores; what does not compile is reported when it is tried."""
    distinct = dict.fromkeys(shapes)
    sources = [stage.load(shape) for stage in stages for shape in distinct if not stage.unsupported(shape)]
    with contextlib.suppress(jit_loader.KernelCompileError):
        jit_loader.prebuild(list(dict.fromkeys(sources)), "cuda", progress=progress)


def _outcome(attempt: Callable[[], str]) -> tuple[Outcome, str]:
    """What came of an attempt, which returns what was wrong."""
    if not _gpu_responds():
        return "not run", "an earlier error ended this process's use of the GPU"
    try:
        message = attempt()
        torch.cuda.synchronize()  # what went wrong in a kernel is this attempt's
        return ("failed" if message else "passed"), message
    except torch.OutOfMemoryError:
        outcome: tuple[Outcome, str] = "not run", "out of memory"
    except (RuntimeError, ValueError, TypeError) as error:
        outcome = "failed", str(error)
    if _gpu_responds():
        torch.cuda.empty_cache()
    return outcome


def _gpu_responds() -> bool:
    """Whether the GPU can still be used: after an illegal access a process's every call fails."""
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


# ---- check

Attempt = tuple[str, Stage, str, Callable[[], str]]  # kind, stage, what is tried, the attempt


def _problems(operator: Operator, seeds: int) -> Iterator[tuple[str, Any, str, int]]:
    """Name, shape, case and seed of every problem: all cases and seeds of small shapes, fewer of large."""
    for name in operator.shapes:
        for label, shape in named_shapes(operator, name).items():
            for seed in range(seeds if name in SMALL else max(1, seeds // len(CASES))):
                cases = tuple(CASES) if name in SMALL else (tuple(CASES)[seed % len(CASES)],)
                yield from ((label, shape, case, seed) for case in cases)
    for shape in FURTHER_SHAPES.get(operator.name, ()):
        yield "x".join(map(str, shape)), shape, "random", 0


def _checks(
    operator: Operator, stages: Sequence[Stage], name: str, shape: Any, case: str, seed: int
) -> Iterator[Attempt]:
    """`check` of every stage that supports a shape, those of one precision on the same problem."""
    posed: dict[str, Problem] = {}
    for stage in stages:
        if stage.unsupported(shape):
            continue

        def attempt(stage: Stage = stage) -> str:
            if stage.precision not in posed:
                posed[stage.precision] = pose(
                    operator, shape, case, precision=stage.precision, device="cuda", seed=seed
                )
            return check_problem(stage, posed[stage.precision], name).message

        yield "check", stage, f"{name}, {case}, seed {seed}", attempt


# ---- trials


def _pairs(operator: Operator, stages: Sequence[Stage]) -> Iterator[tuple[str, Any, Stage]]:
    """Each stage with the small shapes that it supports, or with the first other one; name and shape."""
    for stage in stages:
        fitting = {name: shape for name, shape in operator.shapes.items() if not stage.unsupported(shape)}
        small = [name for name in fitting if name in SMALL]
        yield from ((name, fitting[name], stage) for name in small or list(fitting)[:1])


def _trials(operator: Operator, name: str, shape: Any, stage: Stage) -> Iterator[Attempt]:
    """Every trial of a stage at one shape."""
    for trial in (side_stream, changed_inputs, guarded):

        def attempt(trial: Callable[[Stage, Problem], str] = trial) -> str:
            return trial(stage, pose(operator, shape, precision=stage.precision, device="cuda", seed=7))

        yield trial.__name__.replace("_", " "), stage, name, attempt


def side_stream(stage: Stage, problem: Problem) -> str:
    """On another stream, behind the work that produces its input there."""
    expected = stage(problem.module, problem.msa, problem.mask)
    msa = torch.full_like(problem.msa, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: a kernel on the wrong stream runs before the copy
        msa.copy_(problem.msa)
        output = stage(problem.module, msa, problem.mask)
    torch.cuda.synchronize()
    return "" if _agree(output, expected, problem) else "a different result on a side stream"


def changed_inputs(stage: Stage, problem: Problem) -> str:
    """Captured in a CUDA graph and replayed with other inputs in the same memory."""
    other = problem.operator.inputs(problem.shape, seed=8, device="cuda", dtype=problem.msa.dtype)
    expected = stage(problem.module, *other)
    msa, mask = problem.msa.clone(), problem.mask.clone()
    graph, (output,) = capture(lambda: [stage(problem.module, msa, mask)])
    msa.copy_(other[0])
    mask.copy_(other[1])
    graph.replay()
    torch.cuda.synchronize()
    return "" if _agree(output, expected, problem) else "a replayed graph does not follow its inputs"


def guarded(stage: Stage, problem: Problem) -> str:
    """With guard bands around its output and workspace."""
    stage(problem.module, problem.msa, problem.mask)  # compiled before allocations are watched
    with GuardedMemory() as memory:
        stage(problem.module, problem.msa, problem.mask)
    torch.cuda.synchronize()
    damaged = memory.damaged()
    return f"wrote outside of {', '.join(damaged)}" if damaged else ""


def _agree(output: Tensor, expected: Tensor, problem: Problem) -> bool:
    """Whether two results differ by rounding at most: a library may choose another kernel in a graph."""
    return bool((output.double() - expected.double()).abs().max() <= problem.tolerance)  # no for a NaN


# ---- compute-sanitizer


def small_shapes(operator: Operator) -> dict[str, Any]:
    """The seed shape and all odd ones, by name."""
    return {label: shape for name in SMALL for label, shape in named_shapes(operator, name).items()}


def sanitize(operator: Operator, stages: Sequence[Stage], tool: str) -> list[Tried]:
    """Run every stage once at the small shapes under a tool of compute-sanitizer, in several programs."""
    programs = min(SANITIZED_AT_ONCE, len(stages))
    groups = [[stage.number for stage in stages[first::programs]] for first in range(programs)]
    codes = [
        f"from workbench.verify import call_each; call_each({operator.name!r}, {numbers!r})"
        for numbers in groups
    ]
    what = ", ".join(small_shapes(operator))
    try:
        results = run_each_under(tool, codes, _kernels(operator, stages))
    except jit_loader.KernelCompileError as error:
        results = [("not run", str(error))] * len(groups)
    return [
        Tried(tool, operator.name, f"stages {', '.join(numbers)}", what, *result)
        for numbers, result in zip(groups, results, strict=True)
    ]


def _kernels(operator: Operator, stages: Sequence[Stage]) -> set[str]:
    """Names of all kernels of some stages, without the arguments of templates."""
    names: set[str] = set()
    for stage in stages:
        shape = next(shape for shape in operator.shapes.values() if not stage.unsupported(shape))
        kernels = stage.load(shape).build("cuda").resources.kernel
        names |= {name.partition("<")[0].rpartition("::")[2] for name in kernels}
    return names


def call_each(operator_name: str, numbers: Sequence[str]) -> None:
    """Call stages once at every small shape that they support; run under compute-sanitizer."""
    operator = OPERATORS[operator_name]
    for number in numbers:
        stage = operator.stage(number)
        for name, shape in small_shapes(operator).items():
            if not stage.unsupported(shape):
                print(f"{stage.name} {name}", flush=True)  # names the one that takes long or fails
                module = operator.module(shape, device="cuda", dtype=stage.dtype)
                stage(module, *operator.inputs(shape, device="cuda", dtype=stage.dtype))
                torch.cuda.synchronize()
