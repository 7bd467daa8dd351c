"""The circumstances of a run: what a figure needs beside it to be believed, and measured again."""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import torch

import jit_loader
from workbench.results import ROOT
from workbench.roofline import Ceilings


def describe_run(ceilings: Ceilings) -> dict[str, Any]:
    """Card, versions, clocks, commit, date, command and ceilings of this run, for run.json."""
    return {
        "gpu": torch.cuda.get_device_name(),
        **_card(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flags": " ".join(jit_loader.CUDA_FLAGS),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _is_dirty(),
        "sources": digest_of_sources(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *_module_form(sys.argv)]),
        "ceilings": {name: float(f"{value:.4g}") for name, value in ceilings._asdict().items()},
    }


def digest_of_sources() -> str:
    """A digest of everything under kernels_src: it tells whether results are of the sources at hand."""
    digest = hashlib.sha256()
    paths = (
        path for path in (ROOT / "kernels_src").rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".py")
    )
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _card() -> dict[str, Any]:
    """Driver and clocks, as nvidia-smi reports them; None where it does not run."""
    names = {
        "driver": "driver_version",
        "sm_mhz": "clocks.sm",
        "max_sm_mhz": "clocks.max.sm",
        "memory_mhz": "clocks.mem",
    }
    query = ["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader,nounits"]
    text = _output(query)
    values = text.splitlines()[0].split(", ") if text else [None] * len(names)
    return dict(zip(names, values, strict=True))


def _git(*arguments: str) -> str | None:
    return _output(["git", "-C", str(ROOT), *arguments])


def _is_dirty() -> bool | None:
    """Whether tracked files differ from the commit; None where there is no repository."""
    if _git("rev-parse", "HEAD") is None:
        return None
    return bool(_git("status", "--porcelain", "--untracked-files=no"))


def _output(command: list[str]) -> str | None:
    """What a program printed; None when it is missing or failed."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _module_form(argv: list[str]) -> list[str]:
    """The arguments as one would type them: `-m workbench` for the path of its __main__.py."""
    program, *rest = argv
    return ["-m", "workbench", *rest] if program.endswith("__main__.py") else argv
