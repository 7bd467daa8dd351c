"""The command line: `python -m workbench COMMAND`."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import jit_loader
from kernels_src import OPERATORS
from kernels_src.operator import Operator, Stage
from workbench.check import Check, check_problem, default_device, failed_check
from workbench.problem import CASES, Problem, pose
from workbench.sanitizer import OUTCOMES, TOOLS
from workbench.selection import distinct_shapes, named_shapes, select, shapes_to_check, why_not
from workbench.units import time_text

RESOURCES = ("spill_stores", "spill_loads", "stack_bytes")  # what a kernel should have none of


class UserError(Exception):
    """A mistake in what was asked for; its text is all that the user is shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 on a failure, 2 on a mistake in the command."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except (UserError, jit_loader.KernelCompileError, jit_loader.ToolchainError) as error:
        print(f"workbench {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def doctor(options: argparse.Namespace) -> int:
    """What was found, what will run where, what to install."""
    from workbench.doctor import examine

    found = examine()
    print(found.text())
    return 0 if found.runs_on_cpu or found.runs_on_gpu else 1


def list_all(options: argparse.Namespace) -> int:
    """Operators and stages."""
    for operator in OPERATORS.values():
        print(f"{operator.name}: {operator.title}")
        for stage in operator.stages:
            claimed = [name for name, shape in operator.shapes.items() if not stage.unsupported(shape)]
            where = "" if stage.on_cpu else ", GPU only"
            where += f", compute capability {stage.capability}" if stage.capability else ""
            print(f"  {stage.name:28} {stage.precision}{where}  {stage.title}  ({', '.join(claimed)})")
    return 0


def check(options: argparse.Namespace) -> int:
    """Check stages against float64, a line for each stage and shape."""
    device = _device(options.device)
    plan = [
        (operator, stages, name, shape)
        for operator, stages in _selected(options.target)
        for name, shape in _known(lambda of=operator: shapes_to_check(of, options.shape, device)).items()
    ]
    _prebuild(plan, device)
    results: list[Check] = []
    with tqdm(total=sum(len(stages) for _, stages, _, _ in plan), unit="stage", leave=False) as bar:
        for operator, stages, name, shape in plan:
            bar.set_description(f"{operator.name} {name}")
            problems: dict[tuple[str, str], Problem] = {}  # shared by the stages of a precision
            for stage in stages:
                reason = why_not(stage, shape, device)
                if reason:
                    line = f"{operator.name}/{stage.name} {name}: skipped, {reason}"
                else:
                    done = [_checked(operator, stage, case, name, shape, device, problems) for case in CASES]
                    results += done
                    line = _line_of(done)
                tqdm.write(line, file=sys.stdout)
                bar.update()
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed or not results else 0


def bench(options: argparse.Namespace) -> int:
    """Measure on the GPU and write results/<gpu>/, a group of stages at a time."""
    from workbench.bench import DTYPES, GROUP_SECONDS, groups, measure
    from workbench.provenance import describe_run
    from workbench.results import folder_of, store, store_resources
    from workbench.roofline import measure_ceilings
    from workbench.views import resources

    _require_gpu()
    wanted = [
        group
        for operator, stages in _selected(options.target)
        for group in groups(
            operator,
            stages,
            _known(lambda of=operator: _shapes_to_bench(of, options.shape)),
            (options.dtype,) if options.dtype else DTYPES,
        )
    ]
    with contextlib.suppress(jit_loader.KernelCompileError, ValueError):  # reported when it is measured
        sources = [stage.load(group.sizes) for group in wanted for stage in group.stages]
        jit_loader.prebuild(sources, "cuda")
    print(f"{len(wanted)} groups, {_minutes(wanted, GROUP_SECONDS)} as recorded on an H200", flush=True)
    ceilings = measure_ceilings()
    run = describe_run(ceilings)
    folder = folder_of(run["gpu"])
    complaints: list[str] = []

    def report(text: str) -> None:
        complaints.append(text)
        tqdm.write(text, file=sys.stderr)

    for number, group in enumerate(tqdm(wanted, desc="bench", unit="group"), start=1):
        print(f"{number}/{len(wanted)}: {group.operator.name} {group.shape} {group.dtype}", flush=True)
        alone = len(group.stages) == 1 and "/" in (options.target or "")
        rows = measure(group, ceilings, baselines=not alone, report=report, progress=True)
        store(folder, group.operator, rows, run)
        measured = [stage for stage in group.stages if stage.name in {row["stage"] for row in rows}]
        for stage in measured:
            store_resources(folder, resources(group.operator, stage, group.shape))
        print(_times(rows), flush=True)
    failed = sum(text.startswith("FAILED") for text in complaints)
    print(f"results in {folder}; {failed} failed")
    return 1 if failed else 0


def _minutes(wanted: Sequence[Any], seconds_each: tuple[int, int]) -> str:
    """About how long it will take."""
    least, most = (math.ceil(len(wanted) * seconds / 60) for seconds in seconds_each)
    return f"about {least} min" if least == most else f"{least} to {most} min"


def _shapes_to_bench(operator: Operator, name: str | None) -> list[str]:
    """The named shape, or all but the odd one, which is for checks. Raises KeyError naming the shapes."""
    if name is None:
        return [each for each in operator.shapes if each != "odd"]
    return list(named_shapes(operator, name))[:1]


def report(options: argparse.Namespace) -> int:
    """Make plots and README tables from the recorded results."""
    from workbench.report import old_rows, write

    try:
        written = write()
    except ValueError as error:
        raise UserError(str(error)) from error
    print(f"{len(written)} files written")
    for command, rows in old_rows().items():
        print("\nmeasured with an earlier version of the stage's source:")
        print("\n".join(f"  {row}" for row in rows))
        print(f"renewed on that card by: {command}")
    return 0


def build(options: argparse.Namespace) -> int:
    """Compile with nvcc and print registers, spills and shared memory. Returns 1 when anything spills."""
    import pandas as pd  # here, since no check needs it

    from workbench.views import resources

    wanted = [
        (operator, stage, shape)
        for operator, stages in _selected(options.target)
        for stage in stages
        for shape in distinct_shapes(operator, stage)
    ]
    tables, errors = [], []
    with contextlib.suppress(jit_loader.KernelCompileError, ValueError):  # reported below
        sources = [stage.load(operator.shapes[shape]) for operator, stage, shape in wanted]
        jit_loader.prebuild(sources, "cuda", options.arch)
    for operator, stage, shape in wanted:
        try:
            tables.append(resources(operator, stage, shape, options.arch))
        except (jit_loader.KernelCompileError, ValueError) as error:
            errors.append(f"{operator.name}/{stage.name} {shape}: {error}")
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=list(RESOURCES))
    lines = [table.to_string(index=False)] if len(table) else []
    print("\n".join([*lines, *errors]))
    bad = table[(table[list(RESOURCES)] > 0).any(axis=1)]
    print(f"{len(table)} kernels, {len(bad)} of them spill or use local memory; {len(errors)} errors")
    return 1 if len(bad) or errors else 0


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
    """Try everything that can be tried on a GPU, and record it in results/<gpu>/verify.json."""
    from workbench.provenance import describe_run
    from workbench.results import folder_of
    from workbench.roofline import measure_ceilings
    from workbench.verify import PARTS, Tried, record, summary
    from workbench.verify import verify as try_part

    _require_gpu()
    run = describe_run(measure_ceilings())
    path = folder_of(run["gpu"]) / "verify.json"
    tests: list[Tried] = []
    for operator, stages in _selected(options.target):
        for part in [options.part] if options.part else PARTS:
            done = try_part(operator, stages, part, seeds=options.seeds)
            only = f"/{stages[0].number}" if len(stages) < len(operator.stages) else ""
            record(path, f"{operator.name}{only} {part}", done, run)
            tests += done
    print(summary(tests).to_string())
    for test in tests:
        if test.outcome != "passed":
            print(f"{test.outcome}: {test.operator}/{test.stage} {test.kind}, {test.what}: {test.message}")
    count = {outcome: sum(test.outcome == outcome for test in tests) for outcome in OUTCOMES}
    print(", ".join(f"{number} {outcome}" for outcome, number in count.items()))
    return 1 if count["failed"] else 0


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise UserError(
            "needs an NVIDIA GPU, and none was found; `check --device cpu` runs stages without one"
        )


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


def _prebuild(plan: Sequence[tuple[Operator, tuple[Stage, ...], str, Any]], device: str) -> None:
    """Compile on all cores; what does not compile is reported when it is checked."""
    with contextlib.suppress(jit_loader.KernelCompileError, ValueError):
        sources = [
            stage.load(shape)
            for _, stages, _, shape in plan
            for stage in stages
            if not why_not(stage, shape, device)
        ]
        sources = list(dict.fromkeys(sources))
        jit_loader.prebuild(sources, "cuda" if device == "cuda" else "cpu")
        if device == "cpu":
            with jit_loader.cpu_schedule("races"):
                jit_loader.prebuild(sources, "cpu")


def _checked(
    operator: Operator,
    stage: Stage,
    case: str,
    name: str,
    shape: Any,
    device: str,
    problems: dict[tuple[str, str], Problem],
) -> Check:
    """Check a stage in one case; one that raises has failed."""
    key = (case, stage.precision)
    if key not in problems:
        problems[key] = pose(operator, shape, case, precision=stage.precision, device=device)
    try:
        return check_problem(stage, problems[key], name)
    except Exception as error:  # whatever went wrong in it, the other stages are still checked
        return failed_check(stage, problems[key], name, f"{type(error).__name__}: {error}")


def _line_of(results: Sequence[Check]) -> str:
    """One line for all cases of a stage at a shape, and one for each that failed."""
    first, failed = results[0], [result for result in results if not result.passed]
    worst = max(results, key=lambda result: result.max_abs_error if result.passed else math.inf)
    verdict = f"{len(failed)} of {len(results)} cases FAILED" if failed else f"{len(results)} cases passed"
    lines = [
        f"{first.operator}/{first.stage} {first.shape}: {verdict}; largest error {worst.max_abs_error:.1e}"
        f" of {worst.tolerance:.1e} allowed ({worst.case})"
    ]
    return "\n".join(lines + [f"  {result.case}: {result.message}" for result in failed])


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row of a group."""
    return "\n".join(
        f"  {row['stage']:28} {time_text(row['p50_us']):>9}  call {time_text(row['call_us']):>9}"
        f"  {row['tflops']:8.3g} TFLOP/s  {row['percent_of_bound']:5.3g} % of the bound"
        for row in rows
    )


def _arch(text: str) -> str:
    """A compute capability. Raises ArgumentTypeError, of which argparse makes an error of one line."""
    if not re.fullmatch(r"\d+\.\d[af]?", text):
        raise argparse.ArgumentTypeError(f"expected a compute capability such as 9.0a, got {text!r}")
    return text


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
    building.add_argument(
        "--arch", metavar="9.0a", type=_arch, help="default: of the GPU, or the newest that nvcc knows"
    )
    exporting = command("export", export, target="OP/NN")
    exporting.add_argument("file", metavar="FILE.py", type=Path)
    with_shape(exporting)
    verifying = command("verify", verify, target="OP[/NN]")
    verifying.add_argument("--part", choices=("check", "trials", *TOOLS), help="default: all")
    verifying.add_argument("--seeds", type=int, default=20, help="seeds of the small shapes (default: 20)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
