"""What notebook cells call: one short function for each thing that a reader looks at.

`%load_ext workbench.notebook` adds %load_stage and %%stage, see workbench/magics.py. Where there is no GPU,
stages run on the CPU and are checked, and times are those recorded on a GPU, with its name and the date: how
long the CPU takes says nothing about a kernel and is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import HTML, Markdown, display
from matplotlib.figure import Figure

import jit_loader
from kernels_src.msa_column_attention import MSA_COLUMN_ATTENTION
from kernels_src.operator import Operator
from kernels_src.outer_product_mean import OUTER_PRODUCT_MEAN
from workbench import plots, results, session, tables, timeline, traffic, views
from workbench import reading as words
from workbench.annotations import annotated_html
from workbench.check import check as check_cases
from workbench.check import default_cases, default_device, judge
from workbench.counting import recorded_ceilings
from workbench.header import outcome, predicted
from workbench.marks import marked_html
from workbench.picture import Picture
from workbench.problem import pose
from workbench.results import is_baseline
from workbench.selection import why_not
from workbench.sweep import block_sizes
from workbench.sweep import draw as draw_sweep
from workbench.units import time_text
from workbench.variants import require, try_variant

__all__ = [
    "MSA_COLUMN_ATTENTION",
    "OUTER_PRODUCT_MEAN",
    "check",
    "doctor",
    "errors",
    "instructions",
    "instructions_of",
    "measure",
    "plot_errors",
    "plot_resources",
    "plot_roofline",
    "plot_shapes",
    "plot_stages",
    "plot_timeline",
    "reading",
    "resources",
    "seconds",
    "show_diff",
    "show_error",
    "show_notes",
    "show_source",
    "show_traffic",
    "sweep",
    "table",
    "time",
    "tweak",
]

Name = str | int  # a stage's number or file name, or a variant's name
PEERS = ("eager", "eager_graph", "compile_max_autotune", "library_chain")  # shown beside a stage's time


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What `%load_ext workbench.notebook` does: add the magics, and mark the line of a compile error."""
    from workbench.magics import StageMagics

    shell.register_magics(StageMagics)
    shell.set_custom_exc((jit_loader.KernelCompileError,), _on_compile_error)


def _on_compile_error(
    shell: Any, kind: type, error: jit_loader.KernelCompileError, traceback: Any, tb_offset: int | None = None
) -> list[str]:
    """Called by IPython in place of showing a traceback, whose frames are all the loader's."""
    show_error(error)
    return [f"{kind.__name__}: {error}"]


def show_error(error: jit_loader.KernelCompileError, source: str = "") -> None:
    """Display a compile error: the line marked among its neighbours in `source`, or in the file it names."""
    display(HTML(marked_html(error, source)))


def doctor() -> None:
    """What was found and what will run where, as `python -m workbench doctor` prints it."""
    from workbench.__main__ import main

    main(["doctor"])


def show_source(operator: Operator, stage: Name) -> HTML:
    """A stage's CUDA source with line numbers."""
    return HTML(views.source_html(session.find(operator, stage)))


def show_diff(operator: Operator, old: Name, new: Name) -> HTML:
    """What changed from one stage to another, side by side."""
    return HTML(views.diff_html(session.find(operator, old), session.find(operator, new)))


def show_notes(operator: Operator, stage: Name, shape: str = "seed") -> HTML:
    """A stage's source with what the compiler made of it beside its lines; needs no GPU."""
    return HTML(annotated_html(operator, session.find(operator, stage), shape))


def show_traffic(operator: Operator, shape: str = "seed") -> HTML:
    """The reference's `forward` with the kernels that each line runs and the bytes that they move."""
    return HTML(traffic.as_html(operator, shape))


def check(
    operator: Operator, stage: Name, shape: str = "seed", cases: Sequence[str] = ()
) -> pd.DataFrame | Markdown:
    """Check a stage case by case on this machine. Raises Rejected, having said why, when a case fails.

    `cases` are all unless they are named, but one of them on the CPU; `python -m workbench check` runs all.
    """
    one = session.find(operator, stage)
    reason = why_not(one, operator.shapes[shape], default_device())
    if reason:
        return Markdown(f"`{one.name}` is not checked here: {reason}.")
    done = check_cases(operator, one, shape, cases=cases or default_cases())
    table = pd.DataFrame(
        {
            "largest error": [f"{case.max_abs_error:.1e}" for case in done],
            "eager's": [f"{case.eager_error:.1e}" for case in done],
            "allowed": [f"{case.tolerance:.1e}" for case in done],
            "result": ["passed" if case.passed else "FAILED" for case in done],
        },
        index=[case.case for case in done],
    ).rename_axis(columns=f"{one.name}, {shape}, {default_device()}")
    if not all(case.passed for case in done):
        display(table)
    require(done, one)
    return table


def time(operator: Operator, stage: Name, shape: str = "seed") -> Markdown:
    """What a stage's header predicted, what was measured, and what the header says of the difference.

    A table has the stage before it and PyTorch beside it. With a GPU both stages are timed now, in one run,
    and PyTorch's times are the recorded ones.
    """
    one = session.find(operator, stage)
    dtype = session.dtype_of(one)
    old = session.before(operator, one)
    pair = tuple(
        each
        for each in (old, one)
        if each and session.dtype_of(each) == dtype and not each.unsupported(operator.shapes[shape])
    )
    timed = tuple(each for each in pair if not each.unfit("cuda"))
    if torch.cuda.is_available() and one in timed:
        session.measure(operator, timed, shape)
    rows = session.rows_of(operator, shape, dtype)
    rows = rows[rows.stage.isin([*PEERS, *(each.name for each in pair)])]
    said = f"**Predicted** {predicted(one)}"
    if one.name not in set(rows.stage):
        return Markdown(f"{said}\n\n**Measured** at {shape}: {session.NOTHING}.")
    row = rows[rows.stage == one.name].iloc[0]
    measured = (
        f"**Measured** at {shape}: {time_text(row.p50_us)} for the operator's kernels, "
        f"{time_text(row.call_us)} as a call from Python."
    )
    paragraphs = [said, measured, *outcome(one), tables.all_stages(rows)]
    return Markdown("\n\n".join([*paragraphs, f"*{session.caption(operator, rows)}*"]))


def measure(operator: Operator, shape: str = "seed") -> Markdown | None:
    """Time every stage of each dtype against PyTorch now, on this machine's GPU; without one, say so."""
    if not torch.cuda.is_available():
        return display(Markdown("*There is no GPU here, so nothing is timed.*"))
    for dtype in ("fp32", "bf16"):
        stages = [stage for stage in operator.stages if session.dtype_of(stage) == dtype]
        fitting = tuple(
            stage for stage in stages if not why_not(stage, operator.shapes[shape], default_device())
        )
        if fitting:
            session.measure(operator, fitting, shape, baselines=True)
    return None


def tweak(operator: Operator, stage: Name, old: str, new: str, name: str) -> None:
    """Try a stage with a piece of its source replaced, as `%%stage` does with an edited cell.

    Raises ValueError where the piece does not occur in the source.
    """
    base = operator.stage(stage)
    if old not in base.code:
        raise ValueError(f"old: stage {base.name} does not contain {old!r}")
    try_variant(operator, base.variant(base.code.replace(old, new), name))


def sweep(operator: Operator, stage: Name, sizes: Sequence[int], shape: str = "seed") -> pd.DataFrame:
    """A stage at several numbers of threads a block: occupancy and, with a GPU, time, plotted above."""
    one = operator.stage(stage)
    table = block_sizes(operator, one, sizes, shape)
    if "p50_us" in table:
        caption = f"measured in this session on {torch.cuda.get_device_name()}"
        display(Picture(draw_sweep(table, f"{operator.title}, {one.name}: {shape}", caption), table, caption))
    return table


def errors(operator: Operator, shape: str = "seed") -> pd.DataFrame:
    """The largest error of each stage that runs on this machine, beside eager PyTorch's in its precision."""
    rows = []
    for stage in operator.stages:
        if why_not(stage, operator.shapes[shape], default_device()):
            continue
        problem = pose(operator, operator.shapes[shape], precision=stage.precision, device=default_device())
        error = judge(stage(problem.module, problem.msa, problem.mask), problem).max_abs_error
        rows.append(
            {
                "stage": stage.name,
                "precision": stage.precision,
                "largest error": f"{error:.1e}",
                "eager's": f"{problem.eager_error:.1e}",
                "of eager's": f"{error / problem.eager_error:.2f}",
            }
        )
    columns = ["stage", "precision", "largest error", "eager's", "of eager's"]
    return views.headed(pd.DataFrame(rows, columns=columns), "stage")


def instructions(operator: Operator, stage: Name, shape: str = "seed") -> pd.DataFrame:
    """Machine instructions of a stage's kernels, counted by family; needs no GPU."""
    kernels = session.find(operator, stage).load(operator.shapes[shape])
    kernels.build("cuda")
    return instructions_of(kernels.sass())


def instructions_of(sass: str) -> pd.DataFrame:
    """Machine instructions of each kernel in a disassembly, counted by family."""
    return views.headed(views.sass_summary(sass), "kernel")


def seconds(action: Callable[[], object]) -> float:
    """How long something took, wall time."""
    start = perf_counter()
    action()
    return perf_counter() - start


def resources(operator: Operator, stage: Name, shape: str = "seed") -> pd.DataFrame:
    """Registers, shared memory and spills of a stage's kernels, as nvcc reports them; needs no GPU."""
    rows = views.resources(operator, session.find(operator, stage), shape)
    return views.headed(rows.drop(columns=["operator", "stage", "shape"]), "kernel")


def table(operator: Operator, shape: str = "seed", dtype: str = "fp32") -> Markdown:
    """Every stage, baseline and variant at one shape and dtype."""
    rows = session.rows_of(operator, shape, dtype)
    text = f"{tables.all_stages(rows)}\n\n" if len(rows) else ""
    return Markdown(f"{text}*{session.caption(operator, rows)}*")


def reading(operator: Operator, shape: str = "seed", dtype: str = "fp32") -> Markdown:
    """What the plot of times says, in words."""
    return Markdown("\n".join(f"- {said}" for said in words.reading(session.rows_of(operator, shape, dtype))))


def plot_stages(operator: Operator, shape: str = "seed", dtype: str = "fp32") -> Picture:
    """Time of every stage, baseline and variant at one shape and dtype, with its spread."""
    title = f"{operator.title}: {shape}, {dtype}"
    return _picture(
        operator,
        title,
        session.rows_of(operator, shape, dtype),
        lambda rows, caption: plots.time_by_stage(rows, title, caption),
    )


def plot_shapes(operator: Operator) -> Picture:
    """Time and peak memory at each shape."""
    return _picture(
        operator,
        operator.title,
        session.rows_of(operator),
        lambda rows, caption: plots.by_shape(rows, operator, caption),
    )


def plot_errors(operator: Operator, shape: str = "seed") -> Picture:
    """Largest error against float64 of every stage and baseline, beside its time."""
    title = f"{operator.title}: {shape}"
    return _picture(
        operator,
        title,
        session.rows_of(operator, shape),
        lambda rows, caption: plots.error_by_precision(rows, title, caption),
    )


def plot_roofline(operator: Operator) -> Picture:
    """Each stage a point under the ceilings measured on the card."""
    return _picture(
        operator,
        operator.title,
        session.rows_of(operator),
        lambda rows, caption: plots.roofline(rows, operator, recorded_ceilings(), caption),
    )


def plot_timeline(operator: Operator, *stages: Name, shape: str = "seed") -> Picture | Markdown:
    """The kernels of one call on a time axis, eager PyTorch's above the stages'. Needs a GPU."""
    if not torch.cuda.is_available():
        return Markdown("*A timeline is recorded from a GPU as it runs, and there is none here.*")
    module = operator.module(operator.shapes[shape], device="cuda")
    inputs = operator.inputs(operator.shapes[shape], device="cuda")
    chosen = [session.find(operator, stage) for stage in stages]
    with torch.no_grad():
        kernels = {"eager": timeline.kernels_of(lambda: module(*inputs))}
        for stage in chosen:
            kernels[stage.name] = timeline.kernels_of(lambda stage=stage: stage(module, *inputs))
    rows = pd.concat([rows.assign(stage=name) for name, rows in kernels.items()])
    caption = f"one call under torch.profiler on {torch.cuda.get_device_name()}"
    return Picture(timeline.draw(kernels, f"{operator.title}: kernels at {shape}", caption), rows, caption)


def plot_resources(operator: Operator, shape: str = "seed") -> Picture:
    """Registers, shared memory and spills of every measured kernel."""
    found = session.folder()
    rows = results.load_resources(found) if found else pd.DataFrame(columns=["operator", "shape"])
    rows = rows[(rows.operator == operator.name) & (rows["shape"] == shape)]
    if not len(rows):
        return _nothing(f"{operator.title}: {shape}")
    caption = plots.caption_of(results.load_runs(found))
    figure = plots.resources_by_stage(rows, f"{operator.title}: {shape}", caption)
    return Picture(figure, rows, caption)


def _picture(
    operator: Operator, title: str, rows: pd.DataFrame, draw: Callable[[pd.DataFrame, str], Figure]
) -> Picture:
    """A plot of rows; a figure that says so when no stage is among them."""
    if rows.stage.map(is_baseline).all():
        return _nothing(title)
    caption = session.caption(operator, rows)
    return Picture(draw(rows, caption), rows, caption)


def _nothing(title: str) -> Picture:
    figure = Figure(figsize=(plots.WIDTH, 0.6))
    text = f"{title}: {session.NOTHING}".replace("`", "")
    figure.text(0.01, 0.5, text, va="center", color=plots.GREY, fontsize=8)
    return Picture(figure, session.NO_ROWS, session.NOTHING)
