"""Compile a CUDA source on first use and call its functions with tensors.

    kernels = load(Path("kernels_src/outer_product_mean/03_block_per_pair.cu"), defines={"C": 32})
    kernels.block_per_pair(a, b, mask, out, 1, 8, 32)

`load` reads the signature of each EXPORT function from the source. The first call compiles it, with nvcc
for CUDA tensors or with g++ for CPU tensors, through torch's load_inline; later calls and later processes
take the build from the cache. Nothing else in the project knows the compilers.

What can be relied on:

- A build is found by its contents: the source, every header that the compiler read, the options and the
  compilers. Edit a header, and the next call compiles; take the edit back, and the old build is used at once.
- It is made in a folder of its own and renamed into place, and checked against its own digest before it is
  trusted, so that no crash and no damage costs more than one rebuild. Many processes at once build once.
- A failed build is not remembered. KernelCompileError shows the first error: file, line, excerpt and caret.
- Each call is checked against the signature before a pointer is passed; errors name the argument. It runs on
  the tensors' device and its current stream, and raises on a launch error in CUDA's own words.
- A call with a dozen tensors costs 5 to 12 µs of Python, by the machine, and less than half of that where it
  repeats one that was right; the load of a cached kernel in a new process costs 20 ms beyond `import torch`.

The machinery is in jit/, one reason a module; its __init__.py says which.
"""

from __future__ import annotations

import contextvars
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from jit.build import find_or_build
from jit.cache import Build, cache_folder, clean
from jit.calls import caller, repeats
from jit.errors import KernelCompileError, ToolchainError
from jit.files import Snapshot, digest, is_in
from jit.findings import Finding, toolchain_report
from jit.flags import CUDA_FLAGS
from jit.library import Library, cpu_schedule, schedule
from jit.resources import Usage, disassembly, resources_in
from jit.signature import SCALARS, exports_of
from jit.source import Backend, Source, Target
from jit.staging import kill_all_compilers
from jit.symbols import demangle
from jit.toolchain import environment, nvcc, present_arch, release_of, toolkits

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CUDA_FLAGS",
    "Finding",
    "KernelCompileError",
    "Kernels",
    "SCALARS",
    "Source",
    "Target",
    "ToolchainError",
    "cache_folder",
    "clean",
    "cpu_schedule",
    "demangle",
    "exports_of",
    "load",
    "nvcc",
    "prebuild",
    "present_arch",
    "release_of",
    "toolchain_report",
    "toolkits",
]

_loaded: dict[Any, Kernels] = {}  # by what `load` was given


def load(
    source: Path | str,
    defines: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    name: str | None = None,
) -> Kernels:
    """The EXPORT functions of a CUDA source. Nothing is compiled until one is called, or `build`.

    `source` is the Path of a file or the text itself, which errors then call by `name`. `defines` become -D
    options, `flags` further options of nvcc; the CPU's compiler takes -D, -U and -I of them. With unchanged
    source and headers the same object is returned, within microseconds. Raises ValueError where the source
    has no EXPORT function that can be called, naming the line.
    """
    if isinstance(flags, str):
        raise TypeError(f"flags: expected a list of options, got the text {flags!r}; pass [{flags!r}]")
    if isinstance(source, str) and "\n" not in source and source.endswith((".cu", ".cuh")):
        raise ValueError(f"source: got the text {source!r}; for a file pass Path({source!r})")
    path = None if isinstance(source, str) else os.path.abspath(source)
    options = (tuple(sorted(defines.items())) if defines else (), tuple(map(_absolute, flags)))
    key = (path or source, path is None, name, *options, *environment())
    kernels = _loaded.get(key)
    if kernels is None or not kernels._is_current():
        if path is None:
            kernels = Kernels(Source(source, f"{name or 'source'}.cu", None, *options))
        else:
            content = Path(path).read_bytes()
            file = Snapshot(path, digest(content))
            kernels = Kernels(Source(content.decode(), path, os.path.dirname(path), *options), file)
        _loaded[key] = kernels
    return kernels


def _absolute(flag: str) -> str:
    """-I with the folder that it means now: another one when the current folder is another."""
    if flag == "-I":
        raise ValueError("flags: write -I and its folder as one option, such as '-Iheaders'")
    return f"-I{os.path.abspath(flag[2:])}" if flag.startswith("-I") else flag


class Kernels:
    """The EXPORT functions of a source as methods; each call compiles for its tensors' device if need be."""

    def __init__(self, source: Source, file: Snapshot | None = None) -> None:
        self._source = source
        # The source and the headers of what was built, by path and digest.
        self._files = {} if file is None else {(file.path, file.digest): file}
        self._exports = exports_of(source)
        self._libraries: dict[Target, Library] = {}
        for export in self._exports.values():
            if hasattr(Kernels, export.name):
                raise ValueError(f"{export.place}: the loader has a method of that name; choose another")
            setattr(self, export.name, caller(export, self._library))

    def __repr__(self) -> str:
        built = ", ".join(map(str, self._libraries))
        functions = "; ".join(export.declaration for export in self._exports.values())
        return f"<Kernels of {self._source.file}: {functions}; built for: {built or 'nothing yet'}>"

    def __getattr__(self, name: str) -> Any:
        exports = ", ".join(self.__dict__.get("_exports", ()))
        raise AttributeError(f"{self._source.file} has no EXPORT function {name!r}; it has {exports}")

    def build(self, backend: Backend | None = None, arch: str | None = None) -> Kernels:
        """Compile without a call, for `arch` or the GPU present; CUDA needs no GPU.

        Without a backend, for the GPU if there is one. Returns self. Raises KernelCompileError and
        ToolchainError.
        """
        backend = backend or ("cuda" if torch.cuda.is_available() else "cpu")
        if backend not in ("cuda", "cpu"):
            raise ValueError(f"backend: expected cuda or cpu, got {backend!r}")
        if backend == "cpu":
            self._library(schedule.get().target)
            return self
        arch = arch or present_arch()
        if not re.fullmatch(r"\d+\.\d[af]?", arch):
            raise ValueError(f"arch: expected a compute capability such as 9.0a, got {arch!r}")
        self._library(Target("cuda", arch))
        return self

    @property
    def repeats(self) -> SimpleNamespace:
        """Its functions for arguments like those of a call that was right but in their addresses: of these
        alone they check that they are there and aligned."""
        return repeats(self)

    @property
    def resources(self) -> pd.DataFrame:
        """One row a kernel: kernel, registers (a thread), spill_stores, spill_loads, stack_bytes (bytes a
        thread) and shared_bytes (static, bytes a block), as ptxas reports them for the last CUDA build."""
        import pandas as pd

        rows = [usage._asdict() for usage in resources_in(self._cuda_build().log)]
        return pd.DataFrame(rows, columns=Usage._fields)

    def sass(self) -> str:
        """The machine code of the last CUDA build, as cuobjdump shows it. Raises ToolchainError."""
        return disassembly(self._cuda_build().library, "-sass")

    def ptx(self) -> str:
        """The PTX of the last CUDA build, as cuobjdump shows it. Raises ToolchainError."""
        return disassembly(self._cuda_build().library, "-ptx")

    def _cuda_build(self) -> Build:
        for target, library in reversed(self._libraries.items()):
            if target.backend == "cuda":
                return library.build
        self.build("cuda")
        return self._cuda_build()

    def _library(self, target: Target) -> Library:
        library = self._libraries.pop(target, None) or self._open(target)
        self._libraries[target] = library  # the last one used is last
        return library

    def _open(self, target: Target) -> Library:
        try:
            library = Library(find_or_build(self._source, target))
        except OSError:  # it was deleted since it was found
            library = Library(find_or_build(self._source, target))
        for header in library.build.headers.read:
            # The project's headers; those of the compilers change with their versions.
            if is_in(self._source.include_folders, header[0]):
                self._files.setdefault(header, Snapshot(*header))
        return library

    def _is_current(self) -> bool:
        """Whether the source, and the headers of what was built, are what they were."""
        return all(file.is_current() for file in self._files.values())


def prebuild(
    items: Iterable[Kernels], backend: Backend | None = None, arch: str | None = None, progress: bool = True
) -> None:
    """Build several sources at once, a process a core, with a progress bar.

    All are built even if some fail; then the first error is raised. An interrupt ends all compilers.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from tqdm import tqdm

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = [
            pool.submit(contextvars.copy_context().run, kernels.build, backend, arch)  # with its cpu_schedule
            for kernels in items
        ]
        try:
            for _ in tqdm(as_completed(futures), total=len(futures), desc="compiling", disable=not progress):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                kill_all_compilers()
                time.sleep(0.01)
            raise
    for future in futures:
        future.result()
