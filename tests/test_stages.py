"""What holds of every stage of both operators."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels_src import OPERATORS
from kernels_src.msa_column_attention import Shape as AttentionShape
from kernels_src.outer_product_mean import Shape as OuterShape

STAGES = [(operator, stage) for operator in OPERATORS.values() for stage in operator.stages]
NAMED = pytest.mark.parametrize(
    ("operator", "stage"), STAGES, ids=[f"{operator.name}-{stage.name}" for operator, stage in STAGES]
)
SHAPES = {
    "msa_column_attention": (AttentionShape(2, 3, 5, 64, 4), AttentionShape(1, 7, 9, 64, 8)),
    "outer_product_mean": (OuterShape(2, 3, 5, 16, 8, 12), OuterShape(1, 3, 9, 16, 8, 8)),
}


@NAMED
def test_no_kernel_spills(operator, stage):
    for shape in operator.shapes.values():
        if not stage.unsupported(shape):
            resources = stage.load(shape).build("cuda", arch="9.0a").resources
            assert len(resources) >= 1
            local = resources[["spill_stores", "spill_loads", "stack_bytes"]]
            assert (local == 0).all(axis=None), f"{shape}\n{resources}"


@NAMED
def test_a_nan_spreads_as_far_as_in_the_reference(operator, stage, seed):
    """Rows and residues that fill up a tile are zeros, not copies of some that are there."""
    if not stage.on_cpu:
        pytest.skip(stage.unfit("cpu"))
    shapes = [shape for shape in SHAPES[operator.name] if not stage.unsupported(shape)]
    assert shapes
    for shape, row, kept in itertools.product(shapes, (0, 1, 2), (0, 1)):
        module = operator.module(shape, seed, dtype=stage.dtype)
        msa, mask = operator.inputs(shape, seed, dtype=stage.dtype)
        mask[0, row, 0] = kept
        msa[0, row, 0, 1] = float("nan")
        expected, out = module(msa, mask).isnan(), stage(module, msa, mask).isnan()
        assert 0 < expected.sum() < expected.numel()
        where = f"{shape}, row {row}, mask {kept}"
        assert torch.equal(out, expected), f"{where}: {out.sum()} of them, not {expected.sum()}"
