"""The command line, as a user's shell and other people's scripts meet it.

Most run in this process; the README's commands have one each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from processes import python

import jit_loader
from kernels_src import OPERATORS
from workbench import __main__ as command_line
from workbench import report as reports
from workbench import selection
from workbench.results import ROOT
from workbench.sanitizer import TOOLS
from workbench.verify import PARTS

OUTER = OPERATORS["outer_product_mean"]
NO_GPU = not torch.cuda.is_available()


def test_list_names_every_operator_and_stage(capsys):
    assert command_line.main(["list"]) == 0
    shown = capsys.readouterr().out
    for operator in OPERATORS.values():
        assert f"{operator.name}: {operator.title}" in shown
        for stage in operator.stages:
            assert f"  {stage.name} " in shown and stage.title in shown


def test_check_counts_what_passed_and_failed_in_its_last_line(capsys):
    assert command_line.main(["check", "msa_column_attention/03", "--shape", "seed", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "4 passed, 0 failed"
    assert shown.out.startswith("msa_column_attention/03_single_kernel seed: 4 cases passed; largest error ")
    assert "stage" in shown.err  # progress


def broken(monkeypatch, text):
    """Put a stage with another source in place of the first."""
    stage = OUTER.stages[0].variant(text, "01_broken")
    operator = replace(OUTER, stages=(stage,), odd_shapes=())
    monkeypatch.setitem(selection.OPERATORS, OUTER.name, operator)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("a[", "b[", "exceeds"),
        ("EXPORT", "nonsense EXPORT", "KernelCompileError: "),
    ],
    ids=["wrong results", "does not compile"],
)
def test_check_fails_a_wrong_stage_and_says_how(old, new, message, monkeypatch, capsys):
    code = OUTER.stages[0].code
    assert old in code
    broken(monkeypatch, code.replace(old, new))
    status = command_line.main(["check", "outer_product_mean/01", "--shape", "odd", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert status == 1
    assert shown.splitlines()[-1] == "0 passed, 4 failed"
    assert message in shown


def test_check_names_what_it_skips_and_fails_where_nothing_is_left(monkeypatch, capsys):
    stage = replace(OUTER.stages[0], on_cpu=False)
    monkeypatch.setitem(selection.OPERATORS, OUTER.name, replace(OUTER, stages=(stage,)))
    assert command_line.main(["check", "outer_product_mean", "--shape", "seed", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "01_thread_per_output seed: skipped, it has no CPU model" in shown
    assert shown.splitlines()[-1] == "0 passed, 0 failed"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "outer_product"], "no operator 'outer_product'; there are msa_column_attention, outer"),
        (["check", "outer_product_mean/77"], "outer_product_mean has no stage '77'; it has 01_thread"),
        (["check", "--shape", "huge"], "has no shape 'huge'; it has seed, af2"),
        (["export", "outer_product_mean", "out.py"], "outer_product_mean: expected OP/NN"),
        (["export", "outer_product_mean/01", "/no/such/folder/out.py"], "No such file or directory"),
        (["export", "outer_product_mean/03", "out.py", "--shape", "extra"], "does not support"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(arguments, message, capsys):
    assert command_line.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith(f"workbench {arguments[0]}: ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["measure"], "invalid choice: 'measure'"),
        (["build", "--arch", "hopper"], "expected a compute capability such as 9.0a, got 'hopper'"),
        (["check", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_what_the_command_does_not_know_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["bench"], ["verify"], ["check", "--device", "cuda"]])
def test_what_needs_a_gpu_says_so(arguments, capsys):
    assert command_line.main(arguments) == 2
    assert "needs an NVIDIA GPU, and none was found" in capsys.readouterr().err


def test_build_prints_the_resources_of_every_kernel_without_a_gpu(capsys):
    assert command_line.main(["build", "outer_product_mean/04", "--arch", "9.0a"]) == 0
    header, *rows, total = capsys.readouterr().out.splitlines()
    assert {"kernel", "registers", "shared_bytes", "spill_stores", "stack_bytes"} <= set(header.split())
    assert rows and all("outer_product_mean" in row for row in rows)
    assert total == f"{len(rows)} kernels, 0 of them spill or use local memory; 0 errors"


def test_build_fails_where_registers_spill(monkeypatch, capsys):
    code = """
#include "cuda.cuh"
__global__ void spill_kernel(float* x, int n) {
    float kept[64];
    for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
    for (int i = 0; i < n; ++i) x[i] = kept[i % 64];
}
EXPORT cudaError_t spill(float* x, int n, cudaStream_t stream) {
    return LAUNCH(spill_kernel, dim3(1), dim3(32), 0, stream)(x, n);
}
"""
    broken(monkeypatch, code)
    assert command_line.main(["build", "outer_product_mean/01", "--arch", "9.0a"]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1] == "1 kernels, 1 of them spill or use local memory; 0 errors"
    )


def test_build_reports_a_source_that_does_not_compile(monkeypatch, capsys):
    broken(monkeypatch, OUTER.stages[0].code.replace("EXPORT", "nonsense EXPORT"))
    assert command_line.main(["build", "outer_product_mean/01"]) == 1
    shown = capsys.readouterr().out
    assert "outer_product_mean/01_broken seed: " in shown and "nonsense" in shown
    assert shown.splitlines()[-1] == "0 kernels, 0 of them spill or use local memory; 1 errors"


def test_doctor_says_what_runs_where():
    done = python("-m", "workbench", "doctor")
    assert done.returncode == 0
    assert "CPU tensors: stages run on the CPU" in done.stdout
    assert "nvcc" in done.stdout and torch.__version__ in done.stdout


def test_doctor_says_what_to_install_where_nothing_runs(tmp_path):
    done = python("-m", "workbench", "doctor", env={"CXX": str(tmp_path / "no-such-compiler")})
    assert done.returncode == 1
    assert "CPU tensors: no stage can run" in done.stdout
    assert "to do: C++ compiler: " in done.stdout and "Traceback" not in done.stderr


def test_doctor_knows_that_the_cpu_needs_cudas_headers_too(monkeypatch, capsys):
    found = [
        finding._replace(found="not usable", advice="pip install …")
        if finding.part == "CUDA headers"
        else finding
        for finding in jit_loader.toolchain_report()
    ]
    assert any(finding.advice for finding in found)
    monkeypatch.setattr(jit_loader, "toolchain_report", lambda: found)
    assert command_line.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "CPU tensors: no stage can run" in shown and "to do: CUDA headers: pip install …" in shown


def test_report_writes_what_the_results_say(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(reports, "write", lambda: asked.append(1) or ["a", "b"])
    monkeypatch.setattr(
        reports, "old_rows", lambda: {"python -m workbench bench o": ["gpu: o/01_a seed fp32"]}
    )
    assert command_line.main(["report"]) == 0
    written, *old = capsys.readouterr().out.splitlines()
    assert written == "2 files written" and asked
    assert old[-2:] == ["  gpu: o/01_a seed fp32", "renewed on that card by: python -m workbench bench o"]


# ---- benchmarks/on_gpu.sh


def on_gpu(*arguments, **environment):
    """The script with this Python, or with another program in its place."""
    return subprocess.run(
        [ROOT / "benchmarks" / "on_gpu.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_gpu_script_has_every_operator_part_and_shape():
    listed = on_gpu("--list").stdout.splitlines()
    names = [line.split()[0] for line in listed]
    expected = ["tests"]
    expected += [f"verify/{name}/{part}" for name in OPERATORS for part in PARTS]
    expected += [
        f"bench/{name}/{shape}" for name, operator in OPERATORS.items() for shape in operator.shapes
        if shape != "odd"
    ]  # fmt: skip
    assert names == [*expected, "variants", "loader", "notebooks", "report"]
    for line in listed:  # each is a command that there is
        words = line.split()[2:]
        if words[:2] == ["-m", "workbench"]:
            command_line._parser().parse_args(words[2:])
    some = on_gpu("--list", "bench/outer", "report").stdout.splitlines()
    assert [line.split()[0] for line in some] == [*names[-8:-4], "report"]


def test_the_gpu_script_says_in_a_sentence_that_there_is_none(tmp_path):
    """It asks Python; here a program stands for that, which says no and keeps the question."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nprintf %s "$2" > {tmp_path}/question\nexit 1\n')
    program.chmod(0o755)
    done = on_gpu("report", PYTHON=str(program))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"on_gpu.sh: these steps need an NVIDIA GPU, and {program} finds none.\n"
    answer = python("-c", (tmp_path / "question").read_text())
    assert (answer.returncode, answer.stderr) == (int(NO_GPU), "")


def test_the_gpu_script_goes_on_after_a_failure_and_sums_up(tmp_path):
    """With a program in Python's place that fails in one step and hangs in another."""
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *"--part check"*) exit 3;; *"--part trials"*) exec sleep 60;; *) echo "ran $*";; esac\n'
    )
    program.chmod(0o755)
    done = on_gpu("verify/outer_product_mean", "report", PYTHON=str(program), STEP_SECONDS="1")
    assert done.returncode == 1
    summary = done.stdout.partition("==== summary\n")[2].splitlines()
    outcomes = [(line.split()[0].rpartition("/")[2], line.split(" s  ")[1]) for line in summary[:-1]]
    assert outcomes == [
        ("check", "failed with 3"), ("trials", "ran out of time"), *((tool, "passed") for tool in TOOLS),
        ("report", "passed"),
    ]  # fmt: skip
    assert summary[-1] == "2 failed" and "ran -m workbench report" in done.stdout
    assert on_gpu("report", PYTHON=str(program)).returncode == 0
    unknown = on_gpu("benches", PYTHON=str(program))
    assert (
        unknown.returncode == 2 and "no step begins with benches; there are tests verify/" in unknown.stderr
    )
