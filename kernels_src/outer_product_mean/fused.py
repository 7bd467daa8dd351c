"""OuterProductMean by the fastest stage that supports the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_src.operator import Stage
from kernels_src.outer_product_mean import OUTER_PRODUCT_MEAN, OuterProductMean, Parameters, Shape
from kernels_src.outer_product_mean.reference import shape_of

FASTEST_FIRST = {
    torch.float32: ("12", "09", "07"),
    torch.bfloat16: ("11", "10"),
}
# Up to so many residues one launch that recomputes its inputs beats several that share them.
LAUNCH_BOUND_RESIDUES = 128
FASTEST_FIRST_OF_FEW_RESIDUES = {**FASTEST_FIRST, torch.float32: ("08", "12", "09", "07")}


def fastest_stage(shape: Shape, dtype: torch.dtype, device_type: str) -> Stage:
    """The fastest stage for a call. Raises ValueError where none supports it, saying why of each."""
    few = shape.N <= LAUNCH_BOUND_RESIDUES
    reasons = []
    for number in (FASTEST_FIRST_OF_FEW_RESIDUES if few else FASTEST_FIRST)[dtype]:
        stage = OUTER_PRODUCT_MEAN.stage(number)
        reason = stage.unsupported(shape)
        if device_type == "cpu" and not stage.on_cpu:
            reason = "has no CPU model"
        if not reason:
            return stage
        reasons.append(f"{stage.name}: {reason}")
    raise ValueError(f"msa: no stage supports {shape} in {dtype}; {'; '.join(reasons)}")


class FusedOuterProductMean(OuterProductMean):
    """The reference's constructor, parameters and state_dict; forward by hand-written kernels.

    msa (B,S,N,D), float32 or bfloat16 as the parameters, mask (B,S,N) of 0 and 1 of any dtype
    → (B,N,N,P). Inference only: raises RuntimeError where gradients would be needed.
    Raises ValueError or TypeError on a bad call or where no stage supports it.
    """

    def __init__(self, msa_dim: int, pair_dim: int, hidden_dim: int = 32):
        super().__init__(msa_dim, pair_dim, hidden_dim)
        self._calls: dict[Any, Callable[..., Tensor]] = {}  # what has been checked and loaded before

    def forward(self, msa: Tensor, mask: Tensor) -> Tensor:
        """msa (B,S,N,D) and mask (B,S,N) → (B,N,N,P)."""
        self._refuse_training(msa)
        if type(msa) is not Tensor or type(mask) is not Tensor or torch.compiler.is_compiling():
            shape_of(self, msa, mask)
            return outer_product_mean(msa, mask, [parameter.detach() for parameter in self.parameters()])
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
        if not torch.is_grad_enabled():
            return
        if isinstance(msa, Tensor) and msa.requires_grad:
            raise RuntimeError("msa: the fused operator has no backward; detach msa or use torch.no_grad()")
        if self.training and any(parameter.requires_grad for parameter in self.parameters()):
            raise RuntimeError(
                "parameters: the fused operator has no backward; call eval() or use torch.no_grad()"
            )


@torch.library.custom_op("foldfuse::outer_product_mean", mutates_args=())
def outer_product_mean(msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
    """The operator for torch.compile: `parameters` in the module's order."""
    named = Parameters(*parameters)
    shape = Shape(*msa.shape, len(named.proj_a_bias), len(named.out_bias))
    stage = fastest_stage(shape, msa.dtype, msa.device.type)
    return stage.run(stage.load(shape), named, msa.contiguous(), mask)


@outer_product_mean.register_fake
def _(msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
    residues = msa.shape[2]
    return msa.new_empty(msa.shape[0], residues, residues, parameters[-1].shape[0])
