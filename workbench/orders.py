"""PyTorch with its sums in another order: equal in mathematics, with other rounding errors.

On a small problem the largest error is a matter of luck: one order of summation may by chance come several
times as close to the answer as another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # which argument is the left matrix


class AnotherOrder(TorchDispatchMode):
    """While active, matrix products, LayerNorm, softmax and sums along axes are summed in a random order.

    Other functions are computed as always.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch's compiler, which sees none of this, would be imported to be told so: a second's work."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = function.overloadpacket
        if name in PRODUCTS:
            left = PRODUCTS[name]
            a, b = arguments[left : left + 2]
            order = self._order(a, -1)
            a, b = a.index_select(-1, order), b.index_select(-2, order)
            return function(*arguments[:left], a, b, *arguments[left + 2 :], **options)
        if name is aten.native_layer_norm and len(arguments[1]) == 1:
            x, shape, *affine, epsilon = arguments
            order = self._order(x, -1)
            affine = [each if each is None else each[order] for each in affine]
            y, *moments = function(x.index_select(-1, order), shape, *affine, epsilon)
            return y.index_select(-1, order.argsort()), *moments
        if name is aten._softmax:
            x, axis, *rest = arguments
            order = self._order(x, axis)
            return function(x.index_select(axis, order), axis, *rest).index_select(axis, order.argsort())
        if name in (aten.sum, aten.mean) and len(arguments) > 1:
            x, axes, *rest = arguments
            for axis in axes or ():
                x = x.index_select(axis, self._order(x, axis))
            return function(x, axes, *rest, **options)
        return function(*arguments, **options)

    def _order(self, x: Tensor, axis: int) -> Tensor:
        """A random order of an axis."""
        return torch.randperm(x.shape[axis], generator=self.generator).to(x.device)
