"""The notebooks: their committed form, a section for every stage, and that they run from top to bottom."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kernels_src import OPERATORS
from workbench import execute, session

PATHS = sorted(execute.NOTEBOOKS.glob("*.ipynb"))
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
                str(data) for mime, data in output.get("data", {}).items() if mime not in execute.PICTURES
            ]
    return re.findall(r"/(?:home|root|work|tmp|Users)/\S*", "\n".join(texts))


every_notebook = pytest.mark.parametrize("path", PATHS, ids=by_name)


def test_there_are_notebooks():
    assert len(PATHS) >= 6


@every_notebook
def test_committed_form(path: Path):
    """No times, widgets or kernel of somebody's machine; cells are named; what ran, ran in order."""
    committed = notebook(path)
    nbformat.validate(committed)
    assert execute.normalise(copy.deepcopy(committed)) == committed
    assert path.read_text() == nbformat.writes(committed) + "\n"
    ids = [cell.id for cell in committed.cells]
    assert len(set(ids)) == len(ids)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts in ([None] * len(code), list(range(1, len(code) + 1)))
    assert not [cell.id for cell in code for output in cell.outputs if output.output_type == "error"]


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
    sections = _sections(notebook(execute.NOTEBOOKS / f"{OF_OPERATOR[name]}.ipynb"))
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


def _sections(committed: nbformat.NotebookNode) -> dict[str, tuple[str, str]]:
    """Prose and code below each heading of the second level."""
    sections: dict[str, tuple[str, str]] = {}
    heading = ""
    for cell in committed.cells:
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


def test_all_notebooks_executed_is_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _write(tmp_path / "a.ipynb", ["1 + 1"])
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(execute, "EXECUTED", tmp_path / "executed")
    assert execute.main() == 0


def test_normal_form_drops_what_only_one_run_has():
    """Times, widgets, a progress bar's history and this machine's paths go; text and pictures stay."""
    bar = "\rtiming:  0%|    | 0/2\rtiming: 100%|████| 2/2\r"
    outputs = [
        new_output("stream", name="stderr", text=bar),
        new_output(
            "stream", name="stderr", text="auto.py:21: TqdmWarning: IProgress not found. Please\n  from x\n"
        ),
        new_output("stream", name="stdout", text=f"{bar}kept\nin {execute.ROOT}/results, {sys.prefix}/bin\n"),
        new_output("display_data", data={execute.WIDGET: {}, "text/plain": "timing: 0%"}),
        new_output("display_data", data={"image/png": "AAAA"}, metadata={"image/png": {"width": 5}, "x": 1}),
    ]
    cell = new_code_cell("1", outputs=outputs, metadata={"execution": {"iopub.execute_input": "now"}})
    done = execute.normalise(
        new_notebook(cells=[cell], metadata={"widgets": {}, "kernelspec": {"name": "a", "display_name": "b"}})
    )
    assert done.metadata == execute.METADATA
    assert done.cells[0].metadata == {}
    stream, picture = done.cells[0].outputs
    assert stream.text == "kept\nin ./results, .venv/bin\n"
    assert picture.metadata == {"image/png": {"width": 5}}


def _write(path: Path, sources: list[str]) -> None:
    cells = [new_markdown_cell("# Title", id="title")]
    cells += [new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    execute.write(new_notebook(cells=cells), path)
