"""One run of the compiler, through torch's load_inline."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from jit.cache import temporary_folder
from jit.errors import KernelCompileError
from jit.files import digest
from jit.flags import compiler_flags, include_folders, linker_flags
from jit.packed import text_of
from jit.source import Source, Target
from jit.toolchain import cuda_runtime, ninja_folder, nvcc

PRINTED = "printed.txt"  # what nvcc printed, in a staging folder
UNUSED = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")  # that load_inline links to

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"


class Compiled(NamedTuple):
    """What a compiler made."""

    library: Path
    log: str  # what it printed


def compile_in(staging: Path, source: Source, target: Target) -> Compiled:
    """Compile, link and load in a staging folder. Raises KernelCompileError.

    In this process, since another one would first have to import torch, which takes longer than nvcc.
    """
    extension = torch_extension(target)
    arguments = _arguments(source, target, staging)
    name = f"kernels_{staging.name}"  # a new one each time: torch skips a name that it knows
    try:
        extension.load_inline(
            name,
            build_directory=str(staging),
            no_implicit_headers=True,
            is_python_module=False,
            **arguments,
        )
    except (RuntimeError, OSError) as error:
        if getattr(error, "errno", None):  # of a file, not of a library that does not load
            raise
        unloadable = error.__cause__ if isinstance(error.__cause__, OSError) else ""
        log = f"{_printed(staging)}\n{error}\n{unloadable}".strip()
        if os.strerror(errno.ENOSPC) in log:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise KernelCompileError(log, source) from None
    return Compiled(staging / f"{name}.so", _printed(staging))


def _printed(staging: Path) -> str:
    path = staging / PRINTED
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def torch_extension(target: Target) -> Any:
    """torch.utils.cpp_extension with our toolkit. Importing it takes up to a second: it waits for a build."""
    ninja = str(ninja_folder())
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), ninja])
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = _unquoted(cpp_extension.TORCH_LIB_PATH)
    if target.backend == "cuda":
        cpp_extension.CUDA_HOME = _unquoted(str(nvcc().path.parent.parent))
    return cpp_extension


@functools.cache
def _unquoted(folder: str) -> str:
    """A name of a folder that needs no quotes in a shell: torch gives the linker folders without any."""
    if shlex.quote(folder) == folder:
        return folder
    link = temporary_folder() / digest(folder)[:16]
    link.symlink_to(folder)
    return str(link)


def _arguments(source: Source, target: Target, staging: Path) -> dict[str, Any]:
    """load_inline's arguments for a source."""
    file = source.file.replace("\\", "\\\\").replace('"', '\\"')
    text = f'#line 1 "{file}"\n{source.text}\n#line 1 "calls of {file}"{text_of(source)}'
    flags = [_quoted(flag) for flag in compiler_flags(source, target)]
    for name in UNUSED:  # found before torch's own, whose many symbols take most of a link's time to read
        (staging / f"lib{name}.so").write_text("/* a linker script that links nothing */")
    if target.backend == "cpu":
        return {
            "cpp_sources": [text],
            "extra_cflags": flags,
            "extra_ldflags": [*linker_flags(target), "-L.", "-pthread"],
            "extra_include_paths": include_folders(source, target),
        }
    runtime = cuda_runtime()
    (staging / "libcudart.so").symlink_to(runtime)  # pip's packages have only libcudart.so.13
    return {
        "cpp_sources": [],
        "cuda_sources": [text],
        # load_inline drops what a compiler prints that succeeds, and ptxas's report with it; but it gives the
        # options to a shell.
        "extra_cuda_cflags": [*flags, f">{PRINTED}", "2>&1"],
        "extra_ldflags": [*linker_flags(target), "-L.", _quoted(f"-Wl,-rpath,{runtime.parent}")],
        "extra_include_paths": include_folders(source, target),
    }


def _quoted(flag: str) -> str:
    """An option as it must be written in a ninja file, for a shell."""
    return shlex.quote(flag).replace("$", "$$")
