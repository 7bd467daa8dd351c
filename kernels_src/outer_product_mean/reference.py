"""Outer product mean in plain PyTorch: the truth that every stage is compared with.

The operator is AlphaFold 2's OuterProductMean (Jumper et al. 2021, supplement, algorithm 10), with the
mean taken before the output projection and over the rows in which residue i is present.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels_src.operator import Cost, check_inputs


class Shape(NamedTuple):
    """B batch, S rows of the alignment, N residues, D and C channels in and hidden, P pair channels."""

    B: int
    S: int
    N: int
    D: int
    C: int
    P: int


class OuterProductMean(nn.Module):
    """LayerNorm, two projections, their outer product averaged over rows, output projection."""

    def __init__(self, msa_dim: int, pair_dim: int, hidden_dim: int = 32):
        super().__init__()
        for name, size in (("msa_dim", msa_dim), ("pair_dim", pair_dim), ("hidden_dim", hidden_dim)):
            if size < 1:
                raise ValueError(f"{name}: must be at least 1, got {size}")
        self.layer_norm = nn.LayerNorm(msa_dim)
        self.proj_a = nn.Linear(msa_dim, hidden_dim)
        self.proj_b = nn.Linear(msa_dim, hidden_dim)
        self.out_proj = nn.Linear(hidden_dim * hidden_dim, pair_dim)

    def forward(self, msa: Tensor, mask: Tensor) -> Tensor:
        """msa (B,S,N,D) and mask (B,S,N) of 0 and 1 → (B,N,N,P).

        The divisor max(1, Σ_s mask[b,s,i]) depends on i alone, so the result is not symmetric.
        """
        x = self.layer_norm(msa)
        present = mask.to(x.dtype)[..., None]
        a = self.proj_a(x) * present  # (B,S,N,C)
        b = self.proj_b(x) * present
        outer = torch.einsum("bsih,bsjk->bijhk", a, b)
        rows = mask.to(x.dtype).sum(1).clamp(min=1)  # (B,N): rows in which residue i is present
        return self.out_proj((outer / rows[:, :, None, None, None]).flatten(3))


def shape_of(module: OuterProductMean, msa: Tensor, mask: Tensor) -> Shape:
    """The shape of a call. Raises ValueError or TypeError naming a bad argument."""
    check_inputs(module, msa, mask)
    return Shape(*msa.shape, module.proj_a.out_features, module.out_proj.out_features)


def build(shape: Shape) -> OuterProductMean:
    """The reference for a shape, with its default parameters."""
    return OuterProductMean(shape.D, shape.P, shape.C)


def costs(shape: Shape) -> dict[str, Cost]:
    """Operations of each part, from the matrix products' sizes: 2·m·n·k each."""
    B, S, N, D, C, P = shape
    return {
        "proj_a, proj_b": Cost(2 * B * S * N * D * 2 * C),
        "outer product": Cost(2 * S * B * N**2 * C**2),
        "out_proj": Cost(2 * B * N**2 * C**2 * P),
    }


def least_bytes(shape: Shape, element_bytes: int) -> int:
    """Bytes that any implementation moves: msa, mask and parameters read once, the output written once."""
    B, S, N, D, C, P = shape
    parameters = 2 * D + 2 * (D * C + C) + C * C * P + P
    return element_bytes * (B * S * N * (D + 1) + parameters + B * N * N * P)


SHAPES = {
    "seed": Shape(2, 8, 32, 64, 32, 128),
    "af2": Shape(1, 512, 384, 256, 32, 128),
    "extra": Shape(1, 1024, 384, 64, 32, 128),
    "extra_long": Shape(1, 1024, 768, 64, 32, 128),
    "odd": Shape(1, 5, 11, 24, 8, 20),
}
ODD_SHAPES = (
    Shape(1, 1, 1, 8, 8, 8),
    Shape(2, 3, 7, 16, 31, 100),
    Shape(1, 33, 5, 20, 32, 128),
    Shape(1, 130, 9, 64, 32, 64),
    Shape(1, 3, 5, 16, 8, 200),  # two passes over out_proj's weights, the second not full
)
