"""The form in which notebooks are committed: without outputs, or with those of one complete run on a GPU."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import torch
from nbformat import NotebookNode

from workbench.paths import ROOT
from workbench.sources import KERNELS, without_layout

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
RECORD = "foldfuse"  # the notebook's metadata under this name say which run its outputs are of
WIDGET = "application/vnd.jupyter.widget-view+json"
# What a progress bar overwrote, and tqdm's complaint where widgets are not installed.
PROGRESS = re.compile(r"[^\n]*\r(?!\n)|[^\n]*TqdmWarning: IProgress not found.*\n.*\n")
PICTURES = {"image/svg+xml": ".svg", "image/png": ".png"}
REMEDY = "`python -m workbench.execute --keep` on a machine with a GPU renews the outputs, --clear drops them"


def gpu() -> str | None:
    """The name of this machine's GPU, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def record() -> dict[str, Any]:
    """What a reader must know of a run to believe its outputs: card, version, date, and which kernels."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"gpu": gpu(), "torch": torch.__version__, "date": date, "kernels": digest_of_kernels()}


def digest_of_kernels() -> str:
    """A digest of all CUDA sources; layout and comments do not count, since they change no output's truth."""
    digest = hashlib.sha256()
    for path in sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")]):
        digest.update(f"{path.relative_to(KERNELS)}\n{without_layout(path.read_text())}\n".encode())
    return digest.hexdigest()[:16]


def faults(notebook: NotebookNode) -> list[str]:
    """Why a notebook is not fit to be committed, and what to do; empty when it is."""
    found = []
    if normalise(copy.deepcopy(notebook)) != notebook:
        found.append(f"not in its normal form: times, widgets, paths or a kernel of one machine; {REMEDY}")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not any(cell.outputs or cell.execution_count for cell in code):
        return found
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"not the outputs of one complete run: cells ran as {counts}; {REMEDY}")
    failed = [cell.id for cell in code for output in cell.outputs if output.output_type == "error"]
    if failed:
        found.append(f"cells failed: {', '.join(failed)}")
    return found + _faults_of_run(notebook.metadata.get(RECORD))


def _faults_of_run(run: dict[str, Any] | None) -> list[str]:
    if run is None:
        return [f"outputs of no known run; {REMEDY}"]
    if run["gpu"] is None:
        return [f"outputs of a run without a GPU, where nothing is measured; {REMEDY}"]
    if run["kernels"] != digest_of_kernels():
        return [f"outputs of other kernels than those in kernels_src; {REMEDY}"]
    return []


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook in its normal form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(normalise(notebook), path)


def clear(path: Path) -> None:
    """Take the outputs out of a notebook."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    write(notebook, path)


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Leave in a notebook, in place, only what its author and its cells wrote.

    Times, widgets, what progress bars overwrote and the paths of this machine are taken out.
    """
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_normalise_output, cell.outputs) if output]
    run = notebook.metadata.get(RECORD)
    has_outputs = any(cell.get("outputs") for cell in notebook.cells)
    notebook.metadata = nbformat.from_dict(METADATA | ({RECORD: run} if run and has_outputs else {}))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _normalise_output(output: NotebookNode) -> NotebookNode | None:
    """An output without what only this run or machine has; None when nothing is left of it."""
    if output.output_type == "stream":
        output.text = _without_paths(re.sub(PROGRESS, "", output.text))
        return output if output.text.strip() else None
    if output.output_type == "error":
        return output
    if WIDGET in output.data:  # with its text, a progress bar at 0 %
        return None
    output.data = NotebookNode({mime: _without_paths(data) for mime, data in output.data.items()})
    output.metadata = NotebookNode({mime: size for mime, size in output.metadata.items() if mime in PICTURES})
    return output if output.data else None


def _without_paths(data: Any) -> Any:
    """Text without the folders of this machine: Python's, the repository's, the caches' and the user's."""
    folders = {
        sys.prefix: ".venv",
        str(ROOT): ".",
        os.environ.get("FOLDFUSE_CACHE"): "~/.cache/foldfuse",
        os.environ.get("XDG_CACHE_HOME"): "~/.cache",
        str(Path.home()): "~",
    }
    if isinstance(data, str):
        for folder, name in folders.items():
            data = data.replace(folder, name) if folder and folder != "/" else data
    return data
