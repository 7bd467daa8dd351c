"""Result files: rows replace rows, interruptions lose none, and every row knows its run."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from rows import RUN, row

from kernels_src import OPERATORS
from workbench import results
from workbench.results import COLUMNS, folder_of, load, load_runs, run_of, store

OUTER = OPERATORS["outer_product_mean"]


def stored(folder):
    return load(folder, OUTER.name)


def test_rows_come_back_in_order_and_to_four_digits(tmp_path):
    names = ("02_b", "library_chain", "01_a", "compile_max_autotune", "eager_graph", "compile", "eager")
    rows = [
        row(OUTER, name, shape, dtype)
        for name in names
        for shape in ("af2", "seed")
        for dtype in ("bf16", "fp32")
    ]
    store(tmp_path, OUTER, rows, RUN)
    found = stored(tmp_path)
    assert tuple(found.columns) == COLUMNS
    order = ["eager", "eager_graph", "compile", "compile_max_autotune", "library_chain", "01_a", "02_b"]
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
                assert each.stage in {stage.name for stage in operator.stages} or results.is_baseline(
                    each.stage
                )
