"""What the fused modules share: the choice of a stage, and calls that cost little once they were checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import is_
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from kernels_src.operator import Operator, Stage, under_autocast

KEPT_CALLS = 8  # of a module, each for another size of msa


def first_that_supports(
    operator: Operator,
    numbers: Sequence[str],
    shape: Any,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Stage:
    """The first of these stages that supports a call. Raises ValueError where none does, and why of each."""
    reasons = []
    for number in numbers:
        stage = operator.stage(number)
        reason = stage.unsupported(shape) or (device and stage.unfit(device))
        if not reason:
            return stage
        reasons.append(f"{stage.name}: {reason}")
    raise ValueError(f"msa: no stage supports {shape} in {dtype}; {'; '.join(reasons)}")


def check_parameters(operator: Operator, shape: Any, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError, naming a parameter, unless all have the reference's shapes: kernels trust them."""
    expected = _parameter_shapes(operator.build, shape)
    if len(parameters) != len(expected):
        raise ValueError(f"parameters: expected {', '.join(expected)}; got {len(parameters)} tensors")
    for (name, wanted), parameter in zip(expected.items(), parameters, strict=True):
        if parameter.shape != wanted:
            raise ValueError(f"{name}: expected {tuple(wanted)}, got {tuple(parameter.shape)}")


@cache
def _parameter_shapes(build: Callable[[Any], nn.Module], shape: Any) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build(shape).named_parameters()}


class CheckedCall(NamedTuple):
    """What is kept of a call that was right, for later ones like it."""

    is_like: Callable[..., bool]  # whether msa, mask and parameters differ from its own in addresses at most
    parameter_count: int
    repeat: Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]  # of msa, mask and parameters


Launches = list[tuple[str, tuple[Any, ...]]]  # of a stage's run: names and arguments


def noting(kernels: Any, launches: Launches) -> SimpleNamespace:
    """The functions of `kernels`, which also note their calls."""

    def noted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            launches.append((name, arguments))
            function(*arguments)

        return call

    functions = {name: getattr(kernels, name) for name in vars(kernels.repeats)}
    return SimpleNamespace(**{name: noted(name, function) for name, function in functions.items()})


def single_launch(launches: Launches, inputs: Sequence[Tensor], output: Tensor) -> tuple[str, tuple] | None:
    """Name and numbers of the one launch that made an output like msa from all inputs in order, or None."""
    if len(launches) != 1 or output.shape != inputs[0].shape:
        return None
    [(name, arguments)] = launches
    numbers = arguments[len(inputs) + 1 :]
    in_order = all(map(is_, arguments, (*inputs, output)))
    return (name, numbers) if in_order and not any(isinstance(each, Tensor) for each in numbers) else None


class FusedModule(nn.Module):
    """Forward by the fastest stage; a base class that comes before the operator's reference.

    A call like one before costs little: one function of PyTorch compares dtype, device, sizes and strides of
    every tensor, and whether autocast or a transform is at work; what follows of these is not checked again.
    Under autocast the result has the dtype that the reference's has; it is computed in bfloat16 where that is
    autocast's dtype, else in float32.
    """

    operator: Operator
    # shape, dtype, device, None for a GPU that has all that a stage may need → stage
    fastest_stage: Callable[[Any, torch.dtype, torch.device | str | None], Stage]

    _calls: Mapping[Any, CheckedCall] = MappingProxyType({})

    @classmethod
    def of(cls, reference: nn.Module) -> FusedModule:
        """A fused module that has a reference's own layers, so that it follows their parameters."""
        fused = cls.__new__(cls)
        fused.__dict__ |= {**reference.__dict__, "_modules": dict(reference._modules)}
        return fused

    @staticmethod
    def as_arguments(shape: Any, parameters: Sequence[Tensor]) -> Any:
        """What stages take in place of a module that has these parameters."""
        raise NotImplementedError

    def as_custom_op(self, msa: Tensor, mask: Tensor, parameters: list[Tensor]) -> Tensor:
        """The call as one node of a graph, for what traces calls."""
        raise NotImplementedError

    def forward(self, msa: Tensor, mask: Tensor) -> Tensor:
        """The reference's result. Raises RuntimeError where gradients or dropout would be needed."""
        if self.training or torch.is_grad_enabled():
            self.refuse_training(msa)
        if type(msa) is not Tensor or torch.compiler.is_compiling():  # a tracer's, for example
            return self._traceable(msa, mask)
        # Read as dicts, several times quicker than through nn.Module's attributes.
        layers = self._modules.values()
        parameters = [p for layer in layers for p in layer._parameters.values() if p is not None]
        call = self._calls.get(msa.shape)
        if call and len(parameters) == call.parameter_count and call.is_like(msa, mask, *parameters):
            return call.repeat(msa, mask, parameters)
        if type(mask) is not Tensor or under_autocast(msa):
            return self._traceable(msa, mask)
        return self._checked(msa, mask, parameters)

    def refuse_training(self, msa: Tensor) -> None:
        """Raise RuntimeError, naming what would need it, where a call would need a backward."""
        if not torch.is_grad_enabled():
            return
        if isinstance(msa, Tensor) and msa.requires_grad:
            raise RuntimeError("msa: the fused operator has no backward; detach msa or use torch.no_grad()")
        if self.training and any(parameter.requires_grad for parameter in self.parameters()):
            raise RuntimeError(
                "parameters: the fused operator has no backward; call eval() or use torch.no_grad()"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": {}}  # copies and pickles load their own

    def _checked(self, msa: Tensor, mask: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The result of a call that may be wrong, which is kept if it was right."""
        shape = self.operator.stages[0].shape_of(self, msa, mask)
        check_parameters(self.operator, shape, parameters)
        stage = self.fastest_stage(shape, msa.dtype, msa.device)
        kernels = stage.load(shape)
        launches: Launches = []
        output = stage.run(noting(kernels, launches), self.as_arguments(shape, parameters), msa, mask)
        guards = TensorGuards(msa, mask, *parameters, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        launch = single_launch(launches, (msa, mask, *parameters), output)
        repeat = self._repeat(stage, shape, kernels.repeats, launch)
        call = CheckedCall(guards.check, len(parameters), repeat)
        kept = [*self._calls.items()][1 - KEPT_CALLS :]
        self._calls = {**dict(kept), msa.shape: call}
        return output

    def _repeat(
        self, stage: Stage, shape: Any, kernels: Any, launch: tuple[str, tuple] | None
    ) -> Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]:
        """What a later call does, with kernels that look at addresses alone.

        Where a stage launches one kernel and does nothing else, its own Python is left out.
        """
        if launch is None:
            run, as_arguments = stage.run, self.as_arguments  # not the module, which has its calls
            return lambda msa, mask, parameters: run(kernels, as_arguments(shape, parameters), msa, mask)
        function, numbers = getattr(kernels, launch[0]), launch[1]

        def repeat(msa: Tensor, mask: Tensor, parameters: Sequence[Tensor]) -> Tensor:
            output = torch.empty_like(msa)
            function(msa, mask, *parameters, output, *numbers)
            return output

        return repeat

    def _traceable(self, msa: Tensor, mask: Tensor) -> Tensor:
        parameters = [parameter.detach() for parameter in self.parameters()]
        wanted = _autocast_dtype(msa)
        if wanted:
            dtype = torch.bfloat16 if wanted is torch.bfloat16 else torch.float32
            msa, parameters = msa.to(dtype), [parameter.to(dtype) for parameter in parameters]
        self.operator.stages[0].shape_of(self, msa, mask)
        output = self.as_custom_op(msa, mask, parameters)
        return output.to(wanted) if wanted else output


def _autocast_dtype(msa: Tensor) -> torch.dtype | None:
    """The dtype that autocast would have the reference compute in; None where it leaves it alone."""
    if not isinstance(msa, Tensor) or not under_autocast(msa):
        return None
    if msa.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return torch.get_autocast_dtype(msa.device.type)
