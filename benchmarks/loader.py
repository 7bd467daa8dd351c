"""How long the loader takes, beside other ways to compile and call the same source, all in one run.

    python benchmarks/loader.py            prints a table of ratios (minutes: load_inline's defaults are slow)
    python benchmarks/loader.py --quick    without load_inline's defaults

Compilations alternate, each of a text that no cache has seen, and their medians are shown; load_inline with
torch's headers is so slow that it compiles once. Of what takes microseconds the fastest run is shown. Without
a GPU the compiler is the same and the result is the loaded library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import NamedTuple

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jit_loader  # noqa: E402
from jit.compile import torch_extension  # noqa: E402
from jit.flags import compiler_flags  # noqa: E402
from jit.toolchain import cuda_runtime  # noqa: E402
from kernels_src import OPERATORS  # noqa: E402


class Subject(NamedTuple):
    """What is compiled."""

    name: str
    text: str
    defines: dict
    folder: Path  # of its own headers


POINTERS, NUMBERS = 10, 5  # of the function whose calls are timed, as many as a stage has
SMALLEST = """
#include "cuda.cuh"

__global__ void touch_kernel(float* y) {
    y[threadIdx.x] = 1;
}

EXPORT cudaError_t touch(PARAMETERS, cudaStream_t stream) {
    return LAUNCH(touch_kernel, dim3(1), dim3(32), 0, stream)(p0);
}
"""
PARAMETERS = [f"float* p{i}" for i in range(POINTERS)] + [f"int n{i}" for i in range(NUMBERS)]
SMALLEST = SMALLEST.replace("PARAMETERS", ", ".join(PARAMETERS))
SUBJECT = Subject("smallest kernel", SMALLEST, {}, ROOT / "kernels_src")
NVRTC = 'extern "C" __global__ void touch(float* y) { y[threadIdx.x] = 1; } // EDIT'
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def largest_stage() -> Subject:
    """The stage with the most code, with its defines at the first shape that it supports."""
    stages = [(stage, operator) for operator in OPERATORS.values() for stage in operator.stages]
    stage, operator = max(stages, key=lambda pair: len(pair[0].code))
    shape = next(shape for shape in operator.shapes.values() if not stage.unsupported(shape))
    name = f"largest stage, {operator.name}/{stage.name}"
    return Subject(name, stage.code, dict(stage.constants(shape)), stage.source.parent)


def edited(text: str) -> str:
    """A text that was never compiled."""
    return f"{text}\n// {secrets.token_hex(8)}\n"


def seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


# ---- ways to compile


def with_loader(subject: Subject) -> None:
    """What a user waits for: read the signature, find no build, compile, load."""
    flags = [f"-I{subject.folder}"]
    jit_loader.load(edited(subject.text), defines=subject.defines, flags=flags, name="edited").build("cuda")


def with_nvcc(subject: Subject) -> None:
    """A bare `nvcc -shared` with the loader's options."""
    target = jit_loader.Target("cuda", jit_loader.present_arch())
    source = jit_loader.Source(edited(subject.text), "edited.cu", None, tuple(subject.defines.items()), ())
    options = [flag for flag in compiler_flags(source, target) if flag != "-objtemp"]
    options += ["-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-cudadevrt", "none", "-L."]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "edited.cu").write_text(source.text)
        (Path(folder) / "libcudart.so").symlink_to(cuda_runtime())
        subprocess.run(
            [jit_loader.nvcc().path, *options, "-I", subject.folder, "-I", ROOT / "kernels_src"]
            + ["edited.cu", "-o", "edited.so"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        ctypes.CDLL(f"{folder}/edited.so")


BINDING = """
#include <torch/extension.h>
extern "C" int touch(PARAMETERS, void* stream);
void bound(ARGUMENTS) {
    if (touch(VALUES, nullptr)) throw std::runtime_error("launch failed");
}
"""
BINDING = BINDING.replace("PARAMETERS", ", ".join(PARAMETERS))
BINDING = BINDING.replace(
    "ARGUMENTS",
    ", ".join([f"torch::Tensor p{i}" for i in range(POINTERS)] + [f"int n{i}" for i in range(NUMBERS)]),
)
BINDING = BINDING.replace(
    "VALUES",
    ", ".join([f"p{i}.data_ptr<float>()" for i in range(POINTERS)] + [f"n{i}" for i in range(NUMBERS)]),
)
PLAIN_BINDING = """
#include <pybind11/pybind11.h>
int bound() { return 0; }
"""


def load_inline(subject: Subject, cpp: str, folder: str, name: str, **options: bool) -> ModuleType:
    """torch's own, as its documentation shows it."""
    extension = torch_extension(jit_loader.Target("cuda"))
    arch = jit_loader.present_arch().replace(".", "")
    # After torch's headers, which use names such as D themselves.
    defines = "".join(f"#define {name} {value}\n" for name, value in subject.defines.items())
    with contextlib.suppress(FileExistsError):
        (Path(folder) / "libcudart.so").symlink_to(cuda_runtime())
    return extension.load_inline(
        name,
        cpp_sources=[cpp],
        cuda_sources=[defines + subject.text],
        functions=["bound"],
        extra_cuda_cflags=[f"-gencode=arch=compute_{arch},code=sm_{arch}"],
        extra_ldflags=[f"-L{folder}"],
        extra_include_paths=[str(subject.folder), str(ROOT / "kernels_src")],
        build_directory=folder,
        **options,
    )


def with_defaults(subject: Subject) -> None:
    """load_inline with its own headers."""
    cpp = BINDING if subject.text == SMALLEST else PLAIN_BINDING
    with tempfile.TemporaryDirectory() as folder:
        subject = subject._replace(text=edited(subject.text))
        load_inline(subject, cpp, folder, f"defaults_{secrets.token_hex(4)}")


def without_headers(subject: Subject) -> None:
    """load_inline with no_implicit_headers alone: still a Python module, which needs pybind11."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"no_headers_{secrets.token_hex(4)}"
        options = {"no_implicit_headers": True, "with_pytorch_error_handling": False}
        load_inline(subject._replace(text=edited(subject.text)), PLAIN_BINDING, folder, name, **options)


def with_nvrtc() -> None:
    """NVRTC through torch, which compiles the kernel alone, without a launcher."""
    torch.cuda._compile_kernel(NVRTC.replace("EDIT", secrets.token_hex(8)), "touch")


def compile_times(subject: Subject, quick: bool, rounds: int = 5) -> dict[str, float]:
    """Median seconds from an edit to a loaded library, the ways taking turns."""
    ways = {"loader": with_loader, "nvcc -shared": with_nvcc}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(subject)  # reads the compilers into memory, imports what a first build imports
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(seconds(lambda way=way: way(subject)))
    times["no_implicit_headers alone"] = [seconds(lambda: without_headers(subject))]
    if not quick:
        times["load_inline's defaults"] = [seconds(lambda: with_defaults(subject))]
    if DEVICE == "cuda" and subject.text == SMALLEST:
        with_nvrtc()
        times["NVRTC, the kernel alone"] = [seconds(with_nvrtc) for _ in range(rounds)]
    return {name: statistics.median(values) for name, values in times.items()}


def edit_to_result(rounds: int = 5) -> float:
    """Median seconds from an edit of a seed-size stage to its output, on this machine's device."""
    operator = OPERATORS["msa_column_attention"]
    stage, shape = operator.stage("03"), operator.shapes["seed"]
    module, inputs = operator.module(shape, device=DEVICE), operator.inputs(shape, device=DEVICE)

    def once() -> float:
        return stage.variant(edited(stage.code), "edited")(module, *inputs).sum().item()

    return statistics.median([seconds(once) for _ in range(rounds + 1)][1:])


# ---- a new process

IN_NEW_PROCESS = """
import sys, time, torch
sys.path.insert(0, {root!r})
tensors = [torch.zeros(64, device={device!r}) for _ in range({pointers})]
numbers = [1] * {numbers}
{before}
start = time.perf_counter()
{body}
if {device!r} == "cuda": torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
LOADER_BODY = """
import jit_loader
jit_loader.load({text!r}, name="smallest").touch(*tensors, *numbers)
"""
INLINE_BODY = """
import pathlib
sys.path.insert(0, {benchmarks!r})
import loader
module = loader.load_inline(loader.SUBJECT, loader.BINDING, {folder!r}, "defaults")
if loader.DEVICE == "cuda": module.bound(*tensors, *numbers)
"""


def new_process_seconds(body: str, before: str = "", rounds: int = 7) -> float:
    """Median seconds of a first result in a process that has imported torch."""
    script = IN_NEW_PROCESS.format(
        root=str(ROOT), device=DEVICE, pointers=POINTERS, numbers=NUMBERS, before=before, body=body
    )
    env = {**os.environ}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or the loader itself would be compiled anew each time
    runs = [
        float(
            subprocess.run(
                [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(rounds + 1)
    ]
    return statistics.median(runs[1:])


# ---- calls


def call_microseconds(quick: bool, folder: Path) -> dict[str, float]:
    """Host time of one call with 10 tensors and 5 numbers, many in a row."""
    tensors = [torch.zeros(64, device=DEVICE) for _ in range(POINTERS)]
    numbers = [1] * NUMBERS
    kernels = jit_loader.load(NO_WORK, name="no_work")
    pointers = [tensor.data_ptr() for tensor in tensors]
    library = kernels.build(DEVICE)._library(jit_loader.Target(DEVICE, ARCH))
    bare = library.handle["touch"]
    bare.argtypes = [ctypes.c_void_p] * POINTERS + [ctypes.c_int] * NUMBERS + [ctypes.c_void_p]
    ways = {
        "loader": lambda: kernels.touch(*tensors, *numbers),
        "loader, a call repeated": lambda: kernels.touch.repeat(*tensors, *numbers),
        "ctypes, no checks": lambda: bare(*pointers, *numbers, 0),
    }
    if not quick:
        module = load_inline(SUBJECT._replace(text=NO_WORK), BINDING, str(folder), "calls")
        ways["load_inline's defaults"] = lambda: module.bound(*tensors, *numbers)
    if DEVICE == "cuda":
        nvrtc = torch.cuda._compile_kernel(NVRTC, "touch")
        ways["NVRTC, one tensor"] = lambda: nvrtc(grid=(1, 1, 1), block=(32, 1, 1), args=[tensors[0]])
    best: dict[str, float] = {}
    for _ in range(5):
        for name, call in ways.items():
            for _ in range(100):
                call()
            best[name] = min(best.get(name, 1e9), timeit.timeit(call, number=500) / 500 * 1e6)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    return best


def repeated_load_microseconds() -> dict[str, float]:
    """What each call of a stage pays to notice an edit, and what of it the system takes."""
    operator = OPERATORS["msa_column_attention"]
    stage, shape = operator.stage("03"), operator.shapes["seed"]
    kernels, constants = stage.load(shape).build(DEVICE), dict(stage.constants(shape))
    files = [file.path for file in kernels._files.values()]
    ways = {
        "loader": lambda: jit_loader.load(stage.source, defines=constants, name=stage.name),
        f"os.stat of its {len(files)} files": lambda: [os.stat(path) for path in files],
    }
    assert ways["loader"]() is kernels
    return {name: min(timeit.repeat(way, number=50, repeat=200)) / 50 * 1e6 for name, way in ways.items()}


ARCH = jit_loader.present_arch() if DEVICE == "cuda" else ""
NO_WORK = (
    SMALLEST
    if DEVICE == "cuda"
    else SMALLEST.replace(
        "return LAUNCH(touch_kernel, dim3(1), dim3(32), 0, stream)(p0);", "return cudaSuccess;"
    )
)


def report(title: str, times: dict[str, float], unit: str) -> None:
    """A table, with ratios to the first row."""
    first = next(iter(times.values()))
    rows = [(name, f"{value:.4g} {unit}", f"{value / first:.2f}") for name, value in times.items()]
    print(f"\n{title}")
    print(pd.DataFrame(rows, columns=["", "time", "× loader"]).to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out load_inline's defaults")
    quick = parser.parse_args().quick
    print(f"torch {torch.__version__}, {jit_loader.toolchain_report()[2].found}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as stack:
        os.environ["FOLDFUSE_CACHE"] = cache
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for subject in (SUBJECT, largest_stage()):
            report(f"edit to loaded library, {subject.name}", compile_times(subject, quick), "s")
        print(f"\nedit to result of a seed-size stage on the {DEVICE}: {edit_to_result():.2f} s")
        jit_loader.load(SMALLEST, name="smallest").build(DEVICE)
        again = {"loader": new_process_seconds(LOADER_BODY.format(text=SMALLEST)) * 1e3}
        if not quick:
            (folder / "again").mkdir()
            body = INLINE_BODY.format(benchmarks=str(ROOT / "benchmarks"), folder=str(folder / "again"))
            again["load_inline's defaults"] = new_process_seconds(body, rounds=3) * 1e3
        report("first result in a new process, beyond import torch, everything built", again, "ms")
        (folder / "calls").mkdir()
        report("one call, 10 tensors and 5 numbers", call_microseconds(quick, folder / "calls"), "µs")
        report("one repeated load of an unchanged stage", repeated_load_microseconds(), "µs")
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
