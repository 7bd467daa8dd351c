"""What the loader raises, and how a terminal and a notebook show it."""

from __future__ import annotations

import re
from typing import Any

from jit.first_error import first_error, line_of
from jit.source import Source


class ToolchainError(RuntimeError):
    """A compiler or one of its parts is missing or does not fit; the text says what to install."""


class KernelCompileError(RuntimeError):
    """A source does not compile. The text shows the first error with its place in the source.

    `file`, `line` and `column` say where (None where the compiler did not), `message` what; `excerpt` is that
    line of the source, and `log` everything that the compiler printed.
    """

    def __init__(self, log: str, source: Source) -> None:
        self.log, self.source = re.sub(r"\x1b\[[\d;]*m", "", log), source  # without colours
        self.file, self.line, self.column, self.message = first_error(self.log, source)
        self._shown = False
        self.excerpt = line_of(self.file, self.line, source)
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        self.headline = f"{place}: {self.message}" if place else self.message
        super().__init__("\n".join([self.headline, *self._marked_lines()]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.log, self.source)

    def _marked_lines(self) -> list[str]:
        """The line of the source, and a caret under the error."""
        if not self.excerpt:
            return []
        caret = [] if self.column is None else [" " * (4 + self.column - 1) + "^"]
        return [f"    {self.excerpt.expandtabs(1)}", *caret]

    def _repr_html_(self) -> str:
        from html import escape

        marked = escape("\n".join(self._marked_lines()))
        return (
            f"<div><b style='color:#b3261e'>{escape(self.headline)}</b><pre>{marked}</pre>"
            f"<details><summary>all that the compiler printed</summary>"
            f"<pre>{escape(self.log)}</pre></details></div>"
        )

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback, whose frames are all the loader's."""
        from IPython import get_ipython
        from IPython.display import HTML, display

        if not hasattr(get_ipython(), "kernel"):
            return [f"{type(self).__name__}: {self}"]
        if not self._shown:  # in a notebook, where the log can be folded; IPython asks more than once
            display(HTML(self._repr_html_()))
            self._shown = True
        return [f"{type(self).__name__}: {self.headline}"]
