"""Execute every notebook from top to bottom: `python -m workbench.execute`.

Executed copies, and every picture that a cell showed, go to results/executed/. With `--keep`, on a machine
with a GPU, the copies take the originals' place when all notebooks have succeeded. `--clear` executes nothing
and takes the outputs out of the originals.
"""

from __future__ import annotations

import argparse
import base64
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from tqdm.auto import tqdm

from workbench.committed import PICTURES, RECORD, clear, gpu, record, write
from workbench.paths import EXECUTED, NOTEBOOKS, environment

CELL_SECONDS = 900  # a cell that takes longer hangs
MOST_AT_ONCE = 4  # each has PyTorch in its memory


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
            extra_arguments=["--log-level=ERROR"],  # no warning of plain text: it stays in this machine
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
            notebook.metadata[RECORD] = record()
            write(notebook, folder / path.name)
            _write_pictures(notebook, folder / path.stem)
    return None


def execute_all(paths: Sequence[Path], folder: Path) -> list[str]:
    """Run notebooks, several at once where nothing is timed; return what failed, in their order."""
    at_once = 1 if gpu() else min(os.cpu_count() or 1, MOST_AT_ONCE)
    if at_once == 1 or len(paths) == 1:
        outcomes = {path: execute(path, folder) for path in paths}
    else:
        fork = multiprocessing.get_context("fork")
        longest_first = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
        with ProcessPoolExecutor(at_once, fork, initializer=_share_cores, initargs=(at_once,)) as pool:
            done = pool.map(execute, longest_first, [folder] * len(paths))
            outcomes = dict(zip(longest_first, done, strict=True))
    return [failure for path in paths if (failure := outcomes[path])]


def _share_cores(at_once: int) -> None:
    """Give the kernels of this process their part of the cores; threads that wait in vain cost the others."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))


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


def main(arguments: Sequence[str] = ()) -> int:
    """Execute all notebooks. Returns 1 when a cell of any of them failed, or when nothing can be kept."""
    parser = argparse.ArgumentParser(prog="python -m workbench.execute", description=__doc__.split("\n")[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--keep", action="store_true", help="put the outputs into notebooks/; needs a GPU")
    group.add_argument("--clear", action="store_true", help="take the outputs out of notebooks/")
    options = parser.parse_args(arguments)
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    if options.clear:
        for path in paths:
            clear(path)
        return 0
    if options.keep and not gpu():
        print("--keep: there is no GPU here, and committed outputs have measured times", file=sys.stderr)
        return 1
    failures = execute_all(paths, EXECUTED)
    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    print(f"{len(paths) - len(failures)} of {len(paths)} notebooks executed; copies in {EXECUTED}")
    if options.keep and not failures:
        for path in paths:
            shutil.copyfile(EXECUTED / path.name, path)
        print(f"outputs kept in {NOTEBOOKS}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
