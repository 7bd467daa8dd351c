"""MSAColumnAttention by the fastest stage that supports the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_src.fused import FusedModule, check_parameters, first_that_supports
from kernels_src.msa_column_attention import (
    MSA_COLUMN_ATTENTION,
    MSAColumnAttention,
    Parameters,
    Shape,
)
from kernels_src.operator import Stage

# Up to so many rows B·S·N one launch, that reads the weights once a column, beats several that share them.
LAUNCH_BOUND_ROWS = 8192
FASTEST_FIRST = {
    torch.float32: ("10", "09", "07", "08", "06", "03"),
    torch.bfloat16: ("12", "11"),
}
FASTEST_FIRST_OF_FEW_ROWS = {**FASTEST_FIRST, torch.float32: ("09", "07", "10", "08", "06", "03")}


def fastest_stage(shape: Shape, dtype: torch.dtype, device: torch.device | str | None) -> Stage:
    """The fastest stage for a call. Raises ValueError where none supports it, saying why of each."""
    few = shape.B * shape.S * shape.N <= LAUNCH_BOUND_ROWS
    numbers = (FASTEST_FIRST_OF_FEW_ROWS if few else FASTEST_FIRST)[dtype]
    return first_that_supports(MSA_COLUMN_ATTENTION, numbers, shape, dtype, device)


class FusedMSAColumnAttention(FusedModule, MSAColumnAttention):
    """The reference's constructor, parameters and state_dict; forward by hand-written kernels.

    msa (B,S,N,D), float32 or bfloat16 as the parameters, mask (B,S,N) of 0 and 1 of any dtype
    → (B,S,N,D). Inference only: raises RuntimeError where gradients or dropout would be needed.
    Raises ValueError or TypeError on a bad call or where no stage supports it.
    """

    operator = MSA_COLUMN_ATTENTION
    fastest_stage = staticmethod(fastest_stage)

    @staticmethod
    def as_arguments(shape: Shape, parameters: Sequence[Tensor]) -> Parameters:
        """What stages take in place of a module that has these parameters."""
        return Parameters(shape.H, tuple(parameters))

    def as_custom_op(self, msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
        """The call as one node of a graph."""
        return msa_column_attention(msa, mask, parameters, self.num_heads)

    def refuse_training(self, msa: Tensor) -> None:
        """Raise RuntimeError where a call would need dropout or a backward."""
        if self.training and self.dropout.p > 0:
            raise RuntimeError("dropout: the fused operator is for inference; call eval() first")
        super().refuse_training(msa)


@torch.library.custom_op("foldfuse::msa_column_attention", mutates_args=())
def msa_column_attention(msa: Tensor, mask: Tensor, parameters: list[Tensor], num_heads: int) -> Tensor:
    """The operator for torch.compile: `parameters` in the module's order."""
    shape = Shape(*msa.shape, num_heads)
    check_parameters(MSA_COLUMN_ATTENTION, shape, parameters)
    stage = fastest_stage(shape, msa.dtype, msa.device)
    return stage.run(stage.load(shape), Parameters(num_heads, tuple(parameters)), msa.contiguous(), mask)


@msa_column_attention.register_fake
def _(msa: Tensor, mask: Tensor, parameters: list[Tensor], num_heads: int) -> Tensor:
    return torch.empty_like(msa, memory_format=torch.contiguous_format)
