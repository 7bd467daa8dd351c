"""Compile a CUDA source on first use and call its functions with tensors.

    kernels = load(Path("kernels_src/outer_product_mean/03_block_per_pair.cu"), defines={"C": 32})
    kernels.block_per_pair(a, b, mask, out, 1, 8, 32)

`load` reads the signature of each EXPORT function from the source. The first call compiles it, with nvcc
for CUDA tensors or with g++ for CPU tensors, through torch's load_inline; later calls and later processes
take the build from the cache. Nothing else in the project knows the compilers.

A build is found by its contents: the source, every header that the compiler read, the options and the
compilers. It is made in a folder of its own and renamed into place, and checked against its own digest before
it is trusted, so that no crash and no damage costs more than one rebuild.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import errno
import functools
import hashlib
import json
import keyword
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

SOURCES = Path(__file__).resolve().parent / "kernels_src"  # on every include path
NEWEST_ARCH = "9.0a"  # what kernels are compiled for where there is no GPU to ask
CACHE_BYTES = 4 * 2**30  # a larger cache loses the builds that were not used for longest

Backend = Literal["cuda", "cpu"]

CUDA_FLAGS = (
    *("-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
    *("-Xcompiler", "-fvisibility=hidden"),  # libraries share no symbols
    *("-objtemp", "-Xcompiler", "-pipe"),  # temporary files go into the staging folder
)
CPU_FLAGS = (
    *("-O2", "-std=c++17", "-g1", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas"),
    *("-pipe", "-Wp,-MD,main.o.d"),  # torch asks for a list of the user's headers; this lists all
)
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")
# Variables by which tools and folders are found, and those that change what the tools do.
CHOOSING = ("CUDA_HOME", "CONDA_PREFIX", "PATH", "CXX", "CC", "FOLDFUSE_CACHE", "XDG_CACHE_HOME", "HOME")
CHANGING = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "PYTORCH_NVCC", "CPATH", "CPLUS_INCLUDE_PATH")


# ---- errors


class ToolchainError(RuntimeError):
    """A compiler or one of its parts is missing or does not fit; the text says what to install."""


class KernelCompileError(RuntimeError):
    """A source does not compile. The text shows the first error with its place in the source.

    `file`, `line` and `column` say where (None where the compiler did not), `message` what; `excerpt` is that
    line of the source, and `log` everything that the compiler printed.
    """

    def __init__(self, log: str, source: Source) -> None:
        self.log, self.source = re.sub(r"\x1b\[[\d;]*m", "", log), source  # without colours
        self.file, self.line, self.column, self.message = first_error(self.log, source)
        self._shown = False
        self.excerpt = _line_of(self.file, self.line, source)
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        self.headline = f"{place}: {self.message}" if place else self.message
        super().__init__("\n".join([self.headline, *self._marked_lines()]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.log, self.source)

    def _marked_lines(self) -> list[str]:
        """The line of the source, and a caret under the error."""
        if not self.excerpt:
            return []
        caret = [] if self.column is None else [" " * (4 + self.column - 1) + "^"]
        return [f"    {self.excerpt.expandtabs(1)}", *caret]

    def _repr_html_(self) -> str:
        from html import escape

        marked = escape("\n".join(self._marked_lines()))
        return (
            f"<div><b style='color:#b3261e'>{escape(self.headline)}</b><pre>{marked}</pre>"
            f"<details><summary>all that the compiler printed</summary>"
            f"<pre>{escape(self.log)}</pre></details></div>"
        )

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback, whose frames are all the loader's."""
        from IPython import get_ipython
        from IPython.display import HTML, display

        if not hasattr(get_ipython(), "kernel"):
            return [f"{type(self).__name__}: {self}"]
        if not self._shown:  # in a notebook, where the log can be folded; IPython asks more than once
            display(HTML(self._repr_html_()))
            self._shown = True
        return [f"{type(self).__name__}: {self.headline}"]


class Mistake(NamedTuple):
    """Where a compiler found the first error, and its words."""

    file: str | None
    line: int | None
    column: int | None
    message: str


GCC_ERROR = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?P<column>\d+): (?:fatal )?error: (?P<message>.*)", re.M
)
NVCC_ERROR = re.compile(
    r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<message>.*)", re.M
)
PTXAS_ERROR = re.compile(
    r"^ptxas .*?(?:error|fatal) *: (?P<message>(?:.*?[Ff]unction '(?P<symbol>\w+)')?.*)", re.M
)
LINKER_ERROR = re.compile(r"(?P<message>undefined reference to `(?P<symbol>\w+).*)", re.M)
OTHER_ERROR = re.compile(r"^(?!Error building|ninja:|FAILED:).*(?:error|fatal|not found|denied).*", re.M)


def first_error(log: str, source: Source) -> Mistake:
    """The first error in what a compiler printed."""
    found = [match for pattern in (GCC_ERROR, NVCC_ERROR) if (match := pattern.search(log))]
    if found:
        first = min(found, key=re.Match.start)
        file, line = first["file"], int(first["line"])
        excerpt = _line_of(file, line, source) or ""
        if first.re is GCC_ERROR:
            column = _gcc_column(int(first["column"]), excerpt)
        else:
            column = _nvcc_column(log[first.end() + 1 :], excerpt)
        return Mistake(file, line, column, first["message"])
    if match := PTXAS_ERROR.search(log) or LINKER_ERROR.search(log):  # they know functions, not lines
        if match["symbol"] is None:
            return Mistake(source.file, None, None, match["message"])
        name = demangle(match["symbol"])
        message = match["message"].replace(match["symbol"], name)
        return Mistake(source.file, *_place_of(name.partition("<")[0], source), message)
    match = OTHER_ERROR.search(log)
    return Mistake(source.file, None, None, match[0] if match else "the compiler failed; see .log")


def _gcc_column(column: int, excerpt: str) -> int:
    """gcc counts columns of a screen: a tab goes on to the next multiple of eight, some letters take two."""
    shown = 0
    for index, character in enumerate(excerpt):
        wide = unicodedata.east_asian_width(character) in "WF"
        shown += 8 - shown % 8 if character == "\t" else 1 + wide
        if shown >= column:
            return index + 1
    return column


def _nvcc_column(rest: str, excerpt: str) -> int | None:
    """nvcc names no column; it prints the line, indented and with macros expanded, and below it a caret."""
    lines = rest.split("\n")
    for printed, caret in zip(lines, lines[1:], strict=False):
        if not printed.startswith("  "):
            return None
        if caret.strip() == "^":
            before, after = printed[2 : caret.index("^")], printed[caret.index("^") :].rstrip()
            if excerpt.expandtabs(1).startswith(before):
                return len(before) + 1
            return len(excerpt.rstrip()) - len(after) + 1 if excerpt.rstrip().endswith(after) else None
    return None


def _place_of(function: str, source: Source) -> tuple[int, int] | tuple[None, None]:
    """Line and column where a function first stands in a source."""
    for number, line in enumerate(source.text.split("\n"), start=1):
        if match := re.search(rf"\b{re.escape(function)}\s*\(", line):
            return number, match.start() + 1
    return None, None


def _line_of(file: str | None, line: int | None, source: Source) -> str | None:
    with contextlib.suppress(OSError, IndexError, TypeError, UnicodeDecodeError):
        text = source.text if file == source.file else Path(file).read_text(encoding="utf-8")
        return text.split("\n")[line - 1]
    return None


def demangle(symbol: str) -> str:
    """A kernel's name without its parameters: `_Z4copyILi4EEvPf` gives `copy<4>`."""
    cxa_demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    cxa_demangle.restype = ctypes.c_void_p
    address = cxa_demangle(symbol.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not address:
        return symbol  # extern "C"
    words = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    words = words.replace("(anonymous namespace)::", "").replace("(bool)", "").replace("(int)", "")
    return words.partition("(")[0].removeprefix("void ")


# ---- the source and its signature


class Source(NamedTuple):
    """What is compiled, headers apart."""

    text: str
    file: str  # what errors call it
    folder: str | None  # where its own headers are
    defines: tuple[tuple[str, Any], ...]
    flags: tuple[str, ...]  # nvcc's; the CPU takes those that every compiler has

    @property
    def include_folders(self) -> list[str]:
        """Where the project's headers are looked for, first ones first."""
        own = [] if self.folder is None else [self.folder]
        given = [os.path.abspath(flag[2:]) for flag in self.flags if flag.startswith("-I")]
        return [*given, *own, str(SOURCES)]


class Parameter(NamedTuple):
    """A parameter of an EXPORT function."""

    name: str
    type: str  # a key of POINTERS or SCALARS


class Export(NamedTuple):
    """An EXPORT function; its last parameter, the stream, is not among the parameters."""

    name: str
    parameters: tuple[Parameter, ...]
    declaration: str


POINTERS = {"float*": torch.float32, "__nv_bfloat16*": torch.bfloat16}
SCALARS = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
RANGES = {
    "int": (-(2**31), 2**31 - 1),
    "int64_t": (-(2**63), 2**63 - 1),
    "float": (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max),
}
EXPORT = re.compile(r"\bEXPORT\s+cudaError_t\s+(\w+)\s*\(([^)]*)\)")
COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)


def exports_of(source: Source) -> dict[str, Export]:
    """The EXPORT functions of a source. Raises ValueError where one can't be called from Python."""
    text = COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source.text)
    exports: dict[str, Export] = {}
    for match in EXPORT.finditer(text):
        name, line = match[1], text.count("\n", 0, match.start()) + 1
        where = f"{source.file}:{line}: {name}"
        *parameters, last = [_parameter(words, where) for words in match[2].split(",")]
        if last.type != "cudaStream_t":
            raise ValueError(f"{where}: the last parameter must be a cudaStream_t")
        if not any(parameter.type in POINTERS for parameter in parameters):
            raise ValueError(f"{where}: has no pointer, so that nothing says on which device to run")
        if hasattr(Kernels, name):
            raise ValueError(f"{where}: the loader has a method of that name; choose another")
        export = Export(name, tuple(parameters), " ".join(match[0].split()))
        if exports.setdefault(name, export).parameters != export.parameters:
            raise ValueError(f"{where}: declared twice, with different parameters")
    if not exports:
        form = "EXPORT cudaError_t name(const float* x, float* y, int n, cudaStream_t stream)"
        raise ValueError(f"{source.file}: has no function of the form {form}")
    return exports


def _parameter(words: str, where: str) -> Parameter:
    parts = re.sub(r"\bconst\b|\b__restrict__\b", " ", words).replace("*", " * ").split()
    name, c_type = parts[-1] if parts else "", "".join(parts[:-1])
    if c_type not in (*POINTERS, *SCALARS, "cudaStream_t"):
        known = ", ".join([*POINTERS, *SCALARS])
        raise ValueError(f"{where}: parameter '{' '.join(words.split())}' has none of the types {known}")
    return Parameter(name + "_" * keyword.iskeyword(name), c_type)


# ---- the toolchain


class Compiler(NamedTuple):
    """A compiler that runs, and why it was chosen."""

    path: Path
    version: str  # all that `--version` prints
    reason: str


class Toolkit(NamedTuple):
    """A CUDA toolkit."""

    root: Path
    reason: str


def host_compiler() -> Compiler:
    """The C++ compiler, as torch chooses it: $CXX, else c++. Raises ToolchainError."""
    return _host_compiler("CXX", "c++")


def _host_compiler(variable: str, default: str) -> Compiler:
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
    compiler, release = nvcc(), release_of(nvcc())
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
    return _arch_of(torch.cuda.current_device()) if torch.cuda.is_available() else NEWEST_ARCH


@functools.cache
def _arch_of(device_index: int) -> str:
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"{major}.{minor}" + "a" * (major >= 9)  # a: with the instructions of this generation alone


def _cuda_headers() -> list[str]:
    """CUDA's include folders, which the CPU backend needs too, though not nvcc. Raises ToolchainError."""
    needed = ("cuda_bf16.h", "crt/host_defines.h", "nv/target")  # each of another package
    for root, _ in toolkits():
        for include in (root / "include", root / "targets" / "x86_64-linux" / "include"):
            folders = [include, include / "cccl"]
            if all(any((folder / header).exists() for folder in folders) for header in needed):
                return list(map(str, folders))
    raise ToolchainError("CUDA's headers were not found; pip install 'cuda-toolkit[nvcc,cccl]'")


def _tool(name: str) -> Path:
    """A program of a CUDA toolkit. Raises ToolchainError."""
    for root, _ in toolkits():
        if (root / "bin" / name).exists():
            return root / "bin" / name
    raise ToolchainError(f"{name} was not found; pip install nvidia-cuda-{name}")


def _ninja_folder() -> Path:
    """The folder of ninja, which pip puts on PATH only in an activated environment. Raises ToolchainError."""
    beside_python = Path(sys.executable).parent
    for path in (shutil.which("ninja"), shutil.which("ninja", path=str(beside_python))):
        if path:
            return Path(path).parent
    raise ToolchainError("ninja was not found; pip install ninja")


def _under_address_sanitizer() -> bool:
    return hasattr(ctypes.CDLL(None), "__asan_init")


class Finding(NamedTuple):
    """One part of the toolchain: what was found, and what to do where that is not enough."""

    part: str
    found: str
    advice: str = ""


def toolchain_report() -> list[Finding]:
    """What was found of everything that the loader uses, and what to install."""
    ask = {
        "C++ compiler": lambda: _described(host_compiler()),
        "ninja": lambda: str(_ninja_folder() / "ninja"),
        "nvcc": _nvcc_described,
        "CUDA headers": lambda: _cuda_headers()[0],
        "cuobjdump": lambda: str(_tool("cuobjdump")),
        "nvdisasm": lambda: str(_tool("nvdisasm")),
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
        _check_usable(folder)
        return Finding("cache", str(folder))
    except OSError as error:
        return Finding("cache", "not usable", f"{error}; set FOLDFUSE_CACHE to a folder of your own")


# ---- the cache
#
# builds/RECIPE/HEADERS/ has kernels.so, log.txt and manifest.json. RECIPE is a digest of everything but the
# headers; HEADERS tells apart the builds of one recipe, made while the headers were different.
# staging/ has the builds under way; locks/ keeps two processes from doing the same work.


def cache_folder() -> Path:
    """$FOLDFUSE_CACHE, else foldfuse in the user's cache folder."""
    if named := os.environ.get("FOLDFUSE_CACHE"):
        return Path(os.path.abspath(named))
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # there is neither HOME nor an entry for the user
        return Path(base or Path.home() / ".cache") / "foldfuse"
    return Path(tempfile.gettempdir()) / f"foldfuse-{os.getuid()}"


def _check_usable(folder: Path) -> None:
    """Raise OSError unless builds can be written to a folder, and nobody else can."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_owner(folder: Path) -> None:
    owner = folder.stat().st_uid
    if owner not in (os.getuid(), 0):
        raise PermissionError(
            errno.EPERM, f"belongs to user {owner}, who could put anything there", str(folder)
        )


@functools.cache
def _temporary_folder() -> Path:
    """A folder for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="foldfuse-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_unusable: set[Path] = set()  # cache folders in whose place the temporary one is used


class Target(NamedTuple):
    """What a source is compiled for."""

    backend: Backend
    arch: str  # a compute capability; empty for the CPU


class Build(NamedTuple):
    """A compiled library in the cache."""

    folder: Path
    headers: tuple[tuple[str, str], ...]  # each that the compiler read, and its digest

    @property
    def library(self) -> Path:
        return self.folder / "kernels.so"

    @property
    def log(self) -> str:
        """What the compiler printed."""
        return (self.folder / "log.txt").read_text(encoding="utf-8")


def _digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _digest_of(path: str | Path) -> str | None:
    """The digest of a file's contents; None where it can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _digest(file.readall())
    except OSError:
        return None


def _recipe(source: Source, target: Target) -> str:
    """A digest of everything that makes a build, but the headers."""
    compilers = [host_compiler()]
    if target.backend == "cuda":
        compilers += [nvcc(), _host_compiler("CC", "gcc")]
    parts = (
        *(source, target, _flags(source, target)),
        *((str(compiler.path), compiler.version) for compiler in compilers),
        *map(os.environ.get, CHANGING),
        *(torch.__version__, torch.compiled_with_cxx11_abi(), sys.implementation.cache_tag),
    )
    return _digest(repr(parts))


def _find(recipe: str) -> Build | None:
    """The build of a recipe with the headers of today, if there is one and it is whole."""
    for cache in (cache_folder(), *([_temporary_folder()] if _unusable else ())):
        with contextlib.suppress(OSError):
            _check_owner(cache)
            for folder in (cache / "builds" / recipe).iterdir():
                if build := _trusted(folder, recipe):
                    _mark_used(folder)
                    return build
    return None


def _trusted(folder: Path, recipe: str) -> Build | None:
    """The build in a folder, unless it is damaged, another's, or of other headers."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        headers = tuple((path, digest) for path, digest in manifest["read"])
        whole = (
            manifest["recipe"] == recipe
            and all(_digest_of(path) == digest for path, digest in headers)
            and not any(map(os.path.exists, manifest["absent"]))
            and _digest_of(folder / "kernels.so") == manifest["library"]
            and _digest_of(folder / "log.txt") == manifest["log"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Build(folder, headers) if whole else None


def _mark_used(folder: Path) -> None:
    """Note the use of a build for `clean`, to the hour."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > 3600:
            os.utime(folder)


def clean(max_bytes: int = CACHE_BYTES, max_age_days: float | None = None) -> int:
    """Delete builds, those first that were not used for longest, until the cache has at most `max_bytes`.

    Builds that were not used for `max_age_days` go too, and what killed processes left. Returns the number of
    bytes freed.
    """
    now, cache, freed = time.time(), cache_folder(), 0
    for folder in cache.glob("staging/*"):
        with contextlib.suppress(OSError):
            if now - folder.stat().st_mtime > 3600:  # no compilation takes an hour
                shutil.rmtree(folder, ignore_errors=True)
    builds = []
    for folder in cache.glob("builds/*/*"):
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in folder.iterdir())
            builds.append((folder.stat().st_mtime, size, folder))
    total = sum(size for _, size, _ in builds)
    for used, size, folder in sorted(builds):
        if total - freed > max_bytes or (max_age_days is not None and now - used > 86400 * max_age_days):
            freed += size
            shutil.rmtree(folder, ignore_errors=True)  # a process that has it loaded keeps it
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
    return freed


# ---- building


def _find_or_build(source: Source, target: Target) -> Build:
    """The build for the sources as they are now. Raises KernelCompileError or ToolchainError."""
    recipe = _recipe(source, target)
    if build := _find(recipe):
        return build
    cache = cache_folder()
    if cache not in _unusable:
        try:
            _check_usable(cache)
            with _only_one_builds(cache, recipe):
                return _find(recipe) or _build(source, target, recipe, cache)
        except OSError as error:
            _unusable.add(cache)
            warnings.warn(
                f"kernels can't be kept in {cache} ({error.strerror or error}); each process compiles them "
                f"anew. Set FOLDFUSE_CACHE to a folder of your own with space.",
                stacklevel=2,
            )
    return _build(source, target, recipe, _temporary_folder())


@contextlib.contextmanager
def _only_one_builds(cache: Path, recipe: str) -> Iterator[None]:
    """Hold a lock that the system drops when its holder dies. It saves work; nothing relies on it."""
    from filelock import FileLock, Timeout

    locks = cache / "locks"
    locks.mkdir(exist_ok=True)
    lock = FileLock(locks / recipe[:3], timeout=600, poll_interval=0.01)  # 4096 files at most
    with contextlib.suppress(Timeout, NotImplementedError):  # a holder that hangs, a system without locks
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(source: Source, target: Target, recipe: str, cache: Path) -> Build:
    """Compile and publish. A header that is edited meanwhile makes it compile again."""
    if target.backend == "cuda":
        require_cuda(target.arch)
    read = None
    time.sleep(0.01)  # a tick of the file system's clock, so that an edit before is older than the build
    while True:
        with _staging(cache) as staging:
            began = staging.stat().st_ctime_ns  # by the clock of the file system
            log = _compile(source, target, staging)
            before, read = read, _headers(staging, source)
            if read == before or _unchanged_since(began, read):
                return _publish(staging, read, log, recipe, cache)


_stagings: set[Path] = set()  # of the builds under way in this process


@contextlib.contextmanager
def _staging(cache: Path) -> Iterator[Path]:
    """A private folder to build in, gone afterwards; with it, whatever happens, the compilers in it."""
    folder = cache / "staging" / os.urandom(8).hex()
    folder.mkdir(mode=0o700, parents=True)
    _stagings.add(folder)
    try:
        yield folder
    except BaseException:
        _kill_compilers(folder)
        raise
    finally:
        _stagings.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_compilers(staging: Path) -> None:
    """Kill everything that works in a staging folder.

    An interrupt ends ninja alone: it gives each compiler a process group, which outlives it. But all of them,
    and what they start, have the staging folder as working folder.
    """
    while working := _processes_in(staging):
        for pid in working:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_in(folder: Path) -> list[int]:
    """The processes whose working folder is this one."""
    found, name = [], str(folder.resolve())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(f"/proc/{pid}/cwd") == name:
                found.append(int(pid))
    return found


def _flags(source: Source, target: Target) -> tuple[str, ...]:
    """The compiler's options."""
    defines = tuple(f"-D{name}={int(value) if value is True else value}" for name, value in source.defines)
    if target.backend == "cpu":
        sanitizer = SANITIZER_FLAGS if _under_address_sanitizer() else ()
        common = tuple(flag for flag in source.flags if flag.startswith(("-D", "-U", "-I")))
        return (*CPU_FLAGS, *sanitizer, *defines, *common)
    number = target.arch.replace(".", "")
    codes = tuple(f"-gencode=arch=compute_{number},code={code}_{number}" for code in ("sm", "compute"))
    return (*CUDA_FLAGS, *codes, *defines, *source.flags)


def _compile(source: Source, target: Target, staging: Path) -> str:
    """Compile, link and load in a staging folder; what the compiler printed. Raises KernelCompileError.

    In this process, since another one would first have to import torch, which takes longer than nvcc.
    """
    extension = _torch_extension(target)
    arguments = _arguments(source, target, staging)
    printed = staging / PRINTED
    try:
        extension.load_inline(
            f"kernels_{staging.name}",  # a new name each time: torch skips a name that it knows
            build_directory=str(staging),
            no_implicit_headers=True,
            is_python_module=False,
            **arguments,
        )
    except (RuntimeError, OSError) as error:
        if getattr(error, "errno", None):  # of a file, not of a library that does not load
            raise
        unloadable = error.__cause__ if isinstance(error.__cause__, OSError) else ""
        log = f"{_text(printed)}\n{error}\n{unloadable}".strip()
        if os.strerror(errno.ENOSPC) in log:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise KernelCompileError(log, source) from None
    return _text(printed)


PRINTED = "printed.txt"  # what the compiler printed, in a staging folder


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _torch_extension(target: Target) -> Any:
    """torch.utils.cpp_extension with our toolkit. Importing it takes up to a second: it waits for a build."""
    ninja = str(_ninja_folder())
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), ninja])
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
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
    link = _temporary_folder() / _digest(folder)[:16]
    link.symlink_to(folder)
    return str(link)


def _arguments(source: Source, target: Target, staging: Path) -> dict[str, Any]:
    """load_inline's arguments for a source."""
    file = source.file.replace("\\", "\\\\").replace('"', '\\"')
    text = f'#line 1 "{file}"\n{source.text}'
    flags = [_quoted(flag) for flag in _flags(source, target)]
    linking = ["-Wl,--as-needed"]  # torch's own libraries are on the command line, and not needed
    if not _under_address_sanitizer():  # whose runtime is not linked
        linking.append("-Wl,-z,defs")
    if target.backend == "cpu":
        return {
            "cpp_sources": [text],
            "extra_cflags": flags,
            "extra_ldflags": [*linking, "-pthread", *(SANITIZER_FLAGS if _under_address_sanitizer() else ())],
            "extra_include_paths": [*source.include_folders, *_cuda_headers()],
        }
    runtime = _cuda_runtime()
    (staging / "libcudart.so").symlink_to(runtime)  # pip's packages have only libcudart.so.13
    return {
        "cpp_sources": [],
        "cuda_sources": [text],
        # load_inline drops what a compiler prints that succeeds, and ptxas's report with it; but it gives the
        # options to a shell.
        "extra_cuda_cflags": [*flags, f">{PRINTED}", "2>&1"],
        "extra_ldflags": [*linking, "-L.", _quoted(f"-Wl,-rpath,{runtime.parent}")],
        "extra_include_paths": source.include_folders,
    }


def _quoted(flag: str) -> str:
    """An option as it must be written in a ninja file, for a shell."""
    return shlex.quote(flag).replace("$", "$$")


def _cuda_runtime() -> Path:
    """CUDA's runtime library of the toolkit in use. Raises ToolchainError."""
    root = nvcc().path.parent.parent
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        for library in sorted((root / folder).glob("libcudart.so*")):
            return library
    raise ToolchainError(f"libcudart.so was not found in {root}; pip install nvidia-cuda-runtime")


class Headers(NamedTuple):
    """What a compiler read beside the source."""

    read: tuple[tuple[str, str], ...]  # path and digest
    absent: tuple[str, ...]  # files that would be read instead, or too, if they were there


def _headers(staging: Path, source: Source) -> Headers:
    """The headers of a build, from the compiler's own list, which ninja took in."""
    ninja = [_ninja_folder() / "ninja", "-t", "deps"]
    listing = subprocess.run(ninja, cwd=staging, capture_output=True, text=True).stdout
    listed = {os.path.abspath(staging / line[4:]) for line in listing.split("\n") if line.startswith("    ")}
    paths = {path for path in listed if path != source.file and not _is_in([staging], path)}
    # The project's own come first: where a build is out of date, it is they that differ.
    ordered = sorted(paths, key=lambda path: (not _is_in(source.include_folders, path), path))
    digests = {path: _digest_of(path) for path in ordered}
    read = tuple((path, digest) for path, digest in digests.items() if digest is not None)
    if not read:  # never keep a build whose headers are unknown
        variable = "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"
        raise ToolchainError(f"the compiler listed no headers; unset {variable}")
    missing = [path for path, digest in digests.items() if digest is None]
    return Headers(read, (*missing, *_shadows(ordered, source.include_folders)))


def _is_in(folders: Iterable[str | Path], path: str) -> bool:
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def _shadows(paths: Iterable[str], folders: Sequence[str]) -> Iterator[str]:
    """Where a file would be found before a header that was read."""
    for path in paths:
        for place, folder in enumerate(folders):
            if _is_in([folder], path):
                earlier = (os.path.join(before, os.path.relpath(path, folder)) for before in folders[:place])
                yield from (shadow for shadow in earlier if not os.path.exists(shadow))
                break


def _unchanged_since(began: int, headers: Headers) -> bool:
    """Whether the headers are surely those that the compiler read."""
    try:
        return all(os.stat(path).st_ctime_ns < began for path, _ in headers.read)
    except OSError:
        return False


def _publish(staging: Path, headers: Headers, log: str, recipe: str, cache: Path) -> Build:
    """Make a build visible to all, whole or not at all."""
    entry = staging / "entry"
    entry.mkdir()
    # A copy, since load_inline has loaded the original: debuggers and sanitizers would go on to look for
    # that under the staging folder's name.
    shutil.copyfile(staging / f"kernels_{staging.name}.so", entry / "kernels.so")
    (entry / "log.txt").write_text(log, encoding="utf-8")
    manifest = {
        "recipe": recipe,
        "library": _digest_of(entry / "kernels.so"),
        "log": _digest_of(entry / "log.txt"),
        **headers._asdict(),
    }
    (entry / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for path in (*entry.iterdir(), entry):
        _write_through(path)
    place = cache / "builds" / recipe / _digest(repr(headers))[:16]
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.exists():  # damaged, or it would have been used
        os.rename(place, staging / "damaged")
    os.rename(entry, place)
    _trim_cache()
    return Build(place, headers.read)


def _write_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache  # once a process is enough
def _trim_cache() -> None:
    with contextlib.suppress(OSError):
        clean()


# ---- calling

_schedule: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("cpu_schedule", default=(0, 0))


@contextlib.contextmanager
def cpu_schedule(order: Literal["forward", "reverse", "random"], seed: int = 0) -> Iterator[None]:
    """The order in which the CPU backend runs a block's threads, for calls inside the with statement."""
    orders = ("forward", "reverse", "random")
    if order not in orders:
        raise ValueError(f"order: expected one of {', '.join(orders)}, got {order!r}")
    token = _schedule.set((orders.index(order), seed % 2**64))
    try:
        yield
    finally:
        _schedule.reset(token)


class Library:
    """A compiled library, loaded into this process."""

    def __init__(self, build: Build, own_folders: Sequence[str]) -> None:
        self.build = build
        self.handle = ctypes.CDLL(str(build.library))
        # The project's headers; those of the compilers change with their versions.
        self.headers = [Snapshot(*header) for header in build.headers if _is_in(own_folders, header[0])]

    def function(self, export: Export) -> Callable[..., int]:
        """The C function; pointers and the stream are passed as integers."""
        function = self.handle[export.name]
        types = [SCALARS.get(parameter.type, ctypes.c_void_p) for parameter in export.parameters]
        function.argtypes = [*types, ctypes.c_void_p]
        return function

    def on_cpu(self, export: Export) -> Callable[..., int]:
        """A call on the CPU."""
        function = self.function(export)
        try:
            set_order = self.handle.cpu_schedule
        except AttributeError:  # a source without cuda.cuh
            return lambda *values: function(*values, None)
        set_order.argtypes = [ctypes.c_int, ctypes.c_uint64]

        def call(*values: float) -> int:
            set_order(*_schedule.get())
            return function(*values, None)

        return call

    def on_gpu(self, export: Export, index: int) -> Callable[..., int]:
        """A call on a GPU, on its current stream."""
        function = self.function(export)
        current_device, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def call(*values: float) -> int:
            if current_device() == index:
                return function(*values, stream_of(index))
            with torch.cuda.device(index):
                return function(*values, stream_of(index))

        return call

    def error_text(self, code: int) -> str:
        """What a function's result means, in CUDA's or the CPU backend's words."""
        try:
            words = self.handle.kernel_error_text
        except AttributeError:
            return f"error {code}"
        words.restype = ctypes.c_char_p
        return words(code).decode(errors="replace")


class Snapshot:
    """A file as it was read, and whether it still is so. Contents count; times only save reading."""

    def __init__(self, path: str, digest: str) -> None:
        self.path, self.digest = path, digest
        self.status: tuple[int, ...] | None = None  # at which the contents were seen to be these

    def is_current(self) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        status = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
        if status == self.status:
            return True
        if _digest_of(self.path) != self.digest:
            return False
        # A clock has ticks: within one, a second edit would leave the same times.
        settled = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > 2 * 10**9
        self.status = status if settled else None
        return True


class Kernels:
    """The EXPORT functions of a source as methods; each call compiles for its tensors' device if need be."""

    def __init__(self, source: Source, file: Snapshot | None = None) -> None:
        self._source = source
        self._file = file  # that the source was read from
        self._exports = exports_of(source)
        self._libraries: dict[Target, Library] = {}
        for export in self._exports.values():
            setattr(self, export.name, _caller(self, export))

    def __repr__(self) -> str:
        built = ", ".join(" ".join(target).strip() for target in self._libraries)
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
            self._library(Target("cpu", ""))
            return self
        arch = arch or present_arch()
        if not re.fullmatch(r"\d+\.\d[af]?", arch):
            raise ValueError(f"arch: expected a compute capability such as 9.0a, got {arch!r}")
        self._library(Target("cuda", arch))
        return self

    @property
    def resources(self) -> pd.DataFrame:
        """One row a kernel: kernel, registers (a thread), spill_stores, spill_loads, stack_bytes (bytes a
        thread) and shared_bytes (static, bytes a block), as ptxas reports them for the last CUDA build."""
        import pandas as pd

        rows = [usage._asdict() for usage in resources_in(self._cuda_build().log)]
        return pd.DataFrame(rows, columns=Usage._fields)

    def sass(self) -> str:
        """The machine code of the last CUDA build, as cuobjdump shows it. Raises ToolchainError."""
        return self._dump("-sass")

    def ptx(self) -> str:
        """The PTX of the last CUDA build, as cuobjdump shows it. Raises ToolchainError."""
        return self._dump("-ptx")

    def _dump(self, what: str) -> str:
        tool = _tool("cuobjdump")
        folders = [str(tool.parent), *([str(_tool("nvdisasm").parent)] if what == "-sass" else [])]
        path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
        command = [tool, what, self._cuda_build().library]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
        if result.returncode:
            raise ToolchainError(f"{tool} failed: {result.stderr.strip()}")
        return result.stdout

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
        folders = self._source.include_folders
        try:
            return Library(_find_or_build(self._source, target), folders)
        except OSError:  # it was deleted since it was found
            return Library(_find_or_build(self._source, target), folders)

    def _is_current(self) -> bool:
        """Whether the source, and the headers of what was built, are what they were."""
        if self._file is not None and not self._file.is_current():
            return False
        return all(header.is_current() for library in self._libraries.values() for header in library.headers)


CALLER = """
def {name}({parameters}):
    \"\"\"{declaration}\"\"\"
    try:
        _index = {first}.get_device()
        _plain = {checks}
    except Exception:
        _plain = False
    if not _plain:
        _index, {values} = _carefully(({parameters},))
    _code = (_functions.get(_index) or _open(_index))({values})
    if _code:
        _fail(_index, _code)
"""
POINTER_CHECK = (
    "isinstance({name}, _Tensor) and {name}.dtype is _{name}_dtype and {name}.get_device() == _index"
    " and {name}.is_contiguous() and not {name}.is_neg()"
    " and (_{name} := {name}.data_ptr()) and not _{name} & 15"
)
SCALAR_CHECK = "type({name}) is {type} and {low!r} <= {name} <= {high!r}"


def _caller(kernels: Kernels, export: Export) -> Callable[..., None]:
    """The Python function for an EXPORT function.

    It is written out for the signature: a loop over the parameters would cost more than most launches. It
    lets through what is plainly right, and leaves all else to `_checked`, which names what is wrong.
    """
    functions: dict[int, Callable[..., int]] = {}
    libraries: dict[int, Library] = {}

    def open_for(index: int) -> Callable[..., int]:
        target = Target("cpu", "") if index < 0 else Target("cuda", _arch_of(index))
        library = libraries[index] = kernels._library(target)
        functions[index] = library.on_cpu(export) if index < 0 else library.on_gpu(export, index)
        return functions[index]

    def fail(index: int, code: int) -> None:
        raise RuntimeError(f"{export.name}: {libraries[index].error_text(code)}")

    names = {
        "_Tensor": Tensor,
        "_carefully": functools.partial(_checked, export),
        "_functions": functions,
        "_open": open_for,
        "_fail": fail,
    }
    checks, values = [], []
    for name, c_type in export.parameters:
        if c_type in POINTERS:
            names[f"_{name}_dtype"] = POINTERS[c_type]
            checks.append(POINTER_CHECK.format(name=name))
            values.append(f"_{name}")
        else:
            low, high = RANGES[c_type]
            checks.append(SCALAR_CHECK.format(name=name, type=type(low).__name__, low=low, high=high))
            values.append(name)
    text = CALLER.format(
        name=export.name,
        parameters=", ".join(name for name, _ in export.parameters),
        declaration=export.declaration,
        first=next(name for name, c_type in export.parameters if c_type in POINTERS),
        checks=" and ".join(checks),
        values=", ".join(values),
    )
    exec(text, names)
    return names[export.name]


def _checked(export: Export, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The device's index (-1 for the CPU) and what to pass to the C function.

    Raises TypeError or ValueError naming the first argument that is wrong.
    """
    first, values = None, []
    for (name, c_type), value in zip(export.parameters, arguments, strict=True):
        where = f"{export.name}: {name}"
        if c_type in SCALARS:
            values.append(_checked_scalar(value, c_type, where))
            continue
        values.append(_checked_pointer(value, POINTERS[c_type], where))
        first = first or (name, value.device)
        if value.device != first[1]:
            raise ValueError(f"{where}: expected on {first[1]}, where {first[0]} is, got {value.device}")
    return (-1 if first[1].type == "cpu" else first[1].index), *values


def _checked_pointer(value: Any, dtype: torch.dtype, where: str) -> int:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: expected a tensor, got {_kind_of(value)}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: expected a CPU or CUDA tensor, got one on {value.device}")
    if value.dtype != dtype:
        raise TypeError(f"{where}: expected {dtype}, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{where}: expected a dense tensor, got {value.layout}")
    if not value.is_contiguous():
        raise ValueError(f"{where}: must be contiguous, got strides {value.stride()}; pass a contiguous copy")
    if value.is_neg():
        raise ValueError(f"{where}: is negated lazily, its memory has the opposite sign; pass .resolve_neg()")
    try:
        address = value.data_ptr()
    except RuntimeError as error:  # a tensor without memory, such as a tracer's
        raise TypeError(f"{where}: expected a tensor with memory, got {_kind_of(value)}: {error}") from None
    if address == 0:
        raise ValueError(f"{where}: has no elements, shape {tuple(value.shape)}")
    if address % 16:
        raise ValueError(
            f"{where}: must start at a multiple of 16 bytes, as new tensors do, but starts {address % 16} "
            f"bytes after one; pass a clone"
        )
    return address


def _kind_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _checked_scalar(value: Any, c_type: str, where: str) -> float:
    low, high = RANGES[c_type]
    convert = "__index__" if isinstance(low, int) else "__float__"
    if isinstance(value, bool | Tensor) or not hasattr(value, convert):
        raise TypeError(f"{where}: expected {type(low).__name__}, got {_kind_of(value)}")
    number = value.__index__() if isinstance(low, int) else float(value)
    if not low <= number <= high and math.isfinite(number):
        raise ValueError(f"{where}: {number} does not fit into {c_type}")
    return number


# ---- what ptxas reports


class Usage(NamedTuple):
    """What one kernel takes."""

    kernel: str
    registers: int  # a thread
    spill_stores: int  # bytes a thread
    spill_loads: int  # bytes a thread
    shared_bytes: int  # static, a block
    stack_bytes: int  # a thread


ENTRY = re.compile(
    r"entry function '(?P<symbol>\w+)'(?P<properties>.*?)Used (?P<registers>\d+) registers(?P<rest>.*)",
    re.S,
)
FRAME = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


def resources_in(log: str) -> list[Usage]:
    """The resources of each kernel in what `ptxas -v` printed."""
    rows = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        if match := ENTRY.search(part):
            symbol = match["symbol"]
            frame = re.search(rf"properties for {symbol}\s+{FRAME}", match["properties"])
            stack, stores, loads = map(int, frame.groups()) if frame else (0, 0, 0)
            shared = re.search(r"(\d+) bytes smem", match["rest"].partition("\n")[0])
            shared_bytes = int(shared[1]) if shared else 0
            rows.append(Usage(demangle(symbol), int(match["registers"]), stores, loads, shared_bytes, stack))
    return rows


# ---- loading

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
    options = (tuple(sorted(defines.items())) if defines else (), tuple(flags))
    key = (path or source, path is None, name, *options, *map(os.environ.get, (*CHOOSING, *CHANGING)))
    kernels = _loaded.get(key)
    if kernels is None or not kernels._is_current():
        if path is None:
            kernels = Kernels(Source(source, f"{name or 'source'}.cu", None, *options))
        else:
            content = Path(path).read_bytes()
            file = Snapshot(path, _digest(content))
            kernels = Kernels(Source(content.decode(), path, os.path.dirname(path), *options), file)
        _loaded[key] = kernels
    return kernels


def prebuild(
    items: Iterable[Kernels], backend: Backend | None = None, arch: str | None = None, progress: bool = True
) -> None:
    """Build several sources at once, a process a core, with a progress bar.

    All are built even if some fail; then the first error is raised. An interrupt ends all compilers.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from tqdm import tqdm

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = [pool.submit(kernels.build, backend, arch) for kernels in items]
        try:
            for _ in tqdm(as_completed(futures), total=len(futures), desc="compiling", disable=not progress):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                for staging in list(_stagings):
                    _kill_compilers(staging)
                time.sleep(0.01)
            raise
    for future in futures:
        future.result()
