"""Every call is checked against the signature in the source before a pointer is passed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import jit_loader

# Notes what it is given, and gives it back as bits.
WITNESS = r"""
#include <driver_types.h>
#include <stdint.h>
#include <string.h>
struct __nv_bfloat16;
#define EXPORT extern "C" __attribute__((visibility("default")))

static int64_t seen[8];

// EXPORT cudaError_t in_a_comment(const float* x, cudaStream_t stream)
EXPORT cudaError_t witness(const float* x, const __nv_bfloat16* half, float* out, int n, int64_t large,
                           float factor, cudaStream_t stream) {
    seen[0]++;
    seen[1] = (int64_t)x;
    seen[2] = (int64_t)half;
    seen[3] = (int64_t)out;
    seen[4] = n;
    seen[5] = large;
    seen[6] = 0;
    memcpy(&seen[6], &factor, sizeof factor);
    return cudaSuccess;
}

EXPORT cudaError_t recall(float* bits, cudaStream_t stream) {
    memcpy(bits, seen, sizeof seen);
    return cudaSuccess;
}

EXPORT cudaError_t fails(float* x, int code, cudaStream_t stream) { return (cudaError_t)code; }
EXPORT const char* kernel_error_text(int code) { return code == 7 ? "seven things went wrong" : "?"; }
EXPORT cudaError_t names(float* index, float* plain, float* functions, float* code, cudaStream_t stream) {
    index[0] = 1, plain[0] = 2, functions[0] = 3, code[0] = 4;
    return cudaSuccess;
}
EXPORT cudaError_t getpid(float* x, cudaStream_t stream) {  // the C library has one too
    x[0] = 5;
    return cudaSuccess;
}
EXPORT cudaError_t keyword(float* lambda, int in, cudaStream_t stream) {
    lambda[0] = in;
    return cudaSuccess;
}
"""


@pytest.fixture(scope="module")
def kernels():
    return jit_loader.load(WITNESS, name="witness")


def seen(kernels) -> list[int]:
    bits = torch.empty(16)
    kernels.recall(bits)
    return bits.view(torch.int64).tolist()


def floats(count=8):
    return torch.randn(count)


def good_arguments():
    return [floats(), floats().bfloat16(), floats(), 3, 2**40, 0.5]


NAMES = ("x", "half", "out", "n", "large", "factor")
BAD_POINTERS = {
    "None": (lambda dtype: None, TypeError),
    "a list": (lambda dtype: [1.0], TypeError),
    "an array": (lambda dtype: np.zeros(4, np.float32), TypeError),
    "an address": (lambda dtype: 4096, TypeError),
    "another dtype": (lambda dtype: floats().to(torch.float64), TypeError),
    "an equally wide dtype": (
        lambda dtype: floats().to(torch.int32 if dtype == torch.float32 else torch.float16),
        TypeError,
    ),
    "another device": (lambda dtype: torch.empty(8, device="meta", dtype=dtype), ValueError),
    "a transpose": (lambda dtype: torch.ones(4, 3, dtype=dtype).T, ValueError),
    "every second": (lambda dtype: torch.ones(16, dtype=dtype)[::2], ValueError),
    "expanded": (lambda dtype: torch.ones(1, dtype=dtype).expand(8), ValueError),
    "unaligned": (lambda dtype: torch.ones(16, dtype=dtype)[1:], ValueError),
    "empty": (lambda dtype: torch.empty(0, dtype=dtype), ValueError),
    "freed": (lambda dtype: _freed(dtype), ValueError),
    "sparse": (lambda dtype: torch.ones(2, 2, dtype=dtype).to_sparse(), TypeError),
    "lazily negated": (lambda dtype: torch._neg_view(torch.ones(8, dtype=dtype)), ValueError),
}
GOOD_POINTERS = {
    "a matrix": lambda dtype: torch.ones(3, 5, dtype=dtype),
    "a number": lambda dtype: torch.tensor(1.0, dtype=dtype),
    "a parameter": lambda dtype: nn.Parameter(torch.ones(8, dtype=dtype)),
    "with gradient": lambda dtype: torch.ones(8, dtype=dtype, requires_grad=True),
    "an aligned part": lambda dtype: torch.ones(64, dtype=dtype)[16:],
    "one of one": lambda dtype: torch.ones(1, 1, dtype=dtype).T,
}
BAD_SCALARS = {
    "n": [
        None,
        "3",
        2.0,
        True,
        False,
        2**31,
        -(2**31) - 1,
        10**30,
        torch.tensor(3),
        np.float32(3),
        np.bool_(1),
    ],
    "large": [None, "3", 2.0, True, 2**63, -(2**63) - 1, torch.tensor(3), [1], np.float64(2)],
    "factor": [None, "0.5", True, 1j, torch.tensor(0.5), 1e39, -1e39, 10**60, [0.5]],
}
GOOD_SCALARS = {
    "n": [0, -1, 2**31 - 1, -(2**31), np.int64(7), np.uint8(7)],
    "large": [0, 2**63 - 1, -(2**63), np.int32(-7)],
    "factor": [0.0, -0.0, 1, -3, float("inf"), float("-inf"), float("nan"), np.float32(1.5), 1e-46, 3.4e38],
}
DTYPES = {"x": torch.float32, "half": torch.bfloat16, "out": torch.float32}


def _freed(dtype):
    tensor = torch.ones(8, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def expect_rejection(kernels, arguments, name, error):
    before = seen(kernels)
    with pytest.raises((TypeError, ValueError)) as raised:
        kernels.witness(*arguments)
    assert raised.type is error, raised.value
    assert str(raised.value).startswith(f"witness: {name}: "), raised.value
    assert seen(kernels) == before, "the function was called"


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("what", BAD_POINTERS)
def test_a_wrong_tensor_is_named(kernels, name, what):
    make, error = BAD_POINTERS[what]
    arguments = good_arguments()
    arguments[NAMES.index(name)] = make(DTYPES[name])
    expect_rejection(kernels, arguments, name, error)


@pytest.mark.parametrize("name", BAD_SCALARS)
def test_a_wrong_number_is_named(kernels, name):
    for value in BAD_SCALARS[name]:
        arguments = good_arguments()
        arguments[NAMES.index(name)] = value
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        out_of_range = plain and (name == "factor" or isinstance(value, int))
        expect_rejection(kernels, arguments, name, ValueError if out_of_range else TypeError)


def test_a_wrong_count_is_named(kernels):
    with pytest.raises(TypeError, match=r"witness\(\) missing 1 required positional argument: 'factor'"):
        kernels.witness(*good_arguments()[:-1])
    with pytest.raises(TypeError, match=r"witness\(\) takes 6 positional arguments but 7 were given"):
        kernels.witness(*good_arguments(), 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        kernels.witness(*good_arguments()[:3], m=1)


def test_arguments_can_be_given_by_name(kernels):
    x, half, out, n, large, factor = good_arguments()
    kernels.witness(x, half, out, factor=factor, large=large, n=n)
    assert seen(kernels)[4:6] == [n, large]
    target = torch.zeros(4)
    kernels.keyword(lambda_=target, in_=5)
    assert target[0] == 5


def test_a_function_can_have_the_name_of_one_in_the_c_library(kernels):
    x = torch.zeros(4)
    kernels.getpid(x)
    assert x[0] == 5


def test_arguments_can_have_names_that_the_caller_itself_uses(kernels):
    tensors = [torch.zeros(4) for _ in range(4)]
    kernels.names(*tensors)
    assert [tensor[0].item() for tensor in tensors] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("what", ["None", "a list", "an array", "an address", "unaligned", "empty", "freed"])
def test_a_repeated_call_still_looks_at_addresses(kernels, name, what):
    make, error = BAD_POINTERS[what]
    arguments = good_arguments()
    kernels.witness.repeat(*arguments)
    assert seen(kernels)[1:4] == [tensor.data_ptr() for tensor in arguments[:3]]
    assert seen(kernels)[4:6] == arguments[3:5]
    arguments[NAMES.index(name)] = make(DTYPES[name])
    before = seen(kernels)
    with pytest.raises(error, match=f"^witness: {name}: "):
        kernels.witness.repeat(*arguments)
    assert seen(kernels) == before, "the function was called"


def test_random_calls_reach_the_function_only_when_right(kernels, seed):
    """Each argument is right or wrong at random; an independent list says which and who is named."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(3000):
        arguments, wrong = [], None
        for name in NAMES:
            good = rng.random() < 0.9
            if name in DTYPES:
                make, error = (GOOD_POINTERS, None) if good else (BAD_POINTERS, None)
                choice = rng.choice(list(make))
                maker = make[choice] if good else make[choice][0]
                arguments.append(maker(DTYPES[name]))
            else:
                arguments.append(rng.choice((GOOD_SCALARS if good else BAD_SCALARS)[name]))
            if not good and wrong is None:
                wrong = name
        before = seen(kernels)
        if wrong is not None:
            with pytest.raises((TypeError, ValueError), match=rf"^witness: {wrong}: "):
                kernels.witness(*arguments)
            assert seen(kernels) == before, arguments
            continue
        kernels.witness(*arguments)
        accepted += 1
        after = seen(kernels)
        assert after[0] == before[0] + 1
        assert after[1:4] == [tensor.data_ptr() for tensor in arguments[:3]]
        assert after[4:6] == [int(number) for number in arguments[3:5]]
        passed = torch.tensor([after[6]]).view(torch.float32)[0]
        assert torch.equal(passed.nan_to_num(7), torch.tensor(float(arguments[5])).float().nan_to_num(7))
    assert accepted > 1000


def test_an_error_code_is_raised_in_the_librarys_words(kernels):
    with pytest.raises(RuntimeError, match="^fails: seven things went wrong$"):
        kernels.fails(floats(), 7)
    kernels.fails(floats(), 0)
    with pytest.raises(torch.OutOfMemoryError, match="^fails: "):
        kernels.fails(floats(), 2)


def test_the_functions_can_be_looked_up(kernels):
    assert {"witness", "recall", "fails", "keyword"} <= set(dir(kernels))
    assert "in_a_comment" not in dir(kernels)
    assert "witness" in repr(kernels) and "int64_t large" in kernels.witness.__doc__
    with pytest.raises(AttributeError, match="'wittness'.*has witness, recall"):
        _ = kernels.wittness


F = "EXPORT cudaError_t f(float* x, cudaStream_t s);"


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("EXPORT cudaError_t f(const float* x)", "2: f: the last parameter must be a cudaStream_t"),
        ("EXPORT cudaError_t f(int n, cudaStream_t s)", "2: f: has no pointer"),
        ("EXPORT cudaError_t f(float* x, unsigned n, cudaStream_t s)", "2: f: parameter 'unsigned n'"),
        ("EXPORT cudaError_t f(float** x, cudaStream_t s)", "2: f: parameter 'float"),
        ("EXPORT cudaError_t build(float* x, cudaStream_t s)", "2: build: the loader has a method"),
        ("EXPORT void f(float* x, cudaStream_t s)", "has no function of the form"),
        (f"{F}\nEXPORT cudaError_t g(double* x, cudaStream_t s)", "3: g: parameter 'double"),
        (f"{F}\nEXPORT cudaError_t f(float* x, int n, cudaStream_t s)", "3: f: declared twice"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(declaration, message):
    with pytest.raises(ValueError, match="text.cu") as raised:
        jit_loader.load(f"// a comment\n{declaration} {{ }}\n", name="text")
    assert message in str(raised.value)


def test_signatures_in_all_spellings():
    source = """
    EXPORT   cudaError_t
    f(const float *x, float const* w, float* __restrict__ y, /* rows, not elements */ const int n,
      const __nv_bfloat16* const z,  // the last one
      int64_t stride, float epsilon, cudaStream_t stream) { return LAUNCH("EXPORT cudaError_t g(", n); }
    """
    (export,) = jit_loader.exports_of(jit_loader.Source(source, "x.cu", None, (), ())).values()
    assert [tuple(parameter) for parameter in export.parameters] == [
        ("x", "float*"),
        ("w", "float*"),
        ("y", "float*"),
        ("n", "int"),
        ("z", "__nv_bfloat16*"),
        ("stride", "int64_t"),
        ("epsilon", "float"),
    ]
