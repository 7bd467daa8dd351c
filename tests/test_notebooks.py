"""The notebooks: their committed form, a section for every stage, and that they run from top to bottom."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import python

from kernels_src import OPERATORS
from workbench import session
from workbench.paths import NOTEBOOKS, ROOT

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")  # or what it needs: a GPU's machine may do without, and runs other tests
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output  # noqa: E402

from workbench import committed, execute  # noqa: E402

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
OF_OPERATOR = {
    "msa_column_attention": "01_msa_column_attention",
    "outer_product_mean": "02_outer_product_mean",
}
LONGEST_CELL = 10
PROSE = range(2, 9)  # paragraphs' lines of 110 columns in a stage's section


def notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def by_name(path: Path) -> str:
    return path.stem


def paths_in(shown: nbformat.NotebookNode) -> list[str]:
    """Paths of somebody's machine in sources and in outputs that are text."""
    texts = [cell.source for cell in shown.cells]
    for cell in shown.cells:
        for output in cell.get("outputs", []):
            texts += [output.get("text", "")]
            texts += [
                str(data) for mime, data in output.get("data", {}).items() if mime not in committed.PICTURES
            ]
    return re.findall(r"/(?:home|root|work|tmp|Users)/\S*", "\n".join(texts))


every_notebook = pytest.mark.parametrize("path", PATHS, ids=by_name)


def test_there_are_notebooks():
    assert len(PATHS) >= 6


@every_notebook
def test_committed_form(path: Path):
    """Valid, cells named; no outputs, or those of a complete run on a GPU of the kernels at hand."""
    found = notebook(path)
    nbformat.validate(found)
    assert path.read_text() == nbformat.writes(found) + "\n"
    ids = [cell.id for cell in found.cells]
    assert len(set(ids)) == len(ids)
    assert not committed.faults(found)


@every_notebook
def test_nothing_of_a_machine_is_committed(path: Path):
    assert not paths_in(notebook(path))


@every_notebook
def test_cells_are_short(path: Path):
    long = [
        cell.id
        for cell in notebook(path).cells
        if cell.cell_type == "code" and len(cell.source.splitlines()) > LONGEST_CELL
    ]
    assert not long


@pytest.mark.parametrize("name", OPERATORS)
def test_every_stage_has_its_section(name: str):
    """A heading with the title in the source's header, prose, and cells that show, check and time it."""
    operator = OPERATORS[name]
    sections = _sections(notebook(NOTEBOOKS / f"{OF_OPERATOR[name]}.ipynb"))
    numbers = [heading.split(":")[0] for heading in sections if heading.startswith("Stage ")]
    assert numbers == [f"Stage {stage.number}" for stage in operator.stages]
    for stage in operator.stages:
        before = session.before(operator, stage)
        title = f"Stage {stage.number}: {stage.title}"
        assert title in sections
        prose, code = sections[title]
        lines = sum(1 + len(paragraph) // 110 for paragraph in prose.split("\n\n"))
        assert lines in PROSE, f"{title}: {lines} lines"
        shown = f'show_diff(op, "{before.number}", "{stage.number}")' if before else "show_source("
        assert shown in code, f"{title}: expected {shown}"
        assert re.search(rf'^check\(op, "{stage.number}"', code, re.MULTILINE)
        assert re.search(rf'^time\(op, "{stage.number}"', code, re.MULTILINE)


def _sections(shown: nbformat.NotebookNode) -> dict[str, tuple[str, str]]:
    """Prose and code below each heading of the second level."""
    sections: dict[str, tuple[str, str]] = {}
    heading = ""
    for cell in shown.cells:
        if cell.cell_type == "markdown":
            first, _, rest = cell.source.partition("\n")
            if first.startswith("## "):
                heading = first.removeprefix("## ")
                sections[heading] = (rest.strip(), "")
        elif heading:
            prose, code = sections[heading]
            sections[heading] = prose, f"{code}{cell.source}\n"
    return sections


@every_notebook
@pytest.mark.timeout(600)
def test_executes_from_top_to_bottom(path: Path, tmp_path: Path):
    assert execute.execute(path, tmp_path) is None
    executed = notebook(tmp_path / path.name)
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not paths_in(executed)
    pictures = [cell for cell in code for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(list(tmp_path.glob(f"{path.stem}.*.png"))) == len(pictures)


def test_a_failing_cell_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The exit status is 1, the message has notebook, cell and error, and the other notebooks still run."""
    _write(tmp_path / "a.ipynb", ["x = 1", "y = x / 0", "never = True"])
    _write(tmp_path / "b.ipynb", ["print('b ran')"])
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(execute, "EXECUTED", tmp_path / "executed")
    assert execute.main() == 1
    said = capsys.readouterr().err
    assert "FAILED a.ipynb: cell 3 (cell-1)" in said
    assert "ZeroDivisionError" in said and "\x1b" not in said
    failed, other = notebook(tmp_path / "executed" / "a.ipynb"), notebook(tmp_path / "executed" / "b.ipynb")
    assert failed.cells[2].outputs[0].ename == "ZeroDivisionError" and not failed.cells[3].outputs
    assert other.cells[1].outputs[0].text == "b ran\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU to the eyes of what executes notebooks; their kernels see what there is."""
    for module in (committed, execute):
        monkeypatch.setattr(module, "gpu", lambda: "NVIDIA Test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two notebooks to be executed, in place of the project's."""
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(execute, "EXECUTED", tmp_path / "executed")
    bar = "from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass"
    _write(tmp_path / "a.ipynb", ["import os; print(os.getcwd())", bar])
    _write(tmp_path / "b.ipynb", ["list(range(2))"])
    return tmp_path


def test_outputs_are_kept_with_their_run_and_cleared_again(folder: Path, gpu):
    before = {path.name: path.read_text() for path in folder.glob("*.ipynb")}
    assert execute.main(["--keep"]) == 0
    for path in sorted(folder.glob("*.ipynb")):
        kept = notebook(path)
        assert kept.metadata[committed.RECORD].gpu == "NVIDIA Test"
        assert not committed.faults(kept)
    assert "[0, 1]" in kept.cells[1].outputs[0].data["text/plain"]
    assert execute.main(["--clear"]) == 0
    assert {path.name: path.read_text() for path in folder.glob("*.ipynb")} == before


def test_nothing_is_kept_of_a_failed_run_or_without_a_gpu(folder: Path, request, capsys):
    before = (folder / "b.ipynb").read_text()
    if not torch.cuda.is_available():
        assert execute.main(["--keep"]) == 1
        assert "no GPU" in capsys.readouterr().err and not (folder / "executed").exists()
    request.getfixturevalue("gpu")
    _write(folder / "a.ipynb", ["1 / 0"])
    assert execute.main(["--keep"]) == 1
    assert (folder / "executed" / "b.ipynb").exists() and (folder / "b.ipynb").read_text() == before


def complete_run() -> nbformat.NotebookNode:
    """A notebook as --keep leaves it."""
    cells = [
        new_code_cell(str(number), id=f"cell-{number}", execution_count=number, outputs=[
            new_output("execute_result", data={"text/plain": str(number)}, execution_count=number)])
        for number in (1, 2)
    ]  # fmt: skip
    run = {"gpu": "NVIDIA Test", "torch": "2", "date": "now", "kernels": committed.digest_of_kernels()}
    return committed.normalise(new_notebook(cells=cells, metadata={committed.RECORD: run}))


def test_a_complete_run_has_no_faults():
    assert not committed.faults(complete_run())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda book: book.cells.reverse(), "not the outputs of one complete run"),
        (lambda book: book.cells[1].update(execution_count=None, outputs=[]), "not the outputs of one"),
        (lambda book: book.metadata.pop(committed.RECORD), "of no known run"),
        (lambda book: book.metadata[committed.RECORD].update(gpu=None), "without a GPU"),
        (lambda book: book.metadata[committed.RECORD].update(kernels="0"), "of other kernels"),
        (lambda book: book.metadata.update(widgets={}), "normal form"),
        (lambda book: book.cells[0].outputs[0].data.update({"text/plain": str(ROOT)}), "normal form"),
        (
            lambda book: book.cells[0].outputs.append(
                new_output("error", ename="E", evalue="", traceback=[])
            ),
            "cells failed: cell-1",
        ),
    ],
)
def test_what_is_not_a_complete_run_is_a_fault(spoil: Callable[[nbformat.NotebookNode], object], words: str):
    book = complete_run()
    spoil(book)
    (fault,) = committed.faults(book)
    assert words in fault


def test_the_digest_of_kernels_sees_code_and_not_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(committed, "KERNELS", tmp_path)
    digests = []
    for text in ("int a;  // one\n", "int  a;\n", "int b;\n"):
        (tmp_path / "a.cu").write_text(text)
        digests.append(committed.digest_of_kernels())
    assert digests[0] == digests[1] != digests[2]


def test_normal_form_drops_what_only_one_run_has():
    """Times, widgets, a progress bar's history and this machine's paths go; text and pictures stay."""
    bar = "\rtiming:  0%|    | 0/2\rtiming: 100%|████| 2/2\r"
    outputs = [
        new_output("stream", name="stderr", text=bar),
        new_output(
            "stream", name="stderr", text="auto.py:21: TqdmWarning: IProgress not found. Please\n  from x\n"
        ),
        new_output("stream", name="stdout", text=f"{bar}kept\nin {ROOT}/results, {sys.prefix}/bin\n"),
        new_output("display_data", data={committed.WIDGET: {}, "text/plain": "timing: 0%"}),
        new_output("display_data", data={"image/png": "AAAA"}, metadata={"image/png": {"width": 5}, "x": 1}),
    ]
    cell = new_code_cell("1", outputs=outputs, metadata={"execution": {"iopub.execute_input": "now"}})
    done = committed.normalise(
        new_notebook(cells=[cell], metadata={"widgets": {}, "kernelspec": {"name": "a", "display_name": "b"}})
    )
    assert done.metadata == committed.METADATA
    assert done.cells[0].metadata == {}
    stream, picture = done.cells[0].outputs
    assert stream.text == "kept\nin ./results, .venv/bin\n"
    assert picture.metadata == {"image/png": {"width": 5}}


WITHOUT_PLATFORMDIRS = """
import sys
import pytest

class WithoutPlatformdirs:
    def pytest_collection(self):
        for name in [name for name in sys.modules if name.partition(".")[0] == "platformdirs"]:
            del sys.modules[name]
        sys.modules["platformdirs"] = None  # as if it were not installed

sys.exit(pytest.main(sys.argv[1:], plugins=[WithoutPlatformdirs()]))
"""


def test_where_packages_of_notebooks_are_missing_these_tests_are_skipped():
    """And a run of other tests does not end at this file. nbclient needs platformdirs by way of others."""
    done = python("-c", WITHOUT_PLATFORMDIRS, "-p", "no:cacheprovider", "--co", "-q", "-rs", __file__)
    assert "SKIPPED" in done.stdout and "platformdirs" in done.stdout, done.stdout
    assert "error" not in done.stdout.lower()


def _write(path: Path, sources: list[str]) -> None:
    cells = [new_markdown_cell("# Title", id="title")]
    cells += [new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    committed.write(new_notebook(cells=cells), path)
