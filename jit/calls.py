"""The Python function for an EXPORT function: no pointer is passed before every argument is checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jit.library import Library, schedule
from jit.packed import WRONG_ADDRESS, layout
from jit.signature import POINTERS, SCALARS, Export
from jit.source import Target
from jit.toolchain import arch_of

RANGES = {
    "int": (-(2**31), 2**31 - 1),
    "int64_t": (-(2**63), 2**63 - 1),
    "float": (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max),
}
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: a kernel's code, or its stack, may not fit any more
CALLER = """
def {name}({parameters}):
    \"\"\"{declaration}\"\"\"
    _call = None
    try:
        {addresses}, = _map(_data_ptr, ({pointers},))  # raises TypeError for what is not a tensor
        _index = {first}.get_device()
        if {checks}:
            _call = _functions.get(_index)
    except Exception:
        pass
    if _call is None:
        _index, {values} = _carefully(({parameters},))
        _call = _functions.get(_index) or _open(_index)
    _code = _call(_pack({values}))
    if _code:
        _fail(_index, _code, ({parameters},))
"""
KIND_CHECK = (
    "{name}.dtype is _dtype_{name} and {name}.get_device() == _index"
    " and {name}.is_contiguous() and not {name}.is_neg()"
)
SCALAR_CHECK = "type({name}) is {type} and {low!r} <= {name} <= {high!r}"


def caller(export: Export, library: Callable[[Target], Library]) -> Callable[..., None]:
    """The Python function for an EXPORT function; `library` gives, or builds, the one for a target.

    It is written out for the signature: a loop over the parameters would cost more than most launches. It
    lets through what is plainly right, and leaves all else to `_checked`, which names what is wrong. Whether
    addresses are right is left to the library (packed.py).

    Its attribute `repeat` is for arguments whose dtypes, devices and strides are known to be those of a call
    that was right, and numbers the same: only the tensors' addresses are looked at.
    """
    functions: dict[int, Callable[[bytes], int]] = {}  # by the device's index, -1 for the CPU

    def open_for(index: int) -> Callable[[bytes], int]:
        if index < 0:
            functions[index] = _on_cpu(export, library)
        else:
            functions[index] = library(_target(index)).on_gpu(export, index)
        return functions[index]

    def fail(index: int, code: int, arguments: Sequence[Any]) -> None:
        if code == WRONG_ADDRESS:
            _checked(export, arguments)
        error = torch.OutOfMemoryError if code == OUT_OF_MEMORY else RuntimeError  # as PyTorch raises it
        raise error(f"{export.name}: {library(_target(index)).error_text(code)}")

    names = {
        "_map": map,
        "_data_ptr": Tensor.data_ptr,
        "_pack": layout(export).pack,
        "_carefully": functools.partial(_checked, export),
        "_functions": functions,
        "_open": open_for,
        "_fail": fail,
    }
    names |= {f"_dtype_{name}": POINTERS[c_type] for name, c_type in export.parameters if c_type in POINTERS}
    exec(_text_of(export, _checks(export)), names)
    function = names[export.name]
    exec(_text_of(export, []), names)
    function.repeat = names[export.name]
    return function


def repeats(functions: object) -> SimpleNamespace:
    """The `repeat` of each of an object's functions, by the functions' names."""
    named = vars(functions).items()
    return SimpleNamespace(**{name: value.repeat for name, value in named if hasattr(value, "repeat")})


def _target(index: int) -> Target:
    """What to compile for: the GPU of that index, or the CPU as its schedule asks now."""
    return schedule.get().target if index < 0 else Target("cuda", arch_of(index))


def _on_cpu(export: Export, library: Callable[[Target], Library]) -> Callable[[bytes], int]:
    """A call on the CPU, in the build and the order of the schedule."""
    functions: dict[Target, Callable[..., int]] = {}

    def call(packed: bytes) -> int:
        target, order, seed = schedule.get()
        function = functions.get(target)
        if function is None:
            function = functions[target] = library(target).on_cpu(export)
        return function(order, seed, packed)

    return call


def _text_of(export: Export, checks: Sequence[str]) -> str:
    """The text of a Python function that passes on what these checks let through."""
    pointers = _pointers(export)
    return CALLER.format(
        name=export.name,
        parameters=", ".join(name for name, _ in export.parameters),
        declaration=export.declaration,
        pointers=", ".join(pointers),
        addresses=", ".join(f"_at_{name}" for name in pointers),
        first=pointers[0],
        checks=" and ".join(checks) or "True",
        values=", ".join(f"_at_{name}" if c_type in POINTERS else name for name, c_type in export.parameters),
    )


def _checks(export: Export) -> list[str]:
    """That every argument is what the signature says."""
    checks = [KIND_CHECK.format(name=name) for name in _pointers(export)]
    for name, c_type in export.parameters:
        if c_type in SCALARS:
            low, high = RANGES[c_type]
            checks.append(SCALAR_CHECK.format(name=name, type=type(low).__name__, low=low, high=high))
    return checks


def _pointers(export: Export) -> list[str]:
    return [name for name, c_type in export.parameters if c_type in POINTERS]


def _checked(export: Export, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The device's index (-1 for the CPU) and what to pass to the C function.

    Raises TypeError or ValueError naming the first argument that is wrong.
    """
    first, values = None, []
    for (name, c_type), value in zip(export.parameters, arguments, strict=True):
        where = f"{export.name}: {name}"
        if c_type in SCALARS:
            values.append(_checked_scalar(value, c_type, where))
            continue
        values.append(_checked_pointer(value, POINTERS[c_type], where))
        first = first or (name, value.device)
        if value.device != first[1]:
            raise ValueError(f"{where}: expected on {first[1]}, where {first[0]} is, got {value.device}")
    return (-1 if first[1].type == "cpu" else first[1].index), *values


def _checked_pointer(value: Any, dtype: torch.dtype, where: str) -> int:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: expected a tensor, got {_kind_of(value)}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: expected a CPU or CUDA tensor, got one on {value.device}")
    if value.dtype != dtype:
        raise TypeError(f"{where}: expected {dtype}, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{where}: expected a dense tensor, got {value.layout}")
    if not value.is_contiguous():
        raise ValueError(f"{where}: must be contiguous, got strides {value.stride()}; pass a contiguous copy")
    if value.is_neg():
        raise ValueError(f"{where}: is negated lazily, its memory has the opposite sign; pass .resolve_neg()")
    try:
        address = value.data_ptr()
    except RuntimeError as error:  # a tensor without memory, such as a tracer's
        raise TypeError(f"{where}: expected a tensor with memory, got {_kind_of(value)}: {error}") from None
    if address == 0:
        raise ValueError(f"{where}: has no elements, shape {tuple(value.shape)}")
    if address % 16:
        raise ValueError(
            f"{where}: must start at a multiple of 16 bytes, as new tensors do, but starts {address % 16} "
            f"bytes after one; pass a clone"
        )
    return address


def _kind_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _checked_scalar(value: Any, c_type: str, where: str) -> float:
    low, high = RANGES[c_type]
    convert = "__index__" if isinstance(low, int) else "__float__"
    if isinstance(value, bool | Tensor) or not hasattr(value, convert):
        raise TypeError(f"{where}: expected {type(low).__name__}, got {_kind_of(value)}")
    number = value.__index__() if isinstance(low, int) else float(value)
    if not low <= number <= high and math.isfinite(number):
        raise ValueError(f"{where}: {number} does not fit into {c_type}")
    return number
