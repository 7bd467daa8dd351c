"""The command line: `python -m workbench COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

import jit_loader
from kernels_src import OPERATORS
from kernels_src.operator import Operator, Stage
from workbench.check import Check, check_problem, default_device
from workbench.plots import time_text
from workbench.problem import CASES, Problem, pose
from workbench.selection import select, shapes_to_check

BENCH_SHAPES = ("seed", "af2", "extra", "extra_long")


class UserError(Exception):
    """A mistake in what was asked for; its text is all that the user is shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 on a failure, 2 on a mistake in the command."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except (UserError, jit_loader.KernelCompileError) as error:
        print(f"workbench {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def doctor(options: argparse.Namespace) -> int:
    """What was found, what will run where, what to install."""
    raise NotImplementedError


def list_all(options: argparse.Namespace) -> int:
    """Operators and stages."""
    for operator in OPERATORS.values():
        print(f"{operator.name}: {operator.title}")
        for stage in operator.stages:
            claimed = [name for name, shape in operator.shapes.items() if not stage.unsupported(shape)]
            where = "" if stage.on_cpu else ", GPU only"
            print(f"  {stage.name:28} {stage.precision}{where}  {stage.title}  ({', '.join(claimed)})")
    return 0


def check(options: argparse.Namespace) -> int:
    """Check stages against float64, a line for each stage and shape."""
    device = _device(options.device)
    results: list[Check] = []
    for operator, stages in _selected(options.target):
        shapes = _known(lambda operator=operator: shapes_to_check(operator, options.shape, device))
        for name, shape in shapes.items():
            problems: dict[tuple[str, str], Problem] = {}
            for stage in tqdm(stages, desc=f"{operator.name} {name}", unit="stage", leave=False):
                reason = stage.unsupported(shape)
                if device == "cpu" and not stage.on_cpu:
                    reason = "it uses instructions that have no CPU model"
                if reason:
                    print(f"{operator.name}/{stage.name} {name}: skipped, {reason}")
                    continue
                of_stage = []
                for case in CASES:
                    key = (case, stage.precision)
                    if key not in problems:
                        problems[key] = pose(operator, shape, case, precision=stage.precision, device=device)
                    of_stage.append(_checked(stage, problems[key], name))
                print(_line_of(of_stage))
                results += of_stage
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


def bench(options: argparse.Namespace) -> int:
    """Measure on the GPU and write results/<gpu>/, a group of stages at a time."""
    from workbench.bench import DTYPES, groups, measure
    from workbench.provenance import describe_run
    from workbench.results import folder_of, store, store_resources
    from workbench.roofline import measure_ceilings
    from workbench.views import resources

    if not torch.cuda.is_available():
        raise UserError(
            "needs an NVIDIA GPU, and none was found; `check --device cpu` runs the stages without one"
        )
    dtypes = (options.dtype,) if options.dtype else DTYPES
    ceilings = measure_ceilings()
    run = describe_run(ceilings)
    folder = folder_of(run["gpu"])
    complaints: list[str] = []
    for operator, stages in _selected(options.target):
        whole = options.target is None or "/" not in options.target
        wanted = (
            [options.shape] if options.shape else [name for name in BENCH_SHAPES if name in operator.shapes]
        )
        _known(lambda operator=operator, wanted=wanted: [operator.shapes[name] for name in wanted])
        for group in groups(operator, stages, wanted, dtypes):
            label = f"{operator.name} {group.shape} {group.dtype}"

            def report(text: str, label: str = label) -> None:
                complaints.append(f"{label}: {text}")
                tqdm.write(complaints[-1], file=sys.stderr)

            rows = measure(group, ceilings, baselines=whole, report=report, progress=True)
            store(folder, operator, rows, run)
            store_resources(
                folder, pd.concat([resources(operator, each, group.shape) for each in group.stages])
            )
            print(_times(label, rows), flush=True)
    failed = [text for text in complaints if "FAILED" in text]
    print(f"results in {folder}; {len(failed)} failed")
    return 1 if failed else 0


def report(options: argparse.Namespace) -> int:
    """Make plots and README tables from the recorded results."""
    from workbench.report import write

    try:
        written = write()
    except ValueError as error:
        raise UserError(str(error)) from error
    print(f"{len(written)} files written")
    return 0


def build(options: argparse.Namespace) -> int:
    """Compile with nvcc and print registers, spills and shared memory. Returns 1 when anything spills."""
    raise NotImplementedError


def export(options: argparse.Namespace) -> int:
    """Write one self-contained file of a stage."""
    from workbench.export import export as write

    [(operator, stages)] = _selected(options.target)
    if len(stages) != 1 or "/" not in options.target:
        raise UserError(f"{options.target}: expected OP/NN, one stage")
    try:
        _known(lambda: write(operator, stages[0], options.file, options.shape))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    print(f"{options.file} written")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Try everything that can be tried on a GPU, and write results/<gpu>/verify.json."""
    from workbench.provenance import describe_run
    from workbench.results import folder_of
    from workbench.roofline import measure_ceilings
    from workbench.verify import as_json, summary
    from workbench.verify import verify as try_all

    if not torch.cuda.is_available():
        raise UserError(
            "needs an NVIDIA GPU, and none was found; `check --device cpu` checks the stages without one"
        )
    tests = try_all(_selected(options.target), seeds=options.seeds)
    run = describe_run(measure_ceilings())
    path = folder_of(run["gpu"]) / "verify.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(tests, run))
    print(summary(tests).to_string())
    for test in tests:
        if test.outcome != "passed":
            print(f"{test.outcome}: {test.operator}/{test.stage} {test.kind}, {test.what}: {test.message}")
    count = {
        outcome: sum(test.outcome == outcome for test in tests) for outcome in ("passed", "failed", "not run")
    }
    print(", ".join(f"{number} {outcome}" for outcome, number in count.items()))
    return 1 if count["failed"] else 0


def _selected(target: str | None) -> list[tuple[Operator, tuple[Stage, ...]]]:
    return _known(lambda: select(target))


def _known(look_up: Callable[[], Any]) -> Any:
    """Look something up by a name that the user gave."""
    try:
        return look_up()
    except KeyError as error:
        raise UserError(error.args[0]) from error


def _device(name: str | None) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs an NVIDIA GPU, and none was found; use --device cpu")
    return name or default_device()


def _checked(stage: Stage, problem: Problem, shape: str) -> Check:
    """Check a stage; one that raises has failed."""
    try:
        return check_problem(stage, problem, shape)
    except Exception as error:  # whatever went wrong in it, the other stages are still checked
        nan = float("nan")
        message = f"{type(error).__name__}: {error}"
        return Check(problem.operator.name, stage.name, shape, problem.case, problem.seed, nan, nan,
                     problem.eager_error, problem.tolerance, False, message)  # fmt: skip


def _line_of(results: Sequence[Check]) -> str:
    """One line for all cases of a stage at a shape, and one for each that failed."""
    first, failed = results[0], [result for result in results if not result.passed]
    worst = max(results, key=lambda result: result.max_abs_error / result.tolerance)
    verdict = f"{len(failed)} of {len(results)} cases FAILED" if failed else f"{len(results)} cases passed"
    lines = [
        f"{first.operator}/{first.stage} {first.shape}: {verdict}; largest error {worst.max_abs_error:.1e}"
        f" of {worst.tolerance:.1e} allowed ({worst.case})"
    ]
    return "\n".join(lines + [f"  {result.case}: {result.message}" for result in failed])


def _times(label: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row of a group."""
    lines = [
        f"  {row['stage']:28} {time_text(row['p50_us']):>9}  call {time_text(row['call_us']):>9}"
        f"  {row['tflops']:8.3g} TFLOP/s  {row['percent_of_bound']:5.3g} % of the bound"
        for row in rows
    ]
    return "\n".join([label, *lines])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbench", description="Check, time and compile stages."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], *, target: str = ""
    ) -> argparse.ArgumentParser:
        summary = (run.__doc__ or "").split(".")[0]
        added = commands.add_parser(name, help=summary, description=run.__doc__)
        added.set_defaults(run=run)
        if target:
            optional = {} if target == "OP/NN" else {"nargs": "?"}
            added.add_argument("target", metavar=target, help="an operator, or one of its stages", **optional)
        return added

    def with_shape(added: argparse.ArgumentParser) -> None:
        added.add_argument("--shape", metavar="NAME", help="a shape's name, see list")

    command("doctor", doctor)
    command("list", list_all)
    checking = command("check", check, target="OP[/NN]")
    with_shape(checking)
    checking.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    benching = command("bench", bench, target="OP[/NN]")
    with_shape(benching)
    benching.add_argument("--dtype", choices=("fp32", "bf16"), help="default: both")
    command("report", report)
    building = command("build", build, target="OP[/NN]")
    building.add_argument("--arch", metavar="9.0a", help="default: of the GPU, or the newest that nvcc knows")
    exporting = command("export", export, target="OP/NN")
    exporting.add_argument("file", metavar="FILE.py", type=Path)
    with_shape(exporting)
    verifying = command("verify", verify, target="OP[/NN]")
    verifying.add_argument("--seeds", type=int, default=20, help="seeds of the small shapes (default: 20)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
