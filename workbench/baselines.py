"""What PyTorch itself offers: the times that a stage is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kernels_src.operator import Operator
from workbench.selection import module_beside
from workbench.timing import Candidate, Inputs, capture

BASELINES = ("eager", "eager_graph", "compile", "compile_max_autotune", "library_chain")
"""Every baseline, in the order in which tables and plots show them; an operator's chains follow the last."""

IGNORES_MASK = "_no_mask"
"""The end of the name of a baseline that ignores the mask, so that it computes something else."""


def baselines(
    operator: Operator, module: nn.Module, inputs: Sequence[Inputs], report: Callable[[str], None]
) -> Iterator[Candidate]:
    """The baselines that work on these inputs; `report` is told about each that does not, and why."""
    torch.compiler.reset()
    for name, build in _builders(operator, module, inputs).items():
        torch.cuda.empty_cache()  # a graph being captured can't take what is merely cached
        try:
            candidate = build()
            candidate.call(*inputs[0])
            torch.cuda.synchronize()
        except Exception as error:  # whatever a library or compiler says: the others still count
            report(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        yield candidate


def _builders(
    operator: Operator, module: nn.Module, inputs: Sequence[Inputs]
) -> dict[str, Callable[[], Candidate]]:
    def compiled(name: str, mode: str | None) -> Candidate:
        return Candidate(name, torch.compile(module, mode=mode, dynamic=False))

    return {
        "eager": lambda: Candidate("eager", module, capturable=False),
        "eager_graph": lambda: Candidate("eager_graph", GraphedCall(module, inputs[0]), body=module),
        "compile": lambda: compiled("compile", None),
        "compile_max_autotune": lambda: compiled("compile_max_autotune", "max-autotune-no-cudagraphs"),
        **{
            name: lambda name=name, chain=chain: Candidate(name, chain(module))
            for name, chain in library_chains(operator).items()
        },
    }


def library_chains(operator: Operator) -> dict[str, Callable[[nn.Module], Callable[..., Tensor]]]:
    """The operator's chains of library calls by name: `CHAINS` of the library_chain.py beside its stages."""
    beside = module_beside(operator, "library_chain")
    return beside.CHAINS if beside else {}


class GraphedCall:
    """A call captured once in a CUDA graph: copies the inputs in, replays, returns the graph's own output."""

    def __init__(self, call: Callable[..., Tensor], inputs: Inputs):
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.graph, (self.output,) = capture(lambda: [call(*self.inputs)])

    def __call__(self, *inputs: Tensor) -> Tensor:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            static.copy_(tensor)
        self.graph.replay()
        return self.output
