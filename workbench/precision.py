"""Numbers of fewer bits: how much a matrix product loses by them, and how split operands win it back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from workbench.views import headed

FRACTION_BITS = {"fp32": 23, "tf32": 10, "bf16": 7}  # all three have an exponent of 8 bits
SIZE = 512  # of the matrices


def rounded(x: Tensor, format: str) -> Tensor:
    """A float32 tensor's values in another format: the nearest with that many fraction bits, ties to even."""
    dropped = 23 - FRACTION_BITS[format]
    if not dropped:
        return x
    bits = x.contiguous().view(torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    return ((bits + half) & -(1 << dropped)).view(torch.float32)


def split(x: Tensor, format: str, parts: int) -> list[Tensor]:
    """Parts of a format that add up to x but for the bits that the last one drops."""
    found = []
    for _ in range(parts):
        found.append(rounded(x, format))
        x = x - found[-1]  # exact: the part shares x's leading bits
    return found


def split_product(a: Tensor, b: Tensor, format: str, parts: int) -> Tensor:
    """a @ b as tensor cores compute it from split operands: products of parts, summed in float32.

    Of the parts² products those smaller than the last kept bit are left out: part i times part j matters
    while i + j < parts.
    """
    left, right = split(a, format, parts), split(b, format, parts)
    pairs = [(i, j) for i, j in product(range(parts), repeat=2) if i + j < parts]
    total = torch.zeros(a.shape[0], b.shape[1])
    for i, j in sorted(pairs, key=sum, reverse=True):  # the small ones first
        total += left[i] @ right[j]
    return total


def product_errors(seed: int = 0) -> pd.DataFrame:
    """Error of one matrix product from operands of each format and number of parts, against float64.

    Errors are relative to the root mean square of the product's entries.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    rows = []
    for format, parts in _kinds():
        error = (split_product(a, b, format, parts).double() - exact).abs() / exact.square().mean().sqrt()
        rows.append(
            {
                "operands": f"{format}" if parts == 1 else f"{format} in {parts} parts",
                "fraction bits": FRACTION_BITS[format],
                "products for one": parts * (parts + 1) // 2,
                "typical error": f"{error.square().mean().sqrt().item():.1e}",
                "largest error": f"{error.max().item():.1e}",
            }
        )
    return headed(pd.DataFrame(rows), "operands")


def _kinds() -> Iterator[tuple[str, int]]:
    yield from (("fp32", 1), ("tf32", 1), ("tf32", 2), ("bf16", 1), ("bf16", 2), ("bf16", 3))
