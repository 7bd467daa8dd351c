"""Memory traffic of an eager PyTorch module, line by line of its `forward`.

Eager PyTorch runs one kernel an operation, and each kernel reads its inputs from memory and writes its
output back. The traffic is counted by watching the operations on tensors without storage (the "meta" device),
so that it costs nothing at any size.
"""

from __future__ import annotations

import html
import inspect
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_src.operator import Operator

CSS = """
.foldfuse-traffic td, .foldfuse-traffic th {text-align: left !important; vertical-align: top}
.foldfuse-traffic td:nth-child(2), .foldfuse-traffic td:nth-child(3) {white-space: nowrap}
.foldfuse-traffic pre {margin: 0; padding: 0; background: none !important}
.foldfuse-traffic pre {white-space: pre-wrap !important; word-break: normal !important}
"""


@dataclass
class Line:
    """One line of `forward`, the operations that it ran and the bytes that they moved."""

    number: int
    text: str
    operations: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0


def traffic(operator: Operator, shape: Any, dtype: torch.dtype = torch.float32) -> list[Line]:
    """Every line of the reference's `forward`, in order, with its operations and bytes moved at a shape."""
    module = operator.build(shape).to(device="meta", dtype=dtype)
    msa = torch.empty(shape.B, shape.S, shape.N, shape.D, device="meta", dtype=dtype)
    mask = torch.empty(shape.B, shape.S, shape.N, device="meta", dtype=dtype)
    return traffic_of(module, msa, mask)


def traffic_of(module: nn.Module, *inputs: Tensor) -> list[Line]:
    """Every line of a module's `forward` with what it did when called with these inputs."""
    texts, first = inspect.getsourcelines(type(module).forward)
    shown = textwrap.dedent("".join(texts)).splitlines()
    lines = [Line(number, text) for number, text in enumerate(shown, start=first)]
    with torch.no_grad(), _Recorder(type(module).forward.__code__, lines, first):
        module(*inputs)
    return lines


class _Recorder(TorchDispatchMode):
    """Books each operation on the line of `code` that is running when it is called."""

    def __init__(self, code: Any, lines: list[Line], first: int):
        super().__init__()
        self.code, self.lines, self.first = code, lines, first

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        number = self._line_running()
        if number is not None and not _is_view(func):
            line = self.lines[number - self.first]
            line.operations.append(func.overloadpacket.__name__)
            line.bytes_read += sum(map(_bytes, _tensors((args, kwargs))))
            line.bytes_written += sum(map(_bytes, _tensors(result)))
        return result

    def _line_running(self) -> int | None:
        frame = sys._getframe()
        while frame and frame.f_code is not self.code:
            frame = frame.f_back
        return frame.f_lineno if frame else None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    """Whether an operation returns its input in another shape, moving nothing."""
    returns = func._schema.returns
    return (
        bool(returns)
        and all(r.alias_info and not r.alias_info.is_write for r in returns)
        or (func.overloadpacket.__name__ == "_unsafe_view")
    )


def _bytes(tensor: Tensor) -> int:
    """Bytes that a tensor's elements occupy; a broadcast dimension (stride 0) occupies them once."""
    held = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return torch.Size(held).numel() * tensor.element_size()


def totals(lines: list[Line]) -> Counter[str]:
    """Kernels run, bytes read and bytes written by all lines together."""
    total: Counter[str] = Counter()
    for line in lines:
        total["kernels"] += len(line.operations)
        total["bytes_read"] += line.bytes_read
        total["bytes_written"] += line.bytes_written
    return total


def as_html(operator: Operator, shape: str) -> str:
    """The reference's `forward` with the kernels of each line and what they read and write, as HTML."""
    lines = traffic(operator, operator.shapes[shape])
    body = "".join(_row(line) for line in _without_docstring(lines))
    total = totals(lines)
    least = operator.least_bytes(operator.shapes[shape], 4)
    moved = total["bytes_read"] + total["bytes_written"]
    return (
        f"<style>{CSS}</style><table class='foldfuse-traffic'>"
        "<tr><th>kernels</th><th>read</th><th>written</th><th></th></tr>"
        f"{body}</table><p>{total['kernels']} kernels move {_size(moved)} at {shape}, in fp32. Every "
        f"input read once and the output written once are {_size(least)}: {moved / least:.3g} times less.</p>"
    )


def _without_docstring(lines: list[Line]) -> list[Line]:
    """The signature and the lines of code; what a reader has read in the text above is left out."""
    quotes = [place for place, line in enumerate(lines) if '"""' in line.text]
    if not quotes:
        return lines
    first, last = quotes[0], quotes[0] if lines[quotes[0]].text.count('"""') == 2 else quotes[1]
    return lines[:first] + lines[last + 1 :]


def _row(line: Line) -> str:
    cells = [", ".join(line.operations), _size(line.bytes_read), _size(line.bytes_written)]
    numbers = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f"<tr>{numbers}<td><pre>{html.escape(line.text)}</pre></td></tr>"


def _size(count: int) -> str:
    """A number of bytes with the unit that suits it; nothing for none."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B" if count else ""
