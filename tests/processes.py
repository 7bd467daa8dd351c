"""Processes for tests: real ones, forked from a server that has imported torch and what a build needs."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import jit_loader
from workbench.paths import ROOT

# Importing them asks for a GPU: by way of NVML, since CUDA, once begun, works in no forked process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
CONTEXT = multiprocessing.get_context("forkserver")
# What most processes need, and takes longer to import than they take for the rest.
CONTEXT.set_forkserver_preload(["workbench", "jit_loader", "torch.utils.cpp_extension", "filelock", "pytest"])

# Needs no header of the project, so that it compiles in a tenth of a second.
SCALE = r"""
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <driver_types.h>
#endif
#include "factor.h"
#define EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __CUDACC__
__global__ void scale_kernel(const float* x, float* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = FACTOR * x[threadIdx.x];
}
#endif

EXPORT cudaError_t scale(const float* x, float* y, int n, cudaStream_t stream) {
#ifdef __CUDACC__
    scale_kernel<<<1, 32, 0, stream>>>(x, y, n);
    return cudaGetLastError();
#else
    for (int i = 0; i < n; ++i) y[i] = FACTOR * x[i];
    return cudaSuccess;
#endif
}
"""


def write_scale(folder: Path, factor: object = 3) -> Path:
    """The source above in a folder, and its header, which has the factor."""
    (folder / "factor.h").write_text(f"#ifndef FACTOR\n#define FACTOR {factor}\n#endif\n")
    (folder / "scale.cu").write_text(SCALE)
    return folder / "scale.cu"


def factor_of(source: Path | str, device: str = "cpu", **options: Any) -> float:
    """What the kernel multiplies by: the load, the build and the call in one."""
    x = torch.tensor([1.0, -2.0, 4.0], device=device)
    y = torch.full_like(x, float("nan"))
    jit_loader.load(source, **options).scale(x, y, 3)
    assert torch.equal(y, y[0] * x), y
    return y[0].item()


def counting_compiler(folder: Path, before: str = "") -> Path:
    """A C++ compiler that counts its compilations, and does something before each of them."""
    folder.mkdir(exist_ok=True)
    script = folder / "g++"
    script.write_text(
        "#!/bin/bash\n"
        f'if [[ " $* " == *" -c "* ]]; then echo "$*" >> "{folder}/compilations"; {before} fi\n'
        'exec c++ "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def compilations(compiler: Path) -> int:
    """How often such a compiler compiled."""
    log = compiler.parent / "compilations"
    return len(log.read_text().splitlines()) if log.exists() else 0


class Child:
    """A process that runs one function in an environment of its own."""

    def __init__(
        self, function: Callable, *arguments: Any, env: Mapping[str, str | None] | None = None
    ) -> None:
        self.pipe, far_end = CONTEXT.Pipe()
        variables = {name: os.environ.get(name) for name in ("FOLDFUSE_CACHE", "CXX", "PATH", "HOME")}
        variables |= env or {}
        self.process = CONTEXT.Process(target=_run, args=(far_end, variables, function, arguments))
        self.process.start()
        far_end.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def result(self, timeout: float = 60) -> Any:
        """What the function returned. Raises AssertionError with its traceback where it raised."""
        assert self.pipe.poll(timeout), "the process hangs"
        try:
            succeeded, value = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"the process ended with {self.exit_code()}") from None
        self.process.join()
        assert succeeded, value
        return value

    def exit_code(self) -> int:
        """How the process ended; a negative signal number where one killed it."""
        self.process.join(60)
        return self.process.exitcode


def in_child(function: Callable, *arguments: Any, env: Mapping[str, str | None] | None = None) -> Any:
    """What a function returns in a new process."""
    return Child(function, *arguments, env=env).result()


def python(*arguments: str, env: Mapping[str, str | None] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m …` or `python -c …` in the repository's root, as subprocess.run would return it.

    An interpreter of its own would first import torch, which takes two seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        status = Child(_interpret, arguments, files, env=env).result(timeout=280)
        return subprocess.CompletedProcess(arguments, status, *(file.read_text() for file in files))


def _interpret(arguments: tuple[str, ...], files: list[Path]) -> int:
    """Do what the interpreter does with these arguments, with its output in files; return its status."""
    os.chdir(ROOT)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    option, what, *rest = arguments
    try:
        if option == "-m":
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [option, *rest]
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _run(pipe: Any, variables: Mapping[str, str | None], function: Callable, arguments: tuple) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    try:
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, traceback.format_exc()
    pipe.send(outcome)
