"""What a compiler read beside the source: the headers, by the compiler's own list."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jit.errors import ToolchainError
from jit.files import digest_of, is_in
from jit.source import Source
from jit.toolchain import ninja_folder


class Headers(NamedTuple):
    """What a compiler read beside the source."""

    read: tuple[tuple[str, str], ...]  # path and digest
    absent: tuple[str, ...]  # files that would be read instead, or too, if they were there

    def are_current(self) -> bool:
        """Whether a compiler would read the same today."""
        return all(digest_of(path) == digest for path, digest in self.read) and not any(
            map(os.path.exists, self.absent)
        )

    def are_older_than(self, began: int) -> bool:
        """Whether these are surely what a compiler read that began then (a file's time, in ns)."""
        try:
            return all(os.stat(path).st_ctime_ns < began for path, _ in self.read)
        except OSError:
            return False


def headers_of(staging: Path, source: Source) -> Headers:
    """The headers of a build, from the compiler's own list, which ninja took in."""
    ninja = [ninja_folder() / "ninja", "-t", "deps"]
    listing = subprocess.run(ninja, cwd=staging, capture_output=True, text=True).stdout
    listed = {os.path.abspath(staging / line[4:]) for line in listing.split("\n") if line.startswith("    ")}
    paths = {path for path in listed if path != source.file and not is_in([staging], path)}
    # The project's own come first: where a build is out of date, it is they that differ.
    ordered = sorted(paths, key=lambda path: (not is_in(source.include_folders, path), path))
    digests = {path: digest_of(path) for path in ordered}
    read = tuple((path, digest) for path, digest in digests.items() if digest is not None)
    if not read:  # never keep a build whose headers are unknown
        variable = "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"
        raise ToolchainError(f"the compiler listed no headers; unset {variable}")
    missing = [path for path, digest in digests.items() if digest is None]
    return Headers(read, (*missing, *_shadows(ordered, source.include_folders)))


def _shadows(paths: Iterable[str], folders: Sequence[str]) -> Iterator[str]:
    """Where a file would be found before a header that was read."""
    for path in paths:
        for place, folder in enumerate(folders):
            if is_in([folder], path):
                earlier = (os.path.join(before, os.path.relpath(path, folder)) for before in folders[:place])
                yield from (shadow for shadow in earlier if not os.path.exists(shadow))
                break
