"""Plots and README tables, made from the recorded results alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from kernels_src import OPERATORS
from workbench import plots, tables
from workbench.results import RESULTS, ROOT, load, load_resources, load_runs, recorded
from workbench.roofline import Ceilings

README = ROOT / "README.md"


def write(root: Path = RESULTS, readme: Path = README) -> list[Path]:
    """Make every plot and every generated part of the README anew. Returns the files written."""
    written = []
    for folder in recorded(root):
        source = digest(folder)
        wanted = pictures(folder)
        for old in set(folder.glob("*.svg")) - set(wanted):
            old.unlink()
        for path, draw in wanted.items():
            plots.save(draw(), path, source)
            written.append(path)
    if readme.exists():
        readme.write_text(tables.fill(readme.read_text(), root))
        written.append(readme)
    return written


def lagging(root: Path = RESULTS, readme: Path = README) -> list[str]:
    """What does not show the recorded results: plots that are missing, old or superfluous; the README."""
    behind = []
    for folder in recorded(root):
        wanted, source = pictures(folder), digest(folder)
        behind += [str(path) for path in wanted if not path.exists() or source not in path.read_text()]
        behind += [str(path) for path in sorted(folder.glob("*.svg")) if path not in wanted]
    if readme.exists() and tables.fill(readme.read_text(), root) != readme.read_text():
        behind.append(str(readme))
    return behind


def old_rows(root: Path = RESULTS) -> dict[str, list[str]]:
    """Rows measured with another version of their stage than the one at hand, by the command for each."""
    found: dict[str, list[str]] = {}
    for folder in recorded(root):
        for name in OPERATORS:
            rows = load(folder, name)
            for (shape, dtype), some in rows[rows.is_old].groupby(["shape", "dtype"], sort=False):
                [command] = tables.commands_to_renew(some)
                found.setdefault(command, []).extend(
                    f"{folder.name}: {name}/{stage} {shape} {dtype}" for stage in some.stage
                )
    return found


def digest(folder: Path) -> str:
    """A digest of everything that the plots of a folder are made from; each plot carries it."""
    content = hashlib.sha256()
    for path in sorted([*folder.glob("*.csv"), folder / "run.json"]):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()


def pictures(folder: Path) -> dict[Path, Callable[[], Figure]]:
    """Every plot of a folder by its file, as a function that draws it."""
    runs = load_runs(folder)
    caption, ceilings = plots.caption_of(runs), Ceilings(**runs[-1]["ceilings"])
    resources = load_resources(folder)
    wanted: dict[Path, Callable[[], Figure]] = {}

    def add(name: str, draw: Callable[..., Figure], *arguments: object) -> None:
        wanted[folder / f"{name}.svg"] = lambda: draw(*arguments, caption=caption)

    for name, operator in OPERATORS.items():
        rows = load(folder, name)
        if not len(rows):
            continue
        for (shape, dtype), some in rows.groupby(["shape", "dtype"]):
            add(
                f"{name}_time_{shape}_{dtype}",
                plots.time_by_stage,
                some,
                f"{operator.title}: {shape}, {dtype}",
            )
        for shape, some in rows.groupby("shape"):
            add(f"{name}_error_{shape}", plots.error_by_precision, some, f"{operator.title}: {shape}")
        add(f"{name}_roofline", plots.roofline, rows, operator, ceilings)
        add(f"{name}_shapes", plots.by_shape, rows, operator)
        own = resources[resources.operator == name]
        for shape, some in own.groupby("shape"):
            add(f"{name}_resources_{shape}", plots.resources_by_stage, some, f"{operator.title}: {shape}")
    return wanted
