"""Try a changed stage: compile it, check it, time it against the stage it came from, show what changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from IPython.display import HTML, Markdown, display

import jit_loader
from kernels_src.operator import Operator, Stage
from workbench import session, views
from workbench.check import Check, check, default_device
from workbench.marks import marked_html
from workbench.units import time_text

RESOURCES = {
    "registers": "registers a thread",
    "shared_bytes": "static shared memory a block (bytes)",
    "spill_stores": "spilled (bytes a thread)",
}


class Rejected(AssertionError):
    """A stage that does not compile or gives wrong results. What is wrong has been displayed."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback, whose frames are all the workbench's."""
        return [f"Rejected: {self}"]


def try_variant(operator: Operator, variant: Stage, shape: str = "seed", header_lines: int = 0) -> None:
    """Check a variant of a stage, time it where there is a GPU, display what changed, and remember it.

    `header_lines` is how many lines stand above the source in its cell. Raises Rejected when the variant does
    not compile or is wrong, and it joins no plot; ValueError when its name is a stage's.
    """
    base = operator.stage(variant.number)
    taken = [name for stage in operator.stages for name in (stage.number, stage.name)]
    if variant.name in taken:
        raise ValueError(f"--as {variant.name}: a stage is called that; choose another name")
    with _errors_marked(variant, header_lines):
        checks = check(operator, variant, shape)
    require(checks, variant)
    with _errors_marked(variant, header_lines):
        compiled = [views.resources(operator, stage, shape) for stage in (base, variant)]
    session.keep(operator, variant)
    if torch.cuda.is_available():
        session.measure(operator, (base, variant), shape)
    display(Markdown(_verdict(operator, base, variant, shape, checks)))
    display(_changes(operator, base, variant, shape, compiled))
    display(HTML(views.diff_html(base, variant)))


@contextmanager
def _errors_marked(variant: Stage, header_lines: int) -> Iterator[None]:
    """Show a compile error in the variant's source, and raise Rejected in its place."""
    try:
        yield
    except jit_loader.KernelCompileError as error:
        display(HTML(marked_html(error, variant.code, header_lines)))
        raise Rejected(f"{variant.name} does not compile") from None


def save(operator: Operator, variant: Stage) -> Path:
    """Write a variant beside the stages, under the next free number. Raises FileExistsError.

    The operator's __init__.py lists it by one line like that of the stage it came from.
    """
    folder = variant.source.parent
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"^\d\d_", "", variant.name.lower())).strip("_")
    if list(folder.glob(f"[0-9][0-9]_{name}.cu")):
        raise FileExistsError(f"{operator.name} has a stage called {name} already; choose another --as NAME")
    number = 1 + max(int(path.name[:2]) for path in folder.glob("[0-9][0-9]_*.cu"))
    path = folder / f"{number:02}_{name}.cu"
    text = re.sub(r"\A// Stage \d\d", f"// Stage {number:02}", variant.code)
    path.write_text(text if text.endswith("\n") else f"{text}\n")
    return path


def require(checks: list[Check], stage: Stage) -> None:
    """Raise Rejected, having said why, unless every case passed."""
    failed = [case for case in checks if not case.passed]
    if failed:
        display(Markdown("\n".join(f"- **{case.case}** at {case.shape}: {case.message}" for case in failed)))
        raise Rejected(f"{stage.name} is wrong in {len(failed)} of {len(checks)} cases")


def _verdict(operator: Operator, base: Stage, variant: Stage, shape: str, checks: list[Check]) -> str:
    """One paragraph: that it is right, and whether it is faster."""
    worst = max(case.max_abs_error / case.tolerance for case in checks)
    where = "GPU" if default_device() == "cuda" else "CPU"
    right = (
        f"`{variant.name}` is right in all {len(checks)} cases at {shape} on the {where}; "
        f"its errors are at most {100 * worst:.0f} % of what is allowed."
    )
    times = _times(operator, base, variant, shape)
    if not times:
        return f"{right} It was not timed: there is no GPU here."
    old, new = times
    change = 100 * (new.p50_us / old.p50_us - 1)
    if old.p20_us <= new.p80_us and new.p20_us <= old.p80_us:
        return f"{right} Its time differs from `{base.name}`'s by less than the spread ({change:+.1f} %)."
    return f"{right} It is **{abs(change):.1f} % {'slower' if change > 0 else 'faster'}** than `{base.name}`."


def _changes(
    operator: Operator, base: Stage, variant: Stage, shape: str, compiled: list[pd.DataFrame]
) -> pd.DataFrame:
    """Times and resources of both, and by how much they differ."""
    rows = [*_time_rows(operator, base, variant, shape), *_resource_rows(*compiled)]
    return views.headed(pd.DataFrame(rows, columns=["", base.name, variant.name, "change"]), "")


def _times(operator: Operator, base: Stage, variant: Stage, shape: str) -> list[pd.Series]:
    """The rows of both in this session; none where nothing was timed."""
    if not torch.cuda.is_available():
        return []
    rows = session.rows_of(operator, shape, session.dtype_of(base)).set_index("stage")
    return [rows.loc[stage.name] for stage in (base, variant)]


def _time_rows(operator: Operator, base: Stage, variant: Stage, shape: str) -> Iterator[tuple[str, ...]]:
    times = _times(operator, base, variant, shape)
    if not times:
        return
    old, new = times
    spreads = [f"{time_text(t.p50_us)} ({t.p20_us:.3g} to {t.p80_us:.3g})" for t in times]
    yield "kernel time, p50 (p20 to p80)", *spreads, f"{100 * (new.p50_us / old.p50_us - 1):+.1f} %"
    calls = [time_text(t.call_us) for t in times]
    yield "as a call", *calls, f"{100 * (new.call_us / old.call_us - 1):+.1f} %"


def _resource_rows(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """One row a kernel and resource; a kernel that only one of the two has is compared with nothing."""
    old, new = old.set_index("kernel"), new.set_index("kernel")
    for kernel in dict.fromkeys([*old.index, *new.index]):
        for column, words in RESOURCES.items():
            values = [table[column].get(kernel) for table in (old, new)]
            shown = ["" if value is None else f"{value:,.0f}" for value in values]
            change = f"{values[1] - values[0]:+,.0f}" if None not in values else ""
            yield f"{kernel}: {words}", *shown, "0" if change == "+0" else change
