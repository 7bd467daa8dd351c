"""Which operators, stages and shapes a command speaks of."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from kernels_src import OPERATORS
from kernels_src.operator import Operator, Stage


def select(target: str | None) -> list[tuple[Operator, tuple[Stage, ...]]]:
    """Operators with the stages meant by `OP`, `OP/NN` or None (everything).

    Raises KeyError naming the operators, or the stages, that exist.
    """
    if target is None:
        return [(operator, operator.stages) for operator in OPERATORS.values()]
    name, _, number = target.partition("/")
    if name not in OPERATORS:
        raise KeyError(f"no operator {name!r}; there are {', '.join(OPERATORS)}")
    operator = OPERATORS[name]
    return [(operator, (operator.stage(number),) if number else operator.stages)]


def named_shapes(operator: Operator, name: str) -> dict[str, Any]:
    """The shape of this name; `odd` is one shape and all the odd ones, which are named by their sizes.

    Raises KeyError naming the shapes that exist.
    """
    if name not in operator.shapes:
        raise KeyError(f"{operator.name} has no shape {name!r}; it has {', '.join(operator.shapes)}")
    shapes = {name: operator.shapes[name]}
    if name == "odd":
        shapes |= {f"odd {'x'.join(map(str, shape))}": shape for shape in operator.odd_shapes}
    return shapes


def why_not(stage: Stage, shape: Any, device: str) -> str | None:
    """Why a stage is not run at a shape on a device, or None."""
    reason = stage.unfit(device)
    return f"it {reason}" if reason else stage.unsupported(shape)


def shapes_to_check(operator: Operator, name: str | None, device: str) -> dict[str, Any]:
    """The shapes of this name or, for None, all that take the device no longer than minutes."""
    names = [name] if name else ["seed", "odd"] if device == "cpu" else list(operator.shapes)
    return {key: shape for name in names for key, shape in named_shapes(operator, name).items()}


def distinct_shapes(operator: Operator, stage: Stage) -> list[str]:
    """Names of the shapes that a stage supports, leaving out those that compile to the same again."""
    names: dict[tuple[tuple[str, int], ...], str] = {}
    for name, shape in operator.shapes.items():
        if not stage.unsupported(shape):
            names.setdefault(tuple(sorted(stage.constants(shape).items())), name)
    return list(names.values())


def module_beside(operator: Operator, name: str) -> ModuleType | None:
    """The module of this name in the package of an operator's stages; None where there is none."""
    package = operator.reference.__module__.rpartition(".")[0]
    if not package or importlib.util.find_spec(f"{package}.{name}") is None:
        return None
    return importlib.import_module(f"{package}.{name}")
