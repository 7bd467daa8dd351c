"""The README: its commands work as written, its links lead somewhere, its names exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

from kernels_src import OPERATORS
from workbench.paths import ROOT
from workbench.tables import PART

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
WORKBENCH = [command for command in COMMANDS if command.startswith("python -m workbench ")]


def test_every_command_is_tested():
    assert set(COMMANDS) == {*MAKE, *WORKBENCH}
    assert len(MAKE) >= 4 and len(WORKBENCH) >= 4


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_the_target(command: str):
    """Asks make what it would do; doing it here would run this test inside itself."""
    planned = run(f"{command} --dry-run")
    assert planned.returncode == 0, planned.stderr
    assert any(word in planned.stdout for word in ("workbench", "jupyter lab", "pytest", "on_gpu.sh"))


@pytest.mark.parametrize("command", WORKBENCH)
def test_workbench_command_as_written(command: str):
    program, *arguments = shlex.split(command)
    done = python(*arguments)
    assert program == "python" and done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_a_shell_runs_them_too():
    [command] = [command for command in WORKBENCH if command.endswith(" list")]
    assert run(command).stdout == python("-m", "workbench", "list").stdout != ""


def test_python_as_written():
    """Each Python block runs by itself and leaves a result without NaN."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        assert names["out"].isfinite().all()


def run(command: str) -> subprocess.CompletedProcess:
    """Run a line in a shell, in the repository's root, with this Python as `python`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_links_lead_somewhere():
    """Files that the README links to or shows; plots only where results have been recorded."""
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    recorded = (ROOT / "results" / "nvidia-h200" / "run.json").exists()
    missing = [
        target
        for target in targets
        if not target.startswith("http")
        and not (ROOT / target).exists()
        and (recorded or not target.startswith("results/"))
    ]
    assert not missing


def test_every_operator_is_named_and_has_its_table():
    parts = {name for _, name, _ in PART.findall(README)}
    for name in OPERATORS:
        assert f"`{name}`" in README
        assert f"nvidia-h200/{name}" in parts


def test_magics_are_spelt_as_they_are():
    pytest.importorskip("IPython")
    from workbench.magics import StageMagics

    known = {f"%{name}" for name in StageMagics.magics["line"]} | {
        f"%%{name}" for name in StageMagics.magics["cell"]
    }
    assert known == set(re.findall(r"%%?[a-z_]+", README))


def test_layout_table_names_what_is_there():
    written = re.sub(r"<!-- results:(\S+) -->.*?<!-- /results:\1 -->", "", README, flags=re.DOTALL)
    for name in re.findall(r"^\| `([^`<]+)` \|", written, re.MULTILINE):
        assert name in OPERATORS or (ROOT / name).exists(), name
