"""Every stage of MSA column attention against the reference in float64, and what a bad call gets."""

from __future__ import annotations

import copy

import pytest
import torch

import jit_loader
from kernels_src import msa_column_attention
from kernels_src.msa_column_attention import MSA_COLUMN_ATTENTION as OPERATOR
from kernels_src.msa_column_attention import (
    MSAColumnAttention,
    Shape,
    block_size,
    split_tensor_cores,
    transposed_weights,
)

SMALL = Shape(2, 7, 5, 48, 3)  # every stage supports it
SHAPES = (
    OPERATOR.shapes["seed"],
    OPERATOR.shapes["odd"],
    *OPERATOR.odd_shapes,
    SMALL,
    Shape(1, 1, 3, 16, 1),
    Shape(1, 8, 3, 32, 2),
)
STAGES = [stage for stage in OPERATOR.stages if stage.on_cpu and stage.precision == "fp32"]
CASES = [
    pytest.param(stage, shape, id=f"{stage.name}-{'x'.join(map(str, shape))}")
    for stage in STAGES
    for shape in SHAPES
    if not stage.unsupported(shape)
]


@pytest.fixture(autouse=True)
def poison():
    """Fill new tensors with NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def case(shape: Shape, seed: int, *, logits: float = 1.0):
    """A module whose logits are `logits²` times the usual, msa, and a mask with zeros anywhere."""
    module = OPERATOR.module(shape, seed)
    module.query.weight.mul_(logits)
    module.key.weight.mul_(logits)
    msa, _ = OPERATOR.inputs(shape, seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    mask = (torch.rand(shape[:3], generator=generator) < 0.6).float()
    empty = mask.sum(1) == 0
    mask[:, 0] += empty  # no column is masked throughout unless a test says so
    return module, msa, mask


def assert_close(out, module, msa, mask):
    """NaN exactly where the reference has it, and an error of at most four times eager PyTorch's own."""
    reference = copy.deepcopy(module).double()(msa.double(), mask)
    dead = reference.isnan()
    assert torch.equal(out.isnan(), dead)
    eager_error = (module(msa, mask) - reference)[~dead].abs().max()
    error = (out - reference)[~dead].abs().max()
    assert error <= 4 * eager_error + 1e-6
    assert ((out - reference)[~dead].abs() <= 1e-4 + 1e-4 * reference[~dead].abs()).all()


@pytest.mark.parametrize(("stage", "shape"), CASES)
def test_matches_the_reference_whatever_the_schedule(stage, shape, seed):
    module, msa, mask = case(shape, seed)
    outs = []
    for order in ("forward", "reverse", "random"):
        with jit_loader.cpu_schedule(order, seed):
            outs.append(stage(module, msa, mask))
    assert_close(outs[0], module, msa, mask)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_masked_column_is_nan_and_no_other(stage, seed):
    module, msa, mask = case(SMALL, seed)
    mask[1, :, 2] = 0
    out = stage(module, msa, mask)
    assert out[1, :, 2].isnan().all()
    assert out.isnan().sum() == out[1, :, 2].numel()
    assert_close(out, module, msa, mask)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_large_logits(stage, seed):
    module, msa, mask = case(SMALL, seed, logits=8)
    assert_close(stage(module, msa, mask), module, msa, mask)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_mask_dtype_means_the_same(stage, seed):
    module, msa, mask = case(SMALL, seed)
    out = stage(module, msa, mask)
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        assert torch.equal(stage(module, msa, mask.to(dtype)), out)
    strided = mask.repeat_interleave(2, dim=2)[:, :, ::2]
    assert torch.equal(stage(module, msa, strided), out)


def with_constants(number: str, **constants: int):
    """A stage with compile-time constants that differ from its own."""
    stage = OPERATOR.stage(number)
    defines = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return stage.variant(defines + stage.code, f"{number}_with_constants")


def test_variants_of_the_fp32_stages(seed):
    variants = {
        SMALL: [
            block_size(128),
            block_size(1024),
            transposed_weights(),
        ],
        OPERATOR.shapes["seed"]: [split_tensor_cores(2), split_tensor_cores(4)],
    }
    for shape, stages in variants.items():
        module, msa, mask = case(shape, seed)
        for stage in stages:
            assert stage.name not in [listed.name for listed in OPERATOR.stages]
            assert_close(stage(module, msa, mask), module, msa, mask)


def assert_hopper_stage_close(stage, seed):
    """In bf16, an error of at most twice eager PyTorch's own; several tiles a column and items a block."""
    module, msa, mask = case(Shape(1, 300, 3, 64, 8), seed)
    module, msa, mask = module.bfloat16(), msa.bfloat16(), mask.bfloat16()
    reference = copy.deepcopy(module).double()(msa.double(), mask)
    eager_error = (module(msa, mask) - reference).abs().max()
    assert (stage(module, msa, mask) - reference).abs().max() <= 2 * eager_error


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_hopper_stage_on_so_many_columns_at_a_time(columns, seed, monkeypatch):
    column = 2 * 512 * (4 * 64 + 8)  # bytes of the workspace, S rounded up to 512
    monkeypatch.setattr(msa_column_attention, "WORKSPACE_BYTES", columns * column)
    assert_hopper_stage_close(OPERATOR.stage("12"), seed)


def test_hopper_stage_with_other_constants(seed):
    assert_hopper_stage_close(with_constants("12", PAD=256, POLYNOMIALS=4), seed)


@pytest.mark.parametrize("scale", [1e-20, 1e20], ids=["tiny", "huge"])
def test_online_softmax_keeps_fp32_accuracy_at_any_scale_of_the_weights(scale, seed):
    """Its fp16 pairs hold only what powers of two bring into fp16's range."""
    module, msa, mask = case(OPERATOR.shapes["odd"], seed)
    module.value.weight.mul_(scale)
    module.out_proj.weight.div_(scale)
    module.query.weight.mul_(scale)
    module.key.weight.div_(scale)
    assert_close(OPERATOR.stage("10")(module, msa, mask), module, msa, mask)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        (Shape(1, 2000, 1, 64, 4), "03_single_kernel does not support .*: a block would need .* bytes"),
        (Shape(1, 300, 1, 16, 2), "03_single_kernel does not support .*: a block would need .* bytes"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_clear_error(shape, error):
    module, msa, mask = case(shape, 0)
    with pytest.raises(ValueError, match=error):
        OPERATOR.stage("03")(module, msa, mask)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda msa, mask: (msa.double(), mask), TypeError, "msa: expected float32 or bfloat16"),
        (lambda msa, mask: (msa.bfloat16(), mask), TypeError, "msa: expected torch.float32"),
        (lambda msa, mask: (msa[0], mask), ValueError, r"msa: expected \(B, S, N, 40\)"),
        (lambda msa, mask: (msa[..., :32], mask), ValueError, r"msa: expected \(B, S, N, 40\)"),
        (lambda msa, mask: (msa[:, :0], mask[:, :0]), ValueError, "msa: every dimension must be at least 1"),
        (lambda msa, mask: (msa, mask[:, :, :5]), ValueError, r"mask: expected \(2, 7, 13\)"),
        (lambda msa, mask: (msa, mask[..., None]), ValueError, r"mask: expected \(2, 7, 13\)"),
        (lambda msa, mask: (msa, mask.to("meta")), ValueError, "mask: expected on cpu"),
        (lambda msa, mask: (msa, None), TypeError, "mask: expected a tensor"),
        (
            lambda msa, mask: (msa.transpose(1, 2), mask.transpose(1, 2)),
            ValueError,
            "msa: must be contiguous",
        ),
    ],
)
def test_a_bad_call_is_one_clear_error_before_any_launch(change, error, message):
    module, msa, mask = case(OPERATOR.shapes["odd"], 0)
    for stage in STAGES:
        with pytest.raises(error, match=message):
            stage(module, *change(msa, mask))


def test_heads_must_divide_the_channels():
    with pytest.raises(ValueError, match="num_heads: must divide msa_dim, got msa_dim 64 and num_heads 5"):
        MSAColumnAttention(64, 5)
