"""Versions of stages: whether a result was measured with the source at hand.

A version is a digest of what nvcc is given for a stage at a shape: its file with the project's headers in it,
and its compile-time constants. Comments, white space and what only the CPU compiles do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from kernels_src import OPERATORS
from kernels_src.fused import FusedModule
from kernels_src.operator import Operator, Stage
from workbench.selection import module_beside
from workbench.sources import inline_headers, without_layout

FUSED = "fused"
"""The stage name of rows of the fused module, which runs the stage that it takes to be the fastest."""


def compiled_source(stage: Stage) -> str:
    """What of a stage's files nvcc sees, at any shape."""
    return without_layout(inline_headers(stage.code, stage.source.parent))


def version(stage: Stage, shape: Any, source: Callable[[Stage], str] = compiled_source) -> str:
    """The digest of what is compiled for a stage at a shape."""
    constants = sorted(stage.constants(shape).items())
    return hashlib.sha256(f"{constants}\n{source(stage)}".encode()).hexdigest()[:16]


def versions_now(keys: Iterable[Sequence[str]]) -> list[str | None]:
    """The versions that rows would have if they were measured again; None for a baseline or what is no more.

    A key is a row's operator, stage, shape and dtype. Each source is read once.
    """
    source = cache(compiled_source)
    versions = []
    for operator, stage, shape, dtype in keys:
        found = stage_of(operator, stage, shape, dtype)
        versions.append(version(found, OPERATORS[operator].shapes[shape], source) if found else None)
    return versions


def stage_of(operator: str, stage: str, shape: str, dtype: str) -> Stage | None:
    """The stage that a row's name stands for, which is the chosen one for the fused module, or None."""
    known = OPERATORS.get(operator)
    if known is None or shape not in known.shapes:
        return None
    if stage == FUSED:
        fused = fused_module(known)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        return fused.fastest_stage(known.shapes[shape], kind, None) if fused else None
    return next((each for each in known.stages if each.name == stage), None)


def fused_choice(row: Mapping[str, Any]) -> str | None:
    """The name of the stage that the fused module of a row runs; None for any other row."""
    if row["stage"] != FUSED:
        return None
    stage = stage_of(*(row[name] for name in ("operator", "stage", "shape", "dtype")))
    return stage.name if stage else None


def fused_module(operator: Operator) -> type[FusedModule] | None:
    """The operator's fused module, of the fused.py beside its stages; None where it has none."""
    module = module_beside(operator, "fused")
    found = [each for each in vars(module).values() if _is_fused(each)] if module else []
    return found[0] if found else None


def _is_fused(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, FusedModule) and value is not FusedModule
