"""What `verify` makes of what it tries; the trials themselves need a GPU."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rows import RUN
from test_check import stage_of

import jit_loader
from kernels_src import OPERATORS
from kernels_src.operator import Operator
from workbench import sanitizer, verify
from workbench.problem import CASES
from workbench.sanitizer import run_under
from workbench.verify import Tried, record, summary

OUTER = OPERATORS["outer_product_mean"]
ATTENTION = OPERATORS["msa_column_attention"]


def test_small_shapes_get_every_case_and_seed_and_each_other_case_is_seen():
    plan = list(verify._problems(ATTENTION, 20))
    small = [(case, seed) for name, _, case, seed in plan if name == "seed"]
    assert sorted(small) == sorted((case, seed) for case in CASES for seed in range(20))
    assert {case for name, _, case, _ in plan if name == "extra_long"} == set(CASES)
    shapes = {shape for _, shape, _, _ in plan}
    assert set(ATTENTION.shapes.values()) | set(ATTENTION.odd_shapes) < shapes
    assert {1, 7, 8, 9, 16, 1025, 5120} <= {shape.S for shape in shapes}
    assert any(shape.B * shape.N * shape.H > 65535 for shape in shapes)
    pairs = {shape for _, shape, _, _ in verify._problems(OUTER, 1)}
    assert any(shape.B * shape.N**2 * shape.P >= 2**31 for shape in pairs)
    assert {31} <= {shape.C for shape in pairs} and {100} <= {shape.P for shape in pairs}


TESTS = [
    Tried("check", "o", "01_a", "seed", "passed"),
    Tried("check", "o", "01_a", "odd", "failed", "wrong"),
    Tried("memcheck", "o", "01_a", "seed", "not run", "no sanitizer"),
]


def test_the_summary_counts_what_could_not_run_apart(tmp_path):
    table = summary(TESTS)
    assert table.loc[("o", "01_a", "check")].to_dict() == {"passed": 1, "failed": 1, "not run": 0}
    assert table.loc[("o", "01_a", "memcheck")].to_dict() == {"passed": 0, "failed": 0, "not run": 1}


def test_a_part_replaces_its_older_record_only(tmp_path):
    path = tmp_path / "gpu" / "verify.json"
    record(path, "o check", TESTS, RUN)
    record(path, "o memcheck", TESTS[2:], RUN)
    record(path, "o check", TESTS[:1], RUN)
    kept = json.loads(path.read_text())
    assert kept["o check"]["not passed"] == [] and kept["o check"]["run"]["gpu"] == RUN["gpu"]
    assert kept["o memcheck"]["not passed"][0]["message"] == "no sanitizer"


PASSED = f"{sanitizer.DONE}\n========= ERROR SUMMARY: 0 errors"
NO_HAZARDS = f"{sanitizer.DONE}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
WRITE = (
    "01_a seed\n========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n"
    "=========     at f_kernel+0x50\n=========\n========= ERROR SUMMARY: 3 errors"
)
READ = "========= Uninitialized __global__ memory read of size 4 bytes\n=========     at "
OTHERS = (
    f"{READ}void at::reduce_kernel<(int)512>(T1)+0x60\n=========     by thread (0,0,0) in block (0,0,0)\n"
    "=========\n========= Host API memory access error at host access to 0x7 of size 4 bytes\n"
    "=========     Uninitialized access at 0x7 on access by cudaMemcpy source\n=========\n"
)
OURS = (
    f"01_a odd\n{READ}load(float *)+0x6f0 in 01_a.cu:61\n=========     Device Frame:a_kernel(float *)+0x10\n"
)


@pytest.mark.parametrize(
    "tool, log, status, outcome, message",
    [
        ("memcheck", PASSED, 0, "passed", ""),
        ("racecheck", NO_HAZARDS, 0, "passed", ""),
        ("memcheck", PASSED, 1, "not run", "0 errors"),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, "not run", "0 errors"),  # ended before its end
        ("memcheck", "", 0, "not run", ""),
        ("memcheck", "========= Error: Device not supported.", 1, "not run", "Device not supported"),
        ("memcheck", "01_a odd\nTraceback (most recent call last):\n  x\n"
         "torch.OutOfMemoryError: CUDA out of memory\nSearch the web\n========= ERROR SUMMARY: 0 errors", 1,
         "not run", "torch.OutOfMemoryError: CUDA out of memory; in: 01_a odd"),
        ("memcheck", WRITE, 86, "failed",
         "Invalid __global__ write of size 4 bytes; at f_kernel+0x50; first of 1 printed; in: 01_a seed"),
        ("initcheck", PASSED, 0, "passed", ""),
        ("initcheck", f"{OTHERS}{PASSED}".replace("0 e", "2 e"), 86, "passed", ""),
        ("initcheck", f"{OTHERS}{PASSED}".replace("0 e", "3 e"), 86, "not run", "3 errors"),
        ("initcheck", f"{OTHERS}========= ERROR SUMMARY: 2 errors", 86, "not run", "2 errors"),
        ("initcheck", f"{OTHERS}{OURS}{PASSED}".replace("0 e", "3 e"), 86, "failed",
         "at load(float *)+0x6f0 in 01_a.cu:61; Device Frame:a_kernel(float *)+0x10; first of 1 printed; "
         "in: 01_a odd"),
        ("initcheck", f"========= Something new\n{sanitizer.DONE}\n========= ERROR SUMMARY: 1 error", 86,
         "failed", "Something new"),
        ("initcheck", WRITE, 86, "not run", "3 errors"),  # of f_kernel, and two that are not shown
    ],
)  # fmt: skip
def test_what_the_sanitizer_says_decides(tool, log, status, outcome, message, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"cat {tmp_path}/log; exit {status}")
    (tmp_path / "log").write_text(log + "\n")
    found, said = run_under(tool, "call()", ["b_kernel", "a_kernel"])
    assert found == outcome and message in said


def stand_in(folder, monkeypatch, script):
    """A compute-sanitizer that does what the script says."""
    program = folder / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/arguments\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_sanitizer_is_told_what_to_run_and_which_kernels_are_ours(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"echo {sanitizer.DONE}; echo '========= ERROR SUMMARY: 0 errors'")
    monkeypatch.setattr(verify, "_kernels", lambda operator, stages: {"one_kernel"})
    (test,) = verify.sanitize(OUTER, OUTER.stages[1:2], "memcheck")
    assert (test.kind, test.stage, test.outcome) == ("memcheck", "stages 02", "passed")
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("--tool\nmemcheck\n")
    assert f"kernel_substring=one_kernel\n{sys.executable}\n-c\n" in arguments
    code = "from workbench.verify import call_each; call_each('outer_product_mean', ['02'])"
    assert arguments.endswith(f"{code}\nprint({sanitizer.DONE!r}, flush=True)\n")


def test_initcheck_looks_at_every_kernel_since_others_write_what_ours_read(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "")
    run_under("initcheck", "call()", ["a_kernel"])
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert "--kernel-name" not in arguments
    assert arguments[arguments.index("--print-limit") + 1] == "0"  # ours can't hide behind others


def test_stages_are_sanitized_in_several_programs_at_once(tmp_path, monkeypatch):
    script = f"""echo "$*" | grep -q "'02'" && echo '========= Error: none' && exit 1
        touch {tmp_path}/started.$$; while [ $(ls {tmp_path}/started.* | wc -l) -lt 3 ]; do sleep 0.05; done
        echo {sanitizer.DONE}; echo '========= ERROR SUMMARY: 0 errors'"""
    stand_in(tmp_path, monkeypatch, script)
    monkeypatch.setattr(verify, "_kernels", lambda operator, stages: {"one_kernel"})
    tests = verify.sanitize(OUTER, OUTER.stages[:6], "racecheck")
    assert [(test.stage, test.outcome) for test in tests] == [
        ("stages 01, 05", "passed"), ("stages 02, 06", "not run"),
        ("stages 03", "passed"), ("stages 04", "passed"),
    ]  # fmt: skip


def test_a_sanitizer_that_takes_too_long_is_ended_with_the_program_under_it(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"echo 03_slow seed; sleep 60 & echo $! > {tmp_path}/pid; wait")
    start = time.monotonic()
    assert run_under("memcheck", "call()", [], seconds=1) == (
        "not run", "took longer than 1 s, at: 03_slow seed"
    )  # fmt: skip
    assert time.monotonic() - start < 30
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):  # until whoever adopted it has taken note
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_sanitizer_is_no_pass(monkeypatch):
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    outcome, message = run_under("memcheck", "call()", [])
    assert outcome == "not run" and "cuda-toolkit[sanitizer]" in message


def test_every_kernel_of_a_stage_is_looked_at():
    stages = [OUTER.stage("02"), OUTER.stage("09")]
    names = verify._kernels(OUTER, stages)
    for stage in stages:
        in_file = set(re.findall(r"(\w+_kernel)\(", stage.code))
        assert in_file & names and not [name for name in names if not name.isidentifier()]


def test_the_program_under_the_sanitizer_calls_every_stage_at_every_small_shape(monkeypatch, capsys):
    called = []

    def run(kernels, module, msa, mask):
        called.append(tuple(msa.shape))
        return msa

    stages = (replace(OUTER.stages[0], run=run), replace(OUTER.stage("08"), run=run))
    small = replace(OUTER, stages=stages)
    monkeypatch.setitem(verify.OPERATORS, OUTER.name, small)
    monkeypatch.setattr(Operator, "module", partialmethod_on_cpu(Operator.module))
    monkeypatch.setattr(Operator, "inputs", partialmethod_on_cpu(Operator.inputs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    verify.call_each(OUTER.name, ["01", "08"])
    shapes = list(verify.small_shapes(OUTER).values())
    fitting = [shape for shape in shapes if not OUTER.stage("08").unsupported(shape)]
    assert called == [tuple(shape[:4]) for shape in (*shapes, *fitting)] and len(fitting) < len(shapes)
    assert capsys.readouterr().out.startswith("01_thread_per_output seed\n01_thread_per_output odd\n")


def partialmethod_on_cpu(method):
    def call(self, *arguments, device, **options):
        return method(self, *arguments, **options)

    return call


# ---- attempts


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that can be lost."""
    state = SimpleNamespace(lost=False)

    def synchronize():
        if state.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return state


def test_what_came_of_an_attempt(gpu):
    def raising(error):
        def attempt():
            raise error

        return attempt

    assert verify._outcome(lambda: "") == ("passed", "")
    assert verify._outcome(lambda: "wrong") == ("failed", "wrong")
    assert verify._outcome(raising(ValueError("msa: …"))) == ("failed", "msa: …")
    assert verify._outcome(raising(torch.OutOfMemoryError("…"))) == ("not run", "out of memory")

    def attempt():
        gpu.lost = True
        return ""

    outcome, message = verify._outcome(attempt)  # a kernel's fault shows when the GPU is waited for
    assert outcome == "failed" and "illegal memory access" in message
    assert verify._outcome(lambda: "") == ("not run", "an earlier error ended this process's use of the GPU")


def test_stages_of_a_precision_share_a_problem_and_are_checked_where_they_fit(monkeypatch, seed):
    posed = []

    def on_cpu(operator, shape, case, *, precision, device, seed):
        posed.append(precision)
        return real(operator, shape, case, precision=precision, seed=seed)

    real = verify.pose
    monkeypatch.setattr(verify, "pose", on_cpu)
    right = [stage_of(OUTER, lambda module, msa, mask: module(msa, mask), kind) for kind in ("fp32", "bf16")]
    wrong = stage_of(OUTER, lambda module, msa, mask: module(msa, mask) * 1.01)
    elsewhere = replace(right[0], unsupported=lambda shape: "too small")
    attempts = list(
        verify._checks(OUTER, (*right, wrong, elsewhere), "odd", OUTER.shapes["odd"], "random", seed)
    )
    messages = [attempt() for _, _, _, attempt in attempts]
    assert len(messages) == 3 and messages[:2] == ["", ""] and "exceeds" in messages[2]
    assert sorted(posed) == ["bf16", "fp32"]


def test_every_stage_is_tried_at_each_small_shape_or_at_one_other():
    pairs = [(stage.number, name) for name, _, stage in verify._pairs(ATTENTION, ATTENTION.stages)]
    assert {number for number, _ in pairs} == {stage.number for stage in ATTENTION.stages}
    assert {("03", "seed"), ("03", "odd"), ("12", "seed")} <= set(pairs)


def test_a_write_beyond_the_output_is_found(monkeypatch, seed):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def overrun(module, msa, mask):
        out = torch.empty_like(msa)
        torch.as_strided(out, (out.numel() + 1,), (1,), out.storage_offset()).fill_(0)
        return out

    problem = verify.pose(ATTENTION, ATTENTION.shapes["odd"], seed=seed)
    first = []

    def later(module, msa, mask):  # the first call, outside of the guard, compiles a real stage
        first.append(1)
        return overrun(module, msa, mask) if len(first) > 1 else module(msa, mask)

    assert verify.guarded(stage_of(ATTENTION, later), problem) == "wrote outside of after (2, 7, 13, 40)"
    right = stage_of(ATTENTION, lambda module, msa, mask: torch.empty_like(msa).copy_(module(msa, mask)))
    assert verify.guarded(right, problem) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_verify_needs_a_gpu():
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        verify.verify(OUTER, OUTER.stages, "trials")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_trials_find_a_stage_on_the_wrong_stream_and_pass_the_real_ones(operator):
    outcomes = {
        test.outcome for test in verify.verify(operator, operator.stages[:2], "trials", progress=False)
    }
    assert outcomes == {"passed"}

    def on_the_default_stream(module, msa, mask):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return module(msa, mask)

    problem = verify.pose(operator, operator.shapes["seed"], device="cuda")
    assert verify.side_stream(stage_of(operator, on_the_default_stream), problem)


@pytest.mark.gpu
@pytest.mark.skipif(sanitizer.find() is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_the_sanitizer_finds_a_planted_fault_and_passes_what_is_right(tool):
    """That a tool finds nothing means something only if it would have found this."""
    for body, outcome in ((FAULTS[tool], "failed"), ("y[threadIdx.x] = x[threadIdx.x];", "passed")):
        source = PLANTED.replace("BODY", body)
        jit_loader.load(source, name="planted").build("cuda")
        code = (
            "import jit_loader, torch; "
            "x, y = torch.ones(64, device='cuda'), torch.empty(64, device='cuda'); "
            f"jit_loader.load({source!r}, name='planted').planted(x, y); torch.cuda.synchronize()"
        )
        found, message = run_under(tool, code, ["planted_kernel"])
        assert found == outcome, message


PLANTED = """
#include "cuda.cuh"
__global__ void planted_kernel(const float* x, float* y) {
    SHARED(float, s, [64]);
    BODY
}
EXPORT cudaError_t planted(const float* x, float* y, cudaStream_t stream) {
    return LAUNCH(planted_kernel, dim3(1), dim3(64), 0, stream)(x, y);
}
"""
FAULTS = {
    "memcheck": "y[threadIdx.x + 1] = x[threadIdx.x];",
    "racecheck": "s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[63 - threadIdx.x];",
    "initcheck": "y[threadIdx.x] = y[threadIdx.x] + x[threadIdx.x];",
    "synccheck": "if (threadIdx.x < 40) __syncthreads(); y[threadIdx.x] = x[threadIdx.x];",
}
