"""What was found on this machine, what will run where, and what to install."""

from __future__ import annotations

from typing import NamedTuple

import torch

import jit_loader


class Diagnosis(NamedTuple):
    """What was found, and what it means."""

    findings: list[jit_loader.Finding]
    runs_on_cpu: bool
    runs_on_gpu: bool
    compiles_for_gpu: bool  # for some GPU, present or not

    def text(self) -> str:
        """All of it, for a terminal."""
        width = max(len(finding.part) for finding in self.findings)
        lines = [f"{finding.part:{width}}  {finding.found}" for finding in self.findings]
        lines += [
            "",
            f"CPU tensors: {'stages run on the CPU' if self.runs_on_cpu else 'no stage can run'}",
            f"CUDA tensors: {self._on_gpu()}",
        ]
        return "\n".join(lines + [f"to do: {f.part}: {f.advice}" for f in self.findings if f.advice])

    def _on_gpu(self) -> str:
        if self.runs_on_gpu:
            return "stages run on the GPU"
        if torch.cuda.is_available():
            return "no stage can be compiled for the GPU"
        return f"no GPU; stages can{'' if self.compiles_for_gpu else 'not'} be compiled for one"


def examine() -> Diagnosis:
    """Look for compilers and a GPU."""
    findings = jit_loader.toolchain_report()
    missing = {finding.part for finding in findings if finding.advice}
    # The CPU too compiles CUDA's own type headers, such as cuda_bf16.h.
    compiles = not missing & {"C++ compiler", "ninja", "CUDA headers"}
    compiles_for_gpu = compiles and "nvcc" not in missing
    return Diagnosis(findings, compiles, compiles_for_gpu and torch.cuda.is_available(), compiles_for_gpu)
