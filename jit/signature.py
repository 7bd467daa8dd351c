"""EXPORT functions, read from the source, which is the only place where they are declared."""

from __future__ import annotations

import ctypes
import functools
import keyword
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from jit.source import Source


class Parameter(NamedTuple):
    """A parameter of an EXPORT function."""

    name: str
    type: str  # a key of POINTERS or SCALARS


class Export(NamedTuple):
    """An EXPORT function; its last parameter, the stream, is not among the parameters."""

    name: str
    parameters: tuple[Parameter, ...]
    declaration: str
    place: str  # file, line and name, for errors


POINTERS = {"float*": torch.float32, "__nv_bfloat16*": torch.bfloat16}
SCALARS = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
EXPORT = re.compile(r"\bEXPORT\s+cudaError_t\s+(\w+)\s*\(([^)]*)\)")
COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)


@functools.lru_cache(maxsize=256)  # for Kernels, for the key of a build, and for what is compiled
def exports_of(source: Source) -> Mapping[str, Export]:
    """The EXPORT functions of a source. Raises ValueError where one can't be called from Python."""
    text = COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source.text)
    exports: dict[str, Export] = {}
    for match in EXPORT.finditer(text):
        name, line = match[1], text.count("\n", 0, match.start()) + 1
        where = f"{source.file}:{line}: {name}"
        *parameters, last = [_parameter(words, where) for words in match[2].split(",")]
        if last.type != "cudaStream_t":
            raise ValueError(f"{where}: the last parameter must be a cudaStream_t")
        if not any(parameter.type in POINTERS for parameter in parameters):
            raise ValueError(f"{where}: has no pointer, so that nothing says on which device to run")
        export = Export(name, tuple(parameters), " ".join(match[0].split()), where)
        if exports.setdefault(name, export).parameters != export.parameters:
            raise ValueError(f"{where}: declared twice, with different parameters")
    if not exports:
        form = "EXPORT cudaError_t name(const float* x, float* y, int n, cudaStream_t stream)"
        raise ValueError(f"{source.file}: has no function of the form {form}")
    return exports


def _parameter(words: str, where: str) -> Parameter:
    parts = re.sub(r"\bconst\b|\b__restrict__\b", " ", words).replace("*", " * ").split()
    name, c_type = parts[-1] if parts else "", "".join(parts[:-1])
    if c_type not in (*POINTERS, *SCALARS, "cudaStream_t"):
        known = ", ".join([*POINTERS, *SCALARS])
        raise ValueError(f"{where}: parameter '{' '.join(words.split())}' has none of the types {known}")
    return Parameter(name + "_" * keyword.iskeyword(name), c_type)
