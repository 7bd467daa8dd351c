"""Contents of files, and whether they are what they were."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path


def digest(content: bytes | str) -> str:
    """A name for contents."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of(path: str | Path) -> str | None:
    """The digest of a file's contents; None where it can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return digest(file.readall())
    except OSError:
        return None


def is_in(folders: Iterable[str | Path], path: str) -> bool:
    """Whether a path is below one of some folders."""
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


class Snapshot:
    """A file as it was read, and whether it still is so. Contents count; times only save reading."""

    def __init__(self, path: str, digest: str) -> None:
        self.path, self.digest = path, digest
        self.status: tuple[int, ...] | None = None  # at which the contents were seen to be these

    def is_current(self) -> bool:
        """Whether the file has the contents that it had."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        status = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
        if status == self.status:
            return True
        if digest_of(self.path) != self.digest:
            return False
        # A clock has ticks: within one, a second edit would leave the same times.
        settled = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > 2 * 10**9
        self.status = status if settled else None
        return True
