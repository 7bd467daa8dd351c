"""From a source to a build: one that is there, or a new one."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from jit.cache import Build, cache_folder, check_usable, find, publish, recipe_of, temporary_folder, unusable
from jit.compile import compile_in
from jit.headers import headers_of
from jit.source import Source, Target
from jit.staging import staging_folder
from jit.toolchain import require_cuda


def find_or_build(source: Source, target: Target) -> Build:
    """The build for the sources as they are now. Raises KernelCompileError or ToolchainError."""
    recipe = recipe_of(source, target)
    if build := find(recipe):
        return build
    cache = cache_folder()
    if cache not in unusable:
        try:
            check_usable(cache)
            with _only_one_builds(cache, recipe):
                return find(recipe) or _build(source, target, recipe, cache)
        except OSError as error:
            unusable.add(cache)
            warnings.warn(
                f"kernels can't be kept in {cache} ({error.strerror or error}); each process compiles them "
                f"anew. Set FOLDFUSE_CACHE to a folder of your own with space.",
                stacklevel=2,
            )
    return _build(source, target, recipe, temporary_folder())


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
    headers = None
    time.sleep(0.01)  # a tick of the file system's clock, so that an edit before is older than the build
    while True:
        with staging_folder(cache) as staging:
            began = staging.stat().st_ctime_ns  # by the clock of the file system
            library, log = compile_in(staging, source, target)
            before, headers = headers, headers_of(staging, source)
            if headers == before or headers.are_older_than(began):
                return publish(library, log, headers, recipe, cache)
