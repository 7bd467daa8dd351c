"""Plots of result rows. One style; colours that the colour-blind tell apart; shapes that survive print.

Each function takes rows as `results.load` gives them and returns a matplotlib Figure. `caption` says where
the numbers came from, see `caption_of`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from kernels_src.operator import Operator
from workbench.baselines import IGNORES_MASK
from workbench.results import is_baseline, is_stage, old_ones, stage_rank
from workbench.roofline import Ceilings, intensity
from workbench.units import memory_text, time_text
from workbench.versions import fused_choice

# Okabe and Ito's palette.
COLOURS = {"fp32": "#0072B2", "tf32": "#E69F00", "bf16": "#D55E00"}
MARKERS = {"fp32": "o", "tf32": "^", "bf16": "s"}
GREY = "#666666"
SHAPE_COLOURS = ("#009E73", "#0072B2", "#CC79A7", "#D55E00", "#E69F00", "#56B4E9")
WIDTH = 7.2  # inches: a page's column
CAPTION_COLUMNS = 140  # of its small type, in that width
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "foldfuse",  # the same ids in the file each time
}


def caption_of(runs: Iterable[Mapping[str, Any]]) -> str:
    """GPU, versions, commits and dates of the runs that rows came from, in one line."""
    runs = list(runs)

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(run.get(name) or "unknown") for run in runs}))

    if not runs:
        return ""
    dates = sorted(str(run["date"])[:10] for run in runs)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions = " · ".join(f"{label} {all_of(label.lower())}" for label in ("torch", "CUDA", "driver"))
    return f"{all_of('gpu')} · {when} · {versions}"


def time_by_stage(rows: pd.DataFrame, title: str = "", caption: str = "") -> Figure:
    """Kernel time (p20, p50, p80) and call time of each stage and baseline, at one shape and dtype."""
    rows = in_order(rows)
    with styled_figure(caption, height=0.9 + 0.27 * len(rows)) as figure:
        axes = figure.add_subplot(title=title, xlabel="time for one call (log scale; left is faster)")
        for place, (_, row) in enumerate(rows.iterrows()):
            _time_of(axes, place, row)
        _name_rows(axes, rows)
        _bounds(axes, rows)
        axes.set_xscale("log")
        _leave_room(axes, rows)
        _label_log_axis(axes.xaxis, time_text)
        _legend_of_times(axes, rows)
    return figure


def roofline(rows: pd.DataFrame, operator: Operator, ceilings: Ceilings, caption: str = "") -> Figure:
    """Speed against arithmetic intensity: each stage a point below the card's measured ceilings."""
    stages = rows[rows["shape"].isin(operator.shapes) & rows.stage.map(is_stage)]
    points = [
        (intensity(operator, operator.shapes[row["shape"]], row.precision), row.tflops)
        for _, row in stages.iterrows()
    ]
    colours = dict(zip(operator.shapes, SHAPE_COLOURS * len(operator.shapes), strict=False))
    with styled_figure(caption, height=4.8) as figure:
        axes = figure.add_subplot(
            title=f"{operator.title}: roofline",
            xlabel="arithmetic intensity (operations a byte, if inputs and outputs move once; log scale)",
            ylabel="speed (TFLOP/s, log scale)",
        )
        _ceilings(axes, ceilings, points)
        for (x, y), (_, row) in zip(points, stages.iterrows(), strict=True):
            axes.plot(x, y, MARKERS[row.precision], color=colours[row["shape"]], markersize=6, alpha=0.75)
        _name_best(axes, stages, points)
        _legend_of_shapes(axes, stages, colours)
    return figure


def by_shape(rows: pd.DataFrame, operator: Operator, caption: str = "") -> Figure:
    """Time and peak memory at each shape: the fastest stage of each dtype beside the fastest baselines."""
    rows = rows[~rows.stage.str.endswith(IGNORES_MASK)]
    shapes = [name for name in operator.shapes if name in set(rows["shape"])]
    with styled_figure(caption, height=3.8) as figure:
        time, memory = figure.subplots(1, 2)
        for line in _lines_by_shape(rows, shapes):
            look = {key: line[key] for key in ("color", "markerfacecolor", "label")}
            for axes, column in ((time, "p50_us"), (memory, "peak_mib")):
                axes.plot(range(len(shapes)), line[column], line["style"], markersize=5, linewidth=1, **look)
        for axes, label in ((time, "kernel time"), (memory, "peak memory beyond the inputs")):
            axes.set(yscale="log", ylabel=f"{label}\n(log scale)", xlim=(-0.3, len(shapes) - 0.7))
            axes.set_xticks(range(len(shapes)), [_shape_text(name, operator) for name in shapes])
        _label_log_axis(time.yaxis, time_text)
        memory.yaxis.set_major_locator(LogLocator(base=4))
        memory.yaxis.set_major_formatter(FuncFormatter(lambda mib, _: memory_text(mib)))
        memory.yaxis.set_minor_locator(NullLocator())
        time.set_title(operator.title)
        figure.legend(*time.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def error_by_precision(rows: pd.DataFrame, title: str = "", caption: str = "") -> Figure:
    """Largest error against float64, beside the time it was reached in, at one shape in all precisions."""
    rows = rows[rows.max_error > 0].sort_values(
        ["dtype", "stage"],
        key=lambda names: names.map(stage_rank) if names.name == "stage" else names != "fp32",
    )
    with styled_figure(caption, height=1.0 + 0.2 * len(rows)) as figure:
        error, time = figure.subplots(1, 2, sharey=True)
        for place, (_, row) in enumerate(rows.iterrows()):
            face = "white" if is_baseline(row.stage) else COLOURS[row.precision]
            for axes, value, text in (
                (error, row.max_error, f"{row.max_error:.1e}"),
                (time, row.p50_us, time_text(row.p50_us)),
            ):
                axes.plot(value, place, MARKERS[row.precision], color=COLOURS[row.precision],
                          markerfacecolor=face)  # fmt: skip
                _beside(axes, text, value, place, fontsize=7, color=GREY)
        _name_rows(error, rows)
        error.set(xscale="log", xlabel="largest error against float64 (log scale)", title=title)
        time.set(xscale="log", xlabel="kernel time (log scale)")
        for axes, text in ((error, "{:.0e}".format), (time, time_text)):
            _span_a_decade(axes)
            _label_log_axis(axes.xaxis, text, most=20)
        _legend_of_precisions(figure, error, rows)
    return figure


def resources_by_stage(resources: pd.DataFrame, title: str = "", caption: str = "") -> Figure:
    """Registers a thread, shared memory a block and, if any, spilled bytes a thread of each kernel."""
    names = [f"{row.stage[:2]} {row.kernel}" for _, row in resources.iterrows()]
    panels = {
        "registers a thread": resources.registers,
        "static shared memory a block (KiB)": resources.shared_bytes / 1024,
    }
    if resources.spill_stores.any():
        panels["spilled (bytes a thread)"] = resources.spill_stores
    with styled_figure(caption, height=1.1 + 0.2 * len(resources)) as figure:
        columns = figure.subplots(1, len(panels), sharey=True)
        for axes, (label, values) in zip(columns, panels.items(), strict=True):
            axes.barh(range(len(names)), values, color=COLOURS["fp32"], height=0.65)
            axes.set(xlabel=label, xlim=(0, max(1.0, 1.2 * values.max())))
            axes.grid(axis="y", visible=False)
            for place, value in enumerate(values):
                _beside(axes, f"{value:.3g}", value, place, fontsize=7)
        columns[0].set_yticks(range(len(names)), names, fontsize=7)
        columns[0].set_ylim(len(names) - 0.4, -0.6)
        note = "" if resources.spill_stores.any() else " (nothing is spilled)"
        figure.suptitle(title + note, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def save(figure: Figure, path: Path, source: str = "") -> None:
    """Write an SVG or PNG, the same bytes each time; `source` (provenance or a digest) goes into the file."""
    svg = {"Date": None, "Creator": "Foldfuse", "Source": source}
    png = {"Software": "Foldfuse", "Source": source}
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata=svg if path.suffix == ".svg" else png, dpi=200)


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with baselines first, then stages by number."""
    return rows.sort_values("stage", key=lambda names: names.map(stage_rank), kind="stable")


@contextmanager
def styled_figure(caption: str, height: float) -> Iterator[Figure]:
    """A figure in the project's style, with its caption below. Not registered with pyplot: nothing leaks."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height + 0.25), layout="constrained")
        figure.supxlabel(textwrap.fill(caption, CAPTION_COLUMNS), fontsize=6.5, color=GREY)
        yield figure


def _time_of(axes: Axes, place: int, row: pd.Series) -> None:
    """Median with its spread, and its name; the call's time as a stroke, named where it differs."""
    colour = COLOURS[row.precision]
    face = "white" if is_baseline(row.stage) else colour
    axes.plot([row.p20_us, row.p80_us], [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
    axes.plot(row.p50_us, place, MARKERS[row.precision], color=colour, markerfacecolor=face, markersize=6)
    axes.plot(row.call_us, place, "|", color=GREY, markersize=8)
    median, call = time_text(row.p50_us), time_text(row.call_us)
    if row.call_us * 1.25 < row.p20_us:
        _beside(axes, median, row.p80_us, place, fontsize=8)
        _beside(axes, call, row.call_us, place, left=True, fontsize=7, color=GREY)
        return
    _beside(axes, median, min(row.p20_us, row.call_us), place, left=True, fontsize=8)
    if row.call_us > 1.25 * row.p50_us:
        _beside(axes, call, row.call_us, place, fontsize=7, color=GREY)


def _beside(axes: Axes, text: str, x: float, y: float, *, left: bool = False, **look: Any) -> None:
    """Text beside a point, on its right unless `left`."""
    axes.annotate(text, (x, y), xytext=(-6 if left else 6, 0), ha="right" if left else "left", va="center",
                  textcoords="offset points", **look)  # fmt: skip


def _bounds(axes: Axes, rows: pd.DataFrame) -> None:
    """The operator's bound in each precision: a line, or a note where it is far off to the left."""
    bounds = (rows.p50_us * rows.percent_of_bound / 100).groupby(rows.precision).median()
    for place, (precision, us) in enumerate(bounds.items()):
        name = f"bound {precision}: {time_text(us)}"
        if us < rows.p20_us.min() / 8:
            axes.annotate(f"← {name}", (0.01, 0.97 - 0.04 * place), xycoords="axes fraction",
                          fontsize=7, color=COLOURS[precision])  # fmt: skip
            continue
        axes.axvline(us, color=COLOURS[precision], linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        # Beside the slow rows at the top: the fastest stages, further down, may be close to the bound.
        axes.annotate(name, (us, 0.98), xycoords=("data", "axes fraction"), xytext=(-3, 0), fontsize=7,
                      rotation=90, ha="right", va="top", textcoords="offset points",
                      color=COLOURS[precision])  # fmt: skip


def _leave_room(axes: Axes, rows: pd.DataFrame) -> None:
    """Set the limits so that the text at both ends fits."""
    low, high = axes.get_xaxis().get_data_interval()
    margin = (high / low) ** 0.13 * 1.1
    axes.set_xlim(low / margin, high * margin)


def _span_a_decade(axes: Axes) -> None:
    """Widen a log axis to a decade at least, so that it has ticks, with room for values on the right."""
    low, high = axes.get_xaxis().get_data_interval()
    wider = max(1.0, (10 / (high / low)) ** 0.5)
    low, high = low / wider, high * wider
    margin = (high / low) ** 0.06
    axes.set_xlim(low / margin, high * margin**4)


def _name_rows(axes: Axes, rows: pd.DataFrame) -> None:
    axes.set_yticks(range(len(rows)), [_stage_text(row) for _, row in rows.iterrows()])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def _stage_text(row: pd.Series) -> str:
    text = row.stage.removesuffix(IGNORES_MASK).replace("_", " ")
    if row.stage.endswith(IGNORES_MASK):
        return f"{text} (ignores the mask)"
    chosen = None if old_ones(row.to_frame().T).all() else fused_choice(row)
    return f"{text} ({chosen.replace('_', ' ')})" if chosen else text


def _shape_text(name: str, operator: Operator) -> str:
    """A shape's name over its sizes that matter most."""
    shape = operator.shapes[name]
    return f"{name}\nS {shape.S}\nN {shape.N}\nD {shape.D}"


def _label_log_axis(axis: Axis, text: Callable[[float], str], most: float = 200) -> None:
    """Label 1, 2 and 5 of each decade where the axis spans less than a factor of `most`, else each decade."""
    low, high = axis.get_view_interval()
    few = high / low < most
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def _legend_of_times(axes: Axes, rows: pd.DataFrame) -> None:
    for precision in sorted(set(rows.precision)):
        axes.plot([], [], MARKERS[precision], color=COLOURS[precision], linestyle="-", linewidth=2.5,
                  label=f"{precision}: median, p20 to p80")  # fmt: skip
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="hollow: PyTorch and libraries")
    axes.plot([], [], "|", color=GREY, markersize=8, label="as a call from Python, no graph")
    axes.figure.legend(loc="outside upper center", ncols=4)


def _legend_of_precisions(figure: Figure, axes: Axes, rows: pd.DataFrame) -> None:
    for precision in sorted(set(rows.precision)):
        axes.plot([], [], MARKERS[precision], color=COLOURS[precision], label=precision)
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="hollow: PyTorch and libraries")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)


def _ceilings(axes: Axes, ceilings: Ceilings, points: list[tuple[float, float]]) -> None:
    """The slope of memory and the roof of each precision."""
    slope = ceilings.copy_gb_per_s / 1e3  # TFLOP/s for one operation a byte
    roofs = {
        "bf16": (ceilings.bf16_tflops, "-"),
        "TF32": (ceilings.tf32_tflops, "--"),
        "3 × fp16 for fp32": (ceilings.bf16_tflops / 3, "-."),
        "CUDA cores, fp32": (ceilings.fp32_tflops, ":"),
    }
    top = max(roof for roof, _ in roofs.values())
    left = min([x for x, _ in points] + [4.0]) / 2
    right = max([x for x, _ in points] + [top / slope]) * 4
    bottom = min([y for _, y in points] + [left * slope]) / 1.6
    for name, (roof, dashes) in roofs.items():
        axes.plot([roof / slope, right], [roof, roof], dashes, color="black", linewidth=1)
        axes.annotate(f"{name}: {roof:.0f}", (right, roof), xytext=(3, 0), va="center", fontsize=7,
                      textcoords="offset points", annotation_clip=False)  # fmt: skip
    axes.plot([bottom / slope, top / slope], [bottom, top], color="black", linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top * 1.8))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    rise = (axes.transData.transform((10, 10)) - axes.transData.transform((1, 1))).tolist()
    axes.annotate(f"memory: {slope:.2f} TB/s", (left * 1.2, left * slope * 1.4), fontsize=7,
                  rotation=math.degrees(math.atan2(rise[1], rise[0])), rotation_mode="anchor")  # fmt: skip


def _name_best(axes: Axes, stages: pd.DataFrame, points: list[tuple[float, float]]) -> None:
    """Name the fastest and the slowest stage of each shape and precision; the others lie between."""
    places = pd.DataFrame(points, columns=["x", "y"], index=stages.index)
    for _, part in stages.groupby(["shape", "precision"]):
        for index in {part.tflops.idxmax(), part.tflops.idxmin()}:
            axes.annotate(stages.stage[index][:2], places.loc[index], xytext=(6, -2), fontsize=7,
                          textcoords="offset points", color=GREY)  # fmt: skip


def _legend_of_shapes(axes: Axes, stages: pd.DataFrame, colours: Mapping[str, str]) -> None:
    for name in colours:
        if name in set(stages["shape"]):
            axes.plot([], [], "o", color=colours[name], label=name)
    for precision in sorted(set(stages.precision)):
        axes.plot([], [], MARKERS[precision], color=GREY, label=precision)
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=8)


def _lines_by_shape(rows: pd.DataFrame, shapes: list[str]) -> list[dict[str, Any]]:
    """One line for eager, torch.compile, libraries and the fastest stage, in each dtype."""
    lines = []
    kinds = {
        "eager": (lambda stage: stage in ("eager", "eager_graph"), ":", GREY),
        "torch.compile": (lambda stage: stage.startswith("compile"), "-.", "#CC79A7"),
        "libraries": (lambda stage: stage.startswith("library"), "--", "#E69F00"),
        "fastest stage": (is_stage, "-", "#0072B2"),
    }
    for label, (belongs, dashes, colour) in kinds.items():
        for dtype, part in rows[rows.stage.map(belongs)].groupby("dtype", sort=True):
            by_shape = part.groupby("shape")
            best = part.loc[by_shape.p50_us.idxmin()].set_index("shape").reindex(shapes)
            peak = best.peak_mib.fillna(by_shape.peak_mib.min())  # a graph's own is not known
            lines.append(
                {
                    "label": f"{label}, {dtype}",
                    "style": MARKERS[dtype] + dashes,
                    "color": colour,
                    "markerfacecolor": colour if dtype == "bf16" else "white",
                    "p50_us": best.p50_us,
                    "peak_mib": peak,
                }
            )
    return lines
