"""Exported files: they stand alone, hold the same model and the same kernels."""

from __future__ import annotations

import runpy

import pytest
import torch
from processes import python

import jit_loader
from kernels_src import OPERATORS
from workbench.export import export, inline_headers, self_contained

STAGES = [(operator, stage) for operator in OPERATORS.values() for stage in operator.stages]
FORBIDDEN = ("jit_loader", "kernels_src", "workbench")

ALONE = f"""
import importlib.abc, os, pathlib, runpy, sys
import torch
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {FORBIDDEN}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
for name in [name for name in sys.modules if name.partition(".")[0] in {FORBIDDEN}]:
    del sys.modules[name]
os.chdir(pathlib.Path(sys.argv[1]).parent)
names = runpy.run_path(sys.argv[1])
"""


def run_alone(path, code):
    """Run code after an exported file, in its folder, in a process that can't import the project."""
    return python("-c", ALONE + code, str(path))


def supported(operator, stage):
    return next(name for name, shape in operator.shapes.items() if not stage.unsupported(shape))


@pytest.mark.parametrize("operator, stage", STAGES, ids=[stage.name for _, stage in STAGES])
def test_every_stage_exports_to_valid_python_without_the_project(operator, stage):
    text = self_contained(operator, stage, operator.shapes[supported(operator, stage)])
    compile(text, stage.name, "exec")
    lines = [line for line in text.splitlines() if "import " in line and not line.lstrip().startswith("//")]
    assert not [line for line in lines if any(f" {name}" in line for name in FORBIDDEN)]
    assert '#include "' not in text


@pytest.mark.parametrize("name, number", [("msa_column_attention", "03"), ("outer_product_mean", "10")])
def test_a_file_stands_alone_with_the_same_model(name, number, tmp_path, seed):
    operator = OPERATORS[name]
    stage = operator.stage(number)
    export(operator, stage, tmp_path / "alone.py", "seed")
    code = f"""
torch.manual_seed({seed})
one = names["Model"](*names["get_init_inputs"]())
torch.manual_seed({seed})
two = names["ModelNew"](*names["get_init_inputs"]())
inputs = names["get_inputs"]()
torch.save([one.state_dict(), two.state_dict(), inputs, one(*inputs)], "saved.pt")
"""
    done = run_alone(tmp_path / "alone.py", code)
    assert done.returncode == 0, done.stderr
    one, two, inputs, output = torch.load(tmp_path / "saved.pt")
    torch.manual_seed(seed)
    module = operator.build(operator.shapes["seed"]).to(stage.dtype)
    assert list(one) == list(two) == list(module.state_dict())
    for key, value in module.state_dict().items():
        assert torch.equal(one[key], value) and torch.equal(two[key], value)
    assert inputs[0].shape == operator.shapes["seed"][:4] and inputs[0].dtype == stage.dtype
    assert set(inputs[1].unique().tolist()) == {0, 1}
    torch.testing.assert_close(output, module(*inputs))


@pytest.mark.parametrize("name, number", [("msa_column_attention", "09"), ("outer_product_mean", "11")])
def test_the_source_in_a_file_compiles_to_the_same_kernels(name, number, tmp_path):
    operator = OPERATORS[name]
    stage = operator.stage(number)
    shape = supported(operator, stage)
    export(operator, stage, tmp_path / "alone.py", shape)
    names = runpy.run_path(str(tmp_path / "alone.py"))
    alone = jit_loader.load(names["SOURCE"], defines=names["DEFINES"], name="alone").build("cuda")
    original = stage.load(operator.shapes[shape]).build("cuda")
    assert list(names["SIGNATURES"]) == list(
        jit_loader.exports_of(jit_loader.Source(stage.code, "", None, (), ()))
    )
    assert alone.resources.equals(original.resources)


def test_a_new_model_refuses_what_it_was_not_made_for(tmp_path):
    operator = OPERATORS["msa_column_attention"]
    export(operator, operator.stage("10"), tmp_path / "alone.py", "seed")
    names = runpy.run_path(str(tmp_path / "alone.py"))
    model = names["ModelNew"](*names["get_init_inputs"]())
    msa, mask = names["get_inputs"]()
    for wrong in (msa[:, :3], msa.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="msa: made for torch.float32"):
            model(wrong, mask)


def test_headers_are_put_in_once_and_the_cpu_is_left_out(tmp_path):
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text("#pragma once\n#include <stdint.h>\nint b;\n")
    code = '#include "a.cuh"\n#include "b.cuh"\n#include "of_another_project.h"\nint c;'
    assert inline_headers(code, tmp_path).split("\n") == [
        "#include <stdint.h>", "int b;", "int a;", '#include "of_another_project.h"', "int c;"
    ]  # fmt: skip
    assert "backend.h" not in inline_headers('#include "cuda.cuh"', tmp_path)


@pytest.mark.parametrize(
    "operator, stage",
    [pair for pair in STAGES if pair[1].on_cpu],
    ids=[stage.name for _, stage in STAGES if stage.on_cpu],
)
def test_a_new_model_keeps_a_harness_rules(operator, stage, tmp_path, seed):
    """The file's own Python, with the stage's kernels as built for the CPU in place of the file's."""
    shape = next(name for name in ("odd", "seed", "af2") if not stage.unsupported(operator.shapes[name]))
    export(operator, stage, tmp_path / "alone.py", shape)
    names = runpy.run_path(str(tmp_path / "alone.py"))
    names["ModelNew"].forward.__globals__["kernels"] = lambda: stage.load(operator.shapes[shape])
    torch.manual_seed(seed)
    one = names["Model"](*names["get_init_inputs"]()).eval()
    torch.manual_seed(seed)
    two = names["ModelNew"](*names["get_init_inputs"]()).eval()
    kept = {name: id(value) for name, value in vars(two).items()}
    tolerance = 1e-2 if stage.precision == "bf16" else 1e-4
    first, second = names["get_inputs"](), names["get_inputs"]()
    for inputs in (first, second, first):  # what a call left behind would show in the next
        copies = [each.clone() for each in inputs]
        output = two(*inputs)
        with torch.no_grad():
            torch.testing.assert_close(output, one(*inputs), atol=tolerance, rtol=tolerance)
        assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
        assert not output.requires_grad
    assert kept == {name: id(value) for name, value in vars(two).items()}
    msa, mask = first
    for same in (mask.bool(), mask.to(torch.int64), mask.bfloat16(), mask.float()):
        assert torch.equal(two(msa, same), output)


@pytest.mark.gpu
@pytest.mark.parametrize("operator, stage", STAGES, ids=[stage.name for _, stage in STAGES])
def test_a_file_computes_the_operator_alone_on_the_gpu(operator, stage, tmp_path, seed):
    export(operator, stage, tmp_path / "alone.py")
    tolerance = 1e-2 if stage.precision == "bf16" else 1e-4
    code = f"""
torch.manual_seed({seed})
one = names["Model"](*names["get_init_inputs"]()).cuda().eval()
torch.manual_seed({seed})
two = names["ModelNew"](*names["get_init_inputs"]()).cuda().eval()
for _ in range(2):
    inputs = [each.cuda() for each in names["get_inputs"]()]
    copies = [each.clone() for each in inputs]
    torch.testing.assert_close(two(*inputs), one(*inputs), atol={tolerance}, rtol={tolerance})
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies))
"""
    done = run_alone(tmp_path / "alone.py", code)
    assert done.returncode == 0, done.stderr
