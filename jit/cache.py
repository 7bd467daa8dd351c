"""Builds that outlive the process, found by everything that made them.

builds/RECIPE/HEADERS/ has kernels.so, log.txt and manifest.json. RECIPE is a digest of everything but the
headers; HEADERS tells apart the builds of one recipe, made while the headers were different.
staging/ has the builds under way; locks/ keeps two processes from doing the same work.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from jit.files import digest, digest_of
from jit.flags import compiler_flags, include_folders, linker_flags
from jit.headers import Headers
from jit.packed import text_of
from jit.source import Source, Target
from jit.toolchain import CHANGING, host_compiler, nvcc

CACHE_BYTES = 4 * 2**30  # a larger cache loses the builds that were not used for longest


def cache_folder() -> Path:
    """$FOLDFUSE_CACHE, else foldfuse in the user's cache folder."""
    if named := os.environ.get("FOLDFUSE_CACHE"):
        return Path(os.path.abspath(named))
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # there is neither HOME nor an entry for the user
        return Path(base or Path.home() / ".cache") / "foldfuse"
    return Path(tempfile.gettempdir()) / f"foldfuse-{os.getuid()}"


def check_usable(folder: Path) -> None:
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
def temporary_folder() -> Path:
    """A folder for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="foldfuse-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


unusable: set[Path] = set()  # cache folders in whose place the temporary one is used


class Build(NamedTuple):
    """A compiled library in the cache."""

    folder: Path
    headers: Headers

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / "kernels.so"

    @property
    def log(self) -> str:
        """What the compiler printed."""
        return (self.folder / "log.txt").read_text(encoding="utf-8")


def recipe_of(source: Source, target: Target) -> str:
    """A digest of everything that makes a build, but the headers."""
    compilers = [host_compiler()]
    if target.backend == "cuda":
        compilers += [nvcc(), host_compiler("CC", "gcc")]
    parts = (
        *(source, text_of(source), target),
        *(compiler_flags(source, target), include_folders(source, target), linker_flags(target)),
        *((str(compiler.path), compiler.version) for compiler in compilers),
        *map(os.environ.get, CHANGING),
        *(torch.__version__, torch.compiled_with_cxx11_abi(), sys.implementation.cache_tag),
    )
    return digest(repr(parts))


def find(recipe: str) -> Build | None:
    """The build of a recipe with the headers of today, if there is one and it is whole."""
    for cache in (cache_folder(), *([temporary_folder()] if unusable else ())):
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
        headers = Headers(tuple(map(tuple, manifest["read"])), tuple(manifest["absent"]))
        whole = (
            manifest["recipe"] == recipe
            and headers.are_current()
            and digest_of(folder / "kernels.so") == manifest["library"]
            and digest_of(folder / "log.txt") == manifest["log"]
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


def publish(library: Path, log: str, headers: Headers, recipe: str, cache: Path) -> Build:
    """Move a build from its staging folder to where all find it, whole or not at all."""
    entry = library.parent / "entry"
    entry.mkdir()
    # A copy, since load_inline has loaded the original: debuggers and sanitizers would go on to look for
    # that under the staging folder's name.
    shutil.copyfile(library, entry / "kernels.so")
    (entry / "log.txt").write_text(log, encoding="utf-8")
    manifest = {
        "recipe": recipe,
        "library": digest_of(entry / "kernels.so"),
        "log": digest_of(entry / "log.txt"),
        **headers._asdict(),
    }
    (entry / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for path in (*entry.iterdir(), entry):
        _write_through(path)
    place = cache / "builds" / recipe / digest(repr(headers))[:16]
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.exists():  # damaged, or it would have been used
        os.rename(place, library.parent / "damaged")
    os.rename(entry, place)
    _trim_cache()
    return Build(place, headers)


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
