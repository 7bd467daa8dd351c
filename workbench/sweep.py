"""One stage at several block sizes: time against the occupancy that the compiler's register counts allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kernels_src.operator import Operator, Stage
from workbench import plots, session, views
from workbench.check import check, default_cases
from workbench.units import time_text
from workbench.views import headed

WARP = 32
# Limits of a multiprocessor of compute capability 9.0 (CUDA C++ programming guide, technical specifications).
REGISTERS = 64 * 1024
REGISTERS_AT_ONCE = 256  # a warp gets its registers in units of these
WARPS = 64
BLOCKS = 32


def block_sizes(operator: Operator, stage: Stage, sizes: Sequence[int], shape: str) -> pd.DataFrame:
    """Check a stage at each number of threads a block (its constant THREADS); time them where there is a GPU.

    Raises KeyError when the stage has no such constant, AssertionError when a size gives wrong results.
    """
    if "THREADS" not in stage.constants(operator.shapes[shape]):
        raise KeyError(f"stage {stage.name} has no constant THREADS to sweep")
    variants = tuple(_with_threads(stage, size) for size in sizes)
    for variant in variants:
        failed = [case for case in check(operator, variant, shape, cases=default_cases()) if not case.passed]
        assert not failed, f"{variant.name} is wrong: {failed[0].message}"
        session.keep(operator, variant)
    table = pd.DataFrame({"threads a block": sizes})
    table["registers a thread"] = [_registers(operator, variant, shape) for variant in variants]
    table["most warps a multiprocessor"] = [
        most_warps(threads, registers) for threads, registers in table.itertuples(index=False)
    ]
    table["occupancy"] = (table["most warps a multiprocessor"] / WARPS).map("{:.0%}".format)
    if torch.cuda.is_available():
        session.measure(operator, variants, shape)
        rows = session.rows_of(operator, shape, session.dtype_of(stage)).set_index("stage")
        for column in ("p20_us", "p50_us", "p80_us"):
            table[column] = [rows[column][variant.name] for variant in variants]
    return headed(table, "threads a block")


def draw(table: pd.DataFrame, title: str, caption: str) -> Figure:
    """Time (p20, p50, p80) against threads a block, each with its occupancy."""
    with plots.styled_figure(caption, height=2.6) as figure:
        axes = figure.add_subplot(title=title, xlabel="threads a block", ylabel="kernel time (µs)")
        spread = [table.p50_us - table.p20_us, table.p80_us - table.p50_us]
        places = range(len(table))
        axes.errorbar(
            places, table.p50_us, spread, fmt="o-", color=plots.COLOURS["fp32"], capsize=3, linewidth=1
        )
        for place, (us, occupancy) in enumerate(zip(table.p50_us, table.occupancy, strict=True)):
            axes.annotate(f"{time_text(us)}\noccupancy ≤ {occupancy}", (place, us), xytext=(8, 4),
                          textcoords="offset points", fontsize=7)  # fmt: skip
        axes.set_xticks(places, [str(threads) for threads in table.index])
        axes.set(xlim=(-0.3, len(table) - 0.3), ylim=(0, 1.3 * table.p80_us.max()))
    return figure


def most_warps(threads: int, registers: int) -> int:
    """Warps that a multiprocessor holds at once as far as registers, warps and blocks limit them.

    Shared memory may allow fewer; at 13 KB a block it does not.
    """
    a_block = -(-threads // WARP)
    a_warp = -(-registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    return a_block * min(BLOCKS, WARPS // a_block, REGISTERS // a_warp // a_block)


def _with_threads(stage: Stage, size: int) -> Stage:
    def constants(shape: Any) -> dict[str, int]:
        return {**stage.constants(shape), "THREADS": size}

    return replace(stage, constants=constants, label=f"{stage.number} with {size} threads")


def _registers(operator: Operator, stage: Stage, shape: str) -> int:
    return int(views.resources(operator, stage, shape).registers.max())
