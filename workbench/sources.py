"""A stage's source as one text, and what of it a compiler would not see."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "kernels_src"
INCLUDE = re.compile(r'^#include "([^"]+)"$')
COMMENT_OR_STRING = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
TOKEN = re.compile(
    r"""\w+|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
    r"|<<=|>>=|->|::|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\S"
)


def inline_headers(code: str, folder: Path, seen: set[Path] | None = None) -> str:
    """A source with the project's own headers in place of their #include, each once.

    What is for the CPU alone is left out: the branch that would include it stops the compiler.
    """
    seen = set() if seen is None else seen
    lines = []
    for line in code.splitlines():
        match = INCLUDE.match(line) if line.startswith("#include") else None
        if not match:
            lines += [] if line == "#pragma once" else [line]
            continue
        header = next((at for at in (folder / match[1], KERNELS / match[1]) if at.exists()), None)
        if header is None:
            lines.append(line)
        elif header.parent.name == "cpu":
            lines.append('#error "this file is for nvcc"')
        elif header.resolve() not in seen:
            seen.add(header.resolve())
            lines.append(inline_headers(header.read_text(), header.parent, seen))
    return "\n".join(lines)


@lru_cache(maxsize=256)  # the version of every stage is asked for whenever results are loaded
def without_layout(code: str) -> str:
    """A source without comments, its tokens a space apart, each preprocessor directive on its own line."""
    code = COMMENT_OR_STRING.sub(lambda match: " " if match[0].startswith("/") else match[0], code)
    lines: list[list[str]] = [[]]
    for line in code.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):  # here a space can matter: `#define F (x)`
            lines += [line.split(), []]
        else:
            lines[-1] += TOKEN.findall(line)
    return "\n".join(" ".join(words) for words in lines if words)
