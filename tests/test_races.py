"""The race detector of the CPU backend: what races is found in one run, and what does not is left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import jit_loader
from kernels_src import OPERATORS
from workbench.check import check

SOURCE = Path(__file__).resolve().with_name("planted_races.cu")
KERNELS = re.findall(r"__global__ void (\w+)\(const float\* x, float\* y, int bug\)", SOURCE.read_text())
THREADS = 128  # of a block in planted_races.cu
ORDERS = ("forward", "reverse", "random")

pytestmark = pytest.mark.timeout(120)


def planted(name, bug, order="races", blocks=4):
    """x, and y as the kernel computes it, both (blocks, threads)."""
    x = torch.arange(1.0, blocks * THREADS + 1)
    y = torch.full_like(x, torch.nan)
    with jit_loader.cpu_schedule(order):
        jit_loader.load(SOURCE).planted(x, y, blocks, KERNELS.index(name), bug)
    return x.view(blocks, THREADS), y.view(blocks, THREADS)


def expected(name, x):
    """What the kernel computes, as its comment says."""
    if name == "overwritten_by_itself":
        return x.flip(1)
    if name == "shuffle_for_barrier":
        return x.view(len(x), -1, 2).flip(2).view_as(x)
    if name == "buffer_reused_too_early":
        return x.roll(-2, 1)
    return x.roll(THREADS // 2, 1)


def lines_of(name, letters):
    """The numbers of the lines of a kernel that are marked by one of these letters."""
    lines = SOURCE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f"void {name}(" in line)
    end = lines.index("}", start)
    return [i + 1 for i in range(start, end) if re.search(f"// [{letters}]$", lines[i])]


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_ordered_passes(name):
    x, y = planted(name, 0)
    assert torch.equal(y, expected(name, x))


BARRIER = r"put __syncthreads\(\)"
RACES = [
    ("overwritten_by_itself", 1, "RW", "RW", r"element \d+ of 'tile'", BARRIER),
    ("shuffle_for_barrier", 1, "RW", "RW", r"element \d+ of 'tile'", r"or __syncwarp\(\)"),
    ("buffer_reused_too_early", 1, "W", "R", r"writes element \d+ of 'tile', .* reads at", BARRIER),
    ("copied", 1, "R", "W", "reads element .* copies asynchronously into at", "put copy_async_wait"),
    ("copied", 2, "RW", "RW", r"element \d+ of 'tile'", BARRIER),
    ("same_value", 1, "W", "W", "writes element 0 of 'flag', .* writes at", BARRIER),
    ("same_value", 2, "W", "W", "writes element 0 of 'flag', .* writes at", BARRIER),
    ("same_value", 3, "W", "W", "writes element 0 of 'flag', .* writes at", BARRIER),
    ("counted", 1, "RW", "RW", "element 0 of 'count'", "put"),
    ("written_by_two_blocks", 1, "W", "W", "writes global memory at 0x", "blocks have no order"),
    ("other_block", 2, "RW", "RW", r"element \d+ of 'tile'", r"put cluster_sync\(\)"),
    ("bulk_copied", 1, "R", "W", "reads element .* copies in bulk into at", "put barrier_wait"),
    ("bulk_copied", 2, "W", "RW", "copies in bulk into element .* of 'tile'", "put"),
    ("bulk_copied", 3, "W", "I", "element 0 of 'full'", r"barrier_init_fence\(\)"),
    ("multiplied", 1, "O", "M", "writes element .* of 'a', .* multiplies by wgmma from", "put wgmma_wait"),
    ("multiplied", 2, "M", "W", "multiplies by wgmma from element .* of 'a'", r"put fence_async_proxy\(\)"),
    ("multiplied", 3, "WM", "WM", "multiplies by wgmma from", "put"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name,bug,here,there,said,advice", RACES, ids=[f"{race[0]}-{race[1]}" for race in RACES]
)
def test_a_race_is_reported_with_both_threads_and_lines(name, bug, here, there, said, advice):
    with pytest.raises(RuntimeError, match="a race in") as error:
        planted(name, bug)
    message = str(error.value)
    sites = re.findall(rf"thread \(\d+,0,0\).*?{SOURCE.name}:(\d+)", message)
    assert len(sites) == 2, message
    assert int(sites[0]) in lines_of(name, here), message
    assert int(sites[1]) in lines_of(name, there), message
    assert re.search(said, message) and re.search(advice, message), message
    assert re.search(r"block \(\d,0,0\), thread .* which thread \(\d+,0,0\) of block \(\d,0,0\)", message)
    x, y = planted(name, 0)
    assert torch.equal(y, expected(name, x)), "the next launch suffers from the error"


@pytest.mark.parametrize(
    "name,bug,where,said",
    [
        ("unwritten", 1, "R", "reads element 3 of 'flags', which no thread had written"),
        ("multiplied", 4, "D", "reads registers that the wgmma at .* uses until"),
        ("other_block", 1, "W", r"shared memory of block \(\d,0,0\), which may not have begun"),
        ("other_block", 3, "E", r"shared memory of block \(\d,0,0\), which may have ended"),
    ],
)
def test_memory_that_may_not_be_there_is_reported(name, bug, where, said):
    with pytest.raises(RuntimeError, match=said) as error:
        planted(name, bug)
    (line,) = re.findall(rf"{SOURCE.name}:(\d+): ", str(error.value))
    assert int(line) in lines_of(name, where)


@pytest.mark.parametrize("name", ["overwritten_by_itself", "shuffle_for_barrier", "written_by_two_blocks"])
def test_no_order_of_threads_shows_these(name):
    """So the tests above are of what the orders miss."""
    for order in ORDERS:
        x, y = planted(name, 1, order)
        assert torch.equal(y, expected(name, x))


OUTER = OPERATORS["outer_product_mean"]


@pytest.mark.parametrize("number", ["11", "12"])
def test_a_check_looks_for_races_and_says_so(number, seed):
    """Without the barrier a warp writes products while others multiply those of the tile before."""
    stage = OUTER.stage(number)
    text, count = re.subn(r"(if \(t == 0\) )?named_barrier\(1, [^;]*;", ";", stage.code, count=1)
    assert count == 1
    stages = {"right": stage, "wrong": stage.variant(text, "no_barrier")}
    results = {
        (name, result.case): result
        for name, of in stages.items()
        for result in check(OUTER, of, "odd", device="cpu", seed=seed, cases=["random", "masked"])
    }
    assert results["right", "random"].passed
    assert results["wrong", "masked"].passed, "the three orders of threads miss it"
    message = results["wrong", "random"].message
    assert re.match("looking for races: .* a race in product_kernel: .* multiplies by wgmma from", message)
