"""NVIDIA's compute-sanitizer on Python code that launches kernels."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Literal, NamedTuple, get_args

import jit_loader
from workbench.paths import ROOT, environment

Outcome = Literal["passed", "failed", "not run"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 500  # for one run; kernels are up to a hundred times as slow
FINDING_STATUS = 86  # the exit status when something was found
DONE = "called everything"  # what the program says at its end
OPTIONS = (
    *("--error-exitcode", str(FINDING_STATUS)),
    *("--launch-timeout", "0"),  # Python imports torch for longer than the usual 10 s
    *("--target-processes", "application-only"),  # and not a compiler, should there be one
    *("--report-api-errors", "no"),  # torch asks the driver for things that it may not have
)
# To initcheck memory is written when it saw the write, so that it has to look at the kernels of PyTorch and
# cuBLAS too, whose results ours read. What it finds in those does not count: whether ours leave anything
# unwritten is for `check` to say, where memory starts as NaN.
EVERY_KERNEL = (
    "--force-blocking-launches",  # reports one thread of a launch, and not each of a million
    *("--print-limit", "0"),  # so that nothing that is found in our kernels is hidden behind others
    *("--show-backtrace", "device"),  # names the kernel where an inner function reads
)


class Finding(NamedTuple):
    """One thing that a tool found."""

    line: int  # of the log
    text: tuple[str, ...]

    def may_be_in(self, kernels: Collection[str]) -> bool:
        """Whether it names one of these kernels, or nothing that was running at all."""
        places = [line for line in self.text if re.match(r"at |Device Frame:", line)]
        if not places:
            return not self.text[0].startswith("Host API")  # a copy
        return any(re.search(rf"\b{re.escape(name)}\b", line) for line in places for name in kernels)


def run_under(
    tool: str, code: str, kernels: Collection[str], seconds: float = SECONDS
) -> tuple[Outcome, str]:
    """What a tool finds in some Python code, in kernels of these names only: outcome and message."""
    return run_each_under(tool, [code], kernels, seconds)[0]


def run_each_under(
    tool: str, codes: Sequence[str], kernels: Collection[str], seconds: float = SECONDS
) -> list[tuple[Outcome, str]]:
    """`run_under` for several programs, which run at the same time.

    The repository is importable in them. Each tensor is an allocation of its own, with an end to run over.
    """
    program = find()
    if program is None:
        message = "compute-sanitizer was not found; pip install 'cuda-toolkit[sanitizer]'"
        return [("not run", message) for _ in codes]
    command = [program, "--tool", tool, *OPTIONS, *_kernels_to_look_at(tool, kernels), sys.executable, "-c"]
    variables = {**environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(_running([*command, f"{code}\nprint({DONE!r}, flush=True)"], variables))
            for code in codes
        ]
        found = []
        for process, log in running:
            status = _wait(process, end)
            log.seek(0)
            found.append(_verdict(tool, status, log.read(), kernels, seconds))
        return found


def _kernels_to_look_at(tool: str, kernels: Collection[str]) -> Sequence[str]:
    """Options for a tool to look at kernels of these names only, or at all where it has to."""
    if tool == "initcheck":
        return EVERY_KERNEL
    return [word for name in sorted(kernels) for word in ("--kernel-name", f"kernel_substring={name}")]


def _verdict(
    tool: str, status: int | None, log: str, kernels: Collection[str], seconds: float
) -> tuple[Outcome, str]:
    """Outcome and message from an exit status, None when it took too long, and a log."""
    if status is None:
        return "not run", f"took longer than {seconds:g} s, at: {_last_line_of_program(log)}"
    found = findings(log)
    ours = [finding for finding in found if tool != "initcheck" or finding.may_be_in(kernels)]
    if status == FINDING_STATUS and ours:
        before = "\n".join(log.splitlines()[: ours[0].line])
        first = "; ".join(ours[0].text[:4])
        return "failed", f"{first}; first of {len(ours)} printed; in: {_last_line_of_program(before)}"
    total = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", log, re.MULTILINE)
    expected = {0: ["0"], FINDING_STATUS: [str(len(found))]}  # or some finding is not known
    if DONE in log.splitlines() and total == expected.get(status):
        return "passed", ""
    before, _, traceback = log.partition("Traceback (most recent call last)")
    raised = re.findall(r"^\S+(?:Error|Exception): .+", traceback, re.MULTILINE)
    said = f"{raised[-1]}; in: {_last_line_of_program(before)}" if raised else log.strip()[-400:]
    return "not run", said


def findings(log: str) -> list[Finding]:
    """What a log says was found: an unindented line of the tool's and the indented ones that follow it."""
    found: list[Finding] = []
    inside = False
    for number, line in enumerate(log.splitlines()):
        said = re.match(r"=========( *)(.*)", line)
        if said and len(said[1]) == 1:
            inside = not re.match(r"COMPUTE-SANITIZER|.*SUMMARY:", said[2])
            if inside:
                found.append(Finding(number, (said[2].strip(),)))
        elif said and said[2] and inside:
            found[-1] = found[-1]._replace(text=(*found[-1].text, said[2].strip()))
    return found


def find() -> str | None:
    """compute-sanitizer on PATH or in a CUDA toolkit; None where there is none."""
    folders = [root / place for root, _ in jit_loader.toolkits() for place in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, folders))
    )


@contextlib.contextmanager
def _running(command: list[str], variables: dict[str, str]) -> Iterator[tuple[subprocess.Popen, IO[str]]]:
    """A process and its output so far. In the end it is no more, nor the program under it."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process, log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, end: float) -> int | None:
    """A process's exit status, or None if it is still running at the end."""
    try:
        return process.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _last_line_of_program(log: str) -> str:
    """The last line of a log that the program itself printed."""
    said = [line for line in log.splitlines() if line.strip() and not line.startswith("=====")]
    return said[-1] if said else "its start"
