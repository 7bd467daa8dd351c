"""A compile error in a notebook: the source with the line marked."""

from __future__ import annotations

import html
from pathlib import Path

import jit_loader

AROUND = 4  # lines shown before and after the one that does not compile
CSS = """
.foldfuse-marked {border-collapse: collapse; font: 12px/1.35 monospace; margin-bottom: 6px}
.foldfuse-marked tr, .foldfuse-marked tr:hover {background: none !important}  /* JupyterLab stripes tables */
.foldfuse-marked td {padding: 0 6px; white-space: pre-wrap; text-align: left !important}
.foldfuse-marked td:first-child {color: #888; text-align: right !important; user-select: none}
.foldfuse-marked tr.here td {background: #fbd5d0; color: #000}
.foldfuse-marked tr.says td, .foldfuse-error {color: #b3261e; font-weight: bold}
"""


def marked_html(error: jit_loader.KernelCompileError, code: str = "", header_lines: int = 0) -> str:
    """The first error's line with its neighbours, and the compiler's log folded away.

    The line is one of `code`, numbered as in the cell where `header_lines` stand above it, or one of the file
    that the error names, a header for example.
    """
    log = f"<details><summary>the compiler's log</summary><pre>{html.escape(error.log)}</pre></details>"
    lines = _source_of(error, code)
    if not lines:
        return f'<style>{CSS}</style><pre class="foldfuse-error">{html.escape(str(error))}</pre>{log}'
    above = header_lines if lines == code.splitlines() else 0
    rows = [] if lines == code.splitlines() else [_says(f"in {error.file}")]
    for number in range(max(1, error.line - AROUND), min(len(lines), error.line + AROUND) + 1):
        here = ' class="here"' if number == error.line else ""
        text = html.escape(lines[number - 1]) or "&nbsp;"
        rows.append(f"<tr{here}><td>{number + above}</td><td>{text}</td></tr>")
        if here:
            caret = "" if error.column is None else " " * (error.column - 1) + "^ "
            rows.append(_says(caret + error.message))
    return f'<style>{CSS}</style><table class="foldfuse-marked">{"".join(rows)}</table>{log}'


def _says(text: str) -> str:
    return f'<tr class="says"><td></td><td>{html.escape(text)}</td></tr>'


def _source_of(error: jit_loader.KernelCompileError, code: str) -> list[str]:
    """The lines that the error's number counts; none when its source is not at hand."""
    texts = [code]
    if error.file and Path(error.file).is_file():
        texts.append(Path(error.file).read_text())
    for text in texts:
        lines = text.splitlines()
        if error.line and error.line <= len(lines) and lines[error.line - 1] == error.excerpt:
            return lines
    return []
