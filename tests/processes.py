"""Processes for the loader's tests: real ones, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import stat
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import jit_loader

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["jit_loader"])

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


def _run(pipe: Any, variables: Mapping[str, str | None], function: Callable, arguments: tuple) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    try:
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, traceback.format_exc()
    pipe.send(outcome)
