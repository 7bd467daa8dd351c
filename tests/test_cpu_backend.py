"""The CPU backend: it computes what the GPU computes, and it finds the bugs that a GPU hides."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import jit_loader

HERE = Path(__file__).resolve().parent
BUGS = HERE / "planted_bugs.cu"
KERNELS = re.findall(r"__global__ void (\w+)\(const float\* x, float\* y, int bug\)", BUGS.read_text())
THREADS = 64  # of a block in planted_bugs.cu
SCHEDULES = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]

pytestmark = pytest.mark.timeout(120)  # a hang is a failure

on_either_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def kernels():
    return jit_loader.load(HERE / "cpu_backend.cu")


@pytest.fixture(scope="module")
def bugs():
    return jit_loader.load(BUGS)


def under_schedules(call):
    """call() under each schedule."""
    results = []
    for order, seed in SCHEDULES:
        with jit_loader.cpu_schedule(order, seed):
            results.append(call())
    return results


def planted(bugs, name, bug, blocks=5):
    """x, and y as the kernel computes it."""
    x = torch.arange(1.0, blocks * THREADS + 1)
    y = torch.full_like(x, torch.nan)
    if name in KERNELS:
        bugs.planted(x, y, blocks, KERNELS.index(name), bug)
    else:
        getattr(bugs, name)(x, y, blocks, bug)
    return x, y


# ---- it computes what the GPU computes


@on_either_device
@pytest.mark.parametrize(
    "blocks,threads", [((1, 1, 1), (1, 1, 1)), ((3, 2, 4), (5, 3, 2)), ((7, 1, 1), (1, 33, 31))]
)
def test_indices(kernels, device, blocks, threads):
    count = torch.tensor(blocks).prod(), torch.tensor(threads).prod()
    out = torch.full((*count, 8), torch.nan, device=device)
    kernels.indices(out, *blocks, *threads)
    ranges = (range(extent) for extent in (*reversed(blocks), *reversed(threads)))
    expected = [
        [bx, by, bz, tx, ty, tz, threads[0], blocks[0]]
        for bz, by, bx, tz, ty, tx in itertools.product(*ranges)
    ]
    assert torch.equal(out.cpu().view(-1, 8), torch.tensor(expected, dtype=torch.float32))


@on_either_device
@pytest.mark.parametrize("width", [4, 8, 32])
@pytest.mark.parametrize("distance", [1, 3, 17, 31])
def test_warp_functions(kernels, device, distance, width, seed):
    x = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    out = torch.full((32, 9), torch.nan, device=device)
    kernels.warp_functions(x.to(device), out, distance, width)

    lane = torch.arange(32)
    first, last = lane - lane % width, lane - lane % width + width - 1
    own_if = lambda outside, source: x[torch.where(outside, lane, source % 32)]  # noqa: E731
    expected = torch.stack(
        [
            x[first + (lane + distance) % width],
            own_if(lane - distance < first, lane - distance),
            own_if(lane + distance > last, lane + distance),
            own_if(lane ^ distance > last, lane ^ distance),
            torch.stack([(x[i:] > 0).sum() for i in range(32)]).float(),
            ((x > 2).any() * 2 + (x > -2).all()).float().expand(32),
            x.double().sum().float().expand(32),
            x.max().expand(32),
            x[torch.where(lane < 16, lane ^ 1, lane ^ 2)],
        ],
        dim=1,
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


@on_either_device
def test_the_last_warp_may_be_a_part(kernels, device):
    x = torch.arange(13.0, device=device)
    out = torch.full_like(x, torch.nan)
    kernels.partial_warp(x, out, 13)
    assert torch.equal(out, x.sum().expand(13))


@on_either_device
def test_atomics_lose_nothing(kernels, device):
    blocks, threads = 300, 96
    total = torch.zeros(1, device=device)
    integers = torch.tensor([-1, 2**30, 0], dtype=torch.int32, device=device)
    kernels.atomics(total, integers.view(torch.float32), blocks, threads)
    assert total.item() == blocks * threads
    assert integers.tolist() == [blocks * threads - 1, 0, blocks * threads]


@on_either_device
def test_each_declaration_is_one_shared_array(kernels, device):
    out = torch.full((40, 64), torch.nan, device=device)
    kernels.shared_arrays(out, 40, 64)
    expected = 10 * torch.arange(40.0)[:, None].expand(40, 64) - 1
    assert torch.equal(out.cpu(), expected)


@on_either_device
def test_a_chain_returns_its_first_error(kernels, device):
    out = torch.zeros(3 * 32, device=device)
    kernels.chain(out, 3, 2)
    for blocks in [(0, 3), (3, 0)]:
        with pytest.raises(RuntimeError, match=r"shared_arrays_kernel.*\(0,1,1\)"):
            kernels.chain(out, *blocks)
    kernels.chain(out, 3, 3)  # and the next launch is fine
    if device == "cuda":
        torch.cuda.synchronize()
        torch.ones(1, device=device)


def order_of(kernels, schedule: str, seed: int, threads: int, turns: int = 1) -> list[int]:
    """The threads of a block in the order in which they ran, turn by turn."""
    out, count = torch.full((threads * turns,), torch.nan), torch.zeros(1)
    with jit_loader.cpu_schedule(schedule, seed):
        kernels.order(out, count, threads, turns)
    return out.int().tolist()


@pytest.mark.parametrize("threads", [1, 8, 32, 45])
def test_the_first_to_run_is_anyone_in_a_random_order(kernels, threads, seed):
    """And the first or the last in the other two; each thread runs once."""
    assert order_of(kernels, "forward", seed, threads) == list(range(threads))
    assert order_of(kernels, "reverse", seed, threads) == list(range(threads))[::-1]
    orders = [order_of(kernels, "random", seed + i, threads) for i in range(40 * threads)]
    assert all(sorted(order) == list(range(threads)) for order in orders)
    for place in (0, -1):
        assert {order[place] for order in orders} == set(range(threads))
    if threads in (8, 32):  # all are as likely
        firsts = Counter(order[0] for order in orders)
        assert min(firsts.values()) > 10 and max(firsts.values()) < 80


def test_a_random_order_leaves_warps_half_way(kernels, seed):
    """Two warps, each of which goes on to its next turn once its 32 lanes are there."""
    left, orders = 0, set()
    for i in range(20):
        order = order_of(kernels, "random", seed + i, 64, turns=10)
        warps = [thread // 32 for thread in order]
        changes = [at for at in range(1, len(warps)) if warps[at] != warps[at - 1]]
        left += sum(warps[:at].count(warps[at - 1]) % 32 > 0 for at in changes)
        orders.add(tuple(order))
    assert left > 20 and len(orders) == 20


@pytest.mark.parametrize("blocks", [1, 2, 7, 64, 100])
def test_every_schedule_runs_every_block_once(kernels, blocks):
    def runs():
        total = torch.zeros(1)
        integers = torch.tensor([-1, 2**30, 0], dtype=torch.int32)
        kernels.atomics(total, integers.view(torch.float32), blocks, 32)
        return total.item(), *integers.tolist()

    assert under_schedules(runs) == [(blocks * 32, blocks * 32 - 1, 0, blocks * 32)] * len(SCHEDULES)


@on_either_device
@pytest.mark.parametrize(
    "blocks,threads,said",
    [((0, 1, 1), (32, 1, 1), r"\(0,1,1\)"), ((1, 65536, 1), (32, 1, 1), r"\(1,65536,1\)"),
     ((1, 1, 1), (1025, 1, 1), r"\(1025,1,1\)"), ((1, 1, 1), (1, 1, 65), r"\(1,1,65\)")],
)  # fmt: skip
def test_an_impossible_launch_is_an_error(kernels, device, blocks, threads, said):
    out = torch.zeros(8, device=device)
    with pytest.raises(RuntimeError, match=rf"indices_kernel.*{said}"):
        kernels.indices(out, *blocks, *threads)


# ---- it finds the bugs that a GPU hides


@pytest.mark.parametrize("name", ["missing_barrier", "overwritten_too_early"])
def test_a_missing_barrier_changes_the_result(bugs, name):
    def difference(bug):
        x, y = planted(bugs, name, bug)
        rows = x.view(-1, THREADS)
        expected = rows.flip(1) if name == "missing_barrier" else rows.roll(-2, 1)
        return int((y.view(-1, THREADS) != expected).sum())  # NaN differs, too

    assert under_schedules(lambda: difference(0)) == [0] * len(SCHEDULES)
    assert max(under_schedules(lambda: difference(1))) > 0


RIGHT = ["shared_overrun", "shared_overread", "divergent_barrier", "shuffle", "misaligned", "local_array",
         "waiting", "static_shared", "dynamic_shared"]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_without_its_bug_a_kernel_passes(bugs, name):
    def copies():
        x, y = planted(bugs, name, 0)
        return torch.equal(x, y)

    assert under_schedules(copies) == [True] * len(SCHEDULES)


WAITS = r"\d+ threads wait at {} for ever"
REPORTED = [
    ("shared_overrun", 1, "// the overrun is noticed", "'tile' of 256 bytes, 0 bytes past its end"),
    ("shared_overrun", 2, "// the overrun is noticed", "'tile' of 256 bytes, 4 bytes before its start"),
    ("shared_overrun", 3, "// loaded", "'dynamic shared memory' of 256 bytes, 0 bytes"),
    ("divergent_barrier", 1, r"// (first|second) barrier", "divergent barrier.*while .* others wait"),
    ("divergent_barrier", 2, "// first barrier", "returned from the kernel"),
    ("divergent_barrier", 3, "// first barrier", WAITS.format("__syncthreads") + ".*__shfl_sync"),
    ("shuffle", 1, "// (exchange|all together)", WAITS.format("__(shfl_xor_sync|syncthreads)")),
    ("shuffle", 2, "// (exchange|other mask)", "mask 0xffff(ffff|0001), but lane .* mask 0xffff(ffff|0001)"),
    ("shuffle", 3, "// exchange", "returned from the kernel"),
    ("shuffle", 4, "// exchange", r"lane \d+ is not in its own mask"),
    ("shuffle", 5, "// exchange", r"lane (\d+) reads lane \d+, which takes no part"),
    ("shuffle", 6, "// (exchange|vote)", "comes to __(shfl_xor|ballot)_sync .* at __(shfl_xor|ballot)"),
    ("waiting", 1, "// (upper|lower) warp", "barrier (for ever|3 is for .. threads here, and for)"),
    ("waiting", 2, "// counted", "64 threads wait at the count for ever"),
    ("misaligned", 1, "// sixteen bytes", "misaligned address"),
    ("static_shared", 1, r"SHARED\(float, value", r"49153 bytes of static shared memory \(at most 49152"),
]  # fmt: skip


@pytest.mark.parametrize("name,bug,where,said", REPORTED, ids=[f"{case[0]}-{case[1]}" for case in REPORTED])
def test_a_bug_is_reported_with_block_thread_and_line(bugs, name, bug, where, said):
    lines = [f"{i}: " for i, line in enumerate(BUGS.read_text().splitlines(), 1) if re.search(where, line)]
    assert lines
    place = rf"block \(\d,0,0\), .*{BUGS.name}:({'|'.join(lines)})"
    for order, seed in SCHEDULES:
        with (
            jit_loader.cpu_schedule(order, seed),
            pytest.raises(RuntimeError, match=place + ".*" + said) as error,
        ):
            planted(bugs, name, bug)
        if name != "shared_overrun":  # whose thread is not known
            assert re.search(r"thread \(\d+,0,0\)", str(error.value))
        x, y = planted(bugs, name, 0)
        assert torch.equal(x, y), "the next launch suffers from the error"


def test_dynamic_shared_memory_over_the_limit(bugs):
    with pytest.raises(
        RuntimeError, match="dynamic_shared_of: 232449 bytes of dynamic shared memory.*232448"
    ):
        planted(bugs, "dynamic_shared", 1)


def test_local_variables_that_overflow_the_stack(bugs):
    with pytest.raises(RuntimeError, match=r"thread \(\d+,0,0\): local variables of more than 262144 bytes"):
        planted(bugs, "local_array", 1)


def test_reading_past_a_shared_array_gives_nan(bugs):
    _, y = planted(bugs, "shared_overread", 1)
    assert y.view(-1, THREADS).isnan().nonzero()[:, 1].tolist() == [THREADS - 1] * 5


def test_shared_memory_that_was_never_written_is_nan(bugs):
    x, y = planted(bugs, "uninitialised", 0)
    torch.testing.assert_close(y.view(-1, THREADS)[:, 0], x.view(-1, THREADS).sum(1))
    _, y = planted(bugs, "uninitialised", 1)
    assert y.isnan().all()


# ---- what a caller may rely on


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("arguments", ["x", "x, n, n", "x, 1.0f, n, n"])
def test_wrong_arguments_of_a_kernel_are_a_compile_error_in_their_line(backend, arguments):
    text = f"""#include "cuda.cuh"
__global__ void kernel(float* x, const float* y, int n) {{ x[n] = y[n]; }}
EXPORT cudaError_t run(float* x, int n, cudaStream_t stream) {{
    return LAUNCH(kernel, dim3(1), dim3(1), 0, stream)({arguments});
}}
"""
    with pytest.raises(jit_loader.KernelCompileError) as error:
        jit_loader.load(text).build(backend)
    assert error.value.line == 4


@pytest.mark.parametrize("header", ["cuda.cuh", "tensor_core.cuh", "hopper.cuh"])
def test_headers_leave_the_letters_of_shapes_to_defines(header):
    """A stage is compiled with -DD=64 and the like, before any header."""
    function = "EXPORT cudaError_t run(float* x, cudaStream_t stream) { return cudaSuccess; }"
    text = f'#include "{header}"\n{function}'
    jit_loader.load(text, defines={letter: 7 for letter in "ABCDHMNPS"}).build("cpu")


# ---- speed, and the sanitizers


def test_a_seed_size_kernel_takes_well_under_a_second(kernels):
    x = torch.arange(64.0 * 256) / 256
    out = torch.full_like(x, torch.nan)
    kernels.busy(x, out, 64)  # compiles
    start = time.perf_counter()
    kernels.busy(x, out, 64)
    seconds = time.perf_counter() - start
    torch.testing.assert_close(out.view(64, 256), x.view(64, 256).sum(1, keepdim=True).expand(64, 256))
    assert seconds < 0.5, f"{seconds:.3f} s for 64 blocks of 256 threads with 20 barriers and 50 shuffles"


SANITIZED = """
__global__ void kernel(const float* x, float* y, int bug) {
    SHARED(float, tile, [64]);
    SHARED(float, after, [64]);
    after[threadIdx.x] = 0;
    __syncthreads();
    tile[threadIdx.x + (bug == 1)] = x[threadIdx.x];  // shared
    __syncthreads();
    const float value = x[threadIdx.x + (bug == 2)];  // global
    y[threadIdx.x] = tile[threadIdx.x] + 0 * value + after[threadIdx.x];
}
EXPORT cudaError_t run(const float* x, float* y, int bug, cudaStream_t stream) {
    return LAUNCH(kernel, dim3(3), dim3(64), 0, stream)(x, y, bug);
}
"""
in_one_worker = pytest.mark.xdist_group("sanitizers")
RUN_SANITIZED = """
import os, sys, torch, jit_loader
from pathlib import Path
source = Path(sys.argv[1])
kernels = jit_loader.load(source.read_text(), name="sanitized")
x, y = torch.randn(64), torch.empty(64)
kernels.run(x, y, 0)
print("right:", "equal" if torch.equal(x, y) else "different", file=sys.stderr)
for bug in (1, 2):  # each in a process of its own, which the sanitizer ends
    if os.fork() == 0:
        os.dup2(os.open(source.with_name(f"{bug}.log"), os.O_WRONLY | os.O_CREAT), 2)
        kernels.run(x, y, bug)
        os._exit(0)
    source.with_name(f"{bug}.code").write_text(str(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The source as it ran under the sanitizers, beside what they said of each bug; and of what is right."""
    source = tmp_path_factory.mktemp("sanitized") / "sanitized.cu"
    source.write_text('#include "cuda.cuh"\n' + SANITIZED)
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", RUN_SANITIZED, str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return source, done


@in_one_worker
def test_the_sanitizers_pass_what_is_right(sanitized):
    _, done = sanitized
    assert done.returncode == 0 and "right: equal" in done.stderr, done.stderr
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr


@in_one_worker
@pytest.mark.parametrize(
    "bug,marker,kind", [(1, "// shared", "use-after-poison"), (2, "// global", "heap-buffer-overflow")]
)
def test_the_sanitizers_name_the_line_of_what_is_wrong(sanitized, bug, marker, kind):
    source, _ = sanitized
    (line,) = (i for i, text in enumerate(source.read_text().splitlines(), 1) if marker in text)
    output = source.with_name(f"{bug}.log").read_text()
    assert source.with_name(f"{bug}.code").read_text() != "0", output
    assert re.search(rf"ERROR: AddressSanitizer: {kind}", output), output
    assert re.search(rf"#0 .* in kernel\(.*{source.name}:{line}\b", output), output
