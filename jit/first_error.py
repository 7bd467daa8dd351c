"""The first error in what a compiler printed: where it is, and its words."""

from __future__ import annotations

import contextlib
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

from jit.source import Source
from jit.symbols import demangle


class Mistake(NamedTuple):
    """Where a compiler found the first error, and its words."""

    file: str | None
    line: int | None
    column: int | None
    message: str


GCC_ERROR = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?P<column>\d+): (?:fatal )?error: (?P<message>.*)", re.M
)
NVCC_ERROR = re.compile(
    r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<message>.*)", re.M
)
PTXAS_ERROR = re.compile(
    r"^ptxas .*?(?:error|fatal) *: (?P<message>(?:.*?[Ff]unction '(?P<symbol>\w+)')?.*)", re.M
)
LINKER_ERROR = re.compile(r"(?P<message>undefined reference to `(?P<symbol>\w+).*)", re.M)
OTHER_ERROR = re.compile(r"^(?!Error building|ninja:|FAILED:).*(?:error|fatal|not found|denied).*", re.M)


def first_error(log: str, source: Source) -> Mistake:
    """The first error in what a compiler printed."""
    found = [match for pattern in (GCC_ERROR, NVCC_ERROR) if (match := pattern.search(log))]
    if found:
        first = min(found, key=re.Match.start)
        file, line = first["file"], int(first["line"])
        excerpt = line_of(file, line, source) or ""
        if first.re is GCC_ERROR:
            column = _gcc_column(int(first["column"]), excerpt)
        else:
            column = _nvcc_column(log[first.end() + 1 :], excerpt)
        return Mistake(file, line, column, first["message"])
    if match := PTXAS_ERROR.search(log) or LINKER_ERROR.search(log):  # they know functions, not lines
        if match["symbol"] is None:
            return Mistake(source.file, None, None, match["message"])
        name = demangle(match["symbol"])
        message = match["message"].replace(match["symbol"], name)
        return Mistake(source.file, *_place_of(name.partition("<")[0], source), message)
    match = OTHER_ERROR.search(log)
    return Mistake(source.file, None, None, match[0] if match else "the compiler failed; see .log")


def _gcc_column(column: int, excerpt: str) -> int:
    """gcc counts columns of a screen: a tab goes on to the next multiple of eight, some letters take two."""
    shown = 0
    for index, character in enumerate(excerpt):
        wide = unicodedata.east_asian_width(character) in "WF"
        shown += 8 - shown % 8 if character == "\t" else 1 + wide
        if shown >= column:
            return index + 1
    return column


def _nvcc_column(rest: str, excerpt: str) -> int | None:
    """nvcc names no column; it prints the line, indented and with macros expanded, and below it a caret."""
    lines = rest.split("\n")
    for printed, caret in zip(lines, lines[1:], strict=False):
        if not printed.startswith("  "):
            return None
        if caret.strip() == "^":
            before, after = printed[2 : caret.index("^")], printed[caret.index("^") :].rstrip()
            if excerpt.expandtabs(1).startswith(before):
                return len(before) + 1
            return len(excerpt.rstrip()) - len(after) + 1 if excerpt.rstrip().endswith(after) else None
    return None


def _place_of(function: str, source: Source) -> tuple[int, int] | tuple[None, None]:
    """Line and column where a function first stands in a source."""
    for number, line in enumerate(source.text.split("\n"), start=1):
        if match := re.search(rf"\b{re.escape(function)}\s*\(", line):
            return number, match.start() + 1
    return None, None


def line_of(file: str | None, line: int | None, source: Source) -> str | None:
    with contextlib.suppress(OSError, IndexError, TypeError, UnicodeDecodeError):
        text = source.text if file == source.file else Path(file).read_text(encoding="utf-8")
        return text.split("\n")[line - 1]
    return None
