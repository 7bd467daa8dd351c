"""Where the compilers, CUDA's headers and its tools are, and whether they fit together."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from jit.errors import ToolchainError

NEWEST_ARCH = "9.0a"  # what kernels are compiled for where there is no GPU to ask
# Variables by which tools and folders are found, and those that change what the compilers do.
CHOOSING = ("CUDA_HOME", "CONDA_PREFIX", "PATH", "CXX", "CC", "FOLDFUSE_CACHE", "XDG_CACHE_HOME", "HOME")
CHANGING = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "PYTORCH_NVCC", "CPATH", "CPLUS_INCLUDE_PATH")
_VARIABLES = tuple(map(os.fsencode, (*CHOOSING, *CHANGING)))
# The dictionary behind os.environ: each `load` reads it, and the decoded one would take 30 times as long.
_environment = getattr(os.environ, "_data", os.environb)


def environment() -> tuple[bytes | None, ...]:
    """The values of all these variables."""
    return tuple(map(_environment.get, _VARIABLES))


class Compiler(NamedTuple):
    """A compiler that runs, and why it was chosen."""

    path: Path
    version: str  # all that `--version` prints
    reason: str


class Toolkit(NamedTuple):
    """A CUDA toolkit."""

    root: Path
    reason: str


def host_compiler(variable: str = "CXX", default: str = "c++") -> Compiler:
    """The C++ compiler, as torch chooses it; nvcc's is $CC, else gcc. Raises ToolchainError."""
    name = os.environ.get(variable) or default
    reason = f"${variable}" if os.environ.get(variable) else "on PATH"
    path = shutil.which(name)
    if path is None:
        raise ToolchainError(f"{name} ({reason}) was not found; install g++, for example: apt install g++")
    return Compiler(Path(path), _version(path), reason)


def nvcc() -> Compiler:
    """nvcc, from the first toolkit that has one. Raises ToolchainError."""
    for root, reason in toolkits():
        path = root / "bin" / "nvcc"
        if path.exists():
            return Compiler(path, _version(str(path)), reason)
        if reason == "$CUDA_HOME":
            raise ToolchainError(f"CUDA_HOME is {root}, which has no bin/nvcc; correct or unset it")
    raise ToolchainError(
        "nvcc was not found; pip install 'cuda-toolkit[nvcc,cccl]', or set CUDA_HOME to a CUDA toolkit"
    )


def toolkits() -> Iterator[Toolkit]:
    """Where CUDA may be, best first: pip's packages beside torch are of the version that torch needs."""
    major = (torch.version.cuda or "13").partition(".")[0]
    on_path = shutil.which("nvcc")
    places = {
        "$CUDA_HOME": os.environ.get("CUDA_HOME"),
        "pip's packages beside torch": Path(torch.__file__).parent.parent / "nvidia" / f"cu{major}",
        "nvcc on PATH": on_path and Path(on_path).parent.parent,
        "conda": os.environ.get("CONDA_PREFIX"),
        "the usual place": "/usr/local/cuda",
    }
    for reason, place in places.items():
        if place:
            yield Toolkit(_real_root(Path(place)), reason)


@functools.cache
def _real_root(folder: Path) -> Path:
    """The toolkit behind a folder whose bin/nvcc may be a link, or a script that calls the real one."""
    nvcc = folder / "bin" / "nvcc"
    if not nvcc.exists():
        return folder
    with open(nvcc, "rb") as file, tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        if file.read(2) != b"#!":
            return nvcc.resolve().parent.parent
        asked = subprocess.run([nvcc, "-dryrun", "-c", empty.name], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", asked.stderr, re.M)
    return Path(top[1]).resolve() if top else folder


def _version(path: str) -> str:
    status = os.stat(path)
    return _printed_version(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.cache
def _printed_version(path: str, status: tuple[int, ...]) -> str:
    """What `--version` prints; asked once a process unless the file changes."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{path} --version does not run ({error}); reinstall it") from None


def release_of(compiler: Compiler) -> str:
    """nvcc's release, such as "13.0"."""
    release = re.search(r"release (\d+\.\d+)", compiler.version)
    return release[1] if release else "unknown"


@functools.cache
def _known_archs(nvcc: Path) -> tuple[str, ...]:
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    return tuple(f"{number[:-1]}.{number[-1]}" for number in re.findall(r"compute_(\d+)", listed))


def require_cuda(arch: str) -> None:
    """Raise ToolchainError unless nvcc, torch and the architecture fit together."""
    compiler = nvcc()
    release = release_of(compiler)
    if torch.version.cuda is None:
        raise ToolchainError(f"torch {torch.__version__} was built without CUDA; install one built with it")
    if release.partition(".")[0] != torch.version.cuda.partition(".")[0]:
        raise ToolchainError(
            f"nvcc is of CUDA {release} ({compiler.path}) and torch of CUDA {torch.version.cuda}; "
            f"pip install 'cuda-toolkit[nvcc,cccl]=={torch.version.cuda}.*'"
        )
    known = _known_archs(compiler.path)
    if known and arch.rstrip("af") not in known:
        raise ToolchainError(
            f"nvcc {release} ({compiler.path}) does not know compute capability {arch}, only "
            f"{', '.join(known)}; install a newer one, or build for one of these"
        )


def present_arch() -> str:
    """The compute capability of the current GPU, such as "9.0a"; NEWEST_ARCH where there is no GPU."""
    return arch_of(torch.cuda.current_device()) if torch.cuda.is_available() else NEWEST_ARCH


@functools.cache
def arch_of(device_index: int) -> str:
    """A GPU's compute capability, such as "9.0a"."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"{major}.{minor}" + "a" * (major >= 9)  # a: with the instructions of this generation alone


def cuda_headers() -> list[str]:
    """CUDA's include folders, which the CPU backend needs too, though not nvcc. Raises ToolchainError."""
    needed = ("cuda_bf16.h", "crt/host_defines.h", "nv/target")  # each of another package
    for root, _ in toolkits():
        for include in (root / "include", root / "targets" / "x86_64-linux" / "include"):
            folders = [include, include / "cccl"]
            if all(any((folder / header).exists() for folder in folders) for header in needed):
                return list(map(str, folders))
    raise ToolchainError("CUDA's headers were not found; pip install 'cuda-toolkit[nvcc,cccl]'")


def tool(name: str) -> Path:
    """A program of a CUDA toolkit. Raises ToolchainError."""
    for root, _ in toolkits():
        if (root / "bin" / name).exists():
            return root / "bin" / name
    raise ToolchainError(f"{name} was not found; pip install nvidia-cuda-{name}")


def ninja_folder() -> Path:
    """The folder of ninja, which pip puts on PATH only in an activated environment. Raises ToolchainError."""
    beside_python = Path(sys.executable).parent
    for path in (shutil.which("ninja"), shutil.which("ninja", path=str(beside_python))):
        if path:
            return Path(path).parent
    raise ToolchainError("ninja was not found; pip install ninja")


def cuda_runtime() -> Path:
    """CUDA's runtime library of the toolkit in use. Raises ToolchainError."""
    root = nvcc().path.parent.parent
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        for library in sorted((root / folder).glob("libcudart.so*")):
            return library
    raise ToolchainError(f"libcudart.so was not found in {root}; pip install nvidia-cuda-runtime")
