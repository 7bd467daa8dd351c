"""Result files: rows replace rows, interruptions lose none, and every row knows its run."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
from processes import Child
from rows import RUN, row

from kernels_src import OPERATORS
from workbench import results, versions
from workbench.results import COLUMNS, folder_of, load, load_runs, run_of, store
from workbench.versions import FUSED

OUTER = OPERATORS["outer_product_mean"]


def stored(folder):
    return load(folder, OUTER.name)


def test_rows_come_back_in_order_and_to_four_digits(tmp_path):
    names = (
        "fused",
        "02_b",
        "library_chain",
        "01_a",
        "compile_max_autotune",
        "eager_graph",
        "compile",
        "eager",
    )
    rows = [
        row(OUTER, name, shape, dtype)
        for name in names
        for shape in ("af2", "seed")
        for dtype in ("bf16", "fp32")
    ]
    store(tmp_path, OUTER, rows, RUN)
    found = stored(tmp_path)
    assert tuple(found.columns) == (*COLUMNS, "is_old")
    order = [
        "eager",
        "eager_graph",
        "compile",
        "compile_max_autotune",
        "library_chain",
        "01_a",
        "02_b",
        "fused",
    ]
    assert list(found.stage) == order * 4
    assert list(dict.fromkeys(zip(found["shape"], found.dtype, strict=True))) == [
        ("seed", "fp32"), ("seed", "bf16"), ("af2", "fp32"), ("af2", "bf16")
    ]  # fmt: skip
    expected = pd.DataFrame(rows).set_index(results.KEY).p50_us
    assert (found.set_index(results.KEY).p50_us / expected - 1).abs().max() < 1e-3


def test_measuring_a_stage_again_replaces_its_rows_only(tmp_path):
    store(tmp_path, OUTER, [row(OUTER, name, p50_us=10) for name in ("eager", "01_a", "02_b")], RUN)
    store(tmp_path, OUTER, [row(OUTER, "01_a", "af2", p50_us=11)], RUN)
    store(tmp_path, OUTER, [row(OUTER, "01_a", p50_us=7)], {**RUN, "date": "later"})
    times = stored(tmp_path).set_index(["shape", "stage"]).p50_us.to_dict()
    assert times == {("seed", "eager"): 10, ("seed", "01_a"): 7, ("seed", "02_b"): 10, ("af2", "01_a"): 11}


def test_each_row_belongs_to_the_run_that_measured_it_last(tmp_path):
    first, later = {**RUN, "date": "first"}, {**RUN, "date": "later"}
    store(tmp_path, OUTER, [row(OUTER, name) for name in ("01_a", "02_b")], first)
    store(tmp_path, OUTER, [row(OUTER, "02_b")], later)
    store(tmp_path, OUTER, [row(OUTER, "03_c")], later)
    by_stage = {each.stage: run_of(tmp_path, each)["date"] for _, each in stored(tmp_path).iterrows()}
    assert by_stage == {"01_a": "first", "02_b": "later", "03_c": "later"}
    store(tmp_path, OUTER, [row(OUTER, "01_a")], later)
    assert [run["date"] for run in load_runs(tmp_path)] == ["later"]  # a run without rows is forgotten
    with pytest.raises(KeyError, match="04_d"):
        run_of(tmp_path, row(OUTER, "04_d"))


def test_an_interruption_leaves_the_old_file_whole(tmp_path, monkeypatch):
    store(tmp_path, OUTER, [row(OUTER, "01_a")], RUN)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(self, text):
        with open(self, "w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(results.Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path, OUTER, [row(OUTER, "02_b")], RUN)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


WRITERS, STORES = 4, 10


def store_some(folder, writer):
    """Store rows one after another, as a process does that measures on a GPU of its own."""
    for number in range(STORES):
        store(folder, OUTER, [row(OUTER, f"{writer}_{number}")], {**RUN, "date": str(writer)})


def test_processes_that_store_at_once_lose_no_rows(tmp_path):
    writers = [Child(store_some, tmp_path, writer) for writer in range(WRITERS)]
    for writer in writers:
        writer.result()
    names = {f"{writer}_{number}" for writer in range(WRITERS) for number in range(STORES)}
    assert set(stored(tmp_path).stage) == names
    assert all(run_of(tmp_path, each)["date"] == each.stage[0] for _, each in stored(tmp_path).iterrows())


def test_missing_and_damaged_files(tmp_path):
    assert len(stored(tmp_path)) == 0 and load_runs(tmp_path) == []
    (tmp_path / "outer_product_mean.csv").write_text("operator,stage\na,b\n")
    with pytest.raises(ValueError, match="expected the columns operator, stage, shape"):
        stored(tmp_path)


def test_a_folder_is_named_after_the_card():
    assert folder_of("NVIDIA H200") == results.RESULTS / "nvidia-h200"
    assert folder_of("NVIDIA GeForce RTX 4090 (D)").name == "nvidia-geforce-rtx-4090-d"


def test_resources_replace_those_of_the_same_stage(tmp_path):
    def table(stage, registers, kernels=2):
        return pd.DataFrame(
            [
                {"operator": "o", "stage": stage, "shape": "seed", "kernel": f"k{k}", "registers": registers}
                for k in range(kernels)
            ]
        )

    results.store_resources(tmp_path, table("01_a", 10))
    results.store_resources(tmp_path, table("02_b", 20))
    results.store_resources(tmp_path, table("01_a", 30, kernels=1))
    found = results.load_resources(tmp_path)
    assert list(zip(found.stage, found.registers, strict=True)) == [("01_a", 30), ("02_b", 20), ("02_b", 20)]


def test_recorded_results_are_whole():
    """What is committed: every row has a run with its circumstances, and numbers that can be."""
    for folder in results.recorded():
        json.loads((folder / "run.json").read_text())
        for operator in OPERATORS.values():
            for _, each in load(folder, operator.name).iterrows():
                run = run_of(folder, each)
                assert all(
                    run[name] for name in ("gpu", "driver", "cuda", "torch", "date", "command", "ceilings")
                )
                assert 0 < each.p20_us <= each.p50_us <= each.p80_us
                known = {FUSED, *(stage.name for stage in operator.stages)}
                assert each.stage in known or results.is_baseline(each.stage) or each.is_old
                version = run["rows"]["/".join(each[results.KEY])]
                assert (version is None) == results.is_baseline(each.stage)


# ---- versions of stages

CODE = """
// Stage 01: a test
#include "twice.cuh"
#include <stdint.h>
#define FACTOR(x) \\
    (2 * (x))  // of two
__global__ void f_kernel(float* y) { y[threadIdx.x] = FACTOR(1.f) - -1; /* "//" */ }
"""
HEADER = "#pragma once\nconstexpr int kTwice = 2;  // two\n"
SAME = {
    "a comment": ("// of two", "// 2, that is"),
    "a comment's lines": ("01: a test", "01: a test\n// and another line"),
    "white space": ("{ y[threadIdx.x] =", "{\n    y[ threadIdx.x ]\n    ="),
}
OTHERWISE = {
    "code": ("1.f", "2.f"),
    "a string": ("#include <stdint.h>", '#include <stdint.h>\nconst char* url = "http://x";'),
    "a macro": ("FACTOR(x)", "FACTOR (x)"),
    "an operator": ("- -1", "--1"),
    "a directive's line": ("#include <stdint.h>\n", "#include <stdint.h> "),
}


def version_of(folder, code=CODE, header=HEADER, **constants):
    """The version of a stage whose file and header are these."""
    (folder / "01_test.cu").write_text(code)
    (folder / "twice.cuh").write_text(header)
    stage = replace(OUTER.stages[0], source=folder / "01_test.cu", constants=lambda shape: constants)
    return versions.version(stage, OUTER.shapes["seed"])


@pytest.mark.parametrize(("old", "new"), SAME.values(), ids=SAME)
def test_a_version_does_not_change_with_comments_and_layout(old, new, tmp_path):
    assert old in CODE and version_of(tmp_path, CODE.replace(old, new)) == version_of(tmp_path)


@pytest.mark.parametrize(("old", "new"), OTHERWISE.values(), ids=OTHERWISE)
def test_a_version_changes_with_the_code(old, new, tmp_path):
    assert old in CODE and version_of(tmp_path, CODE.replace(old, new)) != version_of(tmp_path)


def test_a_version_changes_with_a_header_and_with_a_constant(tmp_path):
    base = version_of(tmp_path, C=8)
    assert version_of(tmp_path, header=HEADER.replace("two", "2"), C=8) == base
    assert version_of(tmp_path, header=HEADER.replace("2", "3"), C=8) != base
    assert len({version_of(tmp_path, C=16), version_of(tmp_path, D=8), base}) == 3


def test_every_stage_has_a_version_of_its_own():
    for operator in OPERATORS.values():
        shape = operator.shapes["odd"]
        stages = [stage for stage in operator.stages if not stage.unsupported(shape)]
        assert len({versions.version(stage, shape) for stage in stages}) == len(stages)


def edited(monkeypatch, number):
    """Change the code of a stage, as an edit of its file would."""
    stages = tuple(
        stage.variant(stage.code.replace("int ", "int64_t ", 1), None) if stage.number == number else stage
        for stage in OUTER.stages
    )
    monkeypatch.setitem(versions.OPERATORS, OUTER.name, replace(OUTER, stages=stages))


def test_a_row_is_old_once_its_stage_has_changed(tmp_path, monkeypatch):
    names = [OUTER.stage("04").name, OUTER.stage("13").name, "eager", "fused"]
    store(tmp_path, OUTER, [row(OUTER, name) for name in names], RUN)
    assert not stored(tmp_path).is_old.any()
    edited(monkeypatch, "04")
    assert list(stored(tmp_path).stage[stored(tmp_path).is_old]) == [OUTER.stage("04").name]
    store(tmp_path, OUTER, [row(OUTER, OUTER.stage("04").name)], {**RUN, "date": "later"})
    assert not stored(tmp_path).is_old.any()


def test_the_row_of_the_fused_module_is_old_once_it_takes_another_stage(tmp_path, monkeypatch):
    store(tmp_path, OUTER, [row(OUTER, "fused")], RUN)
    chosen = versions.fused_choice(row(OUTER, "fused"))
    assert chosen == OUTER.stage("13").name
    fused = versions.fused_module(OUTER)
    monkeypatch.setattr(fused, "fastest_stage", staticmethod(lambda *call: OUTER.stage("07")))
    assert stored(tmp_path).is_old.all()
