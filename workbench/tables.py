"""Tables of results in Markdown, and the README's parts that are made of them.

A part of a text between `<!-- results:NAME -->` and `<!-- /results:NAME -->` is generated. NAME is

- `FOLDER`: the circumstances of the run, such as `nvidia-h200`;
- `FOLDER/verify`: what `verify` tried and how often it passed;
- `FOLDER/OPERATOR`: one line a shape and dtype, the fastest stage beside PyTorch's best;
- `FOLDER/OPERATOR/SHAPE/DTYPE`: one line a stage and baseline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.baselines import IGNORES_MASK
from workbench.plots import caption_of, in_order
from workbench.results import RESULTS, is_stage, load, load_runs, old_ones
from workbench.sanitizer import OUTCOMES, TOOLS
from workbench.units import memory_text, time_text
from workbench.versions import FUSED, fused_choice

NOTHING = "Nothing measured yet: `make bench` on a machine with an NVIDIA GPU records it."
BEFORE_UNIT = re.compile(r"(?<=\d) (?=µs|ms|s\b|[KMG]iB|%)")
PART = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)


def fill(text: str, root: Path = RESULTS) -> str:
    """A text with its generated parts made anew. Raises ValueError for a part that cannot be made."""
    marks = len(re.findall(r"<!-- /?results:", text))
    if marks != 2 * len(PART.findall(text)):
        raise ValueError(
            "a <!-- results:NAME --> has no <!-- /results:NAME --> of the same name, or the reverse"
        )
    return PART.sub(lambda match: f"{match[1]}{part(match[2], root)}\n{match[3]}", text)


def part(name: str, root: Path = RESULTS) -> str:
    """The Markdown of one generated part. Raises ValueError for a name of none of the four forms."""
    folder, *rest = name.split("/")
    if len(rest) not in (0, 1, 3):
        raise ValueError(
            f"results:{name}: expected FOLDER, FOLDER/verify, FOLDER/OPERATOR or FOLDER/OPERATOR/SHAPE/DTYPE"
        )
    if not rest:
        return caption_of(load_runs(root / folder)) or NOTHING
    if rest == ["verify"]:
        path = root / folder / "verify.json"
        return verified(json.loads(path.read_text())) if path.exists() else NOTHING
    rows = load(root / folder, rest[0])
    if len(rest) == 1:
        return summary(rows) if len(rows) else NOTHING
    rows = rows[(rows["shape"] == rest[1]) & (rows.dtype == rest[2])]
    return all_stages(rows) if len(rows) else NOTHING


def summary(rows: pd.DataFrame) -> str:
    """The fastest stage at each shape and dtype beside the fastest of each kind of baseline."""
    kinds: dict[str, Callable[[str], bool]] = {
        "eager": lambda stage: stage in ("eager", "eager_graph"),
        "torch.compile": lambda stage: stage.startswith("compile"),
        "libraries": lambda stage: stage.startswith("library_chain") and not stage.endswith(IGNORES_MASK),
        "stages": is_stage,
    }
    lines = []
    for (shape, dtype), some in rows.groupby(["shape", "dtype"], sort=False):
        fastest = {kind: _fastest(some[some.stage.map(belongs)]) for kind, belongs in kinds.items()}
        winner = min(row.p50_us for row in fastest.values() if row is not None)
        times = {kind: "" if row is None else _time(row, winner) for kind, row in fastest.items()}
        best, time = fastest["stages"], times.pop("stages")
        line = {"shape": shape, "dtype": dtype, **times}
        fused = some[some.stage == FUSED]
        if best is not None:
            line |= {
                "fastest stage": _name(best),
                "time": time,
                **({"as a call": time_text(fused.call_us.iloc[0])} if len(fused) else {}),
                "of the bound": f"{best.percent_of_bound:.3g} %",
                "peak memory": memory_text(best.peak_mib),
            }
        lines.append(line)
    shown = pd.DataFrame(lines).fillna("")
    return _markdown(shown, left=("shape", "dtype", "fastest stage")) + _footnote(rows)


def all_stages(rows: pd.DataFrame) -> str:
    """Every stage and baseline of one shape and dtype."""
    rows = in_order(rows)
    table = pd.DataFrame(
        {
            "stage": [_name(row) for _, row in rows.iterrows()],
            "time": [_kernel_time(row) for _, row in rows.iterrows()],
            "p20 to p80": [
                f"{time_text(a)} to {time_text(b)}" for a, b in zip(rows.p20_us, rows.p80_us, strict=True)
            ],
            "as a call": rows.call_us.map(time_text).values,
            "peak memory": rows.peak_mib.map(lambda mib: memory_text(mib) if mib == mib else "").values,
            "TFLOP/s": rows.tflops.map("{:.3g}".format).values,
            "of the bound": rows.percent_of_bound.map("{:.3g} %".format).values,
            "largest error": [
                "ignores the mask" if name.endswith(IGNORES_MASK) else f"{error:.1e}"
                for name, error in zip(rows.stage, rows.max_error, strict=True)
            ],
        }
    )
    return _markdown(table, left=("stage",)) + _footnote(rows)


def verified(parts: Mapping[str, Any]) -> str:
    """How much of what `verify` tried passed, a line a kind of trial; below it, where something did not."""
    records = pd.DataFrame([record for each in parts.values() for record in each["summary"]])
    counts = records.groupby(["kind", "operator"], sort=False)[list(OUTCOMES)].sum()
    words = counts.apply(
        lambda line: ", ".join(f"{line[name]:,} {name}" for name in OUTCOMES if line[name]), axis=1
    )
    kinds = sorted(records.kind.unique(), key=lambda kind: (kind in TOOLS, kind))
    table = words.unstack("operator").reindex(kinds).fillna("").reset_index()
    others = {
        f"- {test['kind']} of `{test['operator']}`, {test['stage']}: {test['outcome']}"
        for each in parts.values()
        for test in each["not passed"]
    }
    return "\n".join([_markdown(table, left=tuple(table)), *([""] if others else []), *sorted(others)])


def commands_to_renew(rows: pd.DataFrame) -> list[str]:
    """The commands that measure old rows again, each with all that was measured beside it."""
    old = rows[old_ones(rows)][["operator", "shape", "dtype"]].drop_duplicates()
    return [
        f"python -m workbench bench {row.operator} --shape {row['shape']} --dtype {row['dtype']}"
        for _, row in old.iterrows()
    ]


def _name(row: pd.Series) -> str:
    """A row's stage, with the one that the fused module chose, or a dagger where it is old."""
    if old_ones(row.to_frame().T).all():
        return f"`{row.stage}` †"
    chosen = fused_choice(row)
    return f"`{row.stage}`, by `{chosen}`" if chosen else f"`{row.stage}`"


def _footnote(rows: pd.DataFrame) -> str:
    """What the daggers mean, where there are any."""
    notes = []
    if commands := [f"`{command}`" for command in commands_to_renew(rows)]:
        renew = "measures it again" if len(commands) == 1 else "measure it again"
        notes.append(
            f"† measured with an earlier version of this stage's source; {' and '.join(commands)} {renew}"
        )
    if any(_exceeds_calls(row) for _, row in rows.iterrows()):
        notes.append(
            "‡ longer by over a tenth than one of many calls back to back: this time includes waiting for "
            "Python between kernels, or for inputs that a loop of calls finds in the L2 cache"
        )
    return "".join(f"\n\n{note}" for note in notes)


def _exceeds_calls(row: pd.Series) -> bool:
    """Whether a kernel time is longer than a call, which includes it, by more than its spread explains."""
    return row.p50_us > 1.1 * row.call_us and row.p20_us > row.call_us


def _kernel_time(row: pd.Series) -> str:
    return time_text(row.p50_us) + (" ‡" if _exceeds_calls(row) else "")


def _time(row: pd.Series, winner: float) -> str:
    """A row's time, in bold where nothing beside it is faster."""
    return f"**{_kernel_time(row)}**" if row.p50_us <= winner else _kernel_time(row)


def _fastest(rows: pd.DataFrame) -> pd.Series | None:
    return rows.loc[rows.p50_us.idxmin()] if len(rows) else None


def _markdown(table: pd.DataFrame, left: tuple[str, ...]) -> str:
    """A table whose columns are padded, so that its source can be read too; numbers to the right.

    A number and its unit stay in one line, however narrow the page.
    """
    columns = [[name, *(BEFORE_UNIT.sub("\u00a0", str(cell)) for cell in table[name])] for name in table]
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.ljust(width) if column[0] in left else cell.rjust(width) for cell in column]
        for column, width in zip(columns, widths, strict=True)
    ]
    rules = [
        "-" * width if name in left else "-" * (width - 1) + ":"
        for name, width in zip(table, widths, strict=True)
    ]
    head, *body = zip(*aligned, strict=True)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *body))
