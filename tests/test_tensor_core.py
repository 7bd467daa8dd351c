"""tensor_core.cuh against the PTX ISA: which element of a matrix each register of each lane holds.

The tables below are written from the formulas of "Matrix Fragments for mma.m16n8k8" and "…m16n8k16" and of
"ldmatrix"; groupID is lane / 4 and threadID_in_group lane % 4. The same tests hold the CPU's models and,
where there is one, the GPU against them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jit_loader

SOURCE = Path(__file__).with_suffix(".cu").with_name("tensor_core.cu")
LANES = range(32)
KINDS = {"tf32": 8, "bf16": 16, "fp16": 16}  # depth of the product
DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

pytestmark = pytest.mark.timeout(120)
on_either_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def kernels():
    return jit_loader.load(SOURCE)


# ---- the tables: value i of a lane, a 16-bit half counted as a value of its own -> (row, column)


def a_table(kind, lane, i):
    group, thread = lane // 4, lane % 4
    if kind == "tf32":
        row = group if i in (0, 2) else group + 8
        column = thread if i in (0, 1) else thread + 4
    else:
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        column = thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    return row, column


def b_table(kind, lane, i):
    group, thread = lane // 4, lane % 4
    if kind == "tf32":
        row = thread if i == 0 else thread + 4
    else:
        row = thread * 2 + (i & 1) if i < 2 else thread * 2 + (i & 1) + 8
    return row, group


def d_table(lane, i):
    group, thread = lane // 4, lane % 4
    return group if i < 2 else group + 8, thread * 2 + (i & 1)


def fragment(matrix, table, values):
    """(…, rows, columns) -> (…, 32, values): what the lanes hold."""
    places = torch.tensor([[table(lane, i) for i in range(values)] for lane in LANES])
    return matrix[..., places[..., 0], places[..., 1]].contiguous()


def from_fragment(held, table, rows, columns):
    """(…, 32, values) -> (…, rows, columns)."""
    matrix = torch.full((*held.shape[:-2], rows, columns), torch.nan)
    for lane in LANES:
        for i in range(held.shape[-1]):
            row, column = table(lane, i)
            assert matrix[..., row, column].isnan().all(), "two registers hold one element"
            matrix[..., row, column] = held[..., lane, i]
    return matrix


def multiply(kernels, device, kind, a, b, d=None):
    """a (n, 16, depth) and b (n, depth, 8) of the kind's dtype -> d (n, 16, 8), through the registers."""
    values = 4 if kind == "tf32" else 8
    a = fragment(a, lambda lane, i: a_table(kind, lane, i), values)
    b = fragment(b, lambda lane, i: b_table(kind, lane, i), values // 2)
    d = torch.zeros(len(a), 16, 8) if d is None else d
    held = fragment(d, d_table, 4).to(device)
    kernels.mma(
        a.view(torch.float32).to(device),
        b.view(torch.float32).to(device),
        held,
        len(a),
        list(KINDS).index(kind),
    )
    return from_fragment(held.cpu(), d_table, 16, 8)


def one_hot(rows, columns, dtype):
    """(rows * columns, rows, columns): a 1 at each place in turn."""
    return torch.eye(rows * columns, dtype=dtype).view(-1, rows, columns)


@on_either_device
@pytest.mark.parametrize("kind", KINDS)
def test_each_element_of_a_and_b_is_where_the_isa_has_it(kernels, device, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    depth, dtype = KINDS[kind], DTYPES[kind]
    whole_numbers = lambda *shape: torch.randint(1, 100, shape, generator=generator).to(dtype)  # noqa: E731
    for a, b in [
        (one_hot(16, depth, dtype), whole_numbers(16 * depth, depth, 8)),
        (whole_numbers(depth * 8, 16, depth), one_hot(depth, 8, dtype)),
    ]:
        assert torch.equal(multiply(kernels, device, kind, a, b), a.float() @ b.float())


@on_either_device
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_number_of_16_bits_is_read_as_what_it_is(kernels, device, kind):
    """Infinities, NaN and fp16's subnormal numbers too; those of bf16 have products below float's range."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[kind])
    values = torch.where(values.float().abs() < 2.0**-126, 0, values)
    a, b = torch.zeros(4096, 16, 16).to(values), torch.zeros(4096, 16, 8).to(values)
    a[:, :, 0], b[:, 0] = values.view(4096, 16), 1
    got = multiply(kernels, device, kind, a, b)
    expected = values.float().view(4096, 16, 1).expand(got.shape)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0), expected.nan_to_num(0))


@on_either_device
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_as_accurate_as_fp32_sums(kernels, device, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    depth, dtype = KINDS[kind], DTYPES[kind]
    a = torch.randn(50, 16, depth, generator=generator).to(dtype)
    b = torch.randn(50, depth, 8, generator=generator).to(dtype)
    start = torch.randn(50, 16, 8, generator=generator)
    got = multiply(kernels, device, kind, a, b, start)
    if kind == "tf32":  # what is beyond 10 bits of fraction must not count
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    a, b, start = a.double(), b.double(), start.double()
    expected = start + a @ b
    size = start.abs() + a.abs() @ b.abs()
    assert ((got - expected).abs() <= 2.0**-21 * size).all()


@on_either_device
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_ldmatrix(kernels, device, matrices, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randperm(2**15, generator=generator)[:256].to(torch.int16).view(32, 8)
    order = torch.randperm(32, generator=generator)
    out = torch.full((32, 4), torch.nan, device=device)
    rows = values.view(torch.float32).contiguous()
    kernels.ldmatrix(rows.to(device), order.float().to(device), out, matrices, transposed)
    got = out.cpu().view(torch.int16).view(32, 4, 2)
    for lane in LANES:
        for j in range(matrices):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if transposed:
                    row, column = column, row
                assert got[lane, j, half] == values[order[8 * j + row], column]
    assert (got[:, matrices:] == 0).all()


@on_either_device
def test_a_wrong_register_gives_a_wrong_product(kernels, device, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(16, 16, generator=generator).bfloat16()
    b = torch.randn(16, 8, generator=generator).bfloat16()
    errors = []
    for bug in (0, 1):
        c = torch.full((16, 8), torch.nan, device=device)
        kernels.product(a.to(device), b.to(device), c, bug)
        errors.append((c.cpu() - a.double() @ b.double()).abs().max().item())
    assert errors[0] <= 1e-5 < 1e-2 < errors[1]


# ---- asynchronous copies


def copied(kernels, device, bytes_each, bug=0, pieces=5, count=12):
    piece = 32 * bytes_each // 4
    x = torch.arange(1.0, pieces * piece + 1)
    expected = x.clone()
    expected[(pieces - 1) * piece + count :] = 0
    out = torch.full_like(x, torch.nan, device=device)
    kernels.copy(x.to(device), out, bytes_each, pieces, count, bug)
    return out.cpu(), expected


@on_either_device
@pytest.mark.parametrize("bytes_each", [4, 8, 16])
def test_asynchronous_copies(kernels, device, bytes_each):
    out, expected = copied(kernels, device, bytes_each)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bug", [1, 2])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_a_copy_that_was_not_waited_for_is_nan(kernels, order, bug):
    with jit_loader.cpu_schedule(order, 1):
        out, _ = copied(kernels, "cpu", 16, bug)
    assert out.isnan().any()


# ---- conversions


@on_either_device
def test_conversions(kernels, device, seed):
    generator = torch.Generator().manual_seed(seed)
    ties = torch.tensor([0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, -0x407FF000]).to(torch.int32)
    x = torch.cat(
        [
            ties.view(torch.float32),
            torch.randn(1000, generator=generator) * 20,
            torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 127.9, -126.5, -140.0, 3.0]),
        ]
    )
    finite = x.isfinite()
    out = torch.full((len(x), 8), torch.nan, device=device)
    kernels.conversions(x.to(device), out, len(x))
    tf32, big, small, power, packed, *terms = out.cpu().T.contiguous()

    bits = x.view(torch.int32)
    nearest = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)  # ties away from zero
    assert torch.equal(tf32, nearest) and torch.equal(big, nearest)
    residue = (x.double() - big.double() - small.double()).abs()[finite]
    assert (residue <= 2.0**-21 * x.abs()[finite]).all()

    exact = torch.exp2(x.double())
    normal = exact >= 2.0**-126
    assert ((power - exact).abs() <= 2.0**-21 * exact)[normal & finite].all()
    assert (power[~normal] == 0).all() and (power[x == torch.inf] == torch.inf).all()

    halves = lambda register: register.contiguous().view(torch.bfloat16).view(-1, 2).float()  # noqa: E731
    pairs = torch.stack([x, x.roll(-1)], dim=1)
    assert torch.equal(halves(packed), pairs.bfloat16().float())
    rest = pairs.double()
    for term in terms:
        rest = rest - halves(term)
    kept = pairs.isfinite()
    assert (rest.abs()[kept] <= 2.0**-23 * pairs.abs()[kept]).all()


@on_either_device
def test_tf32_of_nan_is_nan(kernels, device):
    x = torch.tensor([torch.nan, -torch.nan, 1.0]).to(device)
    x[1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()
    out = torch.zeros(3, 8, device=device)
    kernels.conversions(x, out, 3)
    assert out[:, 0].isnan().tolist() == [True, True, False]


# ---- misuse


@pytest.mark.parametrize(
    "which,said",
    [
        (0, "copy_async_16: the target .* is not in shared memory"),
        (1, "copy_async_16: both addresses must be multiples of 16"),
        (2, "copy_async_16: both addresses must be multiples of 16"),
        (3, "wait at (mma_m16n8k8_tf32|__syncthreads) for ever"),
        (4, "ldmatrix_x4: .* is not an address in shared memory"),
    ],
)
def test_misuse_is_reported(kernels, which, said):
    with pytest.raises(RuntimeError, match=r"thread \(\d+,0,0\), .*tensor_core.cu:\d+: .*" + said):
        kernels.misuse(torch.zeros(256), torch.zeros(256), which)


def test_the_gpu_gets_the_instructions(kernels):
    """The compiled code, which needs no GPU, has what each wrapper stands for."""
    kernels.build("cuda", arch="9.0a")
    code = kernels.sass()
    for instruction in ["HMMA.1688.F32.TF32", "HMMA.16816.F32.BF16", "HMMA.16816.F32 ", "LDSM.16.M88.4",
                        "LDSM.16.MT88.2", "LDGSTS.E.BYPASS.128", "LDGDEPBAR", "MUFU.EX2"]:  # fmt: skip
        assert instruction in code, instruction
