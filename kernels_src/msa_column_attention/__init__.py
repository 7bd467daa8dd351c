"""Gated MSA column attention: its stages, each with the Python that calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_src.msa_column_attention.reference import (
    ODD_SHAPES,
    SHAPES,
    MSAColumnAttention,
    Shape,
    build,
    costs,
    least_bytes,
    shape_of,
)
from kernels_src.operator import Operator, Stage

__all__ = [
    "MSA_COLUMN_ATTENTION",
    "MSAColumnAttention",
    "Parameters",
    "Shape",
    "block_size",
    "split_tensor_cores",
    "transposed_weights",
]

HERE = Path(__file__).parent
SHARED_BYTES = 227 * 1024  # the most that a block can have on compute capability 9.0
WORKSPACE_BYTES = 256 * 1024 * 1024  # of the bf16 stages, which work on as many columns at a time as fit


def _stage(file: str, run: Callable[[Any, Any, Tensor, Tensor], Tensor], **fields: Any) -> Stage:
    return Stage(HERE / file, run, shape_of, **fields)


def _sizes(module: MSAColumnAttention, msa: Tensor) -> tuple[int, ...]:
    """B, S, N, D, H as the exports take them."""
    return (*msa.shape, module.num_heads)


def _key_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask as kernels take it; one of another dtype or layout is copied, D times less than msa."""
    return mask if mask.dtype is dtype and mask.is_contiguous() else mask.to(dtype).contiguous()


class Parameters(NamedTuple):
    """What stages from 03 on need of a module, for a caller that has only tensors."""

    num_heads: int
    tensors: tuple[Tensor, ...]  # in the order of the exports' arguments


def _parameters(module: MSAColumnAttention | Parameters) -> tuple[Tensor, ...]:
    """Every parameter, in the order of the exports' arguments."""
    if isinstance(module, Parameters):
        return module.tensors
    layers = module._modules  # a dict, several times quicker than nn.Module's attribute lookup
    norm, gate, out_proj = (layers[name]._parameters for name in ("layer_norm", "gate", "out_proj"))
    return (
        norm["weight"],
        norm["bias"],
        layers["query"]._parameters["weight"],
        layers["key"]._parameters["weight"],
        layers["value"]._parameters["weight"],
        gate["weight"],
        gate["bias"],
        out_proj["weight"],
        out_proj["bias"],
    )


def _fits_shared(floats: Callable[[Shape], int]) -> Callable[[Shape], str | None]:
    """`unsupported` of a stage that holds `floats(shape)` floats in the shared memory of a block."""

    def unsupported(shape: Shape) -> str | None:
        size = 4 * floats(shape)
        if size > SHARED_BYTES:
            return f"a block would need {size:,} bytes of shared memory and has {SHARED_BYTES:,}"
        return None

    return unsupported


def _attention_core(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
    x = module.layer_norm(msa)
    attended = torch.empty_like(msa)
    kernels.attention_core(
        module.query(x), module.key(x), module.value(x), _key_mask(mask), attended, *_sizes(module, msa)
    )
    return module.out_proj(attended * torch.sigmoid(module.gate(x)))


def _core_and_projection(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
    x = module.layer_norm(msa)
    projected = (module.query(x), module.key(x), module.value(x), module.gate(x))
    out_proj, out = module.out_proj, torch.empty_like(msa)
    kernels.core_and_projection(
        *projected, _key_mask(mask), out_proj.weight, out_proj.bias, out, *_sizes(module, msa)
    )
    return out


def _one_launch(
    export: str, *, constant_shape: bool = False
) -> Callable[[Any, MSAColumnAttention, Tensor, Tensor], Tensor]:
    """`run` of a stage whose export takes msa, mask and every parameter and needs no workspace.

    It takes B, S, N, D, H, or B and N alone where the others are compile-time constants.
    """

    def run(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
        out = torch.empty_like(msa)
        B, S, N, D = msa.shape
        sizes = (B, N) if constant_shape else (B, S, N, D, module.num_heads)
        getattr(kernels, export)(msa, _key_mask(mask), *_parameters(module), out, *sizes)
        return out

    return run


def block_size(threads: int) -> Stage:
    """Stage 05 at a block size, a multiple of 32 up to 1024."""
    return _stage(
        "05_block_size.cu",
        _one_launch("block_size"),
        constants=lambda shape: {"THREADS": threads},
        unsupported=_fits_shared(lambda shape: shape.S * (6 * shape.D + threads // 32 + 1)),
        label=None if threads == 512 else f"05_block_size_{threads}",
    )


def transposed_weights() -> Stage:
    """Stage 05 with the weights transposed on every call, which coalesces its reads without 06's tile."""
    stage = block_size(512)

    def run(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
        parameters = [p.t().contiguous() if p.ndim == 2 else p for p in _parameters(module)]
        return stage.run(kernels, Parameters(module.num_heads, tuple(parameters)), msa, mask)

    text = stage.code.replace("weight[e * D + c]", "weight[c * D + e]")
    return replace(stage, run=run, text=text, label="05_transposed_weights")


def _constant_shape(shape: Shape) -> dict[str, int]:
    return {"S": shape.S, "D": shape.D, "H": shape.H}


def _constant_shapes_unsupported(shape: Shape) -> str | None:
    if shape.D % (4 * shape.H):
        return f"16-byte accesses need heads of a multiple of 4 channels, got {shape.D // shape.H}"
    lanes = 32 if shape.S > 16 else 16 if shape.S > 8 else 8 if shape.S > 4 else 4
    stride = shape.D + 4 if shape.D % 8 == 0 else shape.D
    rows, queries = 6 * shape.S + 5 * shape.D, 256 // lanes
    return _fits_shared(lambda shape: rows * stride + (queries + 1) * shape.S)(shape)


def _three_kernels(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
    workspace, out = msa.new_empty(4, *msa.shape), torch.empty_like(msa)
    arguments = (msa, _key_mask(mask), *_parameters(module), workspace, out, msa.shape[0], msa.shape[2])
    kernels.three_kernels(*arguments)
    return out


def _three_kernels_unsupported(shape: Shape) -> str | None:
    d = shape.D // shape.H
    if d % 4 or d > 128:
        return f"16-byte accesses need heads of a multiple of 4 channels up to 128, got {d}"
    return _fits_shared(lambda shape: 2 * shape.S * (d + 4) + -(-shape.S // 4) * 4 + 32 * (d + shape.S))(
        shape
    )


def _split_tensor_cores_unsupported(shape: Shape, blocks: int) -> str | None:
    if shape.H % blocks:
        return f"{blocks} blocks cannot share {shape.H} heads"
    if shape.S > 8 or shape.D > 64 or shape.D != 16 * shape.H:
        return "a warp's tensor-core tiles are 8 rows of at most 64 channels, heads of 16"
    return None


def _heads_constant(shape: Shape) -> dict[str, int]:
    return {"D": shape.D, "H": shape.H}


def _in_columns(
    export: str, row_elements: Callable[[int], int], weight_elements: Callable[[int], int]
) -> Callable[[Any, MSAColumnAttention, Tensor, Tensor], Tensor]:
    """`run` of a bf16 stage, whose workspace holds as many columns at a time as WORKSPACE_BYTES allow.

    The workspace has `row_elements(D)` elements a row, S rounded up to 256 rows a column, and
    `weight_elements(D)` besides.
    """

    def run(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
        B, S, N, D = msa.shape
        column = -(-S // 256) * 256 * row_elements(D)
        parts = -(-B * N * column * msa.element_size() // WORKSPACE_BYTES)
        columns = -(-B * N // parts)
        size = weight_elements(D) + columns * column
        workspace, out = msa.new_empty(size), torch.empty_like(msa)
        arguments = (msa, _key_mask(mask, msa.dtype), *_parameters(module), workspace, out)
        getattr(kernels, export)(*arguments, B, S, N, columns)
        return out

    return run


def _bf16_unsupported(shape: Shape) -> str | None:
    if shape.D > 256 or shape.D % (8 * shape.H) or shape.D > 128 * shape.H:
        return "16-byte accesses need heads of 8, 16, … 128 channels, and at most 256 channels in all"
    return None


def split_tensor_cores(blocks: int) -> Stage:
    """Stage 09 with so many blocks a column, a cluster that shares its heads."""
    return _stage(
        "09_split_tensor_cores.cu",
        _one_launch("split_tensor_cores", constant_shape=True),
        constants=lambda shape: {**_constant_shape(shape), "BLOCKS": blocks},
        unsupported=lambda shape: _split_tensor_cores_unsupported(shape, blocks),
        label=None if blocks == 1 else f"09_split_tensor_cores_{blocks}_blocks",
    )


def _online_softmax(kernels: Any, module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, D = msa.shape
    workspace, key_bias = msa.new_empty(3, *msa.shape), msa.new_empty(B, N, -(-S // 64) * 64)
    weights, factors = msa.new_empty(5, D, D), msa.new_empty(10 * D + 3 * module.num_heads)
    out = torch.empty_like(msa)
    arguments = (msa, _key_mask(mask), *_parameters(module), workspace, key_bias, weights, factors, out)
    kernels.online_softmax(*arguments, B, S, N)
    return out


def _online_softmax_unsupported(shape: Shape) -> str | None:
    d = shape.D // shape.H
    if d % 8 or d > 128 or shape.D > 512:
        return f"needs D up to 512 and heads of a multiple of 8 channels up to 128, got D {shape.D}, d {d}"
    return None


def _hopper_unsupported(shape: Shape) -> str | None:
    if shape.D not in (64, 128, 192, 256) or shape.D / shape.H not in (8, 16, 32, 64):
        return "wgmma tiles need 64, 128, 192 or 256 channels, and heads of 8, 16, 32 or 64"
    return None


STAGES: tuple[Stage, ...] = (
    _stage(
        "01_attention_core.cu",
        _attention_core,
        unsupported=_fits_shared(lambda shape: shape.S * (3 * shape.D + shape.S + 1)),
    ),
    _stage(
        "02_core_and_projection.cu",
        _core_and_projection,
        unsupported=_fits_shared(lambda shape: shape.S * (4 * shape.D + shape.S + 1)),
    ),
    _stage(
        "03_single_kernel.cu",
        _one_launch("single_kernel"),
        unsupported=_fits_shared(lambda shape: shape.S * (6 * shape.D + shape.S + 1)),
    ),
    _stage(
        "04_parallel_heads.cu",
        _one_launch("parallel_heads"),
        unsupported=_fits_shared(lambda shape: shape.S * (6 * shape.D + shape.H * shape.S + 1)),
    ),
    block_size(512),
    _stage(
        "06_staged_weights.cu",
        _one_launch("staged_weights"),
        unsupported=_fits_shared(
            lambda shape: (6 * shape.S + min(64, shape.D)) * (shape.D | 1) + 9 * shape.S
        ),
    ),
    _stage(
        "07_constant_shapes.cu",
        _one_launch("constant_shapes", constant_shape=True),
        constants=_constant_shape,
        unsupported=_constant_shapes_unsupported,
    ),
    _stage(
        "08_three_kernels.cu",
        _three_kernels,
        constants=_constant_shape,
        unsupported=_three_kernels_unsupported,
    ),
    split_tensor_cores(1),
    _stage(
        "10_online_softmax.cu",
        _online_softmax,
        constants=lambda shape: {"D": shape.D, "H": shape.H},
        unsupported=_online_softmax_unsupported,
    ),
    _stage(
        "11_bf16.cu",
        _in_columns("attention_bf16", lambda D: 4 * D + 1, lambda D: 0),
        precision="bf16",
        constants=_heads_constant,
        unsupported=_bf16_unsupported,
    ),
    _stage(
        "12_hopper.cu",
        _in_columns("attention_hopper", lambda D: 4 * D + 8, lambda D: 5 * D * D),
        precision="bf16",
        constants=_heads_constant,
        unsupported=_hopper_unsupported,
        capability="9.0a",
    ),
)

MSA_COLUMN_ATTENTION = Operator(
    name="msa_column_attention",
    title="Gated MSA column attention",
    reference=MSAColumnAttention,
    shapes=SHAPES,
    odd_shapes=ODD_SHAPES,
    build=build,
    costs=costs,
    least_bytes=least_bytes,
    stages=STAGES,
    residue_axes=(2,),
)
