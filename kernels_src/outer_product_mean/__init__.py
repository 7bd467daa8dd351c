"""Outer product mean: its stages, each with the Python that calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_src.operator import Operator, Stage
from kernels_src.outer_product_mean.reference import (
    ODD_SHAPES,
    SHAPES,
    OuterProductMean,
    Shape,
    build,
    costs,
    least_bytes,
    shape_of,
)

__all__ = ["OUTER_PRODUCT_MEAN", "OuterProductMean", "Parameters", "Shape"]

HERE = Path(__file__).parent
SHARED_BYTES = 227 * 1024  # the most that a block can have on compute capability 9.0
BLOCK_THREADS = 1024
OUTPUTS = 128  # pair channels of one pass over out_proj's weights, which are padded to whole passes
RING_OUTPUTS = 2**19 - OUTPUTS  # whose weights lie within 31 bits of bytes, as tile_ring.cuh counts them

Run = Callable[[Any, Any, Tensor, Tensor], Tensor]


class Parameters(NamedTuple):
    """What stages from 07 on need of a module, for a caller that has only tensors; the module's order."""

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor
    proj_a_weight: Tensor
    proj_a_bias: Tensor
    proj_b_weight: Tensor
    proj_b_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


def _parameters(module: OuterProductMean | Parameters) -> Parameters:
    """Every parameter, in the order of the exports' arguments."""
    if isinstance(module, Parameters):
        return module
    layers = module._modules  # a dict, several times quicker than nn.Module's attribute lookup
    names = ("layer_norm", "proj_a", "proj_b", "out_proj")
    return Parameters(*(layers[name]._parameters[kind] for name in names for kind in ("weight", "bias")))


def _row_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask as kernels take it; one of another dtype or layout is copied, it is 1/D of msa."""
    return mask if mask.dtype is dtype and mask.is_contiguous() else mask.to(dtype).contiguous()


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _outer_product(export: str) -> Run:
    """`run` of a stage that computes the divided outer product; PyTorch does the rest."""

    def run(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
        B, S, N, _ = msa.shape
        C = module.proj_a.out_features
        x, present = module.layer_norm(msa), _row_mask(mask)
        a, b = module.proj_a(x) * present[..., None], module.proj_b(x) * present[..., None]
        outer = msa.new_empty(B, N, N, C * C)
        getattr(kernels, export)(a, b, present, outer, B, S, N, C)
        return module.out_proj(outer)

    return run


def _outer_product_with_inputs(export: str) -> Run:
    """`run` of a stage that computes everything up to the divided outer product; PyTorch does out_proj."""

    def run(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
        B, S, N, D = msa.shape
        C = module.proj_a.out_features
        a, b = msa.new_empty(B, S, N, C), msa.new_empty(B, S, N, C)
        reciprocal, outer = msa.new_empty(B, N), msa.new_empty(B, N, N, C * C)
        arguments = (msa, _row_mask(mask), *_parameters(module)[:-2], a, b, reciprocal, outer)
        getattr(kernels, export)(*arguments, B, S, N, D)
        return module.out_proj(outer)

    return run


def _fused_projection(kernels: Any, module: Any, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, D = msa.shape
    parameters = _parameters(module)
    C, P = len(parameters.proj_a_bias), len(parameters.out_bias)
    padded_p = _padded(P, OUTPUTS)
    a, b = msa.new_empty(B, S, N, C), msa.new_empty(B, S, N, C)
    reciprocal, weight = msa.new_empty(B, N), msa.new_empty(C * C, padded_p)
    out = msa.new_empty(B, N, N, P)
    arguments = (msa, _row_mask(mask), *parameters, a, b, reciprocal, weight, out)
    kernels.fused_projection(*arguments, B, S, N, D, P, padded_p)
    return out


def _whole_operator(kernels: Any, module: Any, msa: Tensor, mask: Tensor) -> Tensor:
    B, _, N, _ = msa.shape
    parameters = _parameters(module)
    out = msa.new_empty(B, N, N, len(parameters.out_bias))
    kernels.whole_operator(msa, _row_mask(mask), *parameters, out, B, N)
    return out


def _split_tensor_cores(kernels: Any, module: Any, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, _ = msa.shape
    parameters = _parameters(module)
    P = len(parameters.out_bias)
    padded_p = _padded(P, OUTPUTS)
    a, b = msa.new_empty(B, S, N, 32), msa.new_empty(B, S, N, 32)  # words of two fp16
    reciprocal, weight = msa.new_empty(B, N), msa.new_empty(padded_p, 32 * 32)
    shifts, out = msa.new_empty(2 + padded_p), msa.new_empty(B, N, N, P)
    arguments = (msa, _row_mask(mask), *parameters, a, b, reciprocal, weight, shifts, out)
    kernels.split_tensor_cores(*arguments, B, S, N, P)
    return out


def _bf16_tiles(export: str) -> Run:
    """`run` of a stage on bf16_tiles.cuh, whose a, b and weights are padded to whole tiles."""

    def run(kernels: Any, module: Any, msa: Tensor, mask: Tensor) -> Tensor:
        B, S, N, _ = msa.shape
        parameters = _parameters(module)
        C, P = len(parameters.proj_a_bias), len(parameters.out_bias)
        padded_s, padded_n = _padded(S, 64), _padded(N, 16)
        a, b = msa.new_empty(2, B, padded_n, 32, padded_s)
        weight = msa.new_empty(_padded(P, OUTPUTS), 32 * 32)
        reciprocal = msa.new_empty(B, padded_n, dtype=torch.float32)
        out = msa.new_empty(B, N, N, P)
        arguments = (msa, _row_mask(mask, msa.dtype), *parameters, a, b, weight, reciprocal, out)
        getattr(kernels, export)(*arguments, B, S, N, C, P)
        return out

    return run


def _hopper_split(kernels: Any, module: Any, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, _ = msa.shape
    parameters = _parameters(module)
    P = len(parameters.out_bias)
    padded_p = _padded(P, OUTPUTS)
    a, b = msa.new_empty(2, B, _padded(N, 16), _padded(S, 16), 32)  # words of two fp16
    reciprocal, weight = msa.new_empty(B, N), msa.new_empty(padded_p, 32 * 32)
    shifts, out = msa.new_empty(2 + padded_p), msa.new_empty(B, N, N, P)
    arguments = (msa, _row_mask(mask), *parameters, a, b, weight, reciprocal, shifts, out)
    kernels.hopper_split(*arguments, B, S, N, P)
    return out


def _overlapping_kernels(kernels: Any, module: Any, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, _ = msa.shape
    parameters = _parameters(module)
    a, b = msa.new_empty(B, -(-N // 8), -(-S // 2), 512), msa.new_empty(B, -(-N // 32), S, 1024)
    shifts, out = msa.new_empty(2), msa.new_empty(B, N, N, len(parameters.out_bias))
    kernels.overlapping_kernels(msa, _row_mask(mask), *parameters, a, b, shifts, out, B, N)
    return out


def _sizes(*names: str) -> Callable[[Shape], dict[str, int]]:
    """`constants` of a stage that has these sizes at compile time."""
    return lambda shape: {name: getattr(shape, name) for name in names}


def _at_most(**limits: int) -> Callable[[Shape], str | None]:
    """`unsupported` of a stage whose tiles or registers hold so much and no more."""

    def unsupported(shape: Shape) -> str | None:
        for name, limit in limits.items():
            size = getattr(shape, name)
            if size > limit:
                return f"{name} of {size} is more than {limit}"
        return None

    return unsupported


def _pair_rows(shape: Shape) -> str | None:
    """Why a block can't hold the rows of residues i and j in shared memory, or None."""
    size = 8 * shape.S * shape.C + 128
    if size > SHARED_BYTES:
        return f"a block would need {size:,} bytes of shared memory and has {SHARED_BYTES:,}"
    return None


def _thread_per_channel_pair(shape: Shape) -> str | None:
    """Why a block can't have C² threads and hold its rows, or None."""
    if shape.C**2 > BLOCK_THREADS:
        return f"C of {shape.C} needs {shape.C**2} threads a block, the most is {BLOCK_THREADS}"
    return _pair_rows(shape)


def _stage(file: str, run: Run, **fields: Any) -> Stage:
    return Stage(HERE / file, run, shape_of, **fields)


STAGES: tuple[Stage, ...] = (
    _stage("01_thread_per_output.cu", _outer_product("thread_per_output")),
    _stage("02_thread_per_pair.cu", _outer_product("thread_per_pair")),
    _stage(
        "03_block_per_pair.cu",
        _outer_product("block_per_pair"),
        unsupported=_thread_per_channel_pair,
    ),
    _stage(
        "04_block_per_pair_looped.cu",
        _outer_product("block_per_pair_looped"),
        unsupported=_pair_rows,
    ),
    _stage(
        "05_fused_inputs.cu",
        _outer_product_with_inputs("fused_inputs"),
        constants=_sizes("C"),
        unsupported=_pair_rows,
    ),
    _stage("06_tiled_gemm.cu", _outer_product_with_inputs("tiled_gemm"), constants=_sizes("C")),
    _stage(
        "07_fused_projection.cu",
        _fused_projection,
        constants=_sizes("C"),
        unsupported=_at_most(C=32),
    ),
    _stage(
        "08_whole_operator.cu",
        _whole_operator,
        constants=_sizes("S", "D", "C", "P"),
        unsupported=_at_most(S=8, D=64, C=32),
    ),
    _stage(
        "09_split_tensor_cores.cu",
        _split_tensor_cores,
        constants=_sizes("D", "C"),
        unsupported=_at_most(D=256, C=32),
    ),
    _stage(
        "10_bf16.cu",
        _bf16_tiles("bf16"),
        precision="bf16",
        constants=_sizes("D"),
        unsupported=_at_most(D=512, C=32),
        capability="9.0",
    ),
    _stage(
        "11_hopper.cu",
        _bf16_tiles("hopper"),
        precision="bf16",
        constants=_sizes("D"),
        unsupported=_at_most(D=512, C=32, P=RING_OUTPUTS),
        capability="9.0a",
    ),
    _stage(
        "12_hopper_split.cu",
        _hopper_split,
        constants=_sizes("D", "C"),
        unsupported=_at_most(D=256, C=32, P=RING_OUTPUTS),
        capability="9.0a",
    ),
    _stage(
        "13_overlapping_kernels.cu",
        _overlapping_kernels,
        constants=_sizes("S", "D", "C", "P"),
        unsupported=_at_most(S=32, D=64, C=32),
        capability="9.0",
    ),
)

OUTER_PRODUCT_MEAN = Operator(
    name="outer_product_mean",
    title="Outer product mean",
    reference=OuterProductMean,
    shapes=SHAPES,
    odd_shapes=ODD_SHAPES,
    build=build,
    costs=costs,
    least_bytes=least_bytes,
    stages=STAGES,
    residue_axes=(1, 2),
)
