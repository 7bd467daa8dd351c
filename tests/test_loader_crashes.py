"""Processes that die, race or are interrupted: the next load works at once and trusts nothing half done."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import CONTEXT, Child, compilations, counting_compiler, factor_of, in_child, write_scale

import jit_loader
from jit.compile import torch_extension
from jit.source import Target
from jit.staging import kill_compilers


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FOLDFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def working_in(folder: Path) -> list[str]:
    """The names of processes whose working folder is below a folder."""
    names = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(folder)):
                names.append((process / "comm").read_text().strip())
        except OSError:
            pass
    return names


def end_orphans(cache: Path) -> None:
    """End the compilers of killed processes."""
    for staging in cache.glob("staging/*"):
        kill_compilers(staging)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
    return value


# ---- kill -9


def _killed_at(step: int, source: Path) -> list[str]:
    """Load, killing this process as it takes a step that others could see; the steps that there were."""
    steps = []

    def watch(event: str, arguments: tuple) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "subprocess.Popen"):
            if len(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            steps.append(event)

    torch_extension(Target("cpu"))  # importing it takes hundreds of steps
    sys.addaudithook(watch)
    factor_of(source)
    return steps


def test_killed_at_any_step_the_next_load_works(tmp_path, cache, seed):
    """Before, between and after the compiler's processes, in the writing of each file, before a rename."""
    (tmp_path / "other").mkdir()
    in_child(factor_of, write_scale(tmp_path / "other", factor=8))  # makes the folders
    source = write_scale(tmp_path)
    steps = in_child(_killed_at, -1, source)
    decisive = [step for step, event in enumerate(steps) if event in ("os.rename", "subprocess.Popen")]
    assert steps.count("os.rename") == 1 and steps.count("subprocess.Popen") > 2, steps
    for step in sorted({*decisive[-4:], *random.Random(seed).sample(range(decisive[-1]), 6)}):
        _forget(cache, source)
        assert Child(_killed_at, step, source).exit_code() == -signal.SIGKILL, step
        start = time.monotonic()
        assert in_child(factor_of, source) == 3, step
        assert time.monotonic() - start < 30


def _forget(cache: Path, source: Path) -> None:
    for manifest in cache.glob("builds/*/*/manifest.json"):
        if str(source.parent / "factor.h") in manifest.read_text():
            shutil.rmtree(manifest.parent.parent)


@pytest.mark.parametrize("phase", ["compile", "link"])
def test_killed_while_the_compiler_works(tmp_path, cache, phase, monkeypatch):
    source = write_scale(tmp_path)
    script = tmp_path / "g++"
    option = {"compile": "-c", "link": "-shared"}[phase]
    script.write_text(
        f'#!/bin/bash\nif [[ " $* " == *" {option} "* ]]; then touch "{tmp_path}/reached"; sleep 60; fi\n'
        'exec c++ "$@"\n'
    )
    script.chmod(0o755)
    child = Child(factor_of, source, env={"CXX": str(script)})
    wait_for((tmp_path / "reached").exists)
    os.kill(child.pid, signal.SIGKILL)
    assert child.exit_code() == -signal.SIGKILL
    assert list(cache.glob("staging/*")), "killed too late"
    script.write_text('#!/bin/bash\nexec c++ "$@"\n')
    start = time.monotonic()
    assert in_child(factor_of, source, env={"CXX": str(script)}) == 3
    assert time.monotonic() - start < 30
    end_orphans(cache)


def test_what_a_killed_process_left_is_cleaned_up_later(tmp_path, cache):
    left = cache / "staging" / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "main.o").write_bytes(b"half")
    (cache / "staging" / "young").mkdir()
    os.utime(left, (time.time() - 7200,) * 2)
    assert in_child(factor_of, write_scale(tmp_path)) == 3
    assert [path.name for path in cache.glob("staging/*")] == ["young"]


# ---- races


def _after_the_others(barrier, source, **options):
    barrier.wait(60)
    return factor_of(source, **options)


def _with_factor(barrier, source, factor):
    return _after_the_others(barrier, source, defines={"FACTOR": factor})


def test_eight_processes_and_one_kernel_make_one_compilation(tmp_path, cache):
    source = write_scale(tmp_path)
    compiler = counting_compiler(tmp_path / "compiler", before="sleep 0.3;")
    barrier = CONTEXT.Barrier(8)
    children = [Child(_after_the_others, barrier, source, env={"CXX": str(compiler)}) for _ in range(8)]
    assert [child.result() for child in children] == [3] * 8
    assert compilations(compiler) == 1


def test_eight_processes_and_eight_kernels(tmp_path, cache):
    source = write_scale(tmp_path)
    compiler = counting_compiler(tmp_path / "compiler")
    barrier = CONTEXT.Barrier(8)
    children = [
        Child(_with_factor, barrier, source, factor, env={"CXX": str(compiler)}) for factor in range(8)
    ]
    assert [child.result() for child in children] == list(range(8))
    assert compilations(compiler) == 8


def test_a_holder_of_the_lock_that_dies_does_not_block(tmp_path, cache):
    source = write_scale(tmp_path)
    compiler = counting_compiler(tmp_path / "compiler", before=f'touch "{tmp_path}/reached"; sleep 60;')
    holder = Child(factor_of, source, env={"CXX": str(compiler)})
    wait_for((tmp_path / "reached").exists)
    counting_compiler(tmp_path / "compiler")  # for the next one it does not sleep
    waiting = Child(factor_of, source, env={"CXX": str(compiler)})
    time.sleep(0.5)
    assert not waiting.pipe.poll(), "it did not wait for the other's build"
    os.kill(holder.pid, signal.SIGKILL)
    assert waiting.result(timeout=30) == 3
    end_orphans(cache)


# ---- interrupts


def _interrupted(source, backend):
    """Build until an interrupt comes; then whether it came, and what it left."""
    try:
        jit_loader.load(source).build(backend)
    except KeyboardInterrupt:
        return working_in(jit_loader.cache_folder()), list(jit_loader.cache_folder().glob("staging/*"))
    return "it was not interrupted"


@pytest.mark.parametrize(("backend", "program"), [("cpu", "cc1plus"), ("cuda", "cicc")])
def test_an_interrupt_ends_the_compiler_and_leaves_nothing(tmp_path, cache, backend, program):
    """A signal to the Python process alone, as a notebook's stop button may send it."""
    body = "".join(f"    y[{i}] = x[{i}] * y[n + {i}] + x[n * {i}];\n" for i in range(12_000))
    source = write_scale(tmp_path)
    text, declaration = source.read_text(), "EXPORT cudaError_t scale"
    source.write_text(text.replace(declaration, FILLER.replace("BODY", body) + declaration))
    child = Child(_interrupted, source, backend)
    wait_for(lambda: program in working_in(cache))
    os.kill(child.pid, signal.SIGINT)
    assert child.result(timeout=30) == ([], [])
    assert working_in(cache) == []


FILLER = """
#ifdef __CUDACC__
__global__
#endif
void filler(const float* x, float* y, int n) {
BODY}
"""


def _prebuild_interrupted(source):
    items = [jit_loader.load(source, defines={"FACTOR": number}) for number in range(6)]
    try:
        jit_loader.prebuild(items, backend="cpu", progress=False)
    except KeyboardInterrupt:
        return working_in(jit_loader.cache_folder()), list(jit_loader.cache_folder().glob("staging/*"))
    return "it was not interrupted"


def test_an_interrupt_ends_all_compilers_of_prebuild(tmp_path, cache):
    source = write_scale(tmp_path)
    compiler = counting_compiler(tmp_path / "compiler", before="sleep 60;")
    child = Child(_prebuild_interrupted, source, env={"CXX": str(compiler)})
    wait_for(lambda: compilations(compiler) >= min(2, os.cpu_count()))
    os.kill(child.pid, signal.SIGINT)
    assert child.result(timeout=30) == ([], [])
    assert compilations(compiler) <= os.cpu_count()
    assert in_child(factor_of, source) == 3
