"""OuterProductMean by the fastest stage that supports the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_src.fused import FusedModule, check_parameters, first_that_supports
from kernels_src.operator import Stage
from kernels_src.outer_product_mean import OUTER_PRODUCT_MEAN, OuterProductMean, Parameters, Shape

FASTEST_FIRST = {
    torch.float32: ("12", "09", "07"),
    torch.bfloat16: ("11", "10"),
}
# Up to so many rows S·N of a batch, stage 13 takes less: its products grow with S·N·N, those of the others
# with N·N·(S + P), but the others' launches take 24 µs however small a call is.
FEW_ROWS = 1024
FASTEST_FIRST_OF_FEW_ROWS = {**FASTEST_FIRST, torch.float32: ("13", "12", "09", "07")}


def fastest_stage(shape: Shape, dtype: torch.dtype, device: torch.device | str | None) -> Stage:
    """The fastest stage for a call. Raises ValueError where none supports it, saying why of each."""
    few = shape.S * shape.N <= FEW_ROWS
    numbers = (FASTEST_FIRST_OF_FEW_ROWS if few else FASTEST_FIRST)[dtype]
    return first_that_supports(OUTER_PRODUCT_MEAN, numbers, shape, dtype, device)


class FusedOuterProductMean(FusedModule, OuterProductMean):
    """The reference's constructor, parameters and state_dict; forward by hand-written kernels.

    msa (B,S,N,D), float32 or bfloat16 as the parameters, mask (B,S,N) of 0 and 1 of any dtype
    → (B,N,N,P). Inference only: raises RuntimeError where gradients would be needed.
    Raises ValueError or TypeError on a bad call or where no stage supports it.
    """

    operator = OUTER_PRODUCT_MEAN
    fastest_stage = staticmethod(fastest_stage)

    @staticmethod
    def as_arguments(shape: Shape, parameters: Sequence[Tensor]) -> Parameters:
        """What stages take in place of a module that has these parameters."""
        return Parameters._make(parameters)

    def as_custom_op(self, msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
        """The call as one node of a graph."""
        return outer_product_mean(msa, mask, parameters)


@torch.library.custom_op("foldfuse::outer_product_mean", mutates_args=())
def outer_product_mean(msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
    """The operator for torch.compile: `parameters` in the module's order."""
    named = Parameters._make(parameters)
    shape = Shape(*msa.shape, len(named.proj_a_bias), len(named.out_bias))
    check_parameters(OUTER_PRODUCT_MEAN, shape, parameters)
    stage = fastest_stage(shape, msa.dtype, msa.device)
    return stage.run(stage.load(shape), named, msa.contiguous(), mask)


@outer_product_mean.register_fake
def _(msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
    residues = msa.shape[2]
    return msa.new_empty(msa.shape[0], residues, residues, parameters[-1].shape[0])
