"""The fused modules: drop-in replacements, in a model that is cast, compiled, exported or captured."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels_src import OPERATORS
from kernels_src.fused import KEPT_CALLS
from kernels_src.msa_column_attention import Shape as AttentionShape
from kernels_src.msa_column_attention import fused as attention
from kernels_src.operator import Stage
from kernels_src.outer_product_mean import Shape as PairShape
from kernels_src.outer_product_mean import fused as outer
from workbench.problem import pose

ATTENTION, OUTER = OPERATORS["msa_column_attention"], OPERATORS["outer_product_mean"]
KINDS = {
    "attention": (ATTENTION, attention.FusedMSAColumnAttention, AttentionShape(2, 3, 5, 16, 2)),
    "outer": (OUTER, outer.FusedOuterProductMean, PairShape(2, 3, 5, 16, 8, 12)),
}
FURTHER_SHAPES = {
    "attention": (ATTENTION.shapes["odd"], AttentionShape(1, 1025, 1, 16, 2)),
    "outer": (OUTER.odd_shapes[2],),
}
both = pytest.mark.parametrize("kind", KINDS)


def twin_of(module: nn.Module, fused: type[nn.Module]) -> nn.Module:
    """A fused module with a reference's sizes and parameters."""
    width = module.layer_norm.normalized_shape[0]
    sizes = (
        (width, module.num_heads)
        if hasattr(module, "num_heads")
        else (width, module.out_proj.out_features, module.proj_a.out_features)
    )
    twin = fused(*sizes).to(module.layer_norm.weight.dtype)
    twin.load_state_dict(module.state_dict())
    return twin.eval()


def case(kind: str, seed: int) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """The reference, the fused module with the same parameters, msa and mask."""
    operator, fused, shape = KINDS[kind]
    module = operator.module(shape, seed)
    return module, twin_of(module, fused), *operator.inputs(shape, seed)


def assert_same(
    output: Tensor, module: nn.Module, msa: Tensor, mask: Tensor, tolerance: float = 1e-5
) -> None:
    with torch.no_grad():
        torch.testing.assert_close(output, module(msa, mask), atol=tolerance, rtol=tolerance)


@both
def test_a_drop_in_replacement(kind, seed):
    operator, fused, small = KINDS[kind]
    for shape in (small, *FURTHER_SHAPES[kind]):
        problem = pose(operator, shape, seed=seed)
        twin = twin_of(problem.module, fused)
        for module in (twin, twin, copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
            output = module(problem.msa, problem.mask)
            assert (output - problem.answer).abs().max() <= problem.tolerance
        assert list(twin.state_dict()) == list(problem.module.state_dict())


@both
def test_one_made_of_a_reference_follows_it(kind, seed):
    operator, fused, shape = KINDS[kind]
    module, (msa, mask) = operator.module(shape, seed), operator.inputs(shape, seed)
    twin = fused.of(module)
    assert type(twin) is fused and not twin.training
    for change in (lambda: None, lambda: module.out_proj.weight.mul_(2)):
        change()
        assert_same(twin(msa, mask), module, msa, mask)
    twin.out_proj = nn.Linear(*module.out_proj.weight.shape[::-1])
    assert module.out_proj is not twin.out_proj


@both
def test_the_same_random_seed_gives_the_same_parameters(kind):
    operator, fused, shape = KINDS[kind]
    torch.manual_seed(0)
    expected = operator.build(shape)
    torch.manual_seed(0)
    state = fused(*((16, 2) if kind == "attention" else (16, 12, 8))).state_dict()
    assert list(state) == list(expected.state_dict())
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize(
    ("module", "shape", "dtype", "device", "number"),
    [
        (attention, ATTENTION.shapes["seed"], torch.float32, "cpu", "09"),
        (attention, ATTENTION.shapes["af2"], torch.float32, "cpu", "10"),
        (attention, ATTENTION.shapes["odd"], torch.float32, "cpu", "07"),
        (attention, AttentionShape(1, 2, 3, 6, 1), torch.float32, "cpu", "06"),
        (outer, OUTER.shapes["seed"], torch.float32, "cuda", "13"),
        (outer, OUTER.shapes["af2"], torch.float32, "cuda", "12"),
        (outer, OUTER.shapes["extra"], torch.bfloat16, "cuda", "11"),
        (outer, PairShape(1, 9, 4, 300, 32, 128), torch.float32, "cuda", "07"),
    ],
)
def test_the_stage_meant_for_the_shape(module, shape, dtype, device, number):
    assert module.fastest_stage(shape, dtype, device).number == number


@pytest.mark.parametrize(
    ("capability", "pair_stage", "bf16"),
    [((8, 0), "09", "11"), ((9, 0), "13", "12"), ((10, 0), "13", "11")],
)
def test_a_gpu_gets_the_stage_that_it_can_run(capability, pair_stage, bf16, monkeypatch):
    """Stages with Hopper's wgmma run on no other GPU; some others need what Hopper and later ones have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    seed, af2 = OUTER.shapes["seed"], ATTENTION.shapes["af2"]
    assert outer.fastest_stage(seed, torch.float32, "cuda:0").number == pair_stage
    assert attention.fastest_stage(af2, torch.bfloat16, "cuda:0").number == bf16
    assert attention.fastest_stage(af2, torch.bfloat16, None).number == "12"


def test_a_stage_that_no_such_gpu_can_run_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    needs = "10_bf16: needs a GPU of compute capability 9.0 or later, this one has 8.6"
    with pytest.raises(ValueError, match=needs):
        outer.fastest_stage(OUTER.shapes["af2"], torch.bfloat16, "cuda")
    assert OUTER.stage("11").unfit("cuda") == "needs a GPU of compute capability 9.0, this one has 8.6"
    assert OUTER.stage("11").unfit("cpu") is None and OUTER.stage("09").unfit("cuda") is None


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (attention, AttentionShape(1, 5000, 3, 6, 1), "10_online_softmax: .* 03_single_kernel:"),
        (outer, PairShape(1, 9, 4, 8, 33, 128), "07_fused_projection: C of 33"),
    ],
)
def test_a_shape_that_no_stage_supports(module, shape, message):
    with pytest.raises(ValueError, match=f"msa: no stage supports .* {message}"):
        module.fastest_stage(shape, torch.float32, "cuda")


# ---- calls like one before


@both
def test_a_second_call_looks_nothing_up(kind, seed, monkeypatch):
    module, twin, msa, mask = case(kind, seed)
    twin(msa, mask)
    monkeypatch.setattr(Stage, "load", None)
    assert_same(twin(msa + 1, mask.roll(1, 2)), module, msa + 1, mask.roll(1, 2))


@both
def test_changed_parameters_are_followed(kind, seed):
    module, twin, msa, mask = case(kind, seed)
    twin(msa, mask)
    other = KINDS[kind][0].module(KINDS[kind][2], seed + 1)
    twin.load_state_dict(other.state_dict())
    assert_same(twin(msa, mask), other, msa, mask)
    twin.load_state_dict(module.state_dict(), assign=True)
    assert_same(twin(msa, mask), module, msa, mask)
    for each in (module, twin):
        each.out_proj.weight = nn.Parameter(other.out_proj.weight.clone(), requires_grad=False)
        each.layer_norm = copy.deepcopy(other.layer_norm)
        each.out_proj.bias.data += 1
    assert_same(twin(msa, mask), module, msa, mask)


@both
def test_a_module_that_is_moved_to_bfloat16(kind, seed):
    module, twin, msa, mask = case(kind, seed)
    twin(msa, mask)
    twin.to(torch.bfloat16), module.to(torch.bfloat16)
    with pytest.raises(TypeError, match="msa: expected torch.bfloat16 as the module's parameters"):
        twin(msa, mask)
    output = twin(msa.bfloat16(), mask)
    assert output.dtype == torch.bfloat16
    assert_same(output, module, msa.bfloat16(), mask.bfloat16(), 2e-2)
    twin.float(), module.float()
    assert_same(twin(msa, mask), module, msa, mask)


@both
def test_every_mask_means_the_same_at_a_second_call(kind, seed):
    _, twin, msa, mask = case(kind, seed)
    expected = twin(msa, mask)
    wide = mask.repeat(1, 1, 2)[:, :, : mask.shape[2]]  # not contiguous
    for same in (mask.bool(), mask.to(torch.int64), mask.bfloat16(), wide, mask):
        assert torch.equal(twin(msa, same), expected)
    other = 1 - mask
    other[:, 0] = 1
    assert not torch.equal(twin(msa, other), expected)


def wrong_calls(msa: Tensor, mask: Tensor) -> list[tuple[Any, Any, type, str]]:
    """msa and mask with the error that they get."""
    return [
        (msa.mT.contiguous().mT, mask, ValueError, "msa: must be contiguous"),
        (msa, mask[:, :2], ValueError, "mask: expected"),
        (msa, None, TypeError, "mask: expected a tensor"),
        (None, mask, TypeError, "msa: expected a tensor"),
        (msa.double(), mask, TypeError, "msa: expected float32 or bfloat16"),
        (msa, mask + 0j, TypeError, "mask: expected 0 and 1 of a real dtype"),
        (msa, mask.to("meta"), ValueError, "mask: expected on cpu with msa, got meta"),
        (msa.bfloat16(), mask, TypeError, "msa: expected torch.float32 as the module's parameters"),
        (unaligned(msa), mask, ValueError, "msa: must start at a multiple of 16 bytes"),
        (msa, unaligned(mask), ValueError, "mask: must start at a multiple of 16 bytes"),
    ]


def unaligned(tensor: Tensor) -> Tensor:
    """A copy that starts 4 bytes after a multiple of 16."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)


@both
def test_a_wrong_call_gets_one_clear_error_before_and_after_a_right_one(kind, seed):
    module, twin, msa, mask = case(kind, seed)
    for _ in range(2):
        for bad_msa, bad_mask, error, message in wrong_calls(msa, mask):
            with pytest.raises(error, match=message) as raised:
                twin(bad_msa, bad_mask)
            assert raised.value.__context__ is None  # the loader's own words are not shown above it
        assert_same(twin(msa, mask), module, msa, mask)


@both
def test_parameters_of_another_shape_are_refused_before_a_launch(kind, seed):
    """A kernel that trusted the sizes would read past their end."""

    def shorten(module):
        module.out_proj.bias.data = module.out_proj.bias.data[:-1]

    def replace(module):
        module.out_proj = nn.Linear(8, module.out_proj.out_features)

    def remove(module):
        module.out_proj.bias = None

    changes = {"out_proj.bias": shorten, "out_proj.weight": replace, "parameters": remove}
    for name, change in changes.items():
        for called_before in (True, False):
            _, twin, msa, mask = case(kind, seed)
            if called_before:
                twin(msa, mask)
            twin.requires_grad_(False)
            change(twin)
            with torch.no_grad(), pytest.raises(ValueError, match=f"{name}: expected"):
                twin(msa, mask)


@both
def test_a_parameter_read_in_another_order_is_refused(kind, seed):
    """Its memory and sizes stay the same, only the strides are others."""
    _, twin, msa, mask = case(kind, seed)
    twin(msa, mask)
    weight = twin.out_proj.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))
    with pytest.raises(ValueError, match="out_weight: must be contiguous"):
        twin(msa, mask)


@both
def test_more_sizes_than_are_kept(kind, seed):
    operator, _, shape = KINDS[kind]
    module, twin, _, _ = case(kind, seed)
    for N in (*range(1, KEPT_CALLS + 4), 1, 2):
        msa, mask = operator.inputs(shape._replace(N=N), seed)
        assert_same(twin(msa, mask), module, msa, mask)
    assert len(twin._calls) == KEPT_CALLS


@both
def test_every_way_to_do_without_gradients_means_the_same(kind, seed):
    module, twin, msa, mask = case(kind, seed)
    ways = (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for way in (*ways, *reversed(ways)):
        with way():
            assert_same(twin(msa, mask), module, msa, mask)


@both
def test_autocast_is_noticed_after_a_call_without_it(kind, seed):
    module, twin, msa, mask = case(kind, seed)
    for autocast in (False, True, False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output, expected = twin(msa, mask), module(msa, mask)
        tolerance = 4e-2 if autocast else 1e-5
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


# ---- what a call can't do


@both
def test_what_would_need_a_backward_is_refused(kind, seed):
    _, twin, msa, mask = case(kind, seed)
    with pytest.raises(RuntimeError, match="msa: the fused operator has no backward; detach msa"):
        twin(msa.clone().requires_grad_(), mask)
    twin.train().requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameters: the fused operator has no backward; call eval\(\)"):
        twin(msa, mask)
    with pytest.raises(RuntimeError, match="parameters: the fused operator has no backward"):
        torch.compile(twin, backend="eager")(msa, mask)
    with torch.no_grad():
        twin(msa, mask)
    assert not twin.eval()(msa, mask).requires_grad


def test_dropout_is_refused(seed):
    _, twin, msa, mask = case("attention", seed)
    twin.dropout.p = 0.1
    twin(msa, mask)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dropout: the fused operator is for inference"):
        twin.train()(msa, mask)


# ---- in a model


class Block(nn.Module):
    """A block such as AlphaFold's: the MSA is updated, then what it says of pairs is added to them."""

    def __init__(self, column_attention: nn.Module, transition: nn.Module, outer_product_mean: nn.Module):
        super().__init__()
        self.column_attention = column_attention
        self.transition = transition
        self.outer_product_mean = outer_product_mean

    def forward(self, msa: Tensor, pair: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """msa (B,S,N,D), pair (B,N,N,P), mask (B,S,N) → msa and pair."""
        msa = msa + self.column_attention(msa, mask)
        msa = self.transition(msa)  # under autocast of another dtype than it got
        return msa, pair + self.outer_product_mean(msa, mask)


def blocks(seed: int, device: str = "cpu") -> tuple[Block, Block, tuple[Tensor, ...]]:
    """A block of references, one of fused modules with the same parameters, and inputs."""
    modules, twins, msa, mask = {}, {}, None, None
    for kind in KINDS:
        modules[kind], twins[kind], msa, mask = case(kind, seed)
    torch.manual_seed(seed)
    transition = nn.Linear(16, 16)
    pair = torch.randn(2, 5, 5, 12)
    block, fused = (Block(each["attention"], transition, each["outer"]) for each in (modules, twins))
    inputs = tuple(tensor.to(device) for tensor in (msa, pair, mask))
    return block.eval().to(device), fused.eval().to(device), inputs


def assert_all_close(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted, atol=tolerance, rtol=tolerance)


def compiled(block: Block, inputs: tuple[Tensor, ...]) -> nn.Module:
    return torch.compile(block, fullgraph=True, backend="aot_eager")


def exported(block: Block, inputs: tuple[Tensor, ...]) -> nn.Module:
    return torch.export.export(block, inputs).module()


WAYS = {"called": lambda block, inputs: block, "compiled": compiled, "exported": exported}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_block_computes_what_the_references_do(way, autocast, seed):
    block, fused, inputs = blocks(seed)
    tolerance = {None: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}[autocast]
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        expected = block(*inputs)
        for _ in range(2):
            outputs = WAYS[way](fused, inputs)(*inputs)
            assert_all_close(outputs, expected, tolerance)


def test_a_graph_for_any_number_of_rows_and_residues(seed):
    """Exported once with sizes left open, as a model for sequences of any length is."""
    block, fused, (msa, pair, mask) = blocks(seed)
    rows, residues = torch.export.Dim("rows", max=64), torch.export.Dim("residues", min=2, max=64)
    sizes = ({1: rows, 2: residues}, {1: residues, 2: residues}, {1: rows, 2: residues})
    with torch.no_grad():
        program = torch.export.export(fused, (msa, pair, mask), dynamic_shapes=sizes)
        inputs = (torch.cat([msa, msa], 1)[:, :, :4], pair[:, :4, :4], torch.cat([mask, mask], 1)[:, :, :4])
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        assert_all_close(program.module()(*inputs), block(*inputs), 1e-5)


@pytest.mark.parametrize(
    ("kind", "op", "rest"),
    [("attention", attention.msa_column_attention, (2,)), ("outer", outer.outer_product_mean, ())],
    ids=list(KINDS),
)
def test_opcheck_passes(kind, op, rest, seed):
    module, _, msa, mask = case(kind, seed)
    torch.library.opcheck(op, (msa, mask, list(module.parameters()), *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["graph", "compiled with graphs"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_block_in_a_cuda_graph_follows_its_inputs(mode, autocast, seed):
    block, fused, inputs = blocks(seed, "cuda")
    tolerance = 4e-2 if autocast else 1e-4
    with torch.no_grad(), torch.autocast("cuda", autocast, enabled=autocast is not None, cache_enabled=False):
        if mode:
            call = torch.compile(fused, mode=mode, fullgraph=True)
            for _ in range(3):
                call(*inputs)
        else:
            call = captured(fused, inputs)
        others = tuple(tensor.flip(2).contiguous() for tensor in inputs)
        assert_all_close(call(*others), block(*others), tolerance)


def captured(block: Block, inputs: tuple[Tensor, ...]) -> Any:
    """A call that copies its inputs into a graph's and replays it."""
    from workbench.timing import capture

    own = tuple(tensor.clone() for tensor in inputs)
    graph, outputs = capture(lambda: block(*own))

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        for mine, tensor in zip(own, given, strict=True):
            mine.copy_(tensor)
        graph.replay()
        return outputs

    return call
