"""Outer product mean: its stages, each with the Python that calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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

__all__ = ["OUTER_PRODUCT_MEAN", "OuterProductMean", "Shape"]

HERE = Path(__file__).parent

SHARED_BYTES = 227 * 1024  # the most that a block can have on compute capability 9.0
BLOCK_THREADS = 1024


def _stage(file: str, run: Callable[[Any, Any, Tensor, Tensor], Tensor], **fields: Any) -> Stage:
    return Stage(HERE / file, run, shape_of, **fields)


def _row_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask as kernels take it; one of another dtype or layout is copied, it is 1/D of msa."""
    return mask.to(dtype).contiguous()


def _outer_product(export: str) -> Callable[[Any, OuterProductMean, Tensor, Tensor], Tensor]:
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


def _input_parameters(module: OuterProductMean) -> tuple[Tensor, ...]:
    """The parameters of LayerNorm and both projections, in the order of the exports' arguments."""
    norm, proj_a, proj_b = module.layer_norm, module.proj_a, module.proj_b
    return (norm.weight, norm.bias, proj_a.weight, proj_a.bias, proj_b.weight, proj_b.bias)


def _outer_product_with_inputs(export: str) -> Callable[[Any, OuterProductMean, Tensor, Tensor], Tensor]:
    """`run` of a stage that computes everything up to the divided outer product; PyTorch does out_proj."""

    def run(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
        C = module.proj_a.out_features
        B, S, N, D = msa.shape
        a, b = msa.new_empty(B, S, N, C), msa.new_empty(B, S, N, C)
        reciprocal, outer = msa.new_empty(B, N), msa.new_empty(B, N, N, C * C)
        arguments = (msa, _row_mask(mask), *_input_parameters(module), a, b, reciprocal, outer)
        getattr(kernels, export)(*arguments, B, S, N, D)
        return module.out_proj(outer)

    return run


def _fused_projection(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, D = msa.shape
    P, C = module.out_proj.out_features, module.proj_a.out_features
    padded_p = -(-P // 128) * 128
    a, b = msa.new_empty(B, S, N, C), msa.new_empty(B, S, N, C)
    reciprocal, weight = msa.new_empty(B, N), msa.new_empty(C * C, padded_p)
    out = msa.new_empty(B, N, N, P)
    inputs = (msa, _row_mask(mask), *_input_parameters(module), module.out_proj.weight, module.out_proj.bias)
    kernels.fused_projection(*inputs, a, b, reciprocal, weight, out, B, S, N, D, P, padded_p)
    return out


def _bf16_tiles(export: str) -> Callable[[Any, OuterProductMean, Tensor, Tensor], Tensor]:
    """`run` of a stage on bf16_tiles.cuh, whose a, b and weights are padded to whole tiles."""

    def run(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
        B, S, N, _ = msa.shape
        P, C = module.out_proj.out_features, module.proj_a.out_features
        padded_s, padded_n, padded_p = -(-S // 64) * 64, -(-N // 8) * 8, -(-P // 128) * 128
        a, b = msa.new_empty(2, B, padded_n, 32, padded_s)
        weight = msa.new_empty(padded_p, 32 * 32)
        reciprocal = msa.new_empty(B, padded_n, dtype=torch.float32)
        out = msa.new_empty(B, N, N, P)
        parameters = (*_input_parameters(module), module.out_proj.weight, module.out_proj.bias)
        arguments = (msa, _row_mask(mask, msa.dtype), *parameters, a, b, weight, reciprocal, out)
        getattr(kernels, export)(*arguments, B, S, N, C, P)
        return out

    return run


def _whole_operator(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
    B, _, N, _ = msa.shape
    out_proj = module.out_proj
    out = msa.new_empty(B, N, N, out_proj.out_features)
    parameters = (*_input_parameters(module), out_proj.weight, out_proj.bias)
    kernels.whole_operator(msa, _row_mask(mask), *parameters, out, B, N)
    return out


def _split_tensor_cores(kernels: Any, module: OuterProductMean, msa: Tensor, mask: Tensor) -> Tensor:
    B, S, N, _ = msa.shape
    out_proj = module.out_proj
    P = out_proj.out_features
    padded_p = -(-P // 128) * 128
    a, b = msa.new_empty(B, S, N, 32), msa.new_empty(B, S, N, 32)
    reciprocal, weight, shifts = (
        msa.new_empty(B, N),
        msa.new_empty(padded_p, 1024),
        msa.new_empty(2 + padded_p),
    )
    out = msa.new_empty(B, N, N, P)
    inputs = (msa, _row_mask(mask), *_input_parameters(module), out_proj.weight, out_proj.bias)
    kernels.split_tensor_cores(*inputs, a, b, reciprocal, weight, shifts, out, B, S, N, P)
    return out


def _hidden(shape: Shape) -> dict[str, int]:
    """C as the only compile-time constant."""
    return {"C": shape.C}


def _msa_channels(shape: Shape) -> dict[str, int]:
    """D as the only compile-time constant."""
    return {"D": shape.D}


def _bf16_channels(shape: Shape) -> str | None:
    """Why a tile of 32 channels a residue or a lane's share of a row of msa is too small, or None."""
    if shape.D > 512:
        return f"D of {shape.D} is more than the 512 that the registers of four lanes hold"
    return _up_to_32_channels(shape)


def _all_but_residues(shape: Shape) -> dict[str, int]:
    """Every size but B and N as a compile-time constant."""
    return {"S": shape.S, "D": shape.D, "C": shape.C, "P": shape.P}


def _msa_and_hidden(shape: Shape) -> dict[str, int]:
    """D and C as compile-time constants."""
    return {"D": shape.D, "C": shape.C}


def _up_to_32_channels(shape: Shape) -> str | None:
    """Why a tile of 32 channels h and k a residue does not hold a pair, or None."""
    return f"C of {shape.C} is more than the tile's 32" if shape.C > 32 else None


def _up_to_256_and_32_channels(shape: Shape) -> str | None:
    """Why a lane's registers do not hold its part of a row of msa, or None."""
    return f"D of {shape.D} is more than 256" if shape.D > 256 else _up_to_32_channels(shape)


def _few_rows_and_channels(shape: Shape) -> str | None:
    """Why one block can't project the rows that it needs, or None."""
    if shape.S > 8:
        return f"S of {shape.S} is more than 8"
    return f"D of {shape.D} is more than 64" if shape.D > 64 else _up_to_32_channels(shape)


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
        constants=_hidden,
        unsupported=_pair_rows,
    ),
    _stage("06_tiled_gemm.cu", _outer_product_with_inputs("tiled_gemm"), constants=_hidden),
    _stage(
        "07_fused_projection.cu",
        _fused_projection,
        constants=_hidden,
        unsupported=_up_to_32_channels,
    ),
    _stage(
        "08_whole_operator.cu",
        _whole_operator,
        constants=_all_but_residues,
        unsupported=_few_rows_and_channels,
    ),
    _stage(
        "09_split_tensor_cores.cu",
        _split_tensor_cores,
        constants=_msa_and_hidden,
        unsupported=_up_to_256_and_32_channels,
    ),
    _stage(
        "10_bf16.cu",
        _bf16_tiles("bf16"),
        precision="bf16",
        constants=_msa_channels,
        unsupported=_bf16_channels,
    ),
    _stage(
        "11_hopper.cu",
        _bf16_tiles("hopper"),
        precision="bf16",
        constants=_msa_channels,
        unsupported=_bf16_channels,
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
