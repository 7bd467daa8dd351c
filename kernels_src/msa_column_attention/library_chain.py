"""Column attention as the best chains of library calls that we know: the peers of the stages.

Compiled projections around a library's attention core. The mask is passed as (columns, 1, 1, S), to be
broadcast over heads and rows; expanded to (columns, H, S, S) it would be read S·H times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from kernels_src.msa_column_attention.reference import MSAColumnAttention

Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v (columns,H,S,d), keep (columns,S)

compile_fixed = partial(torch.compile, dynamic=False)


def chain(module: MSAColumnAttention, core: Core, optimize: Callable = compile_fixed) -> Callable:
    """LayerNorm and projections, an attention core, and gate and output projection."""

    @optimize
    def before(msa: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = module.layer_norm(msa.transpose(1, 2)).flatten(0, 1)  # (columns,S,D)
        q, k, v = (
            linear(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for linear in (module.query, module.key, module.value)
        )
        return q, k, v, module.gate(x).sigmoid(), (mask != 0).transpose(1, 2).flatten(0, 1)

    @optimize
    def after(attended: Tensor, gate: Tensor, batch: int) -> Tensor:
        gated = attended.transpose(1, 2).flatten(2) * gate
        return module.out_proj(gated).unflatten(0, (batch, -1)).transpose(1, 2)

    def call(msa: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            q, k, v, gate, keep = before(msa, mask)
            return after(core(q, k, v, keep), gate, msa.shape[0])

    return call


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """PyTorch's attention with the mask as a bias; cuDNN's kernel where it takes the dtype."""
    bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill_(~keep, float("-inf"))[:, None, None]
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def flash_without_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Flash attention, which takes no mask: masked keys are attended to like any other."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def flex(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """FlexAttention, which generates a kernel for the mask; it needs 16 channels a head."""
    channels = q.shape[-1]
    q, k, v = (F.pad(x, (0, max(0, 16 - channels))) for x in (q, k, v))

    def masked(score: Tensor, column: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return torch.where(keep[column, key], score, float("-inf"))

    return flex_attention(q, k, v, score_mod=masked, scale=channels**-0.5)[..., :channels]


def flex_chain(module: MSAColumnAttention, optimize: Callable = compile_fixed) -> Callable:
    """The chain with FlexAttention, whose core is compiled or would not be fused."""
    return chain(module, optimize(flex), optimize)


CHAINS: dict[str, Callable[[MSAColumnAttention], Callable]] = {
    "library_chain": partial(chain, core=scaled_dot_product),
    "library_chain_flex": flex_chain,
    "library_chain_no_mask": partial(chain, core=flash_without_mask),
}
