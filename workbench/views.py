"""Views of a stage's source and of what the compiler made of it."""

from __future__ import annotations

import difflib
import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import pandas as pd

import jit_loader
from kernels_src.operator import Operator, Stage

FAMILIES = {
    "HGMMA": r"HGMMA",
    "HMMA": r"HMMA",
    "FFMA": r"FFMA2?",
    "MUFU": r"MUFU",  # exponentials, reciprocals, square roots
    "LDG.128": r"LDG\b.*\.128",
    "LDG": r"LDG\b",
    "STG.128": r"STG\b.*\.128",
    "STG": r"STG\b",
    "LDGSTS": r"LDGSTS",  # asynchronous copies to shared memory
    "UTMA": r"UTMA|UBLKCP",  # bulk copies
    "LDS": r"LDS",
    "LDSM": r"LDSM",
    "STS": r"STS",
    "SHFL": r"SHFL",
    "BAR": r"BAR\b|WARPSYNC|SYNCS",
    "local": r"LDL|STL",
}
"""Groups of machine instructions worth counting; an instruction counts in the first that it matches."""

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]+)")
FUNCTION = re.compile(r"^\s*(?:Function : |\.text\.)([\w$]+)", re.MULTILINE)
CSS = """
.foldfuse-diff {border-collapse: collapse; font: 12px/1.35 monospace; table-layout: fixed; width: 100%}
.foldfuse-diff tr, .foldfuse-diff tr:hover {background: none !important}  /* JupyterLab stripes tables */
.foldfuse-diff td {padding: 0 6px; vertical-align: top; text-align: left !important}
.foldfuse-diff pre {margin: 0; padding: 0; font: inherit; background: none !important}
.foldfuse-diff pre {white-space: pre-wrap !important; word-break: normal !important; overflow-wrap: anywhere}
.foldfuse-diff td.number {width: 2.5em; color: #888; text-align: right !important; user-select: none}
.foldfuse-diff td.old {background: #fdf0d5}
.foldfuse-diff td.new {background: #d9ecf7}
.foldfuse-diff td.note {width: 30%; color: #5b4a8a; font-style: italic; white-space: pre-line}
.foldfuse-diff td.skip {color: #888; text-align: center !important}
.foldfuse-box {max-height: 44em; overflow: auto; resize: vertical; border: 1px solid #ddd}
"""


def diff(old: Stage, new: Stage, context: int = 3) -> str:
    """The unified diff from one stage's source to another's."""
    lines = difflib.unified_diff(
        old.code.splitlines(), new.code.splitlines(), old.name, new.name, lineterm="", n=context
    )
    return "\n".join(lines)


def diff_html(old: Stage, new: Stage, context: int = 3) -> str:
    """The two sources side by side with their differences marked, CUDA highlighted, as HTML."""
    left, right = old.code.splitlines(), new.code.splitlines()
    shown = _highlighted(old.code), _highlighted(new.code)
    groups = list(difflib.SequenceMatcher(a=left, b=right, autojunk=False).get_grouped_opcodes(context))
    blank = '<td class="number"></td>'
    rows = [
        f"<tr>{blank}<td><b>{html.escape(old.name)}</b></td>{blank}<td><b>{html.escape(new.name)}</b></td></tr>"
    ]
    for number, group in enumerate(groups):
        if number:
            rows.append('<tr><td class="skip" colspan="4">⋯</td></tr>')
        for tag, i1, i2, j1, j2 in group:
            rows += _side_by_side(tag, shown, range(i1, i2), range(j1, j2))
    if not groups:
        rows.append('<tr><td class="skip" colspan="4">the same source</td></tr>')
    return _table(rows)


def source_html(stage: Stage) -> str:
    """A stage's source with CUDA highlighted and line numbers, as HTML."""
    return numbered_html(stage.code)


def numbered_html(code: str, notes: Mapping[int, str] | None = None, first: int = 1) -> str:
    """A CUDA source from its line `first`, highlighted and numbered, with any notes beside its lines."""
    rows = []
    for number, line in enumerate(_highlighted(code)[first - 1 :], start=first):
        note = f'<td class="note">{html.escape(notes.get(number, ""))}</td>' if notes else ""
        rows.append(f'<tr><td class="number">{number}</td><td>{_pre(line)}</td>{note}</tr>')
    return _table(rows)


def resources(operator: Operator, stage: Stage, shape: str = "seed", arch: str | None = None) -> pd.DataFrame:
    """Registers, shared memory, spills and stack of each kernel of a stage, as nvcc reports them.

    Compiles for `arch` (None: the GPU present, or the newest that compiler and stage know); needs no GPU.
    """
    kernels = stage.load(operator.shapes[shape])
    kernels.build("cuda", arch=arch)
    table = kernels.resources.copy()
    for place, (name, value) in enumerate(
        {"operator": operator.name, "stage": stage.name, "shape": shape}.items()
    ):
        table.insert(place, name, value)
    return table


def sass_summary(sass: str) -> pd.DataFrame:
    """How many instructions of each family every kernel of a disassembly has, and how many in all."""
    parts = FUNCTION.split(sass)
    counts = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        opcodes = INSTRUCTION.findall(text)
        if opcodes:
            counts[jit_loader.demangle(name)] = _families(opcodes) | {"all": len(opcodes)}
    table = pd.DataFrame.from_dict(counts, orient="index").fillna(0).astype(int)
    present = [family for family in (*FAMILIES, "all") if family in table]
    return table[present].rename_axis("kernel").reset_index()


def headed(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """A table by one of its columns, whose name stands in the row of the others' and not below it."""
    return table.set_index(name).rename_axis(index=None, columns=name)


def _families(opcodes: list[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for opcode in opcodes:
        for family, pattern in FAMILIES.items():
            if re.match(pattern, opcode):
                counts[family] += 1
                break
    return dict(counts)


def _table(rows: list[str]) -> str:
    """A table in a box that scrolls, so that a long source takes no more room than a screen."""
    style = f"<style>{CSS}{_highlight_css()}</style>"
    table = f'<table class="foldfuse-diff highlight">{"".join(rows)}</table>'
    return f'{style}<div class="foldfuse-box">{table}</div>'


def _pre(line: str) -> str:
    """A line that keeps its indentation wherever the page is shown, with or without the style above."""
    return f"<pre>{line}</pre>"


def _side_by_side(tag: str, shown: tuple[list[str], list[str]], old: range, new: range) -> Iterator[str]:
    """Table rows of one run of lines that are equal, replaced, deleted or inserted."""
    for place in range(max(len(old), len(new))):
        cells = ""
        for lines, numbers, kind in ((shown[0], old, "old"), (shown[1], new, "new")):
            if place < len(numbers):
                marked = "" if tag == "equal" else f' class="{kind}"'
                number = numbers[place]
                cells += f'<td class="number">{number + 1}</td><td{marked}>{_pre(lines[number])}</td>'
            else:
                cells += "<td></td><td></td>"
        yield f"<tr>{cells}</tr>"


def _highlighted(code: str) -> list[str]:
    """A CUDA source's lines as HTML. No token may span lines, or a row of a table would split it."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CudaLexer

    lexer = CudaLexer(stripnl=False)  # adds the newline without which it knows no comment
    formatter = HtmlFormatter(nowrap=True)
    lines = (highlight(line, lexer, formatter).rstrip("\n") for line in code.splitlines())
    # Spaces, names and punctuation have no colour of their own; their tags are most of the text.
    return [re.sub(r'<span class="[wnp]">([^<]*)</span>', r"\1", line) or "&nbsp;" for line in lines]


def _highlight_css() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="default").get_style_defs(".highlight")
