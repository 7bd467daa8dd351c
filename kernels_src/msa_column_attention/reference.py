"""Gated MSA column attention in plain PyTorch: the truth that every stage is compared with.

The operator is AlphaFold 2's MSAColumnAttention (Jumper et al. 2021, supplement, algorithm 8): each
residue column attends over the rows of the alignment, never across columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels_src.operator import Cost, check_inputs


class Shape(NamedTuple):
    """B batch, S rows of the alignment, N residues, D channels, H heads; d = D/H channels a head."""

    B: int
    S: int
    N: int
    D: int
    H: int


class MSAColumnAttention(nn.Module):
    """LayerNorm, gated attention over the rows of each column, output projection.

    Raises ValueError where num_heads does not divide msa_dim.
    """

    def __init__(self, msa_dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        if num_heads < 1 or msa_dim < 1 or msa_dim % num_heads:
            raise ValueError(
                f"num_heads: must divide msa_dim, got msa_dim {msa_dim} and num_heads {num_heads}"
            )
        self.num_heads = num_heads
        self.layer_norm = nn.LayerNorm(msa_dim)
        self.query = nn.Linear(msa_dim, msa_dim, bias=False)
        self.key = nn.Linear(msa_dim, msa_dim, bias=False)
        self.value = nn.Linear(msa_dim, msa_dim, bias=False)
        self.gate = nn.Linear(msa_dim, msa_dim)
        self.out_proj = nn.Linear(msa_dim, msa_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, msa: Tensor, mask: Tensor) -> Tensor:
        """msa (B,S,N,D) and mask (B,S,N) of 0 and 1 → (B,S,N,D).

        A column whose mask is all zero gives NaN in that column.
        """
        x = self.layer_norm(msa.transpose(1, 2))  # (B,N,S,D)
        q, k, v = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B,N,H,S,S)
        keys = (mask != 0).transpose(1, 2)[:, :, None, None, :]  # (B,N,1,1,S)
        weights = scores.masked_fill(~keys, float("-inf")).softmax(-1)
        attended = (self.dropout(weights) @ v).transpose(2, 3).flatten(3)  # (B,N,S,D)
        gated = attended * torch.sigmoid(self.gate(x))
        return self.out_proj(gated).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        """(B,N,S,D) → (B,N,H,S,d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(2, 3)


def shape_of(module: MSAColumnAttention, msa: Tensor, mask: Tensor) -> Shape:
    """The shape of a call. Raises ValueError or TypeError naming a bad argument."""
    check_inputs(module, msa, mask)
    return Shape(*msa.shape, module.num_heads)


def build(shape: Shape) -> MSAColumnAttention:
    """The reference for a shape, with its default parameters."""
    return MSAColumnAttention(shape.D, shape.H)


def costs(shape: Shape) -> dict[str, Cost]:
    """Operations of each part, from the matrix products' sizes: 2·m·n·k each."""
    B, S, N, D, H = shape
    rows = B * S * N
    return {
        "query, key, value, gate": Cost(2 * rows * D * 4 * D, rows * D),  # the sigmoid's exponential
        "scores": Cost(2 * rows * S * D),
        "softmax": Cost(0, rows * S * H),
        "values": Cost(2 * rows * S * D),
        "out_proj": Cost(2 * rows * D * D),
    }


def least_bytes(shape: Shape, element_bytes: int) -> int:
    """Bytes that any implementation moves: msa, mask and parameters read once, the output written once."""
    B, S, N, D, _ = shape
    rows = B * S * N
    parameters = 5 * D * D + 4 * D
    return element_bytes * (2 * rows * D + rows + parameters)


SHAPES = {
    "seed": Shape(2, 8, 32, 64, 4),
    "af2": Shape(1, 512, 384, 256, 8),
    "extra": Shape(1, 1024, 384, 64, 8),
    "extra_long": Shape(1, 5120, 384, 64, 8),
    "odd": Shape(2, 7, 13, 40, 5),
}
ODD_SHAPES = (
    Shape(1, 1, 3, 24, 3),  # one row, d 8
    Shape(2, 9, 5, 64, 4),  # d 16
    Shape(1, 33, 2, 96, 4),  # d 24
    Shape(1, 43, 3, 48, 3),
    Shape(1, 17, 2, 128, 1),  # d 128
    Shape(1, 1025, 1, 16, 2),
)
