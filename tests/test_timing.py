"""Timing: who is called when, what becomes of the samples, and what the ceilings mean."""

from __future__ import annotations

import time

import pytest
import torch

from kernels_src import OPERATORS
from workbench import roofline, timing
from workbench.baselines import library_chains
from workbench.roofline import Bound, Ceilings, bound, intensity, work
from workbench.timing import Candidate, compare, percentiles

ATTENTION = OPERATORS["msa_column_attention"]
OUTER = OPERATORS["outer_product_mean"]
CEILINGS = Ceilings(4000, 50, 400, 750, 3.5e6)


def sleeping(seconds, log, name):
    def call(x):
        log.append(name)
        time.sleep(seconds)
        return x + 1

    return Candidate(name, call)


def test_candidates_take_turns_and_the_slow_one_is_slower(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLES", (5, 8))
    log = []
    inputs = [(torch.zeros(3),), (torch.ones(3),)]
    candidates = [sleeping(0.02, log, "slow"), sleeping(0.001, log, "fast")]
    taken = compare(candidates, inputs, in_graph=False)
    assert 1000 < taken["fast"].p20_us <= taken["fast"].p50_us <= taken["fast"].p80_us
    assert taken["fast"].p50_us < 20000 < min(taken["slow"].p50_us, taken["slow"].call_us)
    assert torch.equal(taken["fast"].outputs[1], inputs[1][0] + 1)  # one output for each set of inputs
    turns = "".join(name[0] for name in log)
    first = len("sf") + len("ssff")  # after the peaks and a warm-up
    taken_in_turn = [turns[at : at + 4] for at in range(first, first + 5 * 4, 4)]
    assert set(taken_in_turn) == {"ssff", "ffss"}  # both sets of inputs for each, in either order


def test_slow_calls_are_sampled_less_often():
    assert timing._samples_for(1.0) == timing.SAMPLES[1]
    assert timing._samples_for(1e5) == 10
    assert timing._samples_for(5e5) == timing.SAMPLES[0]
    for us in (1.1e6, 2e6, 1e7):  # beyond that the time is bounded: only what two samples take
        assert 2 <= timing._samples_for(us) * us <= max(timing.LONGEST_US, 2 * us)


def test_percentiles():
    assert percentiles([float(n) for n in range(101)]) == pytest.approx((20, 50, 80))
    assert percentiles([3.0]) == (3, 3, 3)


def test_the_bound_is_what_takes_longest():
    shape = ATTENTION.shapes["extra"]  # S 1024, d 8
    parts = bound(ATTENTION, shape, "bf16", CEILINGS)
    operations, exponentials = work(ATTENTION, shape)
    assert exponentials > 1024 * 1024 * 384 * 8  # a softmax over S for each of S·N·H, and the gate
    assert parts.exponential_us == pytest.approx(exponentials / 3.5e6)
    assert parts.matrix_us == pytest.approx(operations / 750e6)
    assert parts.memory_us == pytest.approx(ATTENTION.least_bytes(shape, 2) / 4e6)
    assert parts.us == parts.exponential_us
    assert Bound(3, 2, 1).us == 3


def test_fp32_may_use_tensor_cores_on_split_operands():
    """Three products for one, of TF32 or of fp16, which is as fast as bf16."""
    assert Ceilings(4000, 50, 400, 750, 1).matrix_tflops("fp32") == pytest.approx(250)
    assert Ceilings(4000, 50, 400, 300, 1).matrix_tflops("fp32") == pytest.approx(400 / 3)
    assert Ceilings(4000, 50, 100, 90, 1).matrix_tflops("fp32") == 50


def test_intensity_doubles_with_half_the_bytes():
    shape = OUTER.shapes["af2"]
    assert intensity(OUTER, shape, "bf16") == pytest.approx(2 * intensity(OUTER, shape, "fp32"))


def test_ceilings_need_a_gpu():
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="GPU"):
            roofline.measure_ceilings()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
@pytest.mark.parametrize("shape", ["seed", "odd"])
def test_library_chains_compute_the_operator(operator, shape, seed, monkeypatch):
    from kernels_src.msa_column_attention import library_chain as attention
    from kernels_src.outer_product_mean import library_chain as outer

    monkeypatch.setattr(outer, "MOST_ELEMENTS", 2**14)  # so that it works some residues at a time
    plain = {"optimize": lambda function: function}  # compiling takes a minute and is PyTorch's to test
    chains = {
        attention.scaled_dot_product: lambda module: attention.chain(
            module, attention.scaled_dot_product, **plain
        ),
        attention.flex: lambda module: attention.flex_chain(module, **plain),
        outer.chain: lambda module: outer.chain(module, **plain),
    }
    module = operator.module(operator.shapes[shape], seed)
    msa, mask = operator.inputs(operator.shapes[shape], seed)
    mine = [outer.chain] if operator is OUTER else [attention.scaled_dot_product, attention.flex]
    for name in mine:
        torch.testing.assert_close(chains[name](module)(msa, mask), module(msa, mask), atol=1e-5, rtol=1e-4)


def test_every_operator_has_a_library_chain():
    for operator in OPERATORS.values():
        assert "library_chain" in library_chains(operator)


@pytest.mark.gpu
def test_a_graph_and_calls_time_the_same_kernel_alike():
    x = torch.randn(4096, 4096, device="cuda")
    candidate = [Candidate("product", lambda y: y @ y)]
    # In turns, and the fastest of each: what else the card has to do only adds time.
    rounds = [
        [compare(candidate, [(x,)], in_graph=in_graph)["product"] for in_graph in (True, False)]
        for _ in range(3)
    ]
    graph, direct = (min(runs, key=lambda timing: timing.p20_us) for runs in zip(*rounds, strict=True))
    assert graph.p20_us == pytest.approx(direct.p20_us, rel=0.2)
    torch.testing.assert_close(graph.outputs[0], direct.outputs[0])
    assert graph.peak_mib == pytest.approx(64, rel=0.3)


@pytest.mark.gpu
def test_a_slow_host_is_no_part_of_a_direct_call_s_kernel_time():
    x = torch.randn(2**20, device="cuda")

    def slowly(y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = y + 1
            time.sleep(0.001)
        return y

    timing = compare([Candidate("slow host", slowly)], [(x,)], in_graph=False)["slow host"]
    assert timing.p80_us < 500 < 4000 < timing.call_us


@pytest.mark.gpu
def test_ceilings_of_this_card_are_plausible():
    ceilings = roofline.measure_ceilings()
    assert all(value > 0 for value in ceilings)
    assert ceilings.bf16_tflops > ceilings.tf32_tflops > ceilings.fp32_tflops
