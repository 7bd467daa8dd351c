"""The compilers' options."""

from __future__ import annotations

import ctypes

from jit.source import Source, Target
from jit.toolchain import cuda_headers

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
# The compiler inserts a call, such as of __tsan_read4, at each access to memory. kernels_src/cpu has these
# functions; the sanitizer's own library, which knows nothing of a block's threads, is never linked.
RACES_FLAGS = ("-fsanitize=thread", "-DRACES")


def compiler_flags(source: Source, target: Target) -> tuple[str, ...]:
    """The compiler's options."""
    defines = tuple(f"-D{name}={int(value) if value is True else value}" for name, value in source.defines)
    if target.backend == "cpu":
        sanitizer = RACES_FLAGS if target.races else SANITIZER_FLAGS if _is_sanitized(target) else ()
        common = tuple(flag for flag in source.flags if flag.startswith(("-D", "-U", "-I")))
        return (*CPU_FLAGS, *sanitizer, *defines, *common)
    number = target.arch.replace(".", "")
    codes = tuple(f"-gencode=arch=compute_{number},code={code}_{number}" for code in ("sm", "compute"))
    return (*CUDA_FLAGS, *codes, *defines, *source.flags)


def include_folders(source: Source, target: Target) -> list[str]:
    """Where headers are looked for, first ones first. Raises ToolchainError."""
    return [
        *source.include_folders,
        *(cuda_headers() if target.backend == "cpu" else ()),
    ]  # nvcc knows its own


def linker_flags(target: Target) -> tuple[str, ...]:
    """The linker's options."""
    common = (
        "-Wl,--as-needed",  # what is on the command line of torch's, and has no stand-in, is not needed
        "-Wl,-Bsymbolic-functions",  # a function whose name the C library has too is the source's own
    )
    return (*common, *(SANITIZER_FLAGS if _is_sanitized(target) else ("-Wl,-z,defs",)))


def _is_sanitized(target: Target) -> bool:
    """Whether a build is for AddressSanitizer, because this process runs under it."""
    return target == Target("cpu") and hasattr(ctypes.CDLL(None), "__asan_init")
