"""Execute every notebook from top to bottom: `python -m workbench.execute`.

Executed copies, and every picture that a cell showed, go to results/executed/. The copies have the form in
which notebooks are committed, so a copy made on the GPU can take its original's place.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "results" / "executed"
CELL_SECONDS = 900  # a cell that takes longer hangs
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"
# What a progress bar overwrote, and tqdm's complaint where widgets are not installed.
PROGRESS = re.compile(r"[^\n]*\r(?!\n)|[^\n]*TqdmWarning: IProgress not found.*\n.*\n")
PICTURES = {"image/svg+xml": ".svg", "image/png": ".png"}


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Leave in a notebook, in place, only what its author and its cells wrote.

    Times, widgets, what progress bars overwrote and the paths of this machine are taken out.
    """
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_normalise_output, cell.outputs) if output]
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
    """Text without the folders of this machine: Python's, the repository's and the user's."""
    if isinstance(data, str):
        for path, name in ((sys.prefix, ".venv"), (str(ROOT), "."), (str(Path.home()), "~")):
            data = data.replace(path, name)
    return data


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook in its committed form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(normalise(notebook), path)


def execute(path: Path, folder: Path) -> str | None:
    """Run one notebook, write its copy and pictures to `folder`; return what failed, or None."""
    for stale in folder.glob(f"{path.stem}.*"):
        stale.unlink()
    notebook = nbformat.read(path, as_version=4)
    failed: list[int] = []
    with tqdm(total=len(notebook.cells), desc=path.stem, unit="cell") as bar:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(path.parent)}},
            on_cell_complete=lambda cell, cell_index: bar.update(),
            on_cell_error=lambda cell, cell_index, execute_reply: failed.append(cell_index),
        )
        try:
            client.execute(env=environment())
        except CellExecutionError as error:
            index = failed[0]
            where = f"{path.name}: cell {index + 1} ({notebook.cells[index].id})"
            return f"{where}\n\n{_plain(str(error))}"
        finally:
            write(notebook, folder / path.name)
            _write_pictures(notebook, folder / path.stem)
    return None


def environment() -> dict[str, str]:
    """The kernel's environment: this one, with the repository importable where it is not installed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _write_pictures(notebook: NotebookNode, stem: Path) -> None:
    """Write each picture as STEM.CELL.svg or .png; a cell's second picture has -2 after its name."""
    for cell in notebook.cells:
        pictures = [output.data for output in cell.get("outputs", []) if "data" in output]
        for number, data in enumerate((data for data in pictures if PICTURES.keys() & data.keys()), start=1):
            name = cell.id if number == 1 else f"{cell.id}-{number}"
            for mime in PICTURES.keys() & data.keys():
                is_text = mime == "image/svg+xml"
                content = data[mime].encode() if is_text else base64.b64decode(data[mime])
                stem.with_name(f"{stem.name}.{name}{PICTURES[mime]}").write_bytes(content)


def _plain(text: str) -> str:
    """Text without a terminal's colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def main() -> int:
    """Execute all notebooks in the order of their names. Returns 1 when a cell of any of them failed."""
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    failures = [failure for path in paths if (failure := execute(path, EXECUTED))]
    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    print(f"{len(paths) - len(failures)} of {len(paths)} notebooks executed; copies in {EXECUTED}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
