"""MSAColumnAttention by the fastest stage that supports the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_src.msa_column_attention import (
    MSA_COLUMN_ATTENTION,
    MSAColumnAttention,
    Parameters,
    Shape,
)
from kernels_src.msa_column_attention.reference import shape_of
from kernels_src.operator import Stage

# Up to so many rows B·S·N one launch, that reads the weights once a column, beats several that share them.
LAUNCH_BOUND_ROWS = 8192
FASTEST_FIRST = {
    torch.float32: ("10", "09", "07", "08", "06", "03"),
    torch.bfloat16: ("12", "11"),
}
FASTEST_FIRST_OF_FEW_ROWS = {**FASTEST_FIRST, torch.float32: ("09", "07", "10", "08", "06", "03")}


def fastest_stage(shape: Shape, dtype: torch.dtype, device_type: str) -> Stage:
    """The fastest stage for a call. Raises ValueError where none supports it, saying why of each."""
    few = shape.B * shape.S * shape.N <= LAUNCH_BOUND_ROWS
    reasons = []
    for number in (FASTEST_FIRST_OF_FEW_ROWS if few else FASTEST_FIRST)[dtype]:
        stage = MSA_COLUMN_ATTENTION.stage(number)
        reason = stage.unsupported(shape)
        if device_type == "cpu" and not stage.on_cpu:
            reason = "has no CPU model"
        if not reason:
            return stage
        reasons.append(f"{stage.name}: {reason}")
    raise ValueError(f"msa: no stage supports {shape} in {dtype}; {'; '.join(reasons)}")


class FusedMSAColumnAttention(MSAColumnAttention):
    """The reference's constructor, parameters and state_dict; forward by hand-written kernels.

    msa (B,S,N,D), float32 or bfloat16 as the parameters, mask (B,S,N) of 0 and 1 of any dtype
    → (B,S,N,D). Inference only: raises RuntimeError where gradients or dropout would be needed.
    Raises ValueError or TypeError on a bad call or where no stage supports it.
    """

    def __init__(self, msa_dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__(msa_dim, num_heads, dropout)
        self._calls: dict[Any, Callable[..., Tensor]] = {}  # what has been checked and loaded before

    def forward(self, msa: Tensor, mask: Tensor) -> Tensor:
        """msa (B,S,N,D) and mask (B,S,N) → (B,S,N,D)."""
        self._refuse_training(msa)
        if type(msa) is not Tensor or type(mask) is not Tensor or torch.compiler.is_compiling():
            shape_of(self, msa, mask)
            parameters = [parameter.detach() for parameter in self.parameters()]
            return msa_column_attention(msa, mask, parameters, self.num_heads)
        weight = self._modules["layer_norm"]._parameters["weight"]
        key = (msa.shape, msa.dtype, msa.device, weight.dtype, weight.device)
        key += (mask.shape, mask.dtype, mask.device)
        call = self._calls.get(key)
        if call is None or not msa.is_contiguous():
            call = self._calls[key] = self._checked_call(msa, mask)
        return call(self, msa, mask)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": {}}  # for copies and pickles: they load their own

    def _checked_call(self, msa: Tensor, mask: Tensor) -> Callable[..., Tensor]:
        shape = shape_of(self, msa, mask)
        stage = fastest_stage(shape, msa.dtype, msa.device.type)
        kernels = stage.load(shape)
        return lambda module, msa, mask: stage.run(kernels, module, msa, mask)

    def _refuse_training(self, msa: Tensor) -> None:
        if self.training and self.dropout.p > 0:
            raise RuntimeError("dropout: the fused operator is for inference; call eval() first")
        if not torch.is_grad_enabled():
            return
        if isinstance(msa, Tensor) and msa.requires_grad:
            raise RuntimeError("msa: the fused operator has no backward; detach msa or use torch.no_grad()")
        if self.training and any(parameter.requires_grad for parameter in self.parameters()):
            raise RuntimeError(
                "parameters: the fused operator has no backward; call eval() or use torch.no_grad()"
            )


@torch.library.custom_op("foldfuse::msa_column_attention", mutates_args=())
def msa_column_attention(msa: Tensor, mask: Tensor, parameters: list[Tensor], num_heads: int) -> Tensor:
    """The operator for torch.compile: `parameters` in the module's order."""
    shape = Shape(*msa.shape, num_heads)
    stage = fastest_stage(shape, msa.dtype, msa.device.type)
    return stage.run(stage.load(shape), Parameters(num_heads, tuple(parameters)), msa.contiguous(), mask)


@msa_column_attention.register_fake
def _(msa: Tensor, mask: Tensor, parameters: list[Tensor], num_heads: int) -> Tensor:
    return torch.empty_like(msa, memory_format=torch.contiguous_format)
