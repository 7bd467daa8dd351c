"""hopper.cuh: layouts of wgmma's operands and results, barriers, bulk copies and clusters.

The same checks run on the CPU's models and, where there is a Hopper GPU, on its instructions.
"""

from __future__ import annotations

import random

import pytest
import torch

import jit_loader
from kernels_src import OPERATORS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OUTER = OPERATORS["outer_product_mean"]
NAN = 0x7FC0  # as bf16 and as fp16

PRODUCT = r"""
#include "hopper.cuh"

struct Place {
    int start, k_stride, mn_stride;  // bytes
};

template <typename T, Major kMajorA, Major kMajorB>
__device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, const uint32_t* fragments,
                         bool accumulate) {
    if (fragments) {
        uint32_t fragment[4];
        for (int e = 0; e < 4; ++e) fragment[e] = fragments[threadIdx.x * 4 + e];
        wgmma_fence();
        wgmma<T, kMajorB>(d, fragment, b, accumulate);
    } else {
        wgmma_fence();
        wgmma<T, kMajorA, kMajorB>(d, a, b, accumulate);
    }
}

template <typename T>
__global__ void __launch_bounds__(128)
    product_kernel(const __nv_bfloat16* image, float* out, int elements, Place at_a, Place at_b,
                   int major_a, int major_b, const uint32_t* fragments, int accumulate) {
    DYNAMIC_SHARED(__nv_bfloat16, shared);
    for (int i = threadIdx.x; i < elements; i += 128) shared[i] = image[i];
    fence_async_proxy();
    __syncthreads();
    float d[N / 2];
    for (int e = 0; e < N / 2; ++e) d[e] = out[threadIdx.x * (N / 2) + e];
    const uint64_t a = wgmma_operand(shared + at_a.start / 2, at_a.k_stride, at_a.mn_stride);
    const uint64_t b = wgmma_operand(shared + at_b.start / 2, at_b.k_stride, at_b.mn_stride);
    if (major_a == 0 && major_b == 0)
        multiply<T, Major::K, Major::K>(d, a, b, fragments, accumulate);
    if (major_a == 0 && major_b == 1)
        multiply<T, Major::K, Major::MN>(d, a, b, fragments, accumulate);
    if (major_a == 1 && major_b == 0)
        multiply<T, Major::MN, Major::K>(d, a, b, fragments, accumulate);
    if (major_a == 1 && major_b == 1)
        multiply<T, Major::MN, Major::MN>(d, a, b, fragments, accumulate);
    wgmma_commit();
    wgmma_wait<0>();
    for (int e = 0; e < N / 2; ++e) out[threadIdx.x * (N / 2) + e] = d[e];
}

EXPORT cudaError_t product(const __nv_bfloat16* image, const __nv_bfloat16* fragments, float* out,
                           int elements, int half, int a_start, int a_k, int a_mn, int major_a,
                           int b_start, int b_k, int b_mn, int major_b, int from_registers,
                           int accumulate, cudaStream_t stream) {
    const uint32_t* registers =
        from_registers ? reinterpret_cast<const uint32_t*>(fragments) : nullptr;
    auto kernel = half ? product_kernel<__half> : product_kernel<__nv_bfloat16>;
    return LAUNCH(kernel, dim3(1), dim3(128), elements * 2, stream)(
        image, out, elements, Place{a_start, a_k, a_mn}, Place{b_start, b_k, b_mn}, major_a,
        major_b, registers, accumulate);
}
"""


def place(image, rows, start, major, rng):
    """Write a matrix (M or N, 16) in core matrices at random strides; returns (end, k_stride, mn_stride)."""
    cores = rows.shape[0] // 8
    gap = lambda: 16 * rng.randrange(4)  # noqa: E731
    if rng.random() < 0.5:
        mn_stride = 128 + gap()
        k_stride = mn_stride * cores + gap()
    else:
        k_stride = 128 + gap()
        mn_stride = 2 * k_stride + gap()
    mn, k = torch.arange(rows.shape[0])[:, None], torch.arange(16)
    row, column = (k % 8, mn % 8) if major else (mn % 8, k % 8)
    at = start + mn // 8 * mn_stride + k // 8 * k_stride + row * 16 + column * 2
    image[at // 2] = rows
    return start + (cores - 1) * mn_stride + k_stride + 128, k_stride, mn_stride


def fragments_of(a):
    """A (64, 16) as 4 registers of 2 values in each of 128 threads."""
    thread, register, element = torch.arange(128)[:, None, None], torch.arange(4)[:, None], torch.arange(2)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
    return a[row, thread % 4 * 2 + 8 * (register // 2) + element]


def spread(result):
    """A result (64, N) as the N / 2 floats of each of 128 threads."""
    thread, e = torch.arange(128)[:, None], torch.arange(result.shape[1] // 2)
    row = 16 * (thread // 32) + e // 2 % 2 * 8 + thread % 32 // 4
    return result[row, e // 4 * 8 + thread % 4 * 2 + e % 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [8, 32, 256])
def test_wgmma_reads_and_writes_what_the_layouts_say(n, device, seed):
    kernels = jit_loader.load(PRODUCT, defines={"N": n}, name=f"wgmma_{n}")
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for case in range(12):
        dtype = (torch.bfloat16, torch.float16)[case % 2]
        major_a, major_b, from_registers = case // 2 % 2, case // 4 % 2, case >= 8
        a, b = (torch.randint(-9, 10, (rows, 16), generator=generator).to(dtype) for rows in (64, n))
        image = torch.full((40_000,), NAN, dtype=torch.int16).view(dtype)  # what no operand covers is NaN
        end_a, a_k, a_mn = place(image, a, 128, major_a, rng)
        start_b = -(-end_a // 128) * 128 + 16 * rng.randrange(8)
        end_b, b_k, b_mn = place(image, b, start_b, major_b, rng)
        d = torch.randint(-99, 100, (64, n), generator=generator).float()
        accumulate = rng.randrange(2)
        out = spread(d).to(device)
        kernels.product(
            image[: end_b // 2].view(torch.bfloat16).to(device),
            fragments_of(a).view(torch.bfloat16).contiguous().to(device),
            out,
            *(end_b // 2, int(dtype is torch.float16), 128, a_k, a_mn, major_a),
            *(start_b, b_k, b_mn, major_b, int(from_registers), accumulate),
        )
        expected = spread(a.float() @ b.float().T + accumulate * d)
        assert torch.equal(out.cpu(), expected), (case, dtype, major_a, major_b, from_registers)


RELAY = r"""
#include "hopper.cuh"

constexpr int kStages = 2, kPiece = 128;  // elements that one block copies to both

__global__ void __launch_bounds__(64)
    relay_kernel(const __nv_bfloat16* in, __nv_bfloat16* out, int steps) {
    DYNAMIC_SHARED(__nv_bfloat16, ring);
    SHARED(Barrier, full, [kStages]);
    SHARED(Barrier, empty, [kStages]);
    const int rank = cluster_rank(), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(full + stage, 1);
            barrier_init(empty + stage, 2);
        }
        barrier_init_fence();
    }
    cluster_sync();
    for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages, parity = step / kStages % 2;
        if (threadIdx.x == 0) {
            barrier_wait(empty + stage, parity ^ 1);
            barrier_arrive_expect(full + stage, 2 * kPiece * 2);
            copy_bulk_multicast(ring + (2 * stage + rank) * kPiece, in + (2 * step + rank) * kPiece,
                                kPiece * 2, full + stage, 3);
        } else if (threadIdx.x >= 32) {
            barrier_wait(full + stage, parity);
            for (int i = lane; i < 2 * kPiece; i += 32) {
                out[(rank * steps + step) * 2 * kPiece + i] = ring[2 * stage * kPiece + i];
            }
            __syncwarp();
            if (lane < 2) barrier_arrive_remote(empty + stage, lane);
        }
    }
    __syncwarp();
    cluster_sync();
}

EXPORT cudaError_t relay(const __nv_bfloat16* in, __nv_bfloat16* out, int steps,
                         cudaStream_t stream) {
    return LAUNCH_CLUSTER(relay_kernel, dim3(2), dim3(64), dim3(2), kStages * 2 * kPiece * 2,
                          stream)(in, out, steps);
}
"""
STEPS = 7


def relay(source, device, order="forward"):
    kernels = jit_loader.load(source, name="relay")
    data = torch.randn(STEPS, 256).bfloat16().to(device)
    out = torch.full((2, STEPS, 256), float("nan"), dtype=torch.bfloat16, device=device)
    with jit_loader.cpu_schedule(order):
        kernels.relay(data, out, STEPS)
    return data, out


@pytest.mark.parametrize("device", DEVICES)
def test_two_blocks_fill_each_others_ring(device):
    for order in ("forward", "reverse", "random"):
        data, out = relay(RELAY, device, order)
        assert torch.equal(out[0], data) and torch.equal(out[1], data), order


MISTAKES = {
    "no barrier_init": ("barrier_init(empty + stage, 2);", "", "without barrier_init"),
    "an arrival too many": (
        "2 * kPiece * 2);\n            copy",
        "kPiece * 2);\nbarrier_arrive_expect(full + stage, kPiece * 2);\ncopy",
        "more arrivals",
    ),
    "a byte count that never comes": (
        "2 * kPiece * 2);\n            copy",
        "999);\n            copy",
        "for ever",
    ),
    "a stage never given back": ("if (lane < 2) barrier", "if (lane < 1) barrier", "for ever"),
    "an unaligned copy": ("ring + (2 * stage", "ring + 1 + (2 * stage", "multiples of 16"),
    "a block outside the cluster": ("full + stage, 3);", "full + stage, 7);", "no block 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_models_name_mistakes(mistake):
    old, new, message = MISTAKES[mistake]
    assert RELAY.count(old) == 1
    with pytest.raises(RuntimeError, match=message):
        relay(RELAY.replace(old, new), "cpu")


# ---- the stages: 11 uses all of it, 10 has the same tiles

SHAPE = type(OUTER.shapes["seed"])(
    1, 400, 17, 24, 32, 40
)  # several trips around the ring, several tiles a block


# of stage 12 too: five steps of 16 rows, of which PROMOTE adds up two at a time
SPLIT_SHAPE = SHAPE._replace(S=75, N=9, P=72)


def outputs_of(stage, seed, orders=("forward", "reverse")):
    shape = SHAPE if stage.precision == "bf16" else SPLIT_SHAPE
    module = OUTER.module(shape, seed, dtype=stage.dtype)
    msa, mask = OUTER.inputs(shape, seed, dtype=stage.dtype)
    outputs = []
    for order in orders:
        with jit_loader.cpu_schedule(order):
            outputs.append(stage(module, msa, mask))
    return outputs


@pytest.mark.parametrize("name", ["10_bf16", "11_hopper"])
@pytest.mark.parametrize(
    ("shape", "mean"),
    [((2, 3, 7, 16, 31, 100), 0), ((1, 130, 9, 20, 32, 8), 30), ((1, 9, 33, 64, 32, 200), -3)],
    ids=["padded C", "D of 20, large mean", "two passes of outputs"],
)
def test_as_accurate_as_eager(name, shape, mean, seed):
    shape = type(SHAPE)(*shape)
    module = OUTER.module(shape, seed, dtype=torch.bfloat16)
    msa, mask = OUTER.inputs(shape, seed, dtype=torch.bfloat16)
    msa += mean
    mask[:, :, 1] = 0  # a residue that is nowhere present
    out = OUTER.stage(name)(module, msa, mask)
    eager = module(msa, mask)
    exact = OUTER.module(shape, seed, dtype=torch.bfloat16).double()(msa.double(), mask.double())
    error, allowed = (out - exact).abs().max(), 2 * (eager - exact).abs().max()
    assert error <= min(allowed, 1e-2), f"{error:.2e}, twice eager's is {allowed:.2e}"


def test_how_blocks_share_and_how_deep_the_ring_is_change_nothing(seed):
    stage = OUTER.stage("11_hopper")
    expected, reverse = outputs_of(stage, seed)
    assert torch.equal(expected, reverse)
    for define in (
        "#define CLUSTER 1\n",
        "#define CLUSTER 4\n",
        "#define DEPTH 32\n",
        "#define TILES 2\n#define DEPTH 16\n",
    ):
        (out,) = outputs_of(stage.variant(define + stage.code, "variant"), seed, ["forward"])
        assert torch.equal(out, expected), define
    (mma,) = outputs_of(OUTER.stage("10_bf16"), seed, ["forward"])
    assert torch.equal(mma, expected)


def test_when_sums_are_promoted_changes_only_the_last_bits(seed):
    stage = OUTER.stage("12_hopper_split")
    often = stage.variant("#define PROMOTE 32\n" + stage.code, "often")
    alone = stage.variant("#define CLUSTER 1\n" + often.code, "alone")
    first, reverse = outputs_of(often, seed)
    assert torch.equal(first, reverse)
    assert torch.equal(*outputs_of(alone, seed, ["forward"]), first)
    module = OUTER.module(SPLIT_SHAPE, seed)
    msa, mask = OUTER.inputs(SPLIT_SHAPE, seed)
    exact = OUTER.module(SPLIT_SHAPE, seed).double()(msa.double(), mask.double())
    allowed = 2 * (module(msa, mask) - exact).abs().max()
    for out in (first, *outputs_of(stage, seed, ["forward"])):
        error = (out - exact).abs().max()
        assert error <= allowed, f"{error:.2e}, twice eager's is {allowed:.2e}"


FAULTS = {
    "a stage given back while wgmma reads it": (
        "if (step > 0) release(empty, (place.stage + kStages - 1) % kStages)",
        "release(empty, place.stage)",
    ),
    "products stored before wgmma has ended": ("wgmma_wait<0>();", ""),
    "weights read before they arrive": ("barrier_wait(full + place.stage, place.parity);", ""),
    "half of b in the other half's place": ("stage + kRowBytes + rank * kColumnShare", "stage + kRowBytes"),
}


SPLIT_FAULTS = {
    "a stage given back while wgmma reads it": (
        "if (step > first) release(empty, (place.stage + kStages - 1) % kStages)",
        "release(empty, place.stage)",
    ),
    "products read before all are stored": (
        "fence_async_proxy();\n            named_barrier(1, kConsumers * kWarpSize);",
        "",
    ),
    "sums set aside and not added again": ("add_promoted(sums, outer);", ""),
    "weights of the other half of the outputs": ("+ group * (kOutputs * 8)", ""),
    "half of b in the other half's place": ("stage + kRowBytes + rank * kColumnShare", "stage + kRowBytes"),
}
RING = "outer_product_mean/tile_ring.cuh"


@pytest.mark.parametrize(
    ("name", "fault"),
    [("11_hopper", fault) for fault in FAULTS] + [("12_hopper_split", fault) for fault in SPLIT_FAULTS],
)
def test_a_fault_in_the_stage_shows(name, fault, seed):
    stage = OUTER.stage(name)
    ring = (stage.source.parents[1] / RING).read_text()
    code = stage.code.replace(f'#include "{RING}"', ring)
    if name == "12_hopper_split":
        code = "#define PROMOTE 32\n" + code
    (expected,) = outputs_of(stage.variant(code, "right"), seed, ["forward"])
    old, new = (FAULTS if name == "11_hopper" else SPLIT_FAULTS)[fault]
    assert old in code
    faulty = stage.variant(code.replace(old, new), "faulty")
    try:
        outputs = outputs_of(faulty, seed)
    except jit_loader.KernelCompileError:
        raise  # no fault of the stage's
    except RuntimeError:
        return
    assert not all(torch.equal(out, expected) for out in outputs)
