"""What `verify` makes of what it tries; the trials themselves need a GPU."""

from __future__ import annotations

import json
import os

import pytest
import torch
from rows import RUN
from test_check import stage_of

from kernels_src import OPERATORS
from workbench import verify
from workbench.problem import CASES
from workbench.verify import Tried, record, sanitize, summary

OUTER = OPERATORS["outer_product_mean"]
ATTENTION = OPERATORS["msa_column_attention"]


def test_small_shapes_get_every_case_and_seed_and_each_other_case_is_seen():
    plan = list(verify._plan(ATTENTION, 20))
    small = [(case, seed) for name, _, case, seed in plan if name == "seed"]
    assert sorted(small) == sorted((case, seed) for case in CASES for seed in range(20))
    assert {case for name, _, case, _ in plan if name == "extra_long"} == set(CASES)
    shapes = {shape for _, shape, _, _ in plan}
    assert set(ATTENTION.shapes.values()) | set(ATTENTION.odd_shapes) < shapes
    assert {1, 7, 8, 9, 16, 1025, 5120} <= {shape.S for shape in shapes}
    assert any(shape.B * shape.N * shape.H > 65535 for shape in shapes)
    pairs = {shape for _, shape, _, _ in verify._plan(OUTER, 1)}
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
    record(path, "o sanitizer", TESTS[2:], RUN)
    record(path, "o check", TESTS[:1], RUN)
    kept = json.loads(path.read_text())
    assert kept["o check"]["not passed"] == [] and kept["o check"]["run"]["gpu"] == RUN["gpu"]
    assert kept["o sanitizer"]["not passed"][0]["message"] == "no sanitizer"


@pytest.mark.parametrize(
    "log, status, outcome, message",
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "passed", ""),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "passed", ""),
        ("========= ERROR SUMMARY: 0 errors", 1, "not run", "0 errors"),  # the program itself failed
        ("", 0, "not run", ""),
        ("========= Error: Device not supported. Please refer to …", 1, "not run", "Device not supported"),
        (
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n"
            "=========     at f_kernel+0x50\n========= ERROR SUMMARY: 3 errors",
            86, "failed", "Invalid __global__ write of size 4 bytes; at f_kernel+0x50",
        ),
    ],
)  # fmt: skip
def test_what_the_sanitizer_says_decides(log, status, outcome, message, tmp_path, monkeypatch):
    program = tmp_path / "compute-sanitizer"
    (tmp_path / "log").write_text(log + "\n")
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/log\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    test = sanitize(OUTER, OUTER.stages[:2], "racecheck")
    assert (test.kind, test.outcome) == ("racecheck", outcome) and message in test.message
    arguments = (tmp_path / "arguments").read_text()
    assert "--tool racecheck" in arguments and "call_each('outer_product_mean', ['01', '02'])" in arguments


def test_no_sanitizer_is_no_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize(OUTER, OUTER.stages[:1], "memcheck").outcome == "not run"


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
