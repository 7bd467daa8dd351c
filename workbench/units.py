"""Quantities in words."""

from __future__ import annotations


def time_text(us: float) -> str:
    """A time with the unit that suits its size."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def memory_text(mib: float) -> str:
    """A size of memory with the unit that suits it."""
    for unit, size in (("GiB", 1024), ("MiB", 1)):
        if mib >= size:
            return f"{mib / size:.3g} {unit}"
    return f"{mib * 1024:.3g} KiB"
