"""The outer product mean's reference, every stage against it in float64, and what a bad call gets."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kernels_src.outer_product_mean import OUTER_PRODUCT_MEAN as OPERATOR
from kernels_src.outer_product_mean import OuterProductMean, Shape
from workbench.check import CASE_FOR_RACES, check_problem
from workbench.problem import CASES as CASES_OF_INPUTS
from workbench.problem import pose

SMALL = Shape(2, 3, 5, 16, 8, 12)  # every stage supports it
SHAPES = (
    OPERATOR.shapes["odd"],
    *OPERATOR.odd_shapes,
    SMALL,
    Shape(1, 3, 1, 24, 31, 100),
    Shape(1, 8, 33, 7, 5, 3),  # more than one tile of j, and rows of msa that no vector load fits
)
STAGES = [stage for stage in OPERATOR.stages if stage.precision == "fp32"]
CASES = [
    pytest.param(stage, shape, id=f"{stage.name}-{'x'.join(map(str, shape))}")
    for stage in STAGES
    for shape in SHAPES
    if not stage.unsupported(shape)
]


def assert_passes(stage, shape, case, seed):
    """`workbench check`: the error, poisoned memory, three orders of threads, inputs left alone."""
    result = check_problem(stage, pose(OPERATOR, shape, case, seed=seed))
    assert result.passed, result.message


def by_loops(module: OuterProductMean, msa: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The operator from its definition, one number after another."""
    B, S, N, D = msa.shape
    C, P = module.proj_a.out_features, module.out_proj.out_features
    scale, shift = module.layer_norm.weight, module.layer_norm.bias
    out = torch.zeros(B, N, N, P, dtype=torch.float64)

    def projected(linear, b, s, n, c):
        row = msa[b, s, n]
        mean = sum(row) / D
        variance = sum((row - mean) ** 2) / D
        x = (row - mean) / (variance + 1e-5) ** 0.5 * scale + shift
        return (sum(x[d] * linear.weight[c, d] for d in range(D)) + linear.bias[c]) * mask[b, s, n]

    a, b = (
        torch.tensor(
            [
                [[[projected(linear, i, s, n, c) for c in range(C)] for n in range(N)] for s in range(S)]
                for i in range(B)
            ],
            dtype=torch.float64,
        )
        for linear in (module.proj_a, module.proj_b)
    )
    for batch in range(B):
        for i in range(N):
            rows = max(1, sum(mask[batch, s, i] for s in range(S)))
            for j in range(N):
                out[batch, i, j] = module.out_proj.bias
                for h in range(C):
                    for k in range(C):
                        outer = sum(a[batch, s, i, h] * b[batch, s, j, k] for s in range(S))
                        out[batch, i, j] += outer / rows * module.out_proj.weight[:, h * C + k]
    return out


def test_the_reference_is_its_definition(seed):
    shape = Shape(2, 3, 4, 6, 3, 5)
    module = OPERATOR.module(shape, seed).double()
    msa, mask = OPERATOR.inputs(shape, seed, dtype=torch.float64)
    mask[1, :, 2] = 0  # masked throughout: the divisor is 1
    expected = by_loops(module, msa, mask)
    assert torch.allclose(module(msa, mask), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(module(msa, mask)[1, 2], module.out_proj.bias.expand(4, 5))
    assert not torch.allclose(module(msa, mask), module(msa, mask).transpose(1, 2))  # rows of i alone


def test_the_reference_builds_its_parameters_in_the_documented_order():
    names = [name for name, _ in OuterProductMean(6, 5, 3).named_parameters()]
    layers = ("layer_norm", "proj_a", "proj_b", "out_proj")
    assert names == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


@pytest.mark.parametrize(("stage", "shape"), CASES)
def test_odd_shapes(stage, shape, seed):
    """A quarter of the pairs in the case that is searched for races: the same ones in every run, since a
    search has builds of its own. The seed chooses the others' case."""
    place = STAGES.index(stage) + SHAPES.index(shape)
    others = [name for name in CASES_OF_INPUTS if name != CASE_FOR_RACES]
    case = others[(seed + place) % 3] if place % 4 else CASE_FOR_RACES
    assert_passes(stage, shape, case, seed)


@pytest.mark.parametrize("case", ["masked", "masked column", "large"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_masks_and_magnitudes(stage, case, seed):
    assert_passes(stage, SMALL, case, seed)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_seed_shape(stage, seed):
    problem = pose(OPERATOR, OPERATOR.shapes["seed"], seed=seed)
    output = stage(problem.module, problem.msa, problem.mask)
    assert (output - problem.answer).abs().max() <= problem.tolerance


@pytest.mark.parametrize("scale", [1e-20, 1e20], ids=["tiny", "huge"])
@pytest.mark.parametrize("number", ["08", "09", "12", "13"])
def test_split_operands_keep_fp32_accuracy_at_any_scale_of_the_weights(number, scale, seed):
    """Their fp16 parts hold only what powers of two bring into fp16's range."""
    problem = pose(OPERATOR, SMALL, seed=seed)
    module = copy.deepcopy(problem.module)
    for parameter in module.proj_a.parameters():
        parameter.mul_(scale)
    module.out_proj.weight.div_(scale)
    output = OPERATOR.stage(number)(module, problem.msa, problem.mask)
    assert (output - problem.answer).abs().max() <= problem.tolerance


@pytest.mark.parametrize("number", ["08", "09", "12", "13"])
def test_split_operands_keep_rows_far_from_zero(number, seed):
    """LayerNorm takes the mean away before anything is rounded to fp16."""
    problem = pose(OPERATOR, SMALL, seed=seed)
    msa = problem.msa + 100
    answer = copy.deepcopy(problem.module).double()(msa.double(), problem.mask)
    eager_error = (problem.module(msa, problem.mask) - answer).abs().max()
    output = OPERATOR.stage(number)(problem.module, msa, problem.mask)
    assert (output - answer).abs().max() <= 4 * eager_error


@pytest.mark.parametrize(
    ("number", "shape", "reason"),
    [
        ("03", Shape(1, 4, 2, 8, 33, 4), "C of 33 needs 1089 threads a block"),
        ("04", Shape(1, 2000, 2, 8, 32, 4), "a block would need .* bytes of shared memory"),
        ("07", Shape(1, 4, 2, 8, 33, 4), "C of 33 is more than 32"),
        ("08", Shape(1, 9, 2, 8, 8, 4), "S of 9 is more than 8"),
        ("09", Shape(1, 4, 2, 257, 8, 4), "D of 257 is more than 256"),
        ("13", Shape(1, 33, 2, 8, 8, 4), "S of 33 is more than 32"),
        ("12", Shape(1, 1, 1, 1, 1, 2**19), "P of 524288 is more than 524160"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_clear_error(number, shape, reason):
    module, (msa, mask) = OPERATOR.module(shape), OPERATOR.inputs(shape)
    with pytest.raises(ValueError, match=f"stage {number}_.* does not support .*: {reason}"):
        OPERATOR.stage(number)(module, msa, mask)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda msa, mask: (msa.double(), mask), TypeError, "msa: expected float32 or bfloat16"),
        (lambda msa, mask: (msa.bfloat16(), mask), TypeError, "msa: expected torch.float32"),
        (lambda msa, mask: (msa[0], mask), ValueError, r"msa: expected \(B, S, N, 16\)"),
        (lambda msa, mask: (msa[..., :8], mask), ValueError, r"msa: expected \(B, S, N, 16\)"),
        (lambda msa, mask: (msa[:, :0], mask[:, :0]), ValueError, "msa: every dimension must be at least 1"),
        (lambda msa, mask: (msa, mask[:, :, :4]), ValueError, r"mask: expected \(2, 3, 5\)"),
        (lambda msa, mask: (msa, mask[..., None]), ValueError, r"mask: expected \(2, 3, 5\)"),
        (lambda msa, mask: (msa, mask.to("meta")), ValueError, "mask: expected on cpu"),
        (lambda msa, mask: (msa, mask + 0j), TypeError, "mask: expected 0 and 1 of a real dtype"),
        (lambda msa, mask: (msa, None), TypeError, "mask: expected a tensor"),
        (lambda msa, mask: (msa.mT.contiguous().mT, mask), ValueError, "msa: must be contiguous"),
    ],
)
def test_a_bad_call_is_one_clear_error_before_any_launch(change, error, message):
    def launch(*_):
        raise AssertionError("launched")

    module, (msa, mask) = OPERATOR.module(SMALL), OPERATOR.inputs(SMALL)
    for stage in STAGES:
        with pytest.raises(error, match=message):
            replace(stage, run=launch)(module, *change(msa, mask))


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_mask_dtype_means_the_same(stage, seed):
    module, (msa, mask) = OPERATOR.module(SMALL, seed), OPERATOR.inputs(SMALL, seed)
    out = stage(module, msa, mask)
    for same in (mask.bool(), mask.to(torch.int64), mask.bfloat16(), mask.repeat(1, 1, 2)[:, :, : SMALL.N]):
        assert torch.equal(stage(module, msa, same), out)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", OPERATOR.stages, ids=lambda stage: stage.name)
def test_offsets_beyond_32_bits(stage, seed):
    """At N 1472 the outer product has more than 2^31 elements, at N 4160 the output has."""
    keeps_outer = stage.number < "07"
    shape = Shape(1, 2, 1472, 8, 32, 4) if keeps_outer else Shape(1, 2, 4160, 8, 32, 128)
    few = Shape(*shape[:2], 8, *shape[3:])
    problem = pose(OPERATOR, few, precision=stage.precision, device="cuda", seed=seed)
    residues = torch.randint(shape.N, (8,), generator=torch.Generator().manual_seed(seed)).sort().values
    residues[-1] = shape.N - 1
    msa, mask = OPERATOR.inputs(shape, seed, device="cuda", dtype=stage.dtype)
    msa[:, :, residues], mask[:, :, residues] = problem.msa, problem.mask
    out = stage(problem.module, msa, mask)[:, residues][:, :, residues]
    assert (out - problem.answer).abs().max() <= problem.tolerance
