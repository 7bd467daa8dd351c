"""From timings to result rows. Without a GPU the CPU passes for one, and all but the timings is real."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rows import CEILINGS, RUN
from test_check import stage_of

from kernels_src import OPERATORS
from workbench import bench, results, timing
from workbench.problem import pose
from workbench.roofline import work
from workbench.timing import Candidate

OUTER = OPERATORS["outer_product_mean"]
ATTENTION = OPERATORS["msa_column_attention"]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the CPU pass for a GPU with a large L2 cache, and eager PyTorch be the only baseline."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(L2_cache_size=2**30))
    monkeypatch.setattr(bench, "pose", lambda *inputs, device, **options: pose(*inputs, **options))
    monkeypatch.setattr(timing, "SAMPLES", (2, 3))
    # The real one takes half a second a call here; tests/test_fused.py has what `of` makes.
    monkeypatch.setattr(bench, "fused_module", lambda operator: SimpleNamespace(of=lambda module: module))

    def baselines(operator, module, inputs, report):
        report("compile: does not work here")
        return [
            Candidate("eager", module),
            Candidate("library_chain_no_mask", lambda msa, mask: module(msa, torch.ones_like(mask))),
        ]

    monkeypatch.setattr(bench.pytorch, "baselines", baselines)


def group_of(operator, *computations, precision="fp32"):
    stages = [
        replace(stage_of(operator, compute, precision), label=f"0{number}_stage")
        for number, compute in enumerate(computations, start=1)
    ]
    return bench.Group(operator, "odd", precision, tuple(stages))


def right(module, msa, mask):
    return module(msa, mask)


def wrong_later(calls, module, msa, mask):
    """Right at first, as a stage is that returns what an earlier call left in memory."""
    calls.append(1)
    return module(msa, mask) * (1 if len(calls) < 3 else 1.001)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_hang_together(operator, dtype, on_the_cpu, tmp_path):
    said = []
    group = group_of(operator, right, precision=dtype)
    rows = bench.measure(group, CEILINGS, report=said.append)
    assert [row["stage"] for row in rows] == ["eager", "library_chain_no_mask", "01_stage", "fused"], said
    assert said == ["compile: does not work here"]
    operations, _ = work(operator, operator.shapes["odd"])
    for row in rows:
        assert set(row) == set(results.COLUMNS)
        assert (row["shape"], row["dtype"], row["precision"]) == ("odd", dtype, dtype)
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"] and row["call_us"] > 0
        assert row["tflops"] == pytest.approx(operations / row["p50_us"] / 1e6)
    eager, without_mask, stage, fused = rows
    assert (
        0
        < eager["max_error"]
        == stage["max_error"]
        == fused["max_error"]
        < (1e-6 if dtype == "fp32" else 1e-2)
    )
    assert math.isnan(without_mask["max_error"])  # it computes something else
    results.store(tmp_path, operator, rows, RUN)
    assert len(results.load(tmp_path, operator.name)) == 4


def test_a_stage_that_is_wrong_when_timed_gets_no_row(on_the_cpu):
    said = []
    group = group_of(OUTER, right, partial(wrong_later, []))
    rows = bench.measure(group, CEILINGS, baselines=False, report=said.append)
    assert [row["stage"] for row in rows] == ["01_stage"]
    assert len(said) == 1 and said[0].startswith("FAILED 02_stage after timing: error ")


def test_a_stage_that_raises_is_reported_and_the_others_are_measured(on_the_cpu):
    def raising(module, msa, mask):
        raise RuntimeError("out of something")

    said = []
    rows = bench.measure(group_of(OUTER, raising, right), CEILINGS, baselines=False, report=said.append)
    assert [row["stage"] for row in rows] == ["02_stage"]
    assert said == ["FAILED 01_stage: out of something"]


def test_a_stage_that_is_too_slow_is_left_out_and_a_slow_first_call_is_not_held_against_it(
    on_the_cpu, monkeypatch
):
    monkeypatch.setattr(bench, "SLOW_SECONDS", 0.2)

    def slow(module, msa, mask):
        time.sleep(0.3)
        return module(msa, mask)

    calls = []

    def slow_at_first(module, msa, mask):
        time.sleep(0 if calls else 0.3)
        calls.append(1)
        return module(msa, mask)

    said = []
    group = group_of(OUTER, slow, slow_at_first)
    rows = bench.measure(group, CEILINGS, baselines=False, report=said.append)
    assert [row["stage"] for row in rows] == ["02_stage"]
    assert len(said) == 1 and said[0].startswith("01_stage: left out, since a call takes 0.3")


def test_groups_have_stages_of_one_dtype_that_support_the_shape():
    few = replace(stage_of(OUTER, right), unsupported=lambda shape: "too deep" if shape.S > 600 else None)
    brain = stage_of(OUTER, right, "bf16")
    found = list(bench.groups(OUTER, (few, brain), ("af2", "extra")))
    assert [(group.shape, group.dtype, group.stages) for group in found] == [
        ("af2", "fp32", (few,)),
        ("af2", "bf16", (brain,)),
        ("extra", "bf16", (brain,)),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_measured_without_a_gpu():
    with pytest.raises(RuntimeError, match="GPU"):
        bench.measure(group_of(OUTER, right), CEILINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_a_group_on_the_gpu_has_every_baseline(operator):
    said = []
    group = bench.Group(operator, "seed", "fp32", operator.stages[:2])
    rows = bench.measure(group, CEILINGS, report=said.append)
    names = [row["stage"] for row in rows]
    assert set(bench.pytorch.BASELINES) <= set(names), said
    assert names[-3:] == [*(stage.name for stage in operator.stages[:2]), "fused"]
    assert rows[-1]["call_us"] < rows[-2]["call_us"]
    eager, graph = rows[0], rows[1]
    assert graph["p50_us"] < eager["p50_us"]  # launches cost eager more than its kernels at this size
