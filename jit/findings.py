"""What of the toolchain is there, and what to do where something lacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from jit.cache import cache_folder, check_usable
from jit.errors import ToolchainError
from jit.toolchain import (
    Compiler,
    cuda_headers,
    host_compiler,
    ninja_folder,
    nvcc,
    present_arch,
    release_of,
    require_cuda,
    tool,
    toolkits,
)


class Finding(NamedTuple):
    """One part of the toolchain: what was found, and what to do where that is not enough."""

    part: str
    found: str
    advice: str = ""


def toolchain_report() -> list[Finding]:
    """What was found of everything that the loader uses, and what to install."""
    ask = {
        "C++ compiler": lambda: _described(host_compiler()),
        "ninja": lambda: str(ninja_folder() / "ninja"),
        "nvcc": _nvcc_described,
        "CUDA headers": lambda: cuda_headers()[0],
        "cuobjdump": lambda: str(tool("cuobjdump")),
        "nvdisasm": lambda: str(tool("nvdisasm")),
    }
    findings = []
    for part, question in ask.items():
        try:
            findings.append(Finding(part, question()))
        except ToolchainError as error:
            findings.append(Finding(part, "not usable", str(error)))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none; kernels are compiled for"
    findings.append(Finding("GPU", f"{gpu} compute capability {present_arch()}"))
    findings.append(Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda}"))
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        findings.append(Finding("TORCH_CUDA_ARCH_LIST", f"{archs!r} is ignored: the GPU decides"))
    findings.append(_cache_finding())
    return findings


def _described(compiler: Compiler) -> str:
    return f"{compiler.version.splitlines()[0]} at {compiler.path} ({compiler.reason})"


def _nvcc_described() -> str:
    chosen = nvcc()
    host_compiler("CC", "gcc")
    require_cuda(present_arch())
    others: dict[Path, str] = {}
    for root, reason in toolkits():
        if (root / "bin" / "nvcc").exists() and root != chosen.path.parent.parent:
            others.setdefault(root, f"{root} ({reason})")
    also = f"; CUDA_HOME can choose {' or '.join(others.values())} instead" if others else ""
    return f"{release_of(chosen)} at {chosen.path} ({chosen.reason}){also}"


def _cache_finding() -> Finding:
    try:
        folder = cache_folder()
        check_usable(folder)
        return Finding("cache", str(folder))
    except OSError as error:
        return Finding("cache", "not usable", f"{error}; set FOLDFUSE_CACHE to a folder of your own")
