"""The kernels of one call on a time axis: eager PyTorch above, a stage below."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from workbench import plots
from workbench.units import time_text

WARM_UP = 3  # calls before the one that is recorded
COLUMNS = ("start_us", "duration_us", "kernel")


def kernels_of(call: Callable[[], object]) -> pd.DataFrame:
    """Start (from the first one's), duration and name of each kernel that a call runs on the GPU, in µs."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    first = min((event.time_range.start for event in events), default=0)
    rows = [(event.time_range.start - first, event.time_range.elapsed_us(), event.name) for event in events]
    return pd.DataFrame(sorted(rows), columns=list(COLUMNS))


def draw(kernels: dict[str, pd.DataFrame], title: str, caption: str = "") -> Figure:
    """One row of bars for each call; gaps are time in which the GPU waits for the host to launch."""
    with plots.styled_figure(caption, height=0.8 + 0.45 * len(kernels)) as figure:
        axes = figure.add_subplot(title=title, xlabel="time (µs)")
        end = max(float((rows.start_us + rows.duration_us).max()) for rows in kernels.values())
        for place, rows in enumerate(kernels.values()):
            bars = list(zip(rows.start_us, rows.duration_us, strict=True))
            axes.broken_barh(bars, (place - 0.3, 0.6), facecolor=plots.COLOURS["fp32"], edgecolor="white",
                             linewidth=0.4)  # fmt: skip
            last = float((rows.start_us + rows.duration_us).max())
            count = "1 kernel" if len(rows) == 1 else f"{len(rows)} kernels"
            text = f"{count}, busy for {time_text(rows.duration_us.sum())}"
            axes.annotate(
                text, (last, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_yticks(range(len(kernels)), list(kernels))
        axes.set(ylim=(len(kernels) - 0.4, -0.6), xlim=(0, 1.45 * end))
        axes.grid(axis="y", visible=False)
    return figure
