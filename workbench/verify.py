"""Everything that can be checked on a GPU: `python -m workbench verify`.

Beyond `check`: many seeds; grids larger than 65,535 blocks and more than 2³¹ elements; a side stream; a CUDA
graph replayed with changed inputs; guard bands around outputs; and NVIDIA's compute-sanitizer. What could not
run is shown as such, and is no pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from tqdm.auto import tqdm

import jit_loader
from kernels_src import OPERATORS
from kernels_src.msa_column_attention import Shape as AttentionShape
from kernels_src.operator import Operator, Stage
from kernels_src.outer_product_mean import Shape as PairShape
from workbench.check import check_problem, same_bits
from workbench.guard import GuardedMemory
from workbench.problem import CASES, Problem, pose
from workbench.results import ROOT, replace_file
from workbench.selection import named_shapes
from workbench.timing import capture

Outcome = Literal["passed", "failed", "not run"]
Part = Literal["check", "trials", "sanitizer"]
PARTS: tuple[Part, ...] = ("check", "trials", "sanitizer")

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
SMALL = ("seed", "odd")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_SECONDS = 280
FINDING_STATUS = 86  # compute-sanitizer's exit status when it found something


class Tried(NamedTuple):
    """One thing that was tried with one stage."""

    kind: str
    operator: str
    stage: str
    what: str
    outcome: Outcome
    message: str = ""


def verify(
    operator: Operator, stages: Sequence[Stage], part: Part, *, seeds: int = 20, progress: bool = True
) -> list[Tried]:
    """Try everything of a part with some stages of an operator. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("verify needs an NVIDIA GPU, and none was found; `check --device cpu` needs none")
    label = f"{operator.name} {part}"
    if part == "sanitizer":
        return [sanitize(operator, stages, tool) for tool in tqdm(TOOLS, label, disable=not progress)]
    if part == "trials":
        pairs = [(trial, stage) for trial in (side_stream, changed_inputs, guarded) for stage in stages]
        return [_attempt(trial, operator, stage) for trial, stage in tqdm(pairs, label, disable=not progress)]
    plan = list(_plan(operator, seeds))
    _prebuild(stages, [shape for _, shape, _, _ in plan], progress)
    tests: list[Tried] = []
    for problem in tqdm(plan, label, disable=not progress):
        tests += _check_all(operator, stages, *problem)
    return tests


def summary(tests: Sequence[Tried]) -> pd.DataFrame:
    """For each stage and kind of test, how many passed, failed and could not run."""
    table = pd.DataFrame(tests).groupby(["operator", "stage", "kind", "outcome"]).size().unstack(fill_value=0)
    return table.reindex(columns=["passed", "failed", "not run"], fill_value=0)


def record(path: Path, name: str, tests: Sequence[Tried], run: dict[str, Any]) -> None:
    """Put a part's summary, and every test that did not pass, into verify.json in place of its older ones."""
    parts = json.loads(path.read_text()) if path.exists() else {}
    others = [test._asdict() for test in tests if test.outcome != "passed"]
    table = summary(tests).reset_index().to_dict(orient="records")
    parts[name] = {"run": run, "summary": table, "not passed": others}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(parts, indent=1) + "\n")


def _plan(operator: Operator, seeds: int) -> Iterator[tuple[str, Any, str, int]]:
    """Name, shape, case and seed of every problem: all cases and seeds of small shapes, fewer of large."""
    for name in operator.shapes:
        for label, shape in named_shapes(operator, name).items():
            for seed in range(seeds if name in SMALL else max(1, seeds // len(CASES))):
                cases = tuple(CASES) if name in SMALL else (tuple(CASES)[seed % len(CASES)],)
                yield from ((label, shape, case, seed) for case in cases)
    for shape in FURTHER_SHAPES.get(operator.name, ()):
        yield "x".join(map(str, shape)), shape, "random", 0


def _prebuild(stages: Sequence[Stage], shapes: Sequence[Any], progress: bool) -> None:
    """Compile on all cores; what does not compile is reported when it is checked."""
    distinct = dict.fromkeys(shapes)
    sources = [stage.load(shape) for stage in stages for shape in distinct if not stage.unsupported(shape)]
    with contextlib.suppress(jit_loader.KernelCompileError):
        jit_loader.prebuild(list(dict.fromkeys(sources)), "cuda", progress=progress)


def _check_all(
    operator: Operator, stages: Sequence[Stage], name: str, shape: Any, case: str, seed: int
) -> list[Tried]:
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
        tests.append(Tried("check", operator.name, stage.name, what, outcome, message))
    return tests


def _attempt(trial: Callable[[Stage, Problem], str], operator: Operator, stage: Stage) -> Tried:
    """Run a trial at the first small shape that the stage supports. A trial returns what was wrong."""
    kind = trial.__name__.replace("_", " ")
    name = next((name for name in operator.shapes if not stage.unsupported(operator.shapes[name])), None)
    if name is None:
        return Tried(kind, operator.name, stage.name, "", "not run", "supports none of the named shapes")
    try:
        problem = pose(operator, operator.shapes[name], precision=stage.precision, device="cuda", seed=7)
        message = trial(stage, problem)
    except (RuntimeError, ValueError, TypeError) as error:
        message = str(error)
    return Tried(kind, operator.name, stage.name, name, "failed" if message else "passed", message)


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


def sanitize(operator: Operator, stages: Sequence[Stage], tool: str) -> Tried:
    """Run every stage once at the small shapes under a tool of compute-sanitizer."""
    names = ", ".join(stage.number for stage in stages)

    def outcome(kind: Outcome, message: str = "") -> Tried:
        return Tried(tool, operator.name, f"stages {names}", " and ".join(SMALL), kind, message)

    program = shutil.which("compute-sanitizer")
    if program is None:
        return outcome("not run", "compute-sanitizer is not on PATH")
    numbers = [stage.number for stage in stages]
    code = f"from workbench.verify import call_each; call_each({operator.name!r}, {numbers!r})"
    command = [program, "--tool", tool, "--error-exitcode", str(FINDING_STATUS), sys.executable, "-c", code]
    # Each tensor is its own allocation, with an end to run over.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SANITIZER_SECONDS
        )
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
