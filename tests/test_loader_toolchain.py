"""Which compilers are taken; where one lacks, one clear sentence, the same from build and report."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from processes import SCALE, factor_of, in_child, write_scale
from test_loader_builds import copied_toolkit

import jit_loader
from jit import toolchain

TEXT = SCALE.replace('#include "factor.h"', "#define FACTOR 3")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDFUSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bare_path(tmp_path) -> Path:
    """A folder to be the whole PATH, with what a compiler needs beside itself."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("sh", "sed", "which", "as", "ld", "ninja"):
        if path := shutil.which(program):
            (folder / program).symlink_to(path)
    return folder


def _attempt(hide: tuple[str, ...], backend: str, arch: str | None = None, torch_cuda: str | None = "as is"):
    """The error of a build without some parts, and what the report says of it."""
    if "pip" in hide:  # as if torch had been installed without its packages for nvcc
        torch.__file__ = "/nowhere/torch/__init__.py"
    if "usual" in hide:
        places = toolchain.toolkits
        toolchain.toolkits = lambda: (kit for kit in places() if kit.reason != "the usual place")
    if "python" in hide:  # its folder has ninja
        sys.executable = "/nowhere/python"
    if torch_cuda != "as is":
        torch.version.cuda = torch_cuda
    report = [finding for finding in jit_loader.toolchain_report() if finding.advice]
    try:
        jit_loader.load(TEXT, name="scale").build(backend, arch)
    except jit_loader.ToolchainError as error:
        return str(error), [finding.part for finding in report if finding.advice == str(error)]
    return "it was built", [finding.part for finding in report]


def test_without_nvcc(bare_path):
    (bare_path / "c++").symlink_to(shutil.which("c++"))
    env = {"PATH": str(bare_path), "CUDA_HOME": None, "CONDA_PREFIX": None}
    error, parts = in_child(_attempt, ("pip", "usual"), "cuda", env=env)
    assert error == (
        "nvcc was not found; pip install 'cuda-toolkit[nvcc,cccl]', or set CUDA_HOME to a CUDA toolkit"
    )
    assert parts == ["nvcc"]


def test_without_cudas_headers_the_cpu_has_none_either(bare_path):
    (bare_path / "c++").symlink_to(shutil.which("c++"))
    env = {"PATH": str(bare_path), "CUDA_HOME": None, "CONDA_PREFIX": None}
    error, parts = in_child(_attempt, ("pip", "usual"), "cpu", env=env)
    assert parts == ["CUDA headers"]
    assert error == "CUDA's headers were not found; pip install 'cuda-toolkit[nvcc,cccl]'"


def test_cuda_home_without_nvcc(tmp_path):
    error, parts = in_child(_attempt, (), "cuda", env={"CUDA_HOME": str(tmp_path)})
    assert error == f"CUDA_HOME is {tmp_path}, which has no bin/nvcc; correct or unset it"
    assert parts == ["nvcc"]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_without_a_host_compiler(bare_path, backend):
    error, parts = in_child(_attempt, (), backend, env={"PATH": str(bare_path), "CXX": None})
    assert error == "c++ (on PATH) was not found; install g++, for example: apt install g++"
    assert parts == ["C++ compiler"]
    error, parts = in_child(_attempt, (), backend, env={"CXX": "g++-99"})
    assert error == "g++-99 ($CXX) was not found; install g++, for example: apt install g++"
    assert parts == ["C++ compiler"]


def test_without_the_host_compiler_of_nvcc(bare_path):
    """g++ alone is enough for the CPU."""
    (bare_path / "c++").symlink_to(shutil.which("c++"))
    error, parts = in_child(_attempt, (), "cuda", env={"PATH": str(bare_path), "CC": None})
    assert error == "gcc (on PATH) was not found; install g++, for example: apt install g++"
    assert parts == ["nvcc"]
    env = {"PATH": str(bare_path), "CC": None}
    assert in_child(_attempt, (), "cpu", env=env) == ("it was built", ["nvcc"])


def test_without_ninja(bare_path):
    (bare_path / "ninja").unlink()
    (bare_path / "c++").symlink_to(shutil.which("c++"))
    error, parts = in_child(_attempt, ("python",), "cpu", env={"PATH": str(bare_path)})
    assert error == "ninja was not found; pip install ninja"
    assert parts == ["ninja"]


def test_ninja_beside_python_is_enough(bare_path):
    """As when .venv/bin/python is called without activating the environment."""
    (bare_path / "ninja").unlink()
    (bare_path / "c++").symlink_to(shutil.which("c++"))
    assert in_child(_attempt, (), "cpu", env={"PATH": str(bare_path)})[0] == "it was built"


def test_nvcc_older_than_the_arch():
    error, _ = in_child(_attempt, (), "cuda", "99.0a")
    assert "does not know compute capability 99.0a, only 7.5, " in error and "; install a newer one" in error
    with pytest.raises(ValueError, match="arch: expected a compute capability such as 9.0a, got 'sm_90'"):
        jit_loader.load(TEXT, name="scale").build("cuda", "sm_90")
    error, parts = in_child(_attempt_for_newest, "99.0a")
    assert "does not know compute capability 99.0a" in error
    assert parts == ["nvcc"]


def _attempt_for_newest(arch):
    """As on a machine whose GPU is newer than its toolkit."""
    toolchain.NEWEST_ARCH = arch
    torch.cuda.is_available = lambda: False
    return _attempt((), "cuda")


def test_nvcc_and_torch_of_different_cuda():
    error, parts = in_child(_attempt, (), "cuda", None, "12.8")
    assert error.startswith("nvcc is of CUDA 13.") and "and torch of CUDA 12.8; pip install" in error
    assert parts == ["nvcc"]
    error, parts = in_child(_attempt, (), "cuda", None, None)
    assert error.endswith("was built without CUDA; install one built with it")
    assert parts == ["nvcc"]


def test_a_compiler_that_does_not_run(tmp_path):
    broken = tmp_path / "c++"
    broken.write_bytes(b"\x7fELF not a program")
    broken.chmod(0o755)
    error, parts = in_child(_attempt, (), "cpu", env={"CXX": str(broken)})
    assert error.startswith(f"{broken} --version does not run") and error.endswith("reinstall it")
    assert parts == ["C++ compiler"]


@pytest.mark.parametrize("archs", ["banana", "6.1;9.0+PTX"])
def test_an_odd_arch_list_is_not_used(archs):
    """torch's own variable: it would be compiled for those, or refuse to compile."""
    error, parts = in_child(_attempt, (), "cuda", env={"TORCH_CUDA_ARCH_LIST": archs})
    assert (error, parts) == ("it was built", [])


def _report(part: str) -> str:
    return next(finding.found for finding in jit_loader.toolchain_report() if finding.part == part)


def test_the_report_says_that_an_arch_list_is_ignored():
    env = {"TORCH_CUDA_ARCH_LIST": "banana"}
    assert in_child(_report, "TORCH_CUDA_ARCH_LIST", env=env) == "'banana' is ignored: the GPU decides"


# ---- several toolkits


def _toolkit_of_build() -> str:
    """The toolkit that compiles."""
    assert len(jit_loader.load(TEXT, name="scale").build("cuda").resources) == 1
    return str(jit_loader.nvcc().path.parent.parent)


def watched_toolkit(folder: Path) -> Path:
    """A toolkit whose assembler notes that it was called."""
    toolkit = copied_toolkit(folder)
    ptxas = (toolkit / "bin" / "ptxas").resolve()
    (toolkit / "bin" / "ptxas").unlink()
    (toolkit / "bin" / "ptxas").write_text(f'#!/bin/sh\necho >> "{folder}/calls"\nexec "{ptxas}" "$@"\n')
    (toolkit / "bin" / "ptxas").chmod(0o755)
    return toolkit


def test_cuda_home_chooses_and_the_report_says_so(tmp_path):
    usual = str(jit_loader.nvcc().path.parents[1])
    other = watched_toolkit(tmp_path / "öther toolkit")
    assert in_child(_toolkit_of_build, env={"CUDA_HOME": None}) == usual
    assert not (other / "calls").exists()
    assert in_child(_toolkit_of_build, env={"CUDA_HOME": str(other)}) == str(other)
    assert (other / "calls").read_text() == "\n"
    path = f"{other}/bin{os.pathsep}{os.environ['PATH']}"
    text = in_child(_report, "nvcc", env={"CUDA_HOME": None, "PATH": path})
    if "pip's packages" in jit_loader.nvcc().reason:  # which come before PATH, and all others after
        assert f" at {usual}/bin/nvcc " in text and f"CUDA_HOME can choose {other} (nvcc on PATH)" in text
    else:
        assert f" at {other}/bin/nvcc (nvcc on PATH)" in text and f"CUDA_HOME can choose {usual}" in text
    text = in_child(_report, "nvcc", env={"CUDA_HOME": str(other)})
    assert f" at {other}/bin/nvcc ($CUDA_HOME)" in text and usual in text


def script_of(nvcc: Path, folder: Path) -> Path:
    """A script in a folder without anything else of CUDA, that calls an nvcc."""
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec "{nvcc}" "$@"\n')
    script.chmod(0o755)
    return script


def test_a_script_as_nvcc_leads_to_the_real_toolkit(tmp_path):
    """torch would take the script's folder for the toolkit, and not find libcudart."""
    real = watched_toolkit(tmp_path / "real")
    script = script_of(real / "bin" / "nvcc", tmp_path / "wrapped")
    env = {"CUDA_HOME": str(tmp_path / "wrapped")}
    assert in_child(_toolkit_of_build, env=env) == str(real)
    assert (real / "calls").read_text() == "\n"
    env = {"CUDA_HOME": None, "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    assert in_child(_root_on_path, env=env) == str(real)


def _root_on_path() -> str:
    return str(next(kit.root for kit in jit_loader.toolkits() if kit.reason == "nvcc on PATH"))


def test_a_link_as_nvcc_leads_to_the_real_toolkit(tmp_path):
    real = copied_toolkit(tmp_path / "real")
    (tmp_path / "linked" / "bin").mkdir(parents=True)
    (tmp_path / "linked" / "bin" / "nvcc").symlink_to(real / "bin" / "nvcc")
    env = {"CUDA_HOME": None, "PATH": f"{tmp_path}/linked/bin{os.pathsep}{os.environ['PATH']}"}
    assert in_child(_root_on_path, env=env) == str(real)


def test_torch_extension_imported_before_with_another_cuda_home(tmp_path):
    """Someone has imported torch.utils.cpp_extension, which looked for CUDA on its own."""
    assert in_child(_built_after_import, env={"CUDA_HOME": None}) == "/nowhere"


def _built_after_import():
    os.environ["CUDA_HOME"] = "/nowhere"
    from torch.utils import cpp_extension

    found = importlib.reload(cpp_extension).CUDA_HOME
    del os.environ["CUDA_HOME"]
    _toolkit_of_build()
    return found


def test_torch_in_a_folder_with_spaces(tmp_path):
    (tmp_path / "pip's packages").symlink_to(Path(torch.__file__).parent)
    assert in_child(_built_with_torch_in, tmp_path / "pip's packages", write_scale(tmp_path)) == 3


def _built_with_torch_in(folder, source):
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = str(folder / "lib")
    return factor_of(source)


def test_a_full_report_names_everything(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    (tmp_path / "cache").write_text("in the way")
    findings = jit_loader.toolchain_report()
    parts = [finding.part for finding in findings]
    tools = ["C++ compiler", "ninja", "nvcc", "CUDA headers", "cuobjdump", "nvdisasm"]
    assert parts == [*tools, "GPU", "torch", "cache"]
    assert [finding.part for finding in findings if finding.advice] == ["cache"]
    assert findings[-1].found == "not usable" and "FOLDFUSE_CACHE" in findings[-1].advice


def test_without_a_disassembler(tmp_path):
    """The one of pip's packages stands in for it; without that, one sentence."""
    toolkit = copied_toolkit(tmp_path / "toolkit")
    env = {"CUDA_HOME": str(toolkit)}
    for name in ("cuobjdump", "nvdisasm"):
        program = toolkit / "bin" / name
        if kept := program.exists():
            program.rename(tmp_path / name)
        assert "BAR.SYNC" in in_child(_sass, False, env=env)
        assert in_child(_sass, True, env=env) == f"{name} was not found; pip install nvidia-cuda-{name}"
        if kept:
            (tmp_path / name).rename(program)


def _sass(alone):
    """The machine code, or what lacks where there is one toolkit alone."""
    if alone:
        toolchain.toolkits = lambda: iter([toolchain.Toolkit(Path(os.environ["CUDA_HOME"]), "$CUDA_HOME")])
    text = TEXT.replace("y[threadIdx.x] =", "__syncthreads(); y[threadIdx.x] =")
    try:
        return jit_loader.load(text, name="scale").sass()
    except jit_loader.ToolchainError as error:
        return str(error)


def test_the_cpu_needs_no_nvcc(tmp_path):
    """The headers that come with torch's own packages are enough."""
    toolkit = tmp_path / "headers only"
    toolkit.mkdir()
    (toolkit / "include").symlink_to(toolchain.cuda_headers()[0])
    assert in_child(factor_of, write_scale(tmp_path), env={"CUDA_HOME": str(toolkit)}) == 3
