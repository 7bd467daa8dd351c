"""What a kernel takes, as ptxas reports it, and its machine code, as cuobjdump shows it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

from jit.errors import ToolchainError
from jit.symbols import demangle
from jit.toolchain import tool


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


def disassembly(library: Path, what: Literal["-sass", "-ptx"]) -> str:
    """The code in a library, as cuobjdump shows it. Raises ToolchainError."""
    dump = tool("cuobjdump")
    folders = [str(dump.parent), *([str(tool("nvdisasm").parent)] if what == "-sass" else [])]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    command = [dump, what, library]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if result.returncode:
        raise ToolchainError(f"{dump} failed: {result.stderr.strip()}")
    return result.stdout
