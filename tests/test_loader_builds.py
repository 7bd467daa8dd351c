"""A build is found by its contents: what makes another one, what does not, and that none is stale."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import compilations, counting_compiler, factor_of, in_child, write_scale

import jit.source
import jit_loader
from workbench.paths import ROOT


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a compiler that counts."""
    monkeypatch.setenv("FOLDFUSE_CACHE", str(tmp_path / "cache"))
    script = counting_compiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(script))
    return script


def edit_header(folder: Path, factor: int) -> None:
    (folder / "factor.h").write_text(f"#define FACTOR {factor}\n")


# ---- headers


def test_an_edited_header_is_compiled_and_an_edit_taken_back_is_not(tmp_path, compiler):
    source = write_scale(tmp_path)
    for factor, count in ((5, 1), (7, 2), (5, 2), (9, 3), (7, 3), (5, 3)):
        edit_header(tmp_path, factor)
        assert factor_of(source) == factor
        assert compilations(compiler) == count
    for factor in (9, 7, 5):  # the same from another process
        edit_header(tmp_path, factor)
        assert in_child(factor_of, source) == factor
    assert compilations(compiler) == 3


def test_an_edit_that_keeps_size_and_times_is_noticed(tmp_path, compiler):
    source = write_scale(tmp_path, 3)
    header = tmp_path / "factor.h"
    assert factor_of(source) == 3
    time.sleep(2.1)  # the loader has seen the file grow old, and no longer reads it
    assert factor_of(source) == 3
    times = header.stat()
    header.write_text(header.read_text().replace("3", "4"))
    os.utime(header, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert factor_of(source) == 4
    assert in_child(factor_of, source) == 4


class CoarseTimes:
    """A file's status as file systems give it whose clock ticks in seconds."""

    def __init__(self, status: os.stat_result) -> None:
        self.status = status

    def __getattr__(self, name: str) -> int:
        value = getattr(self.status, name)
        return value // 10**9 * 10**9 if name.endswith("_ns") else value


def test_many_edits_within_a_tick_of_the_clock(tmp_path, compiler, monkeypatch):
    source = write_scale(tmp_path, 1)
    for factor in (1, 2):
        edit_header(tmp_path, factor)
        factor_of(source)
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *arguments, **options: CoarseTimes(stat(*arguments, **options)))
    for factor in (1, 2) * 100:
        edit_header(tmp_path, factor)
        assert factor_of(source) == factor_of(source) == factor
    assert compilations(compiler) == 2


def test_a_touch_is_no_edit(tmp_path, compiler):
    source = write_scale(tmp_path)
    kernels = jit_loader.load(source)
    factor_of(source)
    for path in (source, tmp_path / "factor.h"):
        os.utime(path, (0, 0))
        assert jit_loader.load(source) is kernels
        os.utime(path)
    assert factor_of(source) == in_child(factor_of, source) == 3
    assert compilations(compiler) == 1


def test_an_edited_source_is_compiled(tmp_path, compiler):
    source = write_scale(tmp_path)
    original = source.read_text()
    for factor, text in ((3, original), (6, original.replace("FACTOR *", "2 * FACTOR *")), (3, original)):
        source.write_text(text)
        assert factor_of(source) == factor
    assert compilations(compiler) == 2


def test_a_new_header_that_comes_first_is_noticed(tmp_path, compiler):
    """The header is found in the second folder until the first has one."""
    (tmp_path / "first").mkdir()
    (tmp_path / "own").mkdir()
    source = write_scale(tmp_path / "own")
    flags = [f"-I{tmp_path / 'first'}"]
    assert factor_of(source, flags=flags) == 3
    edit_header(tmp_path / "first", 8)
    assert in_child(_with_flags, source, flags) == 8
    (tmp_path / "first" / "factor.h").unlink()
    assert in_child(_with_flags, source, flags) == 3
    assert compilations(compiler) == 2


def _with_flags(source, flags):
    return factor_of(source, flags=flags)


def test_a_header_edited_during_the_compilation_is_not_mistaken(tmp_path, monkeypatch):
    """The compiler reads 3; the file says 4 before the loader looks at it."""
    monkeypatch.setenv("FOLDFUSE_CACHE", str(tmp_path / "cache"))
    source = write_scale(tmp_path, 3)
    script = tmp_path / "g++"
    edit = f'if grep -q 3 "{tmp_path}/factor.h"; then sed -i s/3/4/ "{tmp_path}/factor.h"; fi'
    script.write_text(f'#!/bin/bash\nc++ "$@" || exit\nif [[ " $* " == *" -c "* ]]; then {edit}; fi\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert factor_of(source) == 4
    assert in_child(factor_of, source) == 4


def test_every_header_that_the_compiler_read_is_in_the_key(tmp_path, compiler):
    source = write_scale(tmp_path)
    factor_of(source)
    kernels = jit_loader.load(source).build("cuda")
    for target, library in kernels._libraries.items():
        headers = [Path(path) for path, _ in library.build.headers.read]
        assert {"factor.h", "driver_types.h", "stdc-predef.h"} <= {path.name for path in headers}, target
        assert all(path.is_file() and path.is_absolute() for path in headers)


def test_builds_of_different_headers_are_not_mixed(tmp_path, compiler):
    """One object was built for the CPU before an edit, and for CUDA after it."""
    source = write_scale(tmp_path, 3)
    factor_of(source)
    mixed = jit_loader.load(source)
    edit_header(tmp_path, 4)
    mixed.build("cuda")
    for factor in (3, 4, 3):
        write_scale(tmp_path, 3) if factor == 3 else edit_header(tmp_path, factor)
        assert jit_loader.load(source) is not mixed
        assert factor_of(source) == factor


# ---- what else makes another build


def test_defines_and_flags_make_builds_of_their_own(tmp_path, compiler):
    source = write_scale(tmp_path)
    for _ in range(2):
        assert factor_of(source, defines={"FACTOR": 11}) == 11
        assert factor_of(source, defines={"FACTOR": 12.5}) == 12.5
        assert factor_of(source, defines={"FACTOR": True}) == 1
        assert factor_of(source, defines={"FACTOR": "(1 + 3) /* $HOME `'\\'` */"}) == 4
        assert factor_of(source, flags=["-DFACTOR=13"]) == 13
        assert factor_of(source) == 3
    assert compilations(compiler) == 6


def test_a_relative_include_folder_is_of_the_current_folder(tmp_path, compiler, monkeypatch):
    text = write_scale(tmp_path).read_text()
    for folder, factor in (("first", 2), ("second", 5), ("first", 2)):
        (tmp_path / folder / "headers").mkdir(parents=True, exist_ok=True)
        edit_header(tmp_path / folder / "headers", factor)
        monkeypatch.chdir(tmp_path / folder)
        assert factor_of(text, flags=["-Iheaders"]) == factor
    assert compilations(compiler) == 2


def test_two_copies_of_the_project_use_their_own_headers(tmp_path, compiler):
    """One text and one cache; the headers of both copies are unchanged."""
    text = write_scale(tmp_path).read_text()
    for copy, factor in (("first", 2), ("second", 5), ("first", 2)):
        (tmp_path / copy).mkdir(exist_ok=True)
        edit_header(tmp_path / copy, factor)
        assert in_child(_in_copy, tmp_path / copy, text) == factor
    assert compilations(compiler) == 2


def _in_copy(folder, text):
    jit.source.SOURCES = folder
    return factor_of(text)


def test_a_changed_variable_is_noticed_at_the_next_call(tmp_path, compiler, monkeypatch):
    source = write_scale(tmp_path)
    other = counting_compiler(tmp_path / "other")
    for chosen, counts in ((compiler, (1, 0)), (other, (1, 1)), (compiler, (1, 1)), (other, (1, 1))):
        monkeypatch.setenv("CXX", str(chosen))
        assert factor_of(source) == 3
        assert (compilations(compiler), compilations(other)) == counts
    monkeypatch.setenv("CPATH", str(tmp_path))
    factor_of(source)
    assert compilations(other) == 2
    monkeypatch.delenv("CPATH")
    monkeypatch.setenv("FOLDFUSE_CACHE", str(tmp_path / "another cache"))
    factor_of(source)
    assert compilations(other) == 3


WATCHED = r"""
#include <driver_types.h>
#include <stdint.h>
#define EXPORT extern "C" __attribute__((visibility("default")))

static int accesses = 0, order = -1;

#ifdef RACES
#define HOOK extern "C" __attribute__((no_sanitize("thread"))) void
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_read4(void*) { ++accesses; }
HOOK __tsan_write4(void*) { ++accesses; }
HOOK __tsan_write8(void*) { ++accesses; }
#endif

EXPORT void cpu_schedule(int chosen, uint64_t seed) { order = chosen; }
EXPORT cudaError_t watched(float* y, cudaStream_t stream) {
    y[0] = FACTOR;
    y[1] = order;
    y[2] = accesses;
    return cudaSuccess;
}
"""


def _watched(schedule, factor=5):
    """What the function writes: its factor, the order that it was given, and how many accesses were seen."""
    y = torch.empty(3)
    with jit_loader.cpu_schedule(schedule):
        jit_loader.load(WATCHED, defines={"FACTOR": factor}, name="watched").watched(y)
    return y.tolist()


def test_races_are_sought_in_a_build_of_its_own(tmp_path, compiler):
    """The compiler reports each access to what the source has for it; nothing of the sanitizer is linked."""
    assert _watched("reverse") == [5, 1, 0]
    for count in (2, 2):
        value, order, accesses = _watched("races")
        assert (value, order) == (5, 0) and accesses > 0
        assert _watched("forward") == [5, 0, 0]
        assert compilations(compiler) == count
    assert in_child(_watched, "races")[2] > 0
    assert compilations(compiler) == 2
    with jit_loader.cpu_schedule("races"):
        items = [jit_loader.load(WATCHED, defines={"FACTOR": 6}, name="watched")]
        jit_loader.prebuild(items, backend="cpu", progress=False)
    assert compilations(compiler) == 3
    assert _watched("races", 6)[0] == 6
    assert compilations(compiler) == 3


def test_one_text_under_two_names_shares_no_symbols(tmp_path, compiler):
    """Each library has a static variable and a function of the same name."""
    text = write_scale(tmp_path).read_text().replace('#include "factor.h"', "static float FACTOR = NUMBER;")
    kernels = [jit_loader.load(text, defines={"NUMBER": number}, name=f"n{number}") for number in (2, 3)]
    x, y = torch.ones(4), torch.empty(4)
    for each, number in zip(kernels * 2, (2, 3) * 2, strict=True):
        each.scale(x, y, 4)
        assert y[0] == number


def _with_torch(version, source):
    torch.__version__ = version
    return factor_of(source)


def test_another_host_compiler_or_torch_makes_another_build(tmp_path, compiler):
    source = write_scale(tmp_path)
    assert factor_of(source) == 3
    newer = counting_compiler(tmp_path / "newer")
    text = newer.read_text().replace(
        "exec c++", 'if [ "$1" = --version ]; then echo "g++ 99.0"; exit; fi\nexec c++'
    )
    newer.write_text(text)
    assert in_child(factor_of, source, env={"CXX": str(newer)}) == 3
    assert (compilations(compiler), compilations(newer)) == (1, 1)
    newer.write_text(text.replace("99.0", "99.1"))  # the same path, upgraded
    for _ in range(2):
        assert in_child(factor_of, source, env={"CXX": str(newer)}) == 3
        assert compilations(newer) == 2
    assert in_child(_with_torch, "2.99.0", source) == 3
    assert compilations(compiler) == 2
    assert in_child(factor_of, source, env={"CPATH": str(tmp_path)}) == 3
    assert compilations(compiler) == 3
    assert in_child(factor_of, source) == 3
    assert compilations(compiler) == 3


def copied_toolkit(folder: Path, build: bytes = b"V13.0.88") -> Path:
    """A toolkit of links but for nvcc, which is a copy whose version ends in `build`."""
    original = jit_loader.nvcc().path.parent.parent
    (folder / "bin").mkdir(parents=True)
    for part in original.iterdir():
        if part.name != "bin":
            (folder / part.name).symlink_to(part)
    for program in (original / "bin").iterdir():
        if program.name != "nvcc":
            (folder / "bin" / program.name).symlink_to(program)
    shutil.copy(original / "bin" / "nvcc", folder / "bin" / "nvcc")
    binary = (folder / "bin" / "nvcc").read_bytes()
    release = jit_loader.release_of(jit_loader.nvcc()).encode()
    position = binary.index(b"release " + release + b", V" + release) + len(b"release , V") + 2 * len(release)
    changed = binary[: position + 1] + build + binary[position + 1 + len(build) :]
    (folder / "bin" / "nvcc").write_bytes(changed)
    return folder


def _built_for(source, arch):
    kernels = jit_loader.load(source).build("cuda", arch)
    library = list(kernels._libraries.values())[-1]
    return str(library.build.folder), f"sm_{arch.replace('.', '')}" in kernels.sass()


def test_another_arch_or_nvcc_makes_another_build(tmp_path, compiler):
    source = write_scale(tmp_path)
    first, right = _built_for(source, "9.0a")
    assert right
    other_arch, right = _built_for(source, "8.0")
    assert right
    toolkit = copied_toolkit(tmp_path / "toolkit", b"77")
    other_nvcc, right = in_child(_built_for, source, "9.0a", env={"CUDA_HOME": str(toolkit)})
    assert right
    other_host = counting_compiler(tmp_path / "host")  # nvcc's own
    other_gcc, right = in_child(_built_for, source, "9.0a", env={"CC": str(other_host)})
    assert right and compilations(other_host) > 0
    assert len({first, other_arch, other_nvcc, other_gcc}) == 4
    count = compilations(compiler)
    assert in_child(_built_for, source, "9.0a") == (first, True)
    assert in_child(_built_for, source, "9.0a", env={"CUDA_HOME": str(toolkit)}) == (other_nvcc, True)
    assert compilations(compiler) == count


# ---- failures


def test_a_failed_build_is_not_remembered(tmp_path, compiler):
    source = write_scale(tmp_path)
    good = source.read_text()
    for round in range(2):
        source.write_text(good.replace("FACTOR *", "FACTORY *"))
        with pytest.raises(jit_loader.KernelCompileError, match="FACTORY"):
            factor_of(source)
        assert compilations(compiler) == 1 + round * 1 + round  # a failure is compiled again
        source.write_text(good.replace("FACTOR *", f"{round + 2} * FACTOR *"))
        assert factor_of(source) == 3 * (round + 2)
    edit_header(tmp_path, "a mistake")
    with pytest.raises(jit_loader.KernelCompileError):
        factor_of(source)
    edit_header(tmp_path, 4)
    assert factor_of(source) == 12


def test_failing_at_once_each_gets_its_own_error(tmp_path, compiler):
    text = write_scale(tmp_path).read_text().replace('#include "factor.h"', "")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(factor_of, text.replace("FACTOR", f"unknown_{number}"), name=f"kernel_{number}")
            for number in range(4)
        ]
    for number, future in enumerate(futures):
        error = future.exception()
        assert isinstance(error, jit_loader.KernelCompileError)
        assert (error.file, error.line, error.column) == (f"kernel_{number}.cu", 21, 40)
        assert f"unknown_{number}" in error.message and f"unknown_{number}" in error.log
        assert not any(f"unknown_{other}" in error.log for other in range(4) if other != number)


# ---- many at once


def test_prebuild_builds_all_and_shows_progress(tmp_path, compiler, capsys):
    source = write_scale(tmp_path)
    items = [jit_loader.load(source, defines={"FACTOR": number}) for number in range(5)]
    jit_loader.prebuild(items, backend="cpu")
    assert compilations(compiler) == 5
    assert "5/5" in capsys.readouterr().err
    assert [factor_of(source, defines={"FACTOR": number}) for number in range(5)] == [0, 1, 2, 3, 4]
    jit_loader.prebuild(items, backend="cpu", progress=False)
    assert compilations(compiler) == 5
    assert capsys.readouterr().err == ""


def test_eight_threads_and_one_kernel_make_one_compilation(tmp_path, compiler):
    source = write_scale(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(factor_of, [source] * 8)) == [3] * 8
    assert compilations(compiler) == 1


def test_prebuild_builds_the_others_before_it_raises(tmp_path, compiler):
    source = write_scale(tmp_path)
    items = [jit_loader.load(source, defines={"FACTOR": value}) for value in ("+", 2, "-", 4)]
    with pytest.raises(jit_loader.KernelCompileError):
        jit_loader.prebuild(items, backend="cpu", progress=False)
    count = compilations(compiler)
    assert [factor_of(source, defines={"FACTOR": number}) for number in (2, 4)] == [2, 4]
    assert compilations(compiler) == count == 4


# ---- what ptxas and the disassemblers say

REPORT = """
#include <cuda_runtime.h>
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace { // many values are alive at once, so that 24 registers are not enough
template <int kCount, bool kFlip>
__global__ void spilling_kernel(const float* x, float* y) {
    float values[kCount];
    for (int i = 0; i < kCount; ++i) values[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < kCount; ++i) y[i * 32 + threadIdx.x] = values[kFlip ? kCount - 1 - i : i];
}
}
__global__ void shared_kernel(const float* x, float* y) {
    __shared__ float tile[300];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[31 - threadIdx.x];
}
EXPORT cudaError_t report(const float* x, float* y, cudaStream_t stream) {
    spilling_kernel<64, true><<<1, 32, 0, stream>>>(x, y);
    shared_kernel<<<1, 32, 0, stream>>>(x, y);
    return cudaGetLastError();
}
"""


def test_resources_and_machine_code(compiler):
    kernels = jit_loader.load(REPORT, flags=["-maxrregcount=24"], name="report")
    table = kernels.resources.set_index("kernel")
    assert set(table.index) == {"spilling_kernel<64, true>", "shared_kernel"}
    spilling, shared = table.loc["spilling_kernel<64, true>"], table.loc["shared_kernel"]
    assert spilling.registers == 24 and spilling.spill_stores > 0 and spilling.spill_loads > 0
    assert spilling.stack_bytes > 0 and spilling.shared_bytes == 0
    assert shared.shared_bytes == 1200 and shared.spill_stores == 0 and 4 < shared.registers <= 24
    assert "BAR.SYNC" in kernels.sass() and "sm_90a" in kernels.sass()
    assert ".entry" in kernels.ptx() and "bar.sync" in kernels.ptx() and ".target sm_90a" in kernels.ptx()
    assert kernels.build("cuda", "8.0").resources.shape == table.reset_index().shape
    assert "sm_80" in kernels.sass()


# ---- costs


COST_OF_A_LOAD = """
import multiprocessing, sys, time
from pathlib import Path
from processes import factor_of  # and with it torch

def cost(source):
    start = time.perf_counter()
    factor_of(source)
    return time.perf_counter() - start, {"torch.utils.cpp_extension", "filelock", "pandas"} & set(sys.modules)

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    costs = pool.map(cost, [Path(sys.argv[1])] * 5, chunksize=1)
print(min(costs)[0], *set.union(*(imported for _, imported in costs)))
"""


def test_a_cached_load_imports_nothing_that_only_a_build_needs(tmp_path, compiler):
    source = write_scale(tmp_path)
    factor_of(source)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    command = [sys.executable, "-c", COST_OF_A_LOAD, str(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    seconds, *imported = done.stdout.split()
    assert imported == []
    assert compilations(compiler) == 1
    assert float(seconds) < 0.1  # 5 ms when nothing else runs; benchmarks/loader.py measures it


def test_a_repeated_load_returns_the_same_object(tmp_path, compiler):
    source = write_scale(tmp_path)
    kernels = jit_loader.load(source, defines={"FACTOR": 2})
    assert jit_loader.load(source, defines={"FACTOR": 2}) is kernels
    assert jit_loader.load(Path(os.path.relpath(source)), defines={"FACTOR": 2}) is kernels
    assert jit_loader.load(source, defines={"FACTOR": 3}) is not kernels


def test_a_relative_path_is_of_the_current_folder(tmp_path, compiler, monkeypatch):
    for factor in (2, 3, 2):
        folder = tmp_path / str(factor)
        folder.mkdir(exist_ok=True)
        write_scale(folder, factor)
        monkeypatch.chdir(folder)
        assert factor_of(Path("scale.cu")) == factor


def test_a_path_given_as_text_and_options_in_another_form_are_refused():
    with pytest.raises(ValueError, match=r"for a file pass Path\('kernels/scale.cu'\)"):
        jit_loader.load("kernels/scale.cu")
    with pytest.raises(TypeError, match="flags: expected a list of options"):
        jit_loader.load(Path("scale.cu"), flags="-G")
    with pytest.raises(ValueError, match="flags: write -I and its folder as one option"):
        jit_loader.load(Path("scale.cu"), flags=["-I", "headers"])


# ---- what a build needs


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_library_needs_none_of_torchs(tmp_path, compiler, backend):
    """Not even a function of the C++ library that libc10 has too, such as a table's when it grows."""
    source = tmp_path / "table.cu"
    source.write_text(
        '#include "cuda.cuh"\n#include <unordered_map>\n'
        "EXPORT cudaError_t fill(float* y, int n, cudaStream_t stream) {\n"
        "    std::unordered_map<int, float> table;\n"
        "    for (int i = 0; i < n; ++i) table[i] = i;\n"
        "    for (int i = 0; i < n; ++i) y[i] = table[i];\n"
        "    return cudaSuccess;\n}\n"
    )
    jit_loader.load(source).build(backend, arch="9.0a" if backend == "cuda" else None)
    [library] = (tmp_path / "cache").glob("builds/*/*/kernels.so")
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libc.so.6" in needed
    assert not re.search(r"\[lib(torch|c10)\w*\.so", needed), needed
