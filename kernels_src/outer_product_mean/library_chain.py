"""Outer product mean as the best chain of library calls that we know: the peer of the stages.

A compiled prologue, the outer product as one cuBLAS matrix product, and the output projection as another.
The divisor depends on i alone, so it is taken into `a` before the product instead of touching (N,N,C²).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_src.outer_product_mean.reference import OuterProductMean

MOST_ELEMENTS = 2**28  # of (i,N,C²) at once; more is computed some i at a time

compile_fixed = partial(torch.compile, dynamic=False)


def chain(module: OuterProductMean, optimize: Callable = compile_fixed) -> Callable:
    """LayerNorm and projections, one matrix product over rows, output projection."""
    hidden = module.proj_a.out_features

    @optimize
    def before(msa: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = module.layer_norm(msa)
        present = mask.to(x.dtype)[..., None]
        rows = present.float().sum(1, keepdim=True).clamp(min=1)
        a = module.proj_a(x) * present / rows
        return a.to(x.dtype).flatten(2), (module.proj_b(x) * present).flatten(2)  # (B,S,N·C)

    def project(a: Tensor, b: Tensor) -> Tensor:
        outer = (a.mT @ b).unflatten(1, (-1, hidden)).unflatten(-1, (-1, hidden))  # (B,i,h,j,k)
        return F.linear(outer.transpose(2, 3).flatten(3), module.out_proj.weight, module.out_proj.bias)

    def call(msa: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            a, b = before(msa, mask)
            residues = max(1, MOST_ELEMENTS // (b.shape[0] * b.shape[2] * hidden))
            blocks = [project(block, b) for block in a.split(residues * hidden, dim=2)]
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    return call


CHAINS: dict[str, Callable[[OuterProductMean], Callable]] = {"library_chain": chain}
