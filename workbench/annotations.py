"""What the compiler made of each line of a stage's source."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from kernels_src.operator import Operator, Stage
from workbench.views import numbered_html, resources

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
    """A stage's source with, beside each line, what it became, and each kernel's resources, as HTML.

    Counts are of PTX instructions, in loops as often as they are unrolled. Needs nvcc and no GPU.
    """
    table = resources(operator, stage, shape)
    ptx = stage.load(operator.shapes[shape]).ptx()
    notes = {line: _words(counts) for line, counts in instructions_by_line(ptx, _file_of(stage)).items()}
    for line, text in _kernel_lines(stage, table).items():
        notes[line] = text
    return numbered_html(stage.code, notes)


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


def _kernel_lines(stage: Stage, table: Any) -> dict[int, str]:
    """The line on which each kernel is defined, with its resources."""
    notes: dict[int, str] = {}
    for _, row in table.iterrows():
        definition = re.search(rf"__global__\b[^;{{}}]*?\b{row.kernel.partition('<')[0]}\(", stage.code)
        if definition:
            line = stage.code.count("\n", 0, definition.end()) + 1
            spills = f"{row.spill_stores} bytes spilled" if row.spill_stores else "nothing spilled"
            notes[line] = f"{row.registers} registers, {row.shared_bytes} bytes shared, {spills}"
    return notes
