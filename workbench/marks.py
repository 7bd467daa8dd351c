"""A compile error in a cell: the cell's source with the line marked."""

from __future__ import annotations

import html

import jit_loader

AROUND = 4  # lines shown before and after the one that does not compile
CSS = """
.foldfuse-marked {border-collapse: collapse; font: 12px/1.35 monospace; margin-bottom: 6px}
.foldfuse-marked td {padding: 0 6px; white-space: pre-wrap; text-align: left !important}
.foldfuse-marked td:first-child {color: #888; text-align: right !important; user-select: none}
.foldfuse-marked tr.here td {background: #fbd5d0; color: #000}
.foldfuse-marked tr.says td, .foldfuse-error {color: #b3261e; font-weight: bold}
"""


def marked_html(error: jit_loader.KernelCompileError, code: str, header_lines: int = 0) -> str:
    """The first error's line with its neighbours, numbered as in the cell, and the log folded away.

    `header_lines` is how many lines stand above the source in its cell. An error in a header that the source
    includes is told with its file, since no line of the cell is at fault.
    """
    lines = code.splitlines()
    log = f"<details><summary>the compiler's log</summary><pre>{html.escape(error.log)}</pre></details>"
    if not (error.line and error.line <= len(lines) and lines[error.line - 1] == error.excerpt):
        return f'<style>{CSS}</style><pre class="foldfuse-error">{html.escape(str(error))}</pre>{log}'
    rows = []
    for number in range(max(1, error.line - AROUND), min(len(lines), error.line + AROUND) + 1):
        here = ' class="here"' if number == error.line else ""
        text = html.escape(lines[number - 1]) or "&nbsp;"
        rows.append(f"<tr{here}><td>{number + header_lines}</td><td>{text}</td></tr>")
        if here:
            caret = "" if error.column is None else " " * (error.column - 1) + "^ "
            rows.append(f'<tr class="says"><td></td><td>{caret}{html.escape(error.message)}</td></tr>')
    return f'<style>{CSS}</style><table class="foldfuse-marked">{"".join(rows)}</table>{log}'
