"""What the compiler made of each line of a stage's source."""

from __future__ import annotations

import re
from collections import Counter

import pandas as pd

from kernels_src.operator import Operator, Stage
from workbench.views import numbered_html, resources, sass_summary

FAMILIES = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.",
    "fma": r"fma\.",
    "special function": r"ex2|rcp|rsqrt|sqrt|lg2|tanh|div\.full",
    "global read of 16 bytes": r"ld\.global.*(\.v4\.[bfu]32|\.v2\.[bfu]64)",
    "global read": r"ld\.global",
    "global write of 16 bytes": r"st\.global.*(\.v4\.[bfu]32|\.v2\.[bfu]64)",
    "global write": r"st\.global",
    "asynchronous copy": r"cp\.async\.(ca|cg|bulk)",
    "matrix read from shared memory": r"ldmatrix",
    "shared read": r"ld\.shared",
    "shared write": r"st\.shared",
    "shuffle": r"shfl",
    "barrier": r"bar\.|barrier\.|mbarrier\.",
    "local memory": r"(ld|st)\.local",
    "atomic": r"atom|red\.",
}
"""PTX instructions worth a note; one counts in the first family that it matches."""

FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:.*/)?([^"/]+)"', re.MULTILINE)
PLACE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_.:]*)\b.*;")


def annotated_html(operator: Operator, stage: Stage, shape: str = "seed") -> str:
    """A stage's source below its header with, beside each line, what it became, as HTML.

    Beside a line stand the PTX instructions that it became, in loops as often as they are unrolled; beside a
    kernel's definition its resources and the machine instructions (SASS) of all of it. Needs nvcc and no GPU.
    """
    table = resources(operator, stage, shape)
    kernels = stage.load(operator.shapes[shape])
    lines = instructions_by_line(kernels.ptx(), _file_of(stage))
    notes = {line: _words(counts) for line, counts in lines.items()}
    notes |= kernel_notes(stage.code, table, sass_summary(kernels.sass()))
    header = re.match(r"(?://.*\n)*", stage.code)
    return numbered_html(stage.code, notes, first=1 + header[0].count("\n"))


def instructions_by_line(ptx: str, file: str) -> dict[int, Counter[str]]:
    """How many instructions of each family the lines of a source file became."""
    own = {number for number, name in FILE.findall(ptx) if name == file}
    counts: dict[int, Counter[str]] = {}
    line = None
    for text in ptx.splitlines():
        if place := PLACE.match(text):
            line = int(place[2]) if place[1] in own else None
        elif line and (instruction := INSTRUCTION.match(text)):
            family = next(
                (name for name, pattern in FAMILIES.items() if re.match(pattern, instruction[1])), None
            )
            if family:
                counts.setdefault(line, Counter())[family] += 1
    return counts


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _file_of(stage: Stage) -> str:
    """What the compiler calls the source."""
    return stage.source.name if stage.text is None else f"{stage.name}.cu"


def kernel_notes(code: str, resources: pd.DataFrame, sass: pd.DataFrame) -> dict[int, str]:
    """What to say on the line where a kernel is defined, which a template's instances share."""
    notes: dict[int, list[str]] = {}
    for row in resources.itertuples():
        name = row.kernel.partition("<")[0]
        definition = re.search(rf"__global__\b[^;{{}}]*?\b{name}\(", code)
        if definition:
            line = code.count("\n", 0, definition.end()) + 1
            spills = f"{row.spill_stores} bytes spilled" if row.spill_stores else "nothing spilled"
            parts = [f"{row.registers} registers, {row.shared_bytes} bytes shared, {spills}"]
            parts += [_sass_words(counts) for _, counts in sass[sass.kernel == row.kernel].iterrows()]
            which = f"{row.kernel}: " if row.kernel != name else ""
            notes.setdefault(line, []).append(which + "; ".join(parts))
    return {line: "\n".join(texts) for line, texts in notes.items()}


def _sass_words(counts: pd.Series) -> str:
    """Machine instructions of one kernel by family."""
    families = counts.drop(["kernel", "all"])
    present = ", ".join(f"{count} {family}" for family, count in families.items() if count)
    return f"SASS: {present} of {counts['all']}"
