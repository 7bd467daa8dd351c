"""Memory with a guard band on both sides, to catch writes just outside of an output or workspace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BAND_BYTES = 4096
SENTINEL = 0xA5

ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default,
)


class GuardedMemory(TorchDispatchMode):
    """While active, `torch.empty` and its like give memory between two bands, and NaN in it where it can be.

    `damaged()` says which allocations had a band written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[tuple[int, ...], Tensor, int]] = []  # shape, bytes with bands, bytes between

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        return self._guarded(result) if function in ALLOCATIONS and result.is_contiguous() else result

    def damaged(self) -> list[str]:
        """One line for each allocation whose surroundings were written to."""
        found = []
        for shape, buffer, size in self.buffers:
            bands = {"before": buffer[:BAND_BYTES], "after": buffer[BAND_BYTES + size :]}
            found += [
                f"{place} {shape}" for place, band in bands.items() if not bool((band == SENTINEL).all())
            ]
        return found

    def _guarded(self, plain: Tensor) -> Tensor:
        size = plain.numel() * plain.element_size()
        padded = -size % 16  # the band begins right behind the last element
        buffer = torch.full(
            (2 * BAND_BYTES + size + padded,), SENTINEL, dtype=torch.uint8, device=plain.device
        )
        self.buffers.append((tuple(plain.shape), buffer, size))
        guarded = buffer[BAND_BYTES : BAND_BYTES + size].view(plain.dtype).view(plain.shape)
        return guarded.fill_(float("nan")) if plain.is_floating_point() else guarded
