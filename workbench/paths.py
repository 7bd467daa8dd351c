"""Where things are, and the environment in which other processes find them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "results" / "executed"  # executed copies of notebooks, and exported plots


def environment() -> dict[str, str]:
    """This process's environment, with the repository importable where it is not installed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
