"""Private folders to build in, and the compilers that work there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

_stagings: set[Path] = set()  # of the builds under way in this process


@contextlib.contextmanager
def staging_folder(cache: Path) -> Iterator[Path]:
    """A private folder to build in, gone afterwards; with it, whatever happens, the compilers in it."""
    folder = cache / "staging" / os.urandom(8).hex()
    folder.mkdir(mode=0o700, parents=True)
    _stagings.add(folder)
    try:
        yield folder
    except BaseException:
        kill_compilers(folder)
        raise
    finally:
        _stagings.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)


def kill_all_compilers() -> None:
    """Kill everything that works for this process's builds."""
    for staging in list(_stagings):
        kill_compilers(staging)


def kill_compilers(staging: Path) -> None:
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
