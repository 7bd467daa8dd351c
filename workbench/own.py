"""An operator of a reader's own: from cells with a reference, a kernel and a call to the two files to keep.

The two files are written first, as text, and the operator is made by running them, so that what was checked
in the notebook is what is kept.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from kernels_src.operator import Operator

KERNELS = Path(__file__).resolve().parent.parent / "kernels_src"

MODULE = '''"""{title}."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from kernels_src.operator import Cost, Operator, Stage

HERE = Path(__file__).parent


class Shape(NamedTuple):
    """B batch, S rows of the alignment, N residues, D channels."""

    B: int
    S: int
    N: int
    D: int


{reference}


{run}


def shape_of(module, msa, mask):
    """The shape of a call. Raises ValueError naming a bad argument."""
    if msa.ndim != 4 or 0 in msa.shape or not msa.is_contiguous():
        raise ValueError(f"msa: expected a contiguous (B, S, N, D), got {{tuple(msa.shape)}}")
    if mask.shape != msa.shape[:3]:
        raise ValueError(f"mask: expected {{tuple(msa.shape[:3])}}, got {{tuple(mask.shape)}}")
    return Shape(*msa.shape)


def build(shape):
    """The reference for a shape."""
    return {class_name}()


def costs(shape):
    """Operations, a multiply-add counting as two."""
    B, S, N, D = shape
    return {{"all": Cost({operations})}}


def least_bytes(shape, element_bytes):
    """Bytes of msa and mask, read once, and of the output, written once."""
    B, S, N, D = shape
    return element_bytes * (B * S * N * (D + 1) + {outputs})


def constants(shape):
    """Compiled into the kernel."""
    return {{"S": shape.S, "D": shape.D}}


OPERATOR = Operator(
    name="{name}",
    title="{title}",
    reference={class_name},
    shapes={{"seed": Shape(2, 8, 32, 64), "odd": Shape(1, 5, 11, 24)}},
    odd_shapes=(Shape(1, 1, 1, 8), Shape(3, 33, 2, 20)),
    build=build,
    costs=costs,
    least_bytes=least_bytes,
    stages=(Stage(HERE / "{file}", run, shape_of, constants=constants),),
)
'''


class Files(NamedTuple):
    """The two files of an operator: its package's __init__.py and its first stage."""

    package: str
    module: str
    stage_name: str
    stage: str

    def keep(self, folder: Path = KERNELS) -> list[Path]:
        """Write both below `folder`. Raises FileExistsError rather than overwrite a package."""
        target = folder / self.package
        target.mkdir()
        files = {target / "__init__.py": self.module, target / self.stage_name: self.stage}
        for path, text in files.items():
            path.write_text(text)
        return list(files)


def files_of(
    reference: type[nn.Module], kernel: str, run: Callable[..., Any], *,
    name: str, title: str, idea: str, operations: str, outputs: str,
) -> Files:  # fmt: skip
    """The two files of an operator `name` whose first stage's idea is `idea`.

    `reference` maps msa (B,S,N,D) and mask (B,S,N) to a result of `outputs` elements by `operations`
    operations, both expressions in B, S, N and D; `run(kernels, module, msa, mask)` calls the kernel, which
    is compiled with S and D as constants.
    """
    stage_name = f"01_{'_'.join(idea.lower().replace(',', '').split())}.cu"
    module = MODULE.format(
        name=name, title=title, reference=_source_of(reference), class_name=reference.__name__,
        run=_source_of(run), operations=operations, outputs=outputs, file=stage_name,
    )  # fmt: skip
    return Files(name, module, stage_name, f"// Stage 01: {idea}\n{kernel.strip()}\n")


def operator_of(files: Files) -> Operator:
    """The operator that the two files make, without writing them."""
    module = ModuleType(f"kernels_src.{files.package}")
    module.__file__ = str(KERNELS / files.package / "__init__.py")
    exec(compile(files.module, module.__file__, "exec"), module.__dict__)
    (stage,) = module.OPERATOR.stages
    return replace(module.OPERATOR, stages=(stage.variant(files.stage, stage.name),))


def _source_of(thing: Callable[..., Any] | type) -> str:
    """The source of a class with methods or of a function, from the notebook cell or file that defines it.

    inspect.getsource does not find classes of a notebook; their methods know the cell.
    """
    functions = [value for value in vars(thing).values() if hasattr(value, "__code__")] or [thing]
    text = "".join(linecache.getlines(functions[0].__code__.co_filename))
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == thing.__name__:
            return ast.get_source_segment(text, node)
    raise ValueError(f"{thing.__name__}: expected to be defined at the top of a cell or file")
