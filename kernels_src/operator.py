"""Operator and stage: the two ideas that the rest of the project is written in terms of.

An *operator* is a PyTorch reference with its shapes, inputs and costs. A *stage* is one CUDA file that
computes the operator, together with the Python that calls it. A *result* (workbench/results.py) is what
a stage measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import jit_loader

Precision = Literal["fp32", "tf32", "bf16"]


def no_constants(shape: Any) -> dict[str, int]:
    """Constants of a stage that takes every size at run time."""
    return {}


def every_shape(shape: Any) -> None:
    """Supports of a stage that takes every shape."""


@dataclass(frozen=True)
class Stage:
    """One fusion stage: a CUDA source and the Python that calls it.

    `run(kernels, module, msa, mask)` returns the operator's output; `kernels` has one callable for each
    EXPORT function of the source. `constants(shape)` gives the preprocessor defines to compile with.
    `unsupported(shape)` says why a shape is not supported, or None. `shape_of(module, msa, mask)`
    validates a call and returns its shape; it raises ValueError or TypeError naming the argument.
    """

    source: Path
    run: Callable[[Any, nn.Module, Tensor, Tensor], Tensor]
    shape_of: Callable[[nn.Module, Tensor, Tensor], Any]
    precision: Precision = "fp32"
    constants: Callable[[Any], Mapping[str, int]] = no_constants
    unsupported: Callable[[Any], str | None] = every_shape
    on_cpu: bool = True  # False: uses instructions that have no CPU model
    capability: str | None = None  # of the GPU that it needs: "9.0" is that or later, "9.0a" that alone
    text: str | None = None  # an edited source that stands in for the file's, see `variant`
    label: str | None = None  # the name of a variant

    @property
    def number(self) -> str:
        """The stage's two digits, such as "03"."""
        return self.source.name[:2]

    @property
    def name(self) -> str:
        """The file's name without its ending, such as "03_single_kernel", or the variant's name."""
        return self.label or self.source.stem

    @property
    def code(self) -> str:
        """The CUDA source."""
        return self.source.read_text() if self.text is None else self.text

    @property
    def title(self) -> str:
        """The stage's name in words: the header's first line, which is the only place that states it."""
        first = self.code.split("\n", 1)[0]
        return first.removeprefix("// Stage").strip().partition(":")[2].strip()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of msa and of the parameters that this stage takes."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def variant(self, text: str, label: str) -> Stage:
        """The same stage with another source text."""
        return replace(self, text=text, label=label)

    def unfit(self, device: torch.device | str) -> str | None:
        """Why it cannot run on a device, or None; without a GPU, "cuda" stands for one that will do."""
        device = torch.device(device)
        if device.type == "cpu":
            return None if self.on_cpu else "has no CPU model"
        if self.capability is None or not torch.cuda.is_available():
            return None
        needed, alone = self.capability.removesuffix("a"), self.capability.endswith("a")
        lowest, has = tuple(map(int, needed.split("."))), torch.cuda.get_device_capability(device)
        if has == lowest or (has > lowest and not alone):
            return None
        wanted = needed if alone else f"{needed} or later"
        return f"needs a GPU of compute capability {wanted}, this one has {has[0]}.{has[1]}"

    def load(self, shape: Any) -> jit_loader.Kernels:
        """The compiled source for a shape. Raises ValueError where the shape is not supported."""
        reason = self.unsupported(shape)
        if reason:
            raise ValueError(f"stage {self.name} does not support {shape}: {reason}")
        source = self.source if self.text is None else self.text
        return jit_loader.load(source, defines=dict(self.constants(shape)), name=self.name)

    def __call__(self, module: nn.Module, msa: Tensor, mask: Tensor) -> Tensor:
        """The operator's output. Raises ValueError or TypeError on a bad call, before any launch."""
        shape = self.shape_of(module, msa, mask)
        if msa.dtype != self.dtype:
            raise TypeError(
                f"msa: stage {self.name} takes {self.dtype}, got {msa.dtype}; cast module and msa"
            )
        if reason := self.unfit(msa.device):
            raise ValueError(f"msa: stage {self.name} {reason}, got a tensor on {msa.device}")
        with torch.no_grad():
            return self.run(self.load(shape), module, msa, mask)


class Cost(NamedTuple):
    """What one part of an operator must do, whatever computes it."""

    matrix_operations: int  # a multiply-add counts as two
    exponentials: int = 0


@dataclass(frozen=True)
class Operator:
    """A PyTorch reference with its shapes, inputs, costs and stages."""

    name: str
    title: str
    reference: type[nn.Module]
    shapes: Mapping[str, Any]  # by name; each a NamedTuple
    odd_shapes: tuple[Any, ...]  # for tests: nothing divides anything
    build: Callable[[Any], nn.Module]  # shape -> the reference with its default parameters
    costs: Callable[[Any], Mapping[str, Cost]]  # shape -> part -> cost
    least_bytes: Callable[[Any, int], int]  # shape, bytes an element -> each input and output once
    stages: tuple[Stage, ...]
    # Axes of the output that run over residues: the operator on some residues of its inputs gives those
    # residues of its output. None given: the output of some residues depends on the others too.
    residue_axes: tuple[int, ...] = ()

    def stage(self, number: str | int) -> Stage:
        """The stage with this number or file name. Raises KeyError naming those that exist."""
        wanted = f"{number:02}" if isinstance(number, int) else number
        for stage in self.stages:
            if wanted in (stage.number, stage.name):
                return stage
        have = ", ".join(stage.name for stage in self.stages)
        raise KeyError(f"{self.name} has no stage {number!r}; it has {have}")

    def module(self, shape: Any, seed: int = 0, *, device: str = "cpu", dtype=torch.float32) -> nn.Module:
        """The reference with random parameters, biases and the LayerNorm's scale and shift included."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.build(shape)
            for parameter in module.parameters():
                if parameter.ndim == 1:  # a default LayerNorm (ones and zeros) would hide a missing scale
                    parameter.data += 0.1 * torch.randn_like(parameter)
        return module.requires_grad_(False).eval().to(device=device, dtype=dtype)

    def inputs(
        self, shape: Any, seed: int = 0, *, device: str = "cpu", dtype=torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Random msa (B,S,N,D) and mask (B,S,N) of 0 and 1 with zeros anywhere, both of `dtype`.

        Row 0 is kept, as the query sequence of an MSA is, so that no column is masked throughout.
        """
        generator = torch.Generator().manual_seed(seed)
        msa = torch.randn(shape.B, shape.S, shape.N, shape.D, generator=generator)
        mask = (torch.rand(shape.B, shape.S, shape.N, generator=generator) < 0.85).float()
        mask[:, 0] = 1
        return msa.to(device=device, dtype=dtype), mask.to(device=device, dtype=dtype)


def under_autocast(tensor: Tensor) -> bool:
    """Whether autocast chooses the dtype that PyTorch's own layers would compute with on this device."""
    return torch.is_autocast_enabled("cuda" if tensor.is_cuda else "cpu")


def check_inputs(module: nn.Module, msa: Tensor, mask: Tensor) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the call makes sense for both operators."""
    width = module.layer_norm.normalized_shape[0]
    weight = module.layer_norm.weight
    for name, tensor in (("msa", msa), ("mask", mask)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if msa.ndim != 4 or msa.shape[-1] != width:
        raise ValueError(f"msa: expected (B, S, N, {width}), got {tuple(msa.shape)}")
    if 0 in msa.shape:
        raise ValueError(f"msa: every dimension must be at least 1, got {tuple(msa.shape)}")
    if mask.shape != msa.shape[:3]:
        raise ValueError(f"mask: expected {tuple(msa.shape[:3])} as msa has it, got {tuple(mask.shape)}")
    if mask.is_complex():
        raise TypeError(f"mask: expected 0 and 1 of a real dtype, got {mask.dtype}")
    if msa.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"msa: expected float32 or bfloat16, got {msa.dtype}")
    if weight.dtype != msa.dtype and not under_autocast(msa):
        raise TypeError(f"msa: expected {weight.dtype} as the module's parameters, got {msa.dtype}")
    for name, tensor in (("mask", mask), ("module", weight)):
        if tensor.device != msa.device:
            raise ValueError(f"{name}: expected on {msa.device} with msa, got {tensor.device}")
    if not msa.is_contiguous():
        raise ValueError(f"msa: must be contiguous, got strides {msa.stride()}; call msa.contiguous() first")
