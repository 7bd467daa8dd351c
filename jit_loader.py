"""Compile a CUDA source on first use and call its functions with tensors.

    kernels = load(Path("kernels_src/outer_product_mean/03_block_per_pair.cu"), defines={"C": 32})
    kernels.block_per_pair(a, b, mask, out, 1, 8, 32)

`load` reads the signature of each EXPORT function from the source. The first call compiles it, with nvcc for
CUDA tensors or with g++ for CPU tensors, through torch's load_inline; later calls and later processes take the
build from the cache. Nothing else in the project knows the compilers.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import json
import keyword
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

SOURCES = Path(__file__).resolve().parent / "kernels_src"
NEWEST_ARCH = "9.0a"  # what kernels are compiled for where there is no GPU to ask
CACHE_BYTES = 4 * 2**30  # a larger cache loses the builds that were not used for longest

CUDA_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas", "-v")
CPU_FLAGS = ("-O2", "-std=c++17", "-g1", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas")
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")


# ---- errors


class ToolchainError(RuntimeError):
    """A compiler or one of its parts is missing or does not fit; the text says what to install."""


class KernelCompileError(RuntimeError):
    """A source does not compile. The text shows the first error with its place in the source.

    `file`, `line` and `column` (None where the compiler named none) say where, `message` what; `excerpt` is
    that line of the source and `log` everything that the compiler printed.
    """

    def __init__(self, log: str, source: Source) -> None:
        self.log = log
        self.file, self.line, self.column, self.message = first_error(log, source)
        self.excerpt = _line_of(self.file, self.line, source)
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        super().__init__(f"{place}: {self.message}{self._marked_line()}" if place else self.message)

    def _marked_line(self) -> str:
        if not self.excerpt:
            return ""
        caret = "" if self.column is None else "\n    " + " " * (self.column - 1) + "^"
        return "\n    " + self.excerpt.expandtabs(1) + caret


class Mistake(NamedTuple):
    """Where a compiler found the first error, and its words."""

    file: str | None
    line: int | None
    column: int | None
    message: str


GCC_ERROR = re.compile(r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?P<column>\d+): (fatal )?error: (?P<message>.*)", re.M)
NVCC_ERROR = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (catastrophic )?error( #\S+)?: (?P<message>.*)", re.M)
PTXAS_ERROR = re.compile(r"^ptxas (error|fatal) *: (?P<message>.*)", re.M)


def first_error(log: str, source: Source) -> Mistake:
    """The first error in a compiler's output."""
    found = [match for pattern in (GCC_ERROR, NVCC_ERROR) if (match := pattern.search(log))]
    if found:
        first = min(found, key=re.Match.start)
        column = first.groupdict().get("column") or _caret_column(log[first.end() :])
        return Mistake(first["file"], int(first["line"]), column and int(column), first["message"])
    if match := PTXAS_ERROR.search(log):
        return _ptxas_mistake(match["message"], source)
    lines = [line for line in log.splitlines() if "error" in line.lower()] or log.splitlines()[-1:]
    return Mistake(None, None, None, lines[0] if lines else "the compiler failed and printed nothing")


def _caret_column(rest: str) -> int | None:
    """nvcc prints the source line, stripped and indented by two, and a caret below it."""
    for line in rest.split("\n")[1:4]:
        if line.strip() == "^":
            return line.index("^") - 1
    return None


def _ptxas_mistake(message: str, source: Source) -> Mistake:
    """ptxas names kernels, not lines: point at the kernel."""
    symbol = re.search(r"'(_Z\w+)'", message)
    if symbol:
        kernel = demangle(symbol[1])
        message = message.replace(symbol[1], kernel)
        for number, line in enumerate(source.text.split("\n"), start=1):
            if place := re.search(rf"\b{kernel.partition('<')[0]}\s*\(", line):
                return Mistake(source.file, number, place.start() + 1, message)
    return Mistake(source.file, None, None, message)


def _line_of(file: str | None, line: int | None, source: Source) -> str | None:
    with contextlib.suppress(OSError, IndexError, TypeError):
        text = source.text if file == source.file else Path(file).read_text(encoding="utf-8")
        return text.split("\n")[line - 1]
    return None


# ---- the source and its signature


class Source(NamedTuple):
    """What is compiled."""

    text: str
    file: str  # what errors call it
    folder: str | None  # where its own headers are
    defines: tuple[tuple[str, Any], ...]
    flags: tuple[str, ...]


class Parameter(NamedTuple):
    """A parameter of an EXPORT function."""

    name: str
    type: str  # as in POINTERS or SCALARS


class Export(NamedTuple):
    """An EXPORT function; its last parameter, the stream, is not among the parameters."""

    name: str
    parameters: tuple[Parameter, ...]


POINTERS = {
    "float*": torch.float32,
    "double*": torch.float64,
    "__nv_bfloat16*": torch.bfloat16,
    "__half*": torch.float16,
    "int*": torch.int32,
    "int64_t*": torch.int64,
    "uint8_t*": torch.uint8,
}
SCALARS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
EXPORT = re.compile(r"\bEXPORT\s+cudaError_t\s+(\w+)\s*\(([^)]*)\)")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)


def exports_of(source: Source) -> dict[str, Export]:
    """The EXPORT functions of a source. Raises ValueError where one can't be called from Python."""
    text = COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source.text)
    exports = {}
    for match in EXPORT.finditer(text):
        place = f"{source.file}:{text.count(chr(10), 0, match.start()) + 1}"
        parameters = [_parameter(words, f"{place}: {match[1]}") for words in match[2].split(",")]
        if parameters[-1].type != "cudaStream_t":
            raise ValueError(f"{place}: the last parameter of {match[1]} must be a cudaStream_t")
        if not any(parameter.type in POINTERS for parameter in parameters):
            raise ValueError(f"{place}: {match[1]} has no pointer, so nothing says where it should run")
        exports[match[1]] = Export(match[1], tuple(parameters[:-1]))
    if not exports:
        raise ValueError(f"{source.file}: no function of the form EXPORT cudaError_t name(…, cudaStream_t stream)")
    return exports


def _parameter(words: str, place: str) -> Parameter:
    words = re.sub(r"\bconst\b|\b__restrict__\b", " ", words).replace("*", " * ").split()
    name, c_type = words[-1] if words else "", "".join(words[:-1])
    if c_type not in POINTERS and c_type not in SCALARS and c_type != "cudaStream_t":
        known = ", ".join([*POINTERS, *SCALARS])
        raise ValueError(f"{place}: parameter {' '.join(words)!r} is not of a type that can be passed: {known}")
    return Parameter(name + "_" * keyword.iskeyword(name), c_type)


# ---- the toolchain


class Compiler(NamedTuple):
    """A compiler that works, and why it was chosen."""

    path: Path
    version: str  # all that `--version` prints
    reason: str


@functools.cache
def _version(path: str) -> str:
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{path} --version does not run: {error}") from None


def host_compiler() -> Compiler:
    """The C++ compiler that torch takes: $CXX, else c++. Raises ToolchainError."""
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        raise ToolchainError(f"no C++ compiler: {name} is not on PATH; install g++ (apt install g++)")
    return Compiler(Path(path), _version(path), "$CXX" if "CXX" in os.environ else "on PATH")


def nvcc() -> Compiler:
    """nvcc from $CUDA_HOME, else pip's packages, else PATH, else conda. Raises ToolchainError."""
    for root, reason in _toolkits():
        if (path := root / "bin" / "nvcc").exists():
            return Compiler(path, _version(str(path)), reason)
        if reason == "$CUDA_HOME":
            raise ToolchainError(f"$CUDA_HOME is {root}, which has no bin/nvcc; correct or unset it")
    raise ToolchainError("no nvcc was found; pip install 'cuda-toolkit[nvcc,cccl]', or set CUDA_HOME")


def _toolkits() -> Iterator[tuple[Path, str]]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home), "$CUDA_HOME"
    major = (torch.version.cuda or "13").partition(".")[0]
    yield Path(torch.__file__).parent.parent / "nvidia" / f"cu{major}", "pip's packages beside torch"
    if path := shutil.which("nvcc"):
        yield _toolkit_of(path), "nvcc on PATH"
    if prefix := os.environ.get("CONDA_PREFIX"):
        yield Path(prefix), "conda"


@functools.cache
def _toolkit_of(nvcc: str) -> Path:
    """The toolkit of an nvcc that may be a link, or a script that calls the real one."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        steps = subprocess.run([nvcc, "-dryrun", "-c", empty.name], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", steps, re.M)
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent).resolve()


def toolkit() -> Path:
    """The folder of the CUDA toolkit in use."""
    return nvcc().path.parent.parent


def present_arch() -> str:
    """The compute capability of the current GPU, such as "9.0a"; without a GPU the newest that is tested."""
    if not torch.cuda.is_available():
        return NEWEST_ARCH
    return _arch_of(torch.cuda.current_device())


@functools.cache
def _arch_of(device_index: int) -> str:
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"{major}.{minor}" + "a" * (major >= 9)


def _under_address_sanitizer() -> bool:
    return hasattr(ctypes.CDLL(None), "__asan_init")


# ---- the cache


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _digest_of(path: str | Path) -> str:
    return _digest(Path(path).read_bytes())


def cache_folder() -> Path:
    """$FOLDFUSE_CACHE, else foldfuse in the user's cache folder."""
    if named := os.environ.get("FOLDFUSE_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "foldfuse"


class Target(NamedTuple):
    """What a source is compiled for."""

    backend: Literal["cuda", "cpu"]
    arch: str  # a compute capability; empty for the CPU


class Build(NamedTuple):
    """A compiled library in the cache."""

    folder: Path
    dependencies: tuple[tuple[str, str], ...]  # each header that was read, and its digest

    @property
    def library(self) -> Path:
        return self.folder / "kernels.so"

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(encoding="utf-8")


def _recipe(source: Source, target: Target) -> str:
    """A digest of all that makes a build but the headers."""
    tools = [host_compiler().version]
    if target.backend == "cuda":
        tools.append(nvcc().version)
    parts = [
        *(source.text, source.file, source.folder, source.defines, _flags(source, target)),
        *(tools, torch.__version__, torch.compiled_with_cxx11_abi(), sys.implementation.cache_tag),
    ]
    return _digest(repr(parts))


def _find(recipe: str) -> Build | None:
    """The build of a recipe whose headers are those of today."""
    for folder in (cache_folder() / "builds" / recipe).glob("*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            build = Build(folder, tuple(map(tuple, manifest["dependencies"])))
            if (
                manifest["recipe"] == recipe
                and all(_digest_of(path) == digest for path, digest in build.dependencies)
                and _digest_of(build.library) == manifest["library"]
            ):
                return build
    return None


def _find_or_build(source: Source, target: Target) -> Build:
    from filelock import FileLock

    recipe = _recipe(source, target)
    if build := _find(recipe):
        return build
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / recipe):
        return _find(recipe) or _build(source, target, recipe)


# ---- building


def _build(source: Source, target: Target, recipe: str) -> Build:
    """Compile in a private folder and rename the result into place."""
    staging = cache_folder() / "staging" / secrets.token_hex(8)
    staging.mkdir(parents=True)
    try:
        log = _compile(source, target, staging)
        entry = staging / "entry"
        entry.mkdir()
        os.rename(staging / f"{_module_name(staging)}.so", entry / "kernels.so")
        dependencies = tuple((path, _digest_of(path)) for path in _dependencies(staging, source))
        manifest = {"recipe": recipe, "library": _digest_of(entry / "kernels.so"), "dependencies": dependencies}
        (entry / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        (entry / "log.txt").write_text(log, encoding="utf-8")
        place = cache_folder() / "builds" / recipe / _digest(repr(dependencies))[:16]
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            os.rename(place, staging / "damaged")
        os.rename(entry, place)
        return Build(place, dependencies)
    finally:
        _kill_compilers(staging)
        shutil.rmtree(staging, ignore_errors=True)


def _module_name(staging: Path) -> str:
    return f"kernels_{staging.name}"  # unique: torch remembers names, and that it built them


def _flags(source: Source, target: Target) -> tuple[str, ...]:
    defines = tuple(f"-D{name}={int(value) if value is True else value}" for name, value in source.defines)
    if target.backend == "cpu":
        sanitizer = SANITIZER_FLAGS if _under_address_sanitizer() else ()
        return (*CPU_FLAGS, *sanitizer, *defines)
    number = target.arch.replace(".", "")
    codes = tuple(f"-gencode=arch=compute_{number},code={code}_{number}" for code in ("sm", "compute"))
    return (*CUDA_FLAGS, *codes, *defines, *source.flags)


def _compile(source: Source, target: Target, staging: Path) -> str:
    """Compile and link into a staging folder; what the compiler printed. Raises KernelCompileError."""
    torch_extension = _import_torch_extension(target)
    text = f'#line 1 "{source.file}"\n{source.text}'
    flags = [shlex.quote(flag).replace("$", "$$") for flag in _flags(source, target)]
    folders = [str(SOURCES)] if source.folder is None else [source.folder, str(SOURCES)]
    log = staging / "log.txt"
    if target.backend == "cuda":
        # load_inline drops what a successful compiler prints, which has ptxas's report. It hands flags to a
        # shell unquoted, so that they can redirect.
        what = {"cpp_sources": [], "cuda_sources": [text], "extra_cuda_cflags": [*flags, ">log.txt", "2>&1"]}
        linking = ["-Wl,--as-needed", f"-L{shlex.quote(str(_link_folder(staging)))}"]
    else:
        what = {"cpp_sources": [text], "extra_cflags": flags}
        folders.append(str(toolkit() / "include"))
        linking = ["-Wl,--as-needed", "-pthread", *(SANITIZER_FLAGS if _under_address_sanitizer() else ())]
    try:
        torch_extension.load_inline(
            _module_name(staging),
            **what,
            extra_include_paths=folders,
            extra_ldflags=linking,
            build_directory=str(staging),
            no_implicit_headers=True,
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        raise KernelCompileError(f"{printed}\n{error}".strip(), source) from None
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _import_torch_extension(target: Target) -> Any:
    """torch.utils.cpp_extension, set to our toolkit; it costs up to a second, so it waits for a build."""
    import logging

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    if shutil.which("ninja") is None:
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    from torch.utils import cpp_extension

    if target.backend == "cuda":
        cpp_extension.CUDA_HOME = str(toolkit())
    return cpp_extension


def _link_folder(staging: Path) -> Path:
    """A folder with the libcudart.so that pip's packages have only as libcudart.so.13."""
    folder = staging / "link"
    folder.mkdir()
    for library in sorted((toolkit() / "lib").glob("libcudart.so.*")):
        (folder / "libcudart.so").symlink_to(library)
        break
    return folder


def _dependencies(staging: Path, source: Source) -> list[str]:
    """The headers that the compiler read, from its own dependency file, which ninja took in."""
    listing = subprocess.run(["ninja", "-t", "deps"], cwd=staging, capture_output=True, text=True).stdout
    paths = [line[4:] for line in listing.splitlines() if line.startswith("    ")]
    own = (str(staging), source.file)
    return sorted({os.path.abspath(os.path.join(staging, path)) for path in paths if not path.startswith(own)})


def _kill_compilers(staging: Path) -> None:
    """Kill what works in a staging folder: ninja gives each compiler a process group of its own."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(process / "cwd")) == staging.resolve():
                os.kill(int(process.name), signal.SIGKILL)


# ---- calling

_schedule: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("cpu_schedule", default=(0, 0))


@contextlib.contextmanager
def cpu_schedule(order: Literal["forward", "reverse", "random"], seed: int = 0) -> Iterator[None]:
    """The order in which the CPU backend runs a block's threads, for calls inside the with statement."""
    token = _schedule.set((("forward", "reverse", "random").index(order), seed))
    try:
        yield
    finally:
        _schedule.reset(token)


class Library:
    """A compiled library in this process."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.handle = ctypes.CDLL(str(build.library))
        self.set_schedule = getattr(self.handle, "cpu_schedule", None)
        if self.set_schedule:
            self.set_schedule.argtypes = [ctypes.c_int, ctypes.c_uint64]

    def function(self, export: Export) -> Callable[..., int]:
        function = self.handle[export.name]
        function.argtypes = [SCALARS.get(p.type, ctypes.c_void_p) for p in export.parameters] + [ctypes.c_void_p]
        return function

    def error_text(self, code: int) -> str:
        words = getattr(self.handle, "kernel_error_text", None)
        if words is None:
            return f"error {code}"
        words.restype = ctypes.c_char_p
        return words(code).decode(errors="replace")


class Kernels:
    """The EXPORT functions of a source; each is compiled, for the device of its tensors, when first called."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._exports = exports_of(source)
        self._libraries: dict[Target, Library] = {}
        for export in self._exports.values():
            setattr(self, export.name, self._caller(export))

    def __repr__(self) -> str:
        return f"Kernels({self._source.file}: {', '.join(self._exports)})"

    def build(self, backend: Literal["cuda", "cpu"], arch: str | None = None) -> Library:
        """Compile without a call."""
        return self._library(Target(backend, (arch or present_arch()) if backend == "cuda" else ""))

    def _library(self, target: Target) -> Library:
        if target not in self._libraries:
            self._libraries[target] = Library(_find_or_build(self._source, target))
        return self._libraries[target]

    def _cuda_library(self) -> Library:
        built = [library for target, library in self._libraries.items() if target.backend == "cuda"]
        return built[-1] if built else self.build("cuda")

    def _caller(self, export: Export) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            device, values = _checked(export, arguments)
            target = Target("cuda", _arch_of(device.index)) if device.type == "cuda" else Target("cpu", "")
            library = self._library(target)
            function = library.function(export)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    code = function(*values, torch.cuda.current_stream().cuda_stream)
            else:
                if library.set_schedule:
                    library.set_schedule(*_schedule.get())
                code = function(*values, None)
            if code:
                raise RuntimeError(f"{export.name}: {library.error_text(code)}")

        return call

    @property
    def resources(self) -> Any:
        """A DataFrame with a row a kernel: registers, spills, shared memory and stack, as ptxas reports them."""
        import pandas as pd

        return pd.DataFrame(_resources(self._cuda_library().build.log))

    def sass(self) -> str:
        """The machine code, as cuobjdump shows it."""
        return self._cuobjdump("-sass")

    def ptx(self) -> str:
        """The virtual machine code."""
        return self._cuobjdump("-ptx")

    def _cuobjdump(self, what: str) -> str:
        library = self._cuda_library().build.library
        tool = toolkit() / "bin" / "cuobjdump"
        if not tool.exists():
            raise ToolchainError("no cuobjdump was found; pip install nvidia-cuda-cuobjdump")
        path = f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it calls nvdisasm
        return subprocess.run(
            [tool, what, library], capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
        ).stdout


def _checked(export: Export, arguments: Sequence[Any]) -> tuple[torch.device, list[Any]]:
    """The device of a call, and what to pass. Raises TypeError or ValueError naming the argument."""
    if len(arguments) != len(export.parameters):
        names = ", ".join(parameter.name for parameter in export.parameters)
        raise TypeError(
            f"{export.name} takes {len(export.parameters)} arguments ({names}), got {len(arguments)}"
        )
    device, values = None, []
    for parameter, value in zip(export.parameters, arguments, strict=True):
        where = f"{export.name}: {parameter.name}"
        if parameter.type in POINTERS:
            values.append(_pointer(value, POINTERS[parameter.type], device, where))
            device = device or value.device
        else:
            values.append(_scalar(value, parameter.type, where))
    return device, values


def _pointer(value: Any, dtype: torch.dtype, device: torch.device | None, where: str) -> int:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: expected a tensor, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{where}: expected {dtype}, got {value.dtype}")
    if value.device != (device or value.device) or value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: expected on {device or 'a CPU or CUDA device'}, got {value.device}")
    if not value.is_contiguous():
        raise ValueError(f"{where}: must be contiguous, got strides {value.stride()}")
    address = value.data_ptr()
    if address == 0:
        raise ValueError(f"{where}: is empty, shape {tuple(value.shape)}")
    if address % 16:
        raise ValueError(f"{where}: must start at a multiple of 16 bytes, got {address:#x}; call .clone()")
    return address


def _scalar(value: Any, c_type: str, where: str) -> float:
    if isinstance(value, bool | Tensor) or not hasattr(value, "__index__" if "int" in c_type else "__float__"):
        raise TypeError(f"{where}: expected {c_type}, got {type(value).__name__}")
    if "int" not in c_type:
        return float(value)
    bits = 31 if c_type == "int" else 63
    if not -(2**bits) <= int(value) < 2**bits:
        raise ValueError(f"{where}: {value} does not fit into {c_type}")
    return int(value)


def _resources(log: str) -> list[dict[str, Any]]:
    rows = []
    for part in log.split("Compiling entry function '")[1:]:
        numbers = {
            column: int(match[1]) if (match := re.search(pattern, part)) else 0
            for column, pattern in {
                "registers": r"Used (\d+) registers",
                "spill_stores": r"(\d+) bytes spill stores",
                "spill_loads": r"(\d+) bytes spill loads",
                "shared_bytes": r"(\d+) bytes smem",
                "stack_bytes": r"(\d+) bytes stack frame",
            }.items()
        }
        rows.append({"kernel": demangle(part.partition("'")[0]), **numbers})
    return rows


def demangle(symbol: str) -> str:
    """A kernel's name without its parameters: `_Z4copyILi4EEvPf` → `copy<4>`."""
    convert = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    convert.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = convert(symbol.encode(), None, None, ctypes.byref(status))
    if not address:
        return symbol
    words = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return words.removeprefix("void ").replace("(anonymous namespace)::", "").partition("(")[0]


_loaded: dict[Any, Kernels] = {}


def load(
    source: Path | str, defines: Mapping[str, Any] | None = None, flags: Sequence[str] = (), name: str | None = None
) -> Kernels:
    """The functions of a CUDA source: a Path, or the text itself (then `name` stands for a file's name)."""
    if isinstance(source, Path):
        path = source.resolve()
        text, file, folder = path.read_text(encoding="utf-8"), str(path), str(path.parent)
    else:
        text, file, folder = source, f"{name or 'source'}.cu", None
    key = Source(text, file, folder, tuple(sorted((defines or {}).items())), tuple(flags))
    kernels = _loaded.get(key)
    if kernels is None or not kernels_current(kernels):
        kernels = _loaded[key] = Kernels(key)
    return kernels


def kernels_current(kernels: Kernels) -> bool:
    return all(
        _digest_of(path) == digest
        for library in kernels._libraries.values()
        for path, digest in library.build.dependencies
        if not path.startswith(("/usr", str(Path(torch.__file__).parent.parent)))
    )


def prebuild(items: Iterable[Any], progress: bool = True) -> None:
    for item in items:
        item.build("cuda")


def clean() -> None:
    shutil.rmtree(cache_folder() / "builds", ignore_errors=True)


_ = (time, warnings)
