"""NVIDIA's compute-sanitizer on Python code that launches kernels."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Literal

import jit_loader
from workbench.paths import ROOT, environment

Outcome = Literal["passed", "failed", "not run"]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 500  # for one run; kernels are up to a hundred times as slow
FINDING_STATUS = 86  # the exit status when something was found
OPTIONS = (
    *("--error-exitcode", str(FINDING_STATUS)),
    *("--launch-timeout", "0"),  # Python imports torch for longer than the usual 10 s
    *("--target-processes", "application-only"),  # and not a compiler, should there be one
    *("--report-api-errors", "no"),  # torch asks the driver for things that it may not have
)


def run_under(tool: str, code: str, kernels: Iterable[str], seconds: float = SECONDS) -> tuple[Outcome, str]:
    """What a tool finds in some Python code, looking at kernels of these names only: outcome and message.

    The repository is importable in it. Each tensor is an allocation of its own, with an end to run over.
    """
    program = find()
    if program is None:
        return "not run", "compute-sanitizer was not found; pip install 'cuda-toolkit[sanitizer]'"
    only = [word for name in sorted(set(kernels)) for word in ("--kernel-name", f"kernel_substring={name}")]
    command = [program, "--tool", tool, *OPTIONS, *only, sys.executable, "-c", code]
    status, log = _run(command, {**environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, seconds)
    if status is None:
        return "not run", f"took longer than {seconds:g} s, at: {_last_line_of_program(log)}"
    if status == 0 and any(f"SUMMARY: 0 {word}" in log for word in ("errors", "hazards")):
        return "passed", ""
    if status == FINDING_STATUS:
        return "failed", f"{_first_finding(log)}; in: {_last_line_of_program(log)}"
    return "not run", log.strip()[-400:]


def find() -> str | None:
    """compute-sanitizer on PATH or in a CUDA toolkit; None where there is none."""
    folders = [root / place for root, _ in jit_loader.toolkits() for place in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, folders))
    )


def _run(command: list[str], variables: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit status, None when it took too long, and output. Then the program under the tool is ended too."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=seconds)
        return process.returncode, log
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def _first_finding(log: str) -> str:
    """The first error of a log, and its summary."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=====")]
    wanted = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")]
    return "; ".join([*wanted[:4], *wanted[-1:]])


def _last_line_of_program(log: str) -> str:
    """The last line that the program itself printed before the first finding, or at all."""
    before = log.partition("========= Invalid")[0]
    said = [line for line in before.splitlines() if line.strip() and not line.startswith("=====")]
    return said[-1] if said else "its start"
