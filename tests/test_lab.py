"""A real JupyterLab in a real Chromium: what a reader does, with the mouse and the keyboard.

Screenshots go to tests/artefacts/, to be looked at.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels_src import MSA_COLUMN_ATTENTION as OPERATOR
from workbench.paths import ROOT, environment

pytest.importorskip("nbformat")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
from nbformat.v4 import new_code_cell, new_notebook  # noqa: E402
from playwright.sync_api import Locator, Page, expect  # noqa: E402

from workbench.committed import write  # noqa: E402

ARTEFACTS = Path(__file__).parent / "artefacts"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page
}
TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
SLOW_MS = 120_000  # a cell that imports torch and compiles, on a busy machine
STAGE = OPERATOR.stages[0]
LINE = "constexpr int kThreads = 256;"  # of that stage, to be edited
NOT_COPIED = (".venv", ".git", "executed", "artefacts", ".ipynb_checkpoints", "*.egg-info")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("lab"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of what `make lab` starts, on a copy of the project with an empty notebook more.

    The copy is in the same place each time, since a build is of sources in their place.
    """
    home = tmp_path_factory.mktemp("lab")
    project = ARTEFACTS / "project"
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(*NOT_COPIED))
    write(new_notebook(cells=[new_code_cell("", id="first")]), project / "notebooks" / "scratch.ipynb")
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    variables = environment() | {
        "PYTHONPATH": str(project),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    command = [sys.executable, "-m", "jupyterlab", *_arguments_of_make_lab()]
    command += ["--no-browser", "--allow-root", "--ServerApp.port=0", "--IdentityProvider.token="]
    with (home / "log").open("w+") as log:
        server = subprocess.Popen(command, env=variables, cwd=project, stdout=log, stderr=log)
        try:
            yield _address(server, home / "runtime")
        finally:
            server.terminate()
            server.wait(timeout=30)
            shutil.rmtree(project)


def _arguments_of_make_lab() -> list[str]:
    planned = subprocess.run(
        ["make", "--dry-run", "lab"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [line] = [line for line in planned.stdout.splitlines() if "jupyter lab " in line]
    return shlex.split(line.partition("jupyter lab ")[2])


def _address(server: subprocess.Popen, runtime: Path) -> str:
    """Where the server listens, once it says so."""
    for _ in range(600):
        for path in runtime.glob("jpserver-*.json"):
            url = json.loads(path.read_text())["url"]
            with urllib.request.urlopen(f"{url}api", timeout=30):
                return url
        try:
            server.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise RuntimeError("JupyterLab did not start")


@pytest.fixture(scope="module")
def page(lab: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=CHROMIUM,
            args=FLAGS,
            viewport={"width": 1440, "height": 1100},
        )
        page = browser.new_page()
        page.set_default_timeout(30_000)
        expect.set_options(timeout=SLOW_MS)
        yield page
        browser.close()


def test_a_notebook_runs(lab: str, page: Page):
    """Open the tour, run all of its cells; the race shows, and no cell fails."""
    page.goto(lab)
    book = _opened(page)
    expect(page).to_have_url(re.compile(r"/lab/tree/notebooks/00_loader\.ipynb"))
    _menu(page, "Run", "Run All Cells")
    _wait_for_all(book)
    expect(book.locator('[data-mime-type="application/vnd.jupyter.error"]')).to_have_count(0)
    race = _cell_with(book, "reverse_kernel").first
    race.scroll_into_view_if_needed()
    expect(_cell_with(book, 'name="race"').locator(".jp-OutputArea")).to_contain_text("nan")
    _keep(page, "01_tour")
    mistake = _cell_with(book, "facter")
    mistake.scroll_into_view_if_needed()
    expect(mistake.locator(".jp-OutputArea")).to_contain_text("facter")
    _keep(page, "02_compile_error")


def test_the_tweak_loop(lab: str, page: Page):
    """Load a stage into a cell, edit it, see check and diff; break it, see the line; mend it."""
    book = _open(lab, page, "scratch.ipynb")
    first = book.locator(".jp-CodeCell").first
    _type(page, first, f"%load_ext workbench.notebook\n%load_stage {OPERATOR.name} {STAGE.number}")
    _run(page)
    expect(book.locator(".jp-CodeCell")).to_have_count(2)
    cell = book.locator(".jp-CodeCell").nth(1)
    expect(cell.locator(".cm-content")).to_contain_text(f"%%stage {OPERATOR.name} {STAGE.number} --as my_")
    _keep(page, "03_stage_loaded")

    _replace_line(page, cell, LINE, LINE.replace("256", "128"))
    _run(page)
    _wait_for(cell)
    output = cell.locator(".jp-OutputArea")
    expect(output).to_contain_text("is right in all")
    expect(output.locator("td.new")).to_contain_text(["kThreads = 128"])
    expect(output).to_contain_text("registers a thread")
    _keep(page, "04_variant", output)

    broken = LINE.replace("256", "128").replace("constexpr int", "constexpr itn")
    _replace_line(page, cell, LINE.replace("256", "128"), broken)
    _run(page)
    _wait_for(cell)
    marked = cell.locator(".foldfuse-marked tr.here")
    expect(marked).to_have_count(1)
    expect(marked).to_contain_text("constexpr itn kThreads")
    number = _line_number(cell, broken)
    expect(marked.locator("td").first).to_have_text(str(number))
    expect(cell.locator(".jp-OutputArea")).to_contain_text("Rejected: my_01 does not compile")
    _keep(page, "05_line_marked", cell.locator(".jp-OutputArea"))

    _replace_line(page, cell, broken, LINE)
    _run(page)
    _wait_for(cell)
    expect(cell.locator(".jp-OutputArea")).to_contain_text("is right in all")


def test_a_stage_is_edited_in_its_file(lab: str, page: Page):
    """Open a .cu from the file browser, edit and save it, run the cell again: built anew and checked."""
    source = (
        "from workbench.notebook import MSA_COLUMN_ATTENTION as op, check, show_source\n"
        f'display(show_source(op, "{STAGE.number}"))\ncheck(op, "{STAGE.number}")'
    )
    cell = _run_in_scratch(lab, page, source)
    output = cell.locator(".jp-OutputArea")
    expect(output).to_contain_text("passed")
    for folder in ("/", "kernels_src", OPERATOR.name):
        _enter(page, folder)
    page.locator(".jp-DirListing-item", has_text=STAGE.source.name).dblclick()
    editor = page.locator(".jp-FileEditor:visible")
    for old, new, words in (
        (LINE, LINE.replace("256", "128"), "passed"),
        ("    __syncthreads();", "    // none", "is wrong in"),
        ("    // none", "    __syncthreads();", "passed"),
    ):
        page.get_by_role("tab", name=STAGE.source.name).click()
        _replace_line(page, editor, old, new)
        page.keyboard.press("Control+S")
        expect(page.locator(".lm-TabBar-tab.lm-mod-current.jp-mod-dirty")).to_have_count(0)
        page.get_by_role("tab", name="scratch.ipynb").click()
        cell.locator(".cm-content").click()
        _run(page)
        _wait_for(cell)
        expect(output).to_contain_text(words)
        expect(output).to_contain_text("kThreads = 128")
        _keep(page, f"06_file_{words.split()[0]}", cell.locator(".jp-InputArea"))


def test_a_plot_is_exported(lab: str, page: Page, tmp_path: Path):
    source = (
        "from workbench.notebook import MSA_COLUMN_ATTENTION, plot_stages\n"
        f"plot = plot_stages(MSA_COLUMN_ATTENTION)\nprint(len(plot.export({str(tmp_path / 'plot')!r})))\nplot"
    )
    cell = _run_in_scratch(lab, page, source)
    expect(cell.locator(".jp-OutputArea")).to_contain_text("3")
    picture = cell.locator(".jp-OutputArea img")
    expect(picture).to_be_visible()
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plot.csv").read_text().startswith("# ")
    _keep(page, "07_plot", picture)


def _open(lab: str, page: Page, name: str) -> Locator:
    """Open a notebook in a lab with nothing else in it, and wait for its kernel."""
    page.goto(f"{lab}lab/tree/notebooks/{name}?reset")
    return _opened(page)


def _opened(page: Page) -> Locator:
    """The notebook that is being opened, once its kernel is there."""
    book = page.locator(".jp-NotebookPanel:visible .jp-Notebook")
    expect(book.locator(".jp-Cell").first).to_be_visible(timeout=60_000)
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    return book


def _run_in_scratch(lab: str, page: Page, source: str) -> Locator:
    """The first cell of the empty notebook, once it has run this text; opened where it is not in front."""
    in_front = page.url.endswith("/scratch.ipynb")
    book = _opened(page) if in_front else _open(lab, page, "scratch.ipynb")
    cell = book.locator(".jp-CodeCell").first
    _type(page, cell, source)
    _run(page)
    _wait_for(cell)
    return cell


def _enter(page: Page, folder: str) -> None:
    """Go to a folder in the file browser: one that it shows, or the root."""
    if folder == "/":
        page.locator(".jp-BreadCrumbs-home").click()
    else:
        page.locator(".jp-DirListing-item", has_text=folder).dblclick()
    crumb = page.locator(".jp-BreadCrumbs-item", has_text=folder)
    expect(crumb).to_have_count(0 if folder == "/" else 1)


def _menu(page: Page, menu: str, item: str) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{item}$")).click()


def _run(page: Page) -> None:
    """Run the cell that has the cursor, and stay in it."""
    page.keyboard.press("Control+Enter")


def _type(page: Page, cell: Locator, text: str) -> None:
    """Replace a cell's text."""
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)


def _replace_line(page: Page, cell: Locator, old: str, new: str) -> None:
    """Click on a line, select it and type another."""
    line = cell.locator(".cm-line", has_text=re.compile(f"^{re.escape(old)}$")).first
    line.scroll_into_view_if_needed()
    line.click()
    page.keyboard.press("Home")  # to the first letter
    page.keyboard.press("Home")
    page.keyboard.press("Shift+End")
    page.keyboard.insert_text(new)
    expect(cell.locator(".cm-line", has_text=re.compile(f"^{re.escape(new)}$")).first).to_be_visible()


def _line_number(cell: Locator, text: str) -> int:
    """A line's number in its cell, from 1."""
    lines = cell.locator(".cm-line").all_text_contents()
    return 1 + lines.index(text)


def _cell_with(book: Locator, text: str) -> Locator:
    """The code cells whose source has this text."""
    return book.locator(".jp-CodeCell", has=book.page.locator(".jp-InputArea", has_text=text))


def _wait_for(cell: Locator) -> None:
    """Wait until a cell that was started has its number."""
    expect(cell.locator(".jp-InputPrompt").first).to_have_text(re.compile(r"\[\d+\]:"))


def _wait_for_all(book: Locator) -> None:
    for cell in book.locator(".jp-CodeCell").all():
        _wait_for(cell)


def _keep(page: Page, name: str, shown: Locator | None = None) -> None:
    """Keep a picture of the page, with something scrolled into sight."""
    ARTEFACTS.mkdir(exist_ok=True)
    if shown is not None:
        shown.scroll_into_view_if_needed()
    page.evaluate(TWO_FRAMES)  # a last layout
    page.screenshot(path=ARTEFACTS / f"{name}.png")
