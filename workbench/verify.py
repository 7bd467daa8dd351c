"""Everything that can be checked on a GPU, in one run: `python -m workbench verify`.

Beyond `check`: many seeds; grids larger than 65,535 blocks and more than 2³¹ elements; a side stream; a CUDA
graph replayed with changed inputs; guard bands around outputs; and NVIDIA's compute-sanitizer. What could not
run is shown as such, and is no pass.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from tqdm.auto import tqdm

from kernels_src import OPERATORS
from kernels_src.msa_column_attention import Shape as AttentionShape
from kernels_src.operator import Operator, Stage
from kernels_src.outer_product_mean import Shape as PairShape
from workbench.check import check_problem, same_bits
from workbench.guard import GuardedMemory
from workbench.problem import CASES, Problem, pose
from workbench.results import ROOT
from workbench.selection import named_shapes
from workbench.timing import capture

Outcome = Literal["passed", "failed", "not run"]

LARGE_SHAPES: dict[str, tuple[Any, ...]] = {
    "msa_column_attention": (
        AttentionShape(1, 3, 9001, 32, 8),  # B·N·H over 65,535
        AttentionShape(3, 2, 22001, 16, 1),  # B·N over 65,535
    ),
    "outer_product_mean": (
        PairShape(1, 3, 2881, 16, 8, 8),  # N² over 65,535 · 128
        PairShape(1, 2, 4096, 16, 32, 128),  # an output of 2³¹ elements
    ),
}
SMALL = ("seed", "odd")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_SECONDS = 540
FINDING_STATUS = 86  # compute-sanitizer's exit status when it found something


class Test(NamedTuple):
    """One thing that was tried with one stage."""

    kind: str
    operator: str
    stage: str
    what: str
    outcome: Outcome
    message: str = ""


def verify(
    selected: Sequence[tuple[Operator, tuple[Stage, ...]]], *, seeds: int = 20, progress: bool = True
) -> list[Test]:
    """Try everything with the selected stages. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("verify needs an NVIDIA GPU, and none was found; `check --device cpu` needs none")
    tests: list[Test] = []
    for operator, stages in selected:
        for name, shape, case, seed in tqdm(
            list(_plan(operator, seeds)), desc=operator.name, disable=not progress, unit="problem"
        ):
            tests += _check_all(operator, stages, name, shape, case, seed)
        for trial in (side_stream, changed_inputs, guarded):
            tests += [_attempt(trial, operator, stage) for stage in stages]
        tests += [
            sanitize(operator, stages, tool) for tool in tqdm(TOOLS, desc="sanitizer", disable=not progress)
        ]
    return tests


def summary(tests: Sequence[Test]) -> pd.DataFrame:
    """For each stage and kind of test, how many passed, failed and could not run."""
    table = pd.DataFrame(tests).groupby(["operator", "stage", "kind", "outcome"]).size().unstack(fill_value=0)
    return table.reindex(columns=["passed", "failed", "not run"], fill_value=0)


def as_json(tests: Sequence[Test], run: dict[str, Any]) -> str:
    """The run's circumstances, the summary, and every test that did not pass, for verify.json."""
    table = summary(tests).reset_index().to_dict(orient="records")
    others = [test._asdict() for test in tests if test.outcome != "passed"]
    return json.dumps({**run, "summary": table, "not passed": others}, indent=1) + "\n"


def _plan(operator: Operator, seeds: int) -> Iterator[tuple[str, Any, str, int]]:
    """Name, shape, case and seed of every problem: all cases and seeds of small shapes, fewer of large."""
    for name in operator.shapes:
        for label, shape in named_shapes(operator, name).items():
            for seed in range(seeds if name in SMALL else max(1, seeds // len(CASES))):
                cases = tuple(CASES) if name in SMALL else (tuple(CASES)[seed % len(CASES)],)
                yield from ((label, shape, case, seed) for case in cases)
    for shape in LARGE_SHAPES.get(operator.name, ()):
        yield f"large {'x'.join(map(str, shape))}", shape, "random", 0


def _check_all(
    operator: Operator, stages: Sequence[Stage], name: str, shape: Any, case: str, seed: int
) -> list[Test]:
    """Check every stage that supports a shape on the same problem."""
    tests = []
    problems: dict[str, Problem] = {}
    for stage in stages:
        if stage.unsupported(shape):
            continue
        what = f"{name}, {case}, seed {seed}"
        try:
            if stage.precision not in problems:
                problems[stage.precision] = pose(
                    operator, shape, case, precision=stage.precision, device="cuda", seed=seed
                )
            result = check_problem(stage, problems[stage.precision], name)
            outcome, message = ("passed" if result.passed else "failed"), result.message
        except torch.OutOfMemoryError:
            outcome, message = "not run", "out of memory"
            torch.cuda.empty_cache()
        except (RuntimeError, ValueError, TypeError) as error:
            outcome, message = "failed", str(error)
        tests.append(Test("check", operator.name, stage.name, what, outcome, message))
    return tests


def _attempt(trial: Callable[[Stage, Problem], str], operator: Operator, stage: Stage) -> Test:
    """Run a trial at the first small shape that the stage supports. A trial returns what was wrong."""
    kind = trial.__name__.replace("_", " ")
    name = next((name for name in operator.shapes if not stage.unsupported(operator.shapes[name])), None)
    if name is None:
        return Test(kind, operator.name, stage.name, "", "not run", "supports none of the named shapes")
    try:
        problem = pose(operator, operator.shapes[name], precision=stage.precision, device="cuda", seed=7)
        message = trial(stage, problem)
    except (RuntimeError, ValueError, TypeError) as error:
        message = str(error)
    return Test(kind, operator.name, stage.name, name, "failed" if message else "passed", message)


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
    return "" if same_bits(output, expected) else "a different result on a side stream"


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
    return "" if same_bits(output, expected) else "a replayed graph does not follow its inputs"


def guarded(stage: Stage, problem: Problem) -> str:
    """With guard bands around its output and workspace."""
    stage(problem.module, problem.msa, problem.mask)  # compiled before allocations are watched
    with GuardedMemory() as memory:
        stage(problem.module, problem.msa, problem.mask)
    torch.cuda.synchronize()
    damaged = memory.damaged()
    return f"wrote outside of {', '.join(damaged)}" if damaged else ""


def sanitize(operator: Operator, stages: Sequence[Stage], tool: str) -> Test:
    """Run every stage once at the small shapes under a tool of compute-sanitizer."""
    names = ", ".join(stage.number for stage in stages)

    def outcome(kind: Outcome, message: str = "") -> Test:
        return Test(tool, operator.name, f"stages {names}", " and ".join(SMALL), kind, message)

    program = shutil.which("compute-sanitizer")
    if program is None:
        return outcome("not run", "compute-sanitizer is not on PATH")
    numbers = [stage.number for stage in stages]
    code = f"from workbench.verify import call_each; call_each({operator.name!r}, {numbers!r})"
    command = [program, "--tool", tool, "--error-exitcode", str(FINDING_STATUS), sys.executable, "-c", code]
    environment = {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # each tensor its own allocation, with an end to run over
    try:
        done = subprocess.run(
            ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
            cwd=ROOT, capture_output=True, text=True, timeout=SANITIZER_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return outcome("not run", f"took longer than {SANITIZER_SECONDS} s")
    log = done.stdout + done.stderr
    if done.returncode == 0 and any(f"SUMMARY: 0 {word}" in log for word in ("errors", "hazards")):
        return outcome("passed")
    if done.returncode == FINDING_STATUS:
        return outcome("failed", _first_finding(log))
    return outcome("not run", log.strip()[-400:])


def call_each(operator_name: str, numbers: Sequence[str]) -> None:
    """Call stages once at every small shape that they support; run under compute-sanitizer."""
    operator = OPERATORS[operator_name]
    for number in numbers:
        stage = operator.stage(number)
        for name in SMALL:
            shape = operator.shapes[name]
            if not stage.unsupported(shape):
                module = operator.module(shape, device="cuda", dtype=stage.dtype)
                stage(module, *operator.inputs(shape, device="cuda", dtype=stage.dtype))
    torch.cuda.synchronize()


def _first_finding(log: str) -> str:
    """The first error of a sanitizer's log, and its summary."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=====")]
    wanted = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")]
    return "; ".join([*wanted[:4], *wanted[-1:]])
