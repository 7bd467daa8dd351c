"""What does not compile is shown where it is: file, line, column, excerpt, caret; the log folded away."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import jit_loader

SOURCE = """\
#include "cuda.cuh"
#include "tile.cuh"

__global__ void scale_kernel(const float* x, float* y, int n, float factor) {
    const int i = blockIdx.x * kTile + threadIdx.x;
    if (i < n) y[i] = factor * x[i];
}

EXPORT cudaError_t scale(const float* x, float* y, int n, float factor, cudaStream_t stream) {
    return LAUNCH(scale_kernel, dim3(ceil_div(n, kTile)), dim3(kTile), 0, stream)(x, y, n, factor);
}
"""
TILE = """\
#pragma once
constexpr int kTile = 128;
static_assert(kTile % 32 == 0, "a tile is whole warps");
"""


class Case:
    """A change that does not compile; `marked` is what the caret is under, for g++ and for nvcc."""

    def __init__(self, old, new, message, marked, file="scale.cu"):
        self.old, self.new, self.message, self.file = old, new, message, file
        self.marked = dict(zip(("cpu", "cuda"), marked, strict=True))


CASES = {
    "syntax": Case("x[i];\n}", "x[i]\n}", "expected.*;", ("\n", "}")),
    "undeclared": Case("factor * x", "factr * x", "factr", ("factr * x[i];", "factr * x[i];")),
    "after a tab": Case("    if (i < n)", "\tif (i < m)", '‘m’|"m"', ("m) y", "m) y")),
    "after other letters": Case("    if (i < n)", "    /* 折り é */ if (i < m)", '‘m’|"m"', ("m) y", "m) y")),
    "launch argument missing": Case(
        "(x, y, n, factor);", "(x, y, n);", "no match for call|cannot be called", ("(x", "LAUNCH(scale")
    ),
    "launch arguments swapped": Case(
        "(x, y, n, factor);",
        "(y, x, n, factor);",
        "no match for call|cannot be called",
        ("(y", "LAUNCH(scale"),
    ),
    "in a header": Case(
        "kTile = 128", "kTile = 48", "a tile is whole warps", ("== 0", "static_assert"), "tile.cuh"
    ),
    "no such header": Case('"tile.cuh"', '"tyle.cuh"', "tyle.cuh: No such file", ('"tyle', '"tyle')),
    "undefined": Case(
        "    return LAUNCH",
        "    elsewhere(); return LAUNCH",
        "undefined reference to `elsewhere",
        ("elsewhere(); return", "elsewhere(); return"),
    ),
}


def write(folder: Path, case: Case) -> Path:
    texts = {"scale.cu": SOURCE, "tile.cuh": TILE}
    (name,) = [name for name, text in texts.items() if case.old in text]
    texts[name] = texts[name].replace(case.old, case.new)
    if "elsewhere" in case.new:
        texts["tile.cuh"] += "void elsewhere();\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / "scale.cu"


def error_of(source, backend) -> jit_loader.KernelCompileError:
    with pytest.raises(jit_loader.KernelCompileError) as raised:
        jit_loader.load(source).build(backend)
    return raised.value


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_the_first_error_is_shown_at_its_place(tmp_path, name, backend):
    case = CASES[name]
    error = error_of(write(tmp_path, case), backend)
    file = tmp_path / case.file
    assert error.file == str(file)
    assert re.search(case.message, error.message)
    text = file.read_text()
    excerpt = text.split("\n")[error.line - 1]
    assert error.excerpt == excerpt
    place = sum(len(line) + 1 for line in text.split("\n")[: error.line - 1]) + error.column - 1
    assert text[place:].startswith(case.marked[backend])
    headline, shown, caret = str(error).split("\n")
    assert headline == f"{file}:{error.line}:{error.column}: {error.message}"
    assert shown[4:] == excerpt.replace("\t", " ")
    assert caret == " " * (3 + error.column) + "^"
    assert error.message in error.log


def test_too_much_static_shared_memory(tmp_path):
    """ptxas knows the kernel alone."""
    change = Case(
        "    const int i",
        "    SHARED(float, big, [60000]);\n    big[threadIdx.x] = n;\n    __syncthreads();\n"
        "    if (big[n % 60] > 1) y[0] = 1;\n    const int i",
        "",
        ("", ""),
    )
    error = error_of(write(tmp_path, change), "cuda")
    assert error.message.startswith("Entry function 'scale_kernel' uses too much shared data")
    assert (error.line, error.excerpt) == (4, SOURCE.split("\n")[3])
    assert error.excerpt[error.column - 1 :].startswith("scale_kernel(")


def test_an_instruction_that_the_arch_lacks():
    text = SOURCE.replace('#include "tile.cuh"', "constexpr int kTile = 32;").replace(
        "    if (i < n)", '    asm volatile("wgmma.fence.sync.aligned;"); if (i < n)'
    )
    with pytest.raises(jit_loader.KernelCompileError, match="wgmma.fence.*sm_80") as raised:
        jit_loader.load(text, name="old").build("cuda", "8.0")
    assert raised.value.file == "old.cu"


def test_a_text_is_called_by_its_name():
    text = SOURCE.replace('#include "tile.cuh"', "").replace("factor * x", "factr * x")
    for name in ("cell", 'a "quoted" \\ name'):
        with pytest.raises(jit_loader.KernelCompileError) as raised:
            jit_loader.load(text, name=name).build("cpu")
        error = raised.value
        assert (error.file, error.line) == (f"{name}.cu", 5)
        assert "kTile" in error.excerpt


def test_html_escapes_marks_and_folds(tmp_path):
    source = write(tmp_path, Case("if (i < n)", "if (i <script> n)", "", ("", "")))
    error = error_of(source, "cpu")
    html = error._repr_html_()
    assert "if (i &lt;script&gt; n)" in html and "<script" not in html
    assert "^</pre>" in html
    before, folded = html.split("<details>")
    assert "ninja" in folded and "ninja" not in before
    assert f"{source}:6:" in before


def test_a_notebook_shows_the_html_and_no_traceback(tmp_path):
    """In a real kernel's display: the HTML beside an error without frames."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    source = write(tmp_path, CASES["undeclared"])
    root = Path(jit_loader.__file__).parent
    cell = f"import pathlib, jit_loader\njit_loader.load(pathlib.Path({str(source)!r})).build('cpu')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    client = nbclient.NotebookClient(notebook, allow_errors=True, resources={"metadata": {"path": str(root)}})
    client.execute()
    shown, raised = notebook.cells[0].outputs
    assert "\x1b" not in shown["data"]["text/html"]
    assert "<details>" in shown["data"]["text/html"] and "factr" in shown["data"]["text/html"]
    assert raised["ename"] == "KernelCompileError"
    assert len(raised["traceback"]) == 1 and f"{source}:6:" in raised["traceback"][0]


def test_an_error_can_be_sent_to_another_process(tmp_path):
    error = error_of(write(tmp_path, CASES["undeclared"]), "cpu")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.log, copy.line) == (str(error), error.log, error.line)
