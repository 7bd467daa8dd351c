"""What a kernel session knows beyond the recorded results: variants of stages, and rows measured in it.

All of it is forgotten when the kernel ends.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd
import torch

from kernels_src.operator import Operator, Stage
from workbench import bench, results
from workbench.plots import caption_of
from workbench.results import COLUMNS
from workbench.roofline import Ceilings, measure_ceilings

NO_ROWS = pd.DataFrame(columns=list(COLUMNS))
NOTHING = "nothing recorded yet: `make bench` on a machine with an NVIDIA GPU records it"

_variants: dict[tuple[str, str], Stage] = {}  # by the operator's name and the variant's
_measured: dict[str, pd.DataFrame] = {}  # by the operator's name


def keep(operator: Operator, variant: Stage) -> None:
    """Remember a variant, in place of any with the same name."""
    _variants[operator.name, variant.name] = variant


def find(operator: Operator, name: str | int) -> Stage:
    """A stage by its number or file name, or a variant by its name. Raises KeyError naming the stages."""
    return _variants.get((operator.name, str(name))) or operator.stage(name)


def before(operator: Operator, stage: Stage) -> Stage | None:
    """What a stage is compared with: the one that its header builds on ("As 07", "Against 07").

    Else the one listed before it, None for the first; for a variant, the stage that it came from.
    """
    if (operator.name, stage.name) in _variants:
        return operator.stage(stage.number)
    names = [other.name for other in operator.stages]
    earlier = operator.stages[: names.index(stage.name)]
    said = re.search(r"\A// Stage.*\n// (?:As|Against) (\d\d)\b", stage.code)
    named = [other for other in earlier if said and other.number == said[1]]
    return (named or [*earlier[-1:], None])[0]


def measure(operator: Operator, stages: tuple[Stage, ...], shape: str, *, baselines: bool = False) -> None:
    """Time stages of one dtype, and PyTorch where asked, against each other on this GPU; keep the rows."""
    group = bench.Group(operator, shape, dtype_of(stages[0]), stages)
    rows = bench.measure(group, ceilings(), baselines=baselines, progress=True)
    new = pd.DataFrame([dict(row) for row in rows], columns=list(COLUMNS))
    _measured[operator.name] = results.replaced(_measured.get(operator.name, NO_ROWS), new)


@cache
def ceilings() -> Ceilings:
    """What this machine's GPU reaches, measured once a session."""
    return measure_ceilings()


def dtype_of(stage: Stage) -> str:
    """The dtype that a stage's rows are filed under: fp32 or bf16."""
    return "bf16" if stage.precision == "bf16" else "fp32"


def rows_of(operator: Operator, shape: str | None = None, dtype: str | None = None) -> pd.DataFrame:
    """Recorded rows and this session's in their place, of one shape and dtype where they are given."""
    found = folder()
    recorded = results.load(found, operator.name) if found else NO_ROWS
    rows = results.replaced(recorded, _measured.get(operator.name, NO_ROWS))
    if shape:
        rows = rows[rows["shape"] == shape]
    return rows[rows["dtype"] == dtype] if dtype else rows


def folder() -> Path | None:
    """The recorded results of this machine's GPU; without one, those recorded last. None: there are none."""
    folders = results.recorded()
    if torch.cuda.is_available():
        mine = results.folder_of(torch.cuda.get_device_name())
        return mine if mine in folders else None
    return max(folders, key=lambda path: results.load_runs(path)[-1]["date"], default=None)


def caption(operator: Operator, rows: pd.DataFrame) -> str:
    """Where rows came from: the runs that were recorded, and this session."""
    here = results.keys_of(rows).isin(results.keys_of(_measured.get(operator.name, NO_ROWS)))
    runs = [results.run_of(folder(), row) for _, row in rows[~here].iterrows()]
    distinct = [run for place, run in enumerate(runs) if run not in runs[:place]]
    parts = [f"recorded on {caption_of(distinct)}"] if distinct else []
    if here.any():
        names = ", ".join(dict.fromkeys(rows[here].stage)) if distinct else "all"
        parts.append(f"measured in this session on {torch.cuda.get_device_name()}: {names}")
    return "; ".join(parts) or NOTHING
