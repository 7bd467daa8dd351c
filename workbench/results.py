"""Results: what stages measured, as rows of a CSV with the circumstances of each row beside it.

`results/<gpu>/<operator>.csv` has one row a stage (or baseline), shape and dtype. `run.json` lists the runs
that the rows came from: card, versions, clocks, commit, date, command and measured ceilings, and the rows
that each run contributed, each with the version of the stage that was measured (workbench/versions.py).
Measuring a stage again replaces its rows and no others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from kernels_src.operator import Operator
from workbench.baselines import BASELINES
from workbench.paths import ROOT
from workbench.versions import FUSED, versions_now

RESULTS = ROOT / "results"
COLUMNS = (
    "operator",
    "stage",
    "shape",
    "dtype",
    "precision",
    "p20_us",
    "p50_us",
    "p80_us",
    "call_us",
    "peak_mib",
    "tflops",
    "gb_per_s",
    "percent_of_bound",
    "max_error",
)
KEY = ["operator", "stage", "shape", "dtype"]
DIGITS = 4  # significant; the spread of a measurement is wider

Row = Mapping[str, Any]


def folder_of(gpu: str) -> Path:
    """Where results of a card are kept: its name in lower case with dashes, such as results/nvidia-h200."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def recorded(root: Path = RESULTS) -> list[Path]:
    """Every folder that holds results, in the order of their names."""
    return sorted(path.parent for path in root.glob("*/run.json"))


def load(folder: Path, operator: str) -> pd.DataFrame:
    """An operator's rows; none when it has not been measured. Raises ValueError on a damaged file.

    `is_old` says which were measured with another version of their stage than the one at hand.
    """
    rows = _read(folder, operator)
    versions = {key: version for run in load_runs(folder) for key, version in run["rows"].items()}
    keys = list(rows[KEY].itertuples(index=False, name=None))
    pairs = zip(keys, versions_now(keys), strict=True)
    old = [versions.get("/".join(key)) not in (None, now) for key, now in pairs]
    return rows.assign(is_old=pd.Series(old, index=rows.index, dtype=bool))


def _read(folder: Path, operator: str) -> pd.DataFrame:
    """An operator's rows as they are in its file."""
    path = folder / f"{operator}.csv"
    if not path.exists():
        return pd.DataFrame(columns=list(COLUMNS))
    rows = pd.read_csv(path)
    if tuple(rows.columns) != COLUMNS:
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}; got {', '.join(rows.columns)}")
    return rows


def store(folder: Path, operator: Operator, rows: Iterable[Row], run: Row) -> None:
    """Put rows in place of those with the same stage, shape and dtype, and record the run they came from.

    Both files are replaced whole, so that an interruption leaves the old or the new one, and under the
    folder's lock, so that processes that measure on several GPUs lose none of each other's rows.
    """
    new = pd.DataFrame([dict(row) for row in rows], columns=list(COLUMNS))
    keys = keys_of(new)
    versions = dict(zip(keys, versions_now(key.split("/") for key in keys), strict=True))
    with lock_of(folder):
        rows = _in_order(replaced(_read(folder, operator.name), new), operator)
        text = rows.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n")
        replace_file(folder / f"{operator.name}.csv", text)
        _record_run(folder, versions, run)


def load_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that a folder's rows came from, oldest first."""
    path = folder / "run.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


def run_of(folder: Path, row: Row) -> dict[str, Any]:
    """The run that a row came from. Raises KeyError when none is recorded."""
    key = "/".join(str(row[name]) for name in KEY)
    for run in load_runs(folder):
        if key in run["rows"]:
            return run
    raise KeyError(f"{folder / 'run.json'} records no run for {key}")


def _record_run(folder: Path, versions: Mapping[str, str | None], run: Row) -> None:
    """Add rows to a run, which its date and command identify, and take them from the others."""
    runs = load_runs(folder)
    same = [old for old in runs if all(old.get(name) == value for name, value in run.items())]
    for old in runs:
        old["rows"] = {key: version for key, version in old["rows"].items() if key not in versions}
    if same:
        same[0]["rows"] = dict(sorted({**same[0]["rows"], **versions}.items()))
    else:
        runs.append({**run, "rows": dict(sorted(versions.items()))})
    replace_file(
        folder / "run.json", json.dumps({"runs": [run for run in runs if run["rows"]]}, indent=1) + "\n"
    )


def keys_of(rows: pd.DataFrame, names: Sequence[str] = KEY) -> pd.Series:
    """What identifies each row, as one string."""
    if not len(rows):
        return pd.Series(dtype=object)
    return rows[list(names)].astype(str).agg("/".join, axis=1)


def replaced(old: pd.DataFrame, new: pd.DataFrame, names: Sequence[str] = KEY) -> pd.DataFrame:
    """Old rows but those that new ones replace, then the new ones."""
    kept = old[~keys_of(old, names).isin(keys_of(new, names))]
    frames = [frame for frame in (kept, new) if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else old


def _in_order(rows: pd.DataFrame, operator: Operator) -> pd.DataFrame:
    """Rows by shape as the operator lists them, dtype with fp32 first, baselines, then stages by number."""
    shapes = list(operator.shapes)

    def rank(column: pd.Series) -> pd.Series:
        if column.name == "shape":
            return column.map(lambda name: shapes.index(name) if name in shapes else len(shapes))
        if column.name == "dtype":
            return column != "fp32"
        return column.map(stage_rank)

    return rows.sort_values(["shape", "dtype", "stage"], key=rank, kind="stable")


def is_baseline(stage: str) -> bool:
    """Whether a row's stage is one of PyTorch's or a library's."""
    return stage.startswith(BASELINES)


def is_stage(stage: str) -> bool:
    """Whether a row is of a stage itself, and neither a baseline nor the fused module, which calls one."""
    return stage != FUSED and not is_baseline(stage)


def old_ones(rows: pd.DataFrame) -> pd.Series:
    """Which rows were measured with another version of their stage; those of a session were not."""
    return rows.get("is_old", pd.Series(False, index=rows.index)).eq(True)


def stage_rank(stage: str) -> tuple[int, str]:
    """Sorts baselines before stages, each in its order, and the fused module last."""
    if stage == FUSED:
        return len(BASELINES) + 1, stage
    if not is_baseline(stage):
        return len(BASELINES), stage
    longest = max((name for name in BASELINES if stage.startswith(name)), key=len)
    return BASELINES.index(longest), stage


def lock_of(folder: Path) -> FileLock:
    """What a process holds while it reads and replaces files of a results folder; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".lock")


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_resources(folder: Path) -> pd.DataFrame:
    """Registers, shared memory and spills of every kernel that was measured; empty when none was."""
    path = folder / "resources.csv"
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["operator", "stage", "shape"])


def store_resources(folder: Path, new: pd.DataFrame) -> None:
    """Put the resources of kernels in place of those with the same operator, stage and shape."""
    key = ["operator", "stage", "shape"]
    with lock_of(folder):
        rows = replaced(load_resources(folder), new, key).sort_values(key, kind="stable")
        replace_file(folder / "resources.csv", rows.to_csv(index=False, lineterminator="\n"))
