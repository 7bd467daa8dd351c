"""What is compiled, and for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

SOURCES = Path(__file__).resolve().parents[1] / "kernels_src"  # on every include path

Backend = Literal["cuda", "cpu"]


class Source(NamedTuple):
    """What is compiled, headers apart."""

    text: str
    file: str  # what errors call it
    folder: str | None  # where its own headers are
    defines: tuple[tuple[str, Any], ...]
    flags: tuple[str, ...]  # nvcc's, -I with an absolute path; the CPU takes those that every compiler has

    @property
    def include_folders(self) -> list[str]:
        """Where the project's headers are looked for, first ones first."""
        own = [] if self.folder is None else [self.folder]
        given = [flag[2:] for flag in self.flags if flag.startswith("-I")]
        return [*given, *own, str(SOURCES)]


class Target(NamedTuple):
    """What a source is compiled for."""

    backend: Backend
    arch: str = ""  # CUDA's compute capability
    races: bool = False  # the CPU's: every access to memory is reported to kernels_src/cpu

    def __str__(self) -> str:
        return f"{self.backend} {self.arch}{'races' * self.races}".strip()
