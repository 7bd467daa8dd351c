"""The checker: what is wrong must fail, and what is right must pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels_src import OPERATORS
from kernels_src.operator import Stage
from workbench import check as checker
from workbench import problem as problems
from workbench.check import check, poisoned_memory, same_bits
from workbench.guard import GuardedMemory
from workbench.orders import AnotherOrder

ATTENTION = OPERATORS["msa_column_attention"]
OUTER = OPERATORS["outer_product_mean"]
NOTHING = "EXPORT cudaError_t nothing(float* x, cudaStream_t stream) { return cudaSuccess; }"


def stage_of(operator, compute, precision="fp32"):
    """A stage that is Python: `compute(module, msa, mask)`."""
    shape_of = OPERATORS[operator.name].stages[0].shape_of
    run = lambda kernels, module, msa, mask: compute(module, msa, mask)  # noqa: E731
    return Stage(Path("99_python.cu"), run, shape_of, precision, text=NOTHING)


def verdicts(operator, compute, seed, **options):
    precision = options.pop("precision", "fp32")
    results = check(
        operator, stage_of(operator, compute, precision), "odd", device="cpu", seed=seed, **options
    )
    return {result.case: result for result in results}


def failing(operator, compute, seed, **options):
    """Cases that fail, with their messages."""
    found = verdicts(operator, compute, seed, **options)
    return {case: result.message for case, result in found.items() if not result.passed}


def cases_of_eager(precision):
    """The cases that eager PyTorch itself can pass on this CPU.

    oneDNN's bf16 products with AMX write a NaN row (as of a column that is masked throughout) into the row
    below, too; stages are held against float64, which has no such fault.
    """
    rows = torch.ones(182, 40, dtype=torch.bfloat16)
    rows[5:12] = torch.nan
    product = torch.nn.functional.linear(rows, torch.ones(40, 40, dtype=torch.bfloat16))
    spreads = product.isnan().any(-1).sum() > 7
    return [case for case in problems.CASES if (case, precision, spreads) != ("masked column", "bf16", True)]


def verdicts_on_eager(operator, precision, seed):
    """Those on eager PyTorch in a stage's place."""
    eager = lambda module, msa, mask: module(msa, mask)  # noqa: E731
    return verdicts(operator, eager, seed, precision=precision, cases=cases_of_eager(precision))


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_reference_passes_every_case(operator, precision, seed):
    found = verdicts_on_eager(operator, precision, seed)
    assert list(found) == cases_of_eager(precision)
    for result in found.values():
        assert result.passed, result.message
        assert 0 < result.max_abs_error <= result.eager_error


def with_element(value):
    def compute(module, msa, mask):
        out = module(msa, mask).contiguous()
        out.view(-1)[-3] = value(out.view(-1)[-3])
        return out

    return compute


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
@pytest.mark.parametrize(
    "value",
    [lambda x: float("nan"), lambda x: float("inf"), lambda x: x + 1e-5, lambda x: -x],
    ids=["NaN", "infinite", "off by 1e-5", "negative"],
)
def test_one_wrong_element_fails(operator, value, seed):
    assert "random" in failing(operator, with_element(value), seed)


def test_an_error_of_twice_the_limit_fails_in_bf16(seed):
    assert "random" in failing(ATTENTION, with_element(lambda x: x + 0.03), seed, precision="bf16")


def test_an_unwritten_element_fails(seed):
    def compute(module, msa, mask):
        right = module(msa, mask)
        out = torch.empty_like(msa)
        out.view(-1)[:-1] = right.reshape(-1)[:-1]
        return out

    found = failing(ATTENTION, compute, seed)
    assert "NaN" in found["random"] and "NaN" in found["large"]


def test_a_stale_result_fails(seed):
    results = []

    def compute(module, msa, mask):
        results.append(module(msa, mask))
        return results[0]

    assert "the same memory" in failing(OUTER, compute, seed)["random"]
    results.clear()
    copying = lambda module, msa, mask: compute(module, msa, mask).clone()  # noqa: E731
    assert set(failing(OUTER, copying, seed)) >= {"masked", "large"}


def test_zeros_in_place_of_NaN_fail(seed):
    found = failing(ATTENTION, lambda module, msa, mask: module(msa, mask).nan_to_num(), seed)
    assert "masked column" in found and "random" not in found


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_ignoring_the_mask_fails(operator, seed):
    found = failing(operator, lambda module, msa, mask: module(msa, torch.ones_like(mask)), seed)
    assert set(found) == set(problems.CASES)


def test_a_softmax_that_overflows_fails_with_large_logits_only(seed):
    def compute(module, msa, mask):
        x = module.layer_norm(msa.transpose(1, 2))
        q, k, v = (module._heads(linear(x)) for linear in (module.query, module.key, module.value))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).exp()
        weights = weights * (mask != 0).transpose(1, 2)[:, :, None, None, :]
        attended = (weights / weights.sum(-1, keepdim=True) @ v).transpose(2, 3).flatten(3)
        return module.out_proj(attended * module.gate(x).sigmoid()).transpose(1, 2)

    assert set(failing(ATTENTION, compute, seed)) == {"large"}


@pytest.mark.parametrize("name", ["msa", "mask", "layer_norm.bias"])
def test_a_modified_input_fails(name, seed):
    def compute(module, msa, mask):
        out = module(msa, mask)
        {"msa": msa, "mask": mask}.get(name, module.layer_norm.bias).view(-1)[-1] = 7
        return out

    problem = problems.pose(ATTENTION, ATTENTION.shapes["odd"], "masked column", seed=seed)
    assert f"{name} was modified" in checker.check_problem(stage_of(ATTENTION, compute), problem).message
    right = stage_of(ATTENTION, lambda module, msa, mask: module(msa, mask))
    assert checker.check_problem(right, problem).passed  # it has been put back


def test_results_that_depend_on_the_order_of_threads_fail(seed):
    calls = []

    def compute(module, msa, mask):
        calls.append(1)
        return module(msa, mask) + 1e-7 * (len(calls) % 2)

    found = failing(OUTER, compute, seed)
    assert all("different results" in message for message in found.values())
    assert len(found) == len(problems.CASES)


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[:, :-1]], ids=["dtype", "shape"])
def test_another_shape_or_dtype_fails(change, seed):
    found = failing(OUTER, lambda module, msa, mask: change(module(msa, mask)), seed)
    assert all(message.startswith("expected torch.float32 (1, 11, 11, 20)") for message in found.values())
    assert len(found) == len(problems.CASES)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_some_residues_stand_for_all_where_all_are_too_many(operator, seed, monkeypatch):
    whole = problems.pose(operator, operator.shapes["odd"], "masked column", seed=seed)
    monkeypatch.setattr(problems, "MANY_OPERATIONS", 0)
    monkeypatch.setattr(problems, "SOME_RESIDUES", 5)
    some = problems.pose(operator, operator.shapes["odd"], "masked column", seed=seed)
    assert len(some.residues) == 5 and torch.equal(some.mask, whole.mask)
    torch.testing.assert_close(some.answer, some.known(whole.answer), equal_nan=True)
    masked = (whole.mask == 0).all(1).any(0).nonzero().item()
    assert masked in some.residues.tolist()  # the one that is special
    assert not failing(operator, lambda module, msa, mask: module(msa, mask), seed)
    for residue in (some.residues[-1].item(), next(n for n in range(11) if n not in some.residues)):

        def compute(module, msa, mask, residue=residue):
            out = module(msa, mask).clone()
            out.select(operator.residue_axes[0], residue).fill_(float("nan"))
            return out

        assert "random" in failing(operator, compute, seed)


def test_cases_have_what_they_are_named_for(seed):
    posed = {
        case: problems.pose(ATTENTION, ATTENTION.shapes["odd"], case, seed=seed) for case in problems.CASES
    }
    zeros = posed["masked"].mask[:, 1:] == 0
    assert posed["masked"].mask.dtype == torch.bool
    assert zeros[:, :-1].any() and not zeros[:, :-1].all()  # inside, not at the end only
    assert (posed["masked column"].mask == 0).all(1).sum() == 1
    assert posed["masked column"].answer.isnan().any() and not posed["random"].answer.isnan().any()
    module, msa = posed["large"].module, posed["large"].msa
    x = module.layer_norm(msa)
    logits = module.query(x) @ module.key(x).transpose(-1, -2) * (5 / 40) ** 0.5
    assert logits.abs().max() > 100


def test_a_case_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="no such case"):
        problems.pose(OUTER, OUTER.shapes["odd"], "no such case")


def test_an_error_that_the_stage_raises_is_passed_on(seed):
    unsupported = replace(
        stage_of(OUTER, lambda *inputs: None), unsupported=lambda shape: f"P of {shape.P} is too few"
    )
    with pytest.raises(ValueError, match="P of 20 is too few"):
        check(OUTER, unsupported, "odd", device="cpu")


def test_poisoned_memory_leaves_torch_as_it_was():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
        assert torch.empty(9, dtype=torch.bfloat16).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_bits_are_compared():
    x = torch.tensor([0.0, 1.0, float("nan")])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([-0.0, 1.0, float("nan")]))
    assert not same_bits(x, torch.tensor([0.0, 1.0 + 2**-23, float("nan")]))
    assert not same_bits(x, x.double())


def test_the_plain_limit_holds_for_each_element_however_far_eager_is():
    problem = problems.pose(OUTER, OUTER.shapes["odd"])
    problem = replace(problem, eager_error=1e-4)  # eager's own error would allow four times as much
    wrong = problem.answer.float()
    place = problem.answer.abs().argmin()
    wrong.view(-1)[place] += 2e-4
    assert "0.0001·|answer|" in checker.judge(wrong, problem).message
    assert checker.judge(wrong, replace(problem, case="large")).message == ""


# ---- eager's error at its worst

LUCKY = ATTENTION.odd_shapes[4]  # two columns, in which logits of 128 products may tie: few elements decide


def large_problems(count, seed, shape=LUCKY):
    return [problems.pose(ATTENTION, shape, "large", seed=seed + number) for number in range(count)]


def another_order_of_eager(problem, seed=1234):
    with AnotherOrder(seed):
        return problems.reference_output(problem.module, problem.msa, problem.mask, torch.float32)


def test_eager_itself_passes_in_any_order_of_its_sums(seed):
    """By eager's error in one order alone, one in fifty of these fails."""
    for problem in large_problems(40, seed):
        assert checker.judge(another_order_of_eager(problem), problem).message == ""


def test_an_error_that_is_small_by_luck_is_no_yardstick(seed):
    problem = max(large_problems(20, seed), key=lambda problem: problem.eager_at_worst)
    lucky = replace(problem, eager_error=problem.eager_error / 1000)
    worst = lucky.eager_at_worst
    error = torch.zeros_like(problem.answer)
    error[0, -1, -1, -1] = 3.8 * worst
    judgement = checker.judge((problem.answer + error).float(), lucky)
    assert judgement.message == "" and judgement.eager_error == worst > lucky.eager_error
    error[0, -1, -1, -1] = 4.2 * worst
    message = checker.judge((problem.answer + error).float(), lucky).message
    assert f"4 times eager PyTorch's {worst:.2e} at its worst in 9 orders of its sums" in message


def test_a_stage_six_times_as_inaccurate_as_eager_fails(seed):
    """In every other problem, since its own error is as much a matter of luck: `verify` tries hundreds."""
    failed = 0
    for problem in large_problems(40, seed, ATTENTION.shapes["seed"]):
        error = another_order_of_eager(problem).double() - problem.answer
        failed += bool(checker.judge((problem.answer + 6 * error).float(), problem).message)
    assert failed >= 8, f"failed in {failed} of 40"


def test_one_evaluation_of_eager_is_enough_for_what_is_as_accurate(seed, monkeypatch):
    monkeypatch.setattr(problems.Problem, "eager_at_worst", property(lambda problem: 1 / 0))
    for precision in ("fp32", "bf16"):
        found = verdicts_on_eager(ATTENTION, precision, seed)
        assert all(result.passed for result in found.values())


def test_eager_at_its_worst_in_bf16_is_taken_over_like_inputs(seed):
    """An error of bfloat16 comes from rounding what layers give, which is alike in every order of sums."""

    def posed(number, **options):
        shape = ATTENTION.shapes["odd"]
        return problems.pose(ATTENTION, shape, "random", precision="bf16", seed=seed + number, **options)

    problem = posed(0)
    others = [posed(number, module=problem.module) for number in range(5)]
    assert problem.eager_at_worst == max(other.eager_error for other in others)
    message = checker.judge((problem.answer + 1).bfloat16(), problem).message
    assert message.endswith(f"PyTorch's {problem.eager_at_worst:.2e} at its worst on 5 like inputs")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0] @ x[1].T,
        lambda x: x @ x.transpose(1, 2),
        lambda x: torch.einsum("bij,bkj->ik", x, x),
        lambda x: torch.nn.functional.linear(x, x[0], x[1, :, 0]),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], x[0, 0], x[0, 1]),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: x.softmax(1),
        lambda x: x.sum((0, -1)),
        lambda x: x.mean(1, keepdim=True),
    ],
    ids=[
        "product", "products", "einsum", "linear", "LayerNorm", "plain LayerNorm", "softmax", "sum", "mean",
    ],
)  # fmt: skip
def test_another_order_changes_rounding_and_nothing_else(function, seed):
    x = torch.randn(3, 500, 500, generator=torch.Generator().manual_seed(seed))
    with AnotherOrder(seed):
        single, double = function(x), function(x.double())
    torch.testing.assert_close(double, function(x.double()), rtol=1e-9, atol=1e-9)
    assert not same_bits(single, function(x))


def test_guard_bands_catch_a_write_outside_and_nothing_else():
    with GuardedMemory() as memory:
        x = torch.empty(3, 5)
        y = torch.empty_like(x, dtype=torch.bfloat16)
        z = x.new_empty(7, dtype=torch.int64)
    assert x.isnan().all() and y.isnan().all()
    for tensor in (x, y, z):
        tensor.fill_(1)
    assert memory.damaged() == []
    base = y.untyped_storage().nbytes()
    torch.as_strided(y, (1,), (1,), y.storage_offset() + y.numel())[0] = 1
    assert base > y.numel() * 2 and memory.damaged() == ["after (3, 5)"]
    torch.as_strided(x, (1,), (1,), x.storage_offset() - 1)[0] = 1
    assert memory.damaged() == ["before (3, 5)", "after (3, 5)"]
