"""Times stages against themselves with other compile-time constants, alternately, in one run on a GPU.

    python -m benchmarks.variants [OPERATOR[/NN]]      from the repository's root

Each variant is a question that a stage's source leaves open; its header or a comment says what is predicted.
Wrong results are reported and left out, as in `python -m workbench bench`. Nothing is recorded: a constant
that wins becomes the default, and is measured as such.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch

from kernels_src import OPERATORS
from kernels_src.operator import Operator, Stage
from workbench.bench import Group, measure
from workbench.roofline import measure_ceilings
from workbench.selection import select


class Question(NamedTuple):
    """Constants to try in place of a stage's own, at the shapes where they matter."""

    operator: str
    stage: str
    shapes: tuple[str, ...]
    tried: tuple[dict[str, int], ...]


QUESTIONS = (
    Question("outer_product_mean", "13", ("seed",), ({"EARLY": 0},)),
    Question(
        *("outer_product_mean", "11", ("af2", "extra")),
        ({"DEPTH": 32}, {"CLUSTER": 4}, {"EARLY": 0}),
    ),
    Question(
        *("outer_product_mean", "12", ("af2",)),
        ({"CLUSTER": 4}, {"PROMOTE": 128}, {"PROMOTE": 512}, {"EARLY": 0}),
    ),
)


def with_constants(stage: Stage, constants: dict[str, int]) -> Stage:
    """The same stage, compiled with these constants too."""
    words = " ".join(f"{name}={value}" for name, value in constants.items())
    return replace(
        stage,
        constants=lambda shape: {**stage.constants(shape), **constants},
        label=f"{stage.name} {words}",
    )


def groups(selected: list[tuple[Operator, tuple[Stage, ...]]]) -> Iterator[Group]:
    """Each selected stage beside its variants, at each shape."""
    wanted = {(operator.name, stage.number) for operator, stages in selected for stage in stages}
    for name, number, shapes, tried in QUESTIONS:
        if (name, number) not in wanted:
            continue
        operator = OPERATORS[name]
        stage = operator.stage(number)
        stages = (stage, *(with_constants(stage, constants) for constants in tried))
        for shape in shapes:
            yield Group(operator, shape, "bf16" if stage.precision == "bf16" else "fp32", stages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", help="an operator, or OPERATOR/NN; all when left out")
    selected = select(parser.parse_args().target)
    if not torch.cuda.is_available():
        print("variants.py: times are measured on an NVIDIA GPU, and none was found.", file=sys.stderr)
        return 1
    complaints: list[str] = []
    ceilings = measure_ceilings()
    for group in groups(selected):
        rows = pd.DataFrame(measure(group, ceilings, baselines=False, report=complaints.append))
        print(f"\n{group.operator.name}, {group.shape}, {group.dtype}")
        shown = rows[["stage", "p20_us", "p50_us", "p80_us", "max_error"]].copy()
        shown["of the default"] = shown.p50_us / shown.p50_us[shown.stage == group.stages[0].name].iloc[0]
        print(shown.to_string(index=False, float_format="{:.4g}".format), flush=True)
    print("\n".join(complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
