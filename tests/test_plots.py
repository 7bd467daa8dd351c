"""Plots and README tables: made from the CSV alone, the same each time, and known to lag when they do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
from matplotlib.text import Text
from rows import CEILINGS, RUN, row

from kernels_src import OPERATORS
from workbench import plots, report, results, tables
from workbench.units import time_text

ATTENTION = OPERATORS["msa_column_attention"]
OUTER = OPERATORS["outer_product_mean"]
BASELINES = (
    "eager",
    "eager_graph",
    "compile",
    "compile_max_autotune",
    "library_chain",
    "library_chain_no_mask",
)
FP32, BF16 = ("01_slow", "02_fast"), ("03_bf16",)


def rows_of(operator, shapes=("seed", "af2")):
    return [
        row(operator, name, shape, dtype, max_error=float("nan") if "no_mask" in name else 1e-6)
        for shape in shapes
        for dtype, stages in (("fp32", FP32), ("bf16", BF16))
        for name in BASELINES + stages
    ]


@pytest.fixture
def folder(tmp_path):
    """Recorded results of three stages and all baselines at two shapes."""
    return record(tmp_path, ("seed", "af2"))


def record(root, shapes):
    """Results of three stages and all baselines at these shapes, in a card's folder."""
    folder = root / "nvidia-test-1"
    results.store(folder, OUTER, rows_of(OUTER, shapes), RUN)
    results.store_resources(
        folder,
        pd.DataFrame(
            [
                {
                    "operator": OUTER.name,
                    "stage": "01_slow",
                    "shape": "seed",
                    "kernel": "slow_kernel",
                    "registers": 40,
                    "shared_bytes": 4096,
                    "spill_stores": 0,
                }
            ]  # fmt: skip
        ),
    )
    return folder


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text)]


def test_times_show_every_row_with_its_spread_and_where_it_came_from(folder):
    rows = results.load(folder, OUTER.name)
    rows = rows[(rows["shape"] == "seed") & (rows.dtype == "fp32")]
    figure = plots.time_by_stage(rows, "Title", plots.caption_of([RUN]))
    shown = texts(figure)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [
        "eager", "eager graph", "compile", "compile max autotune", "library chain",
        "library chain (ignores the mask)", "01 slow", "02 fast",
    ]  # fmt: skip
    assert "NVIDIA Test 1 · 2026-01-02 · torch 2.11.0 · CUDA 13.0 · driver 1.2" in shown
    for _, each in rows.iterrows():
        assert time_text(each.p50_us) in shown and time_text(each.call_us) in shown
    spreads = {tuple(line.get_xdata()) for line in figure.axes[0].lines}
    assert {(each.p20_us, each.p80_us) for _, each in rows.iterrows()} <= spreads


def test_text_in_a_plot_does_not_overlap():
    """Values of different rows, titles and legends keep apart, as they would not with a careless layout."""
    rows = pd.DataFrame(rows_of(ATTENTION))
    alike = rows[rows["shape"] == "af2"].copy()
    alike["max_error"] = [1e-6 + 1e-7 * (place % 2) for place in range(len(alike))]
    for figure in (
        plots.time_by_stage(rows[(rows["shape"] == "seed") & (rows.dtype == "fp32")], "Title", "caption"),
        plots.by_shape(rows, ATTENTION, "caption"),
        plots.error_by_precision(alike, "Title", "caption"),
    ):
        with matplotlib.rc_context(plots.STYLE):
            figure.draw_without_rendering()
        boxes = [
            (text.get_text(), text.get_window_extent().shrunk(0.8, 0.8))
            for text in set(figure.findobj(Text)) - set(beyond_the_axes(figure))
            if text.get_text() and text.get_visible()
        ]
        for place, (one, box) in enumerate(boxes):
            for other, beside in boxes[place + 1 :]:
                assert not box.overlaps(beside), (one, other)


def beyond_the_axes(figure):
    """Labels of ticks outside of an axis's limits, which are not drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not low <= tick.get_loc() <= high:
                    yield from (tick.label1, tick.label2)


def test_the_roofline_has_a_point_for_each_stage_below_the_ceilings(folder):
    rows = results.load(folder, OUTER.name)
    figure = plots.roofline(rows, OUTER, CEILINGS, "caption")
    points = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert len(points) == 2 * len(FP32 + BF16)
    assert "bf16: 750" in texts(figure)


DRAW = """
import sys
from pathlib import Path
from workbench import plots, report
folder, out = map(Path, sys.argv[1:])
for path, draw in report.pictures(folder).items():
    if "bf16" not in path.name and "af2" not in path.name:
        plots.save(draw(), out / path.name, "source")
"""


def test_the_same_results_give_the_same_bytes(folder, tmp_path, monkeypatch):
    """Here, and in a process with other hashes of texts, and so another order of every set."""
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setattr(sys, "argv", ["-c", folder, one])
    exec(DRAW, {})
    subprocess.run([sys.executable, "-c", DRAW, folder, two], check=True, timeout=120, cwd=results.ROOT)
    drawn = sorted(one.iterdir())
    assert len(drawn) == 5
    for path in drawn:
        assert path.read_bytes() == (two / path.name).read_bytes()
        ElementTree.parse(path)
        assert "<dc:date>" not in path.read_text()


README = """# Project
<!-- results:nvidia-test-1 -->
<!-- /results:nvidia-test-1 -->
text
<!-- results:nvidia-test-1/outer_product_mean -->
old
<!-- /results:nvidia-test-1/outer_product_mean -->
<!-- results:nvidia-test-1/outer_product_mean/seed/fp32 -->
<!-- /results:nvidia-test-1/outer_product_mean/seed/fp32 -->
<!-- results:other/outer_product_mean -->
<!-- /results:other/outer_product_mean -->
"""


def test_what_lags_the_csv_is_found_and_a_report_mends_it(tmp_path):
    root, readme, folder = tmp_path, tmp_path / "README.md", record(tmp_path, ("seed",))
    readme.write_text(README)
    (folder / "superfluous.svg").write_text("<svg/>")
    wanted = report.pictures(folder)
    assert len(report.lagging(root, readme)) == len(wanted) + 2
    report.write(root, readme)
    assert report.lagging(root, readme) == []
    assert sorted(folder.glob("*.svg")) == sorted(wanted)
    before = readme.read_text()
    report.write(root, readme)
    assert readme.read_text() == before
    results.store(folder, OUTER, [row(OUTER, "01_slow", p50_us=12345.0)], RUN)
    assert len(report.lagging(root, readme)) == len(wanted) + 1
    assert "12.3\u00a0ms" in tables.fill(before, root)


def test_tables_say_the_fastest_and_what_ignores_the_mask(folder):
    text = tables.fill(README, folder.parent)
    rows = results.load(folder, OUTER.name)
    best = rows[(rows["shape"] == "af2") & rows.stage.isin(FP32)].sort_values("p50_us").iloc[0]
    [line] = re.findall(r"\| af2 +\| fp32 .*", text)
    assert f"| `{best.stage}` " in line and time_text(best.p50_us).replace(" ", "\u00a0") in line
    [ignoring] = re.findall(r".*`library_chain_no_mask`.*", text)
    assert "ignores the mask" in ignoring
    assert tables.NOTHING in text  # of a card that nothing was measured on


def test_tables_mark_what_was_measured_with_another_source(folder):
    rows = results.load(folder, OUTER.name)
    assert "†" not in tables.all_stages(rows) + tables.summary(rows)
    rows["is_old"] = rows.stage.isin(FP32) & (rows["shape"] == "af2")
    text = tables.all_stages(rows[(rows["shape"] == "af2") & (rows.dtype == "fp32")])
    assert all(f"| `{name}` † " in text for name in FP32) and "| `eager` " in text
    command = "python -m workbench bench outer_product_mean --shape af2 --dtype fp32"
    assert text.endswith(
        f"\n\n† measured with an earlier version of this stage's source; `{command}` measures it again"
    )
    [marked] = [line for line in tables.summary(rows).splitlines() if "` †" in line]
    assert marked.startswith("| af2 ")
    session = rows.drop(columns="is_old")  # measured in a notebook's session: of the source at hand
    assert "†" not in tables.all_stages(session)


def test_tables_mark_times_longer_than_a_call(folder):
    rows = results.load(folder, OUTER.name)
    some = rows[(rows["shape"] == "af2") & (rows.dtype == "fp32")].copy()
    some["call_us"] = 1.01 * some.p50_us
    assert "‡" not in tables.all_stages(some) + tables.summary(some)
    waiting = some.stage == "eager"
    some.loc[waiting, "call_us"] = some.p20_us / 1.3
    text = tables.all_stages(some)
    [marked] = [line for line in text.splitlines() if " ‡ |" in line]
    assert marked.startswith("| `eager` ") and "\n\n‡ longer by over a tenth" in text


def test_a_report_names_old_rows_and_what_renews_them(folder, monkeypatch):
    name = OUTER.stage("04").name
    results.store(folder, OUTER, [row(OUTER, name), row(OUTER, name, "af2")], RUN)
    assert report.old_rows(folder.parent) == {}
    monkeypatch.setattr(results, "versions_now", lambda keys: [shape for _, _, shape, _ in keys])
    assert report.old_rows(folder.parent) == {
        f"python -m workbench bench outer_product_mean --shape {shape} --dtype fp32": [
            f"nvidia-test-1: outer_product_mean/{name} {shape} fp32"
        ]
        for shape in ("seed", "af2")
    }


def test_the_fused_module_is_shown_last_with_the_stage_that_it_chose(folder):
    results.store(folder, OUTER, [row(OUTER, "fused", p50_us=1.0, call_us=21.0)], RUN)
    rows = results.load(folder, OUTER.name)
    rows = rows[(rows["shape"] == "seed") & (rows.dtype == "fp32")]
    chosen = OUTER.stage("13").name
    assert tables.all_stages(rows).splitlines()[-1].startswith(f"| `fused`, by `{chosen}` ")
    [line] = [line for line in tables.summary(rows).splitlines() if line.startswith("| seed")]
    assert "`fused`" not in line and " 21\u00a0µs " in line  # a stage is fastest; its call is the module's
    names = [label.get_text() for label in plots.time_by_stage(rows).axes[0].get_yticklabels()]
    assert names[-1] == f"fused ({chosen.replace('_', ' ')})"


def test_what_verify_tried_is_counted_and_what_did_not_pass_is_named(folder):
    def outcomes(kind, operator, passed, failed):
        return {"operator": operator, "kind": kind, "passed": passed, "failed": failed, "not run": 0}

    race = {
        "kind": "racecheck",
        "operator": "a",
        "stage": "stages 01, 02",
        "outcome": "failed",
        "message": "…",
    }
    parts = {
        "a racecheck": {"summary": [outcomes("racecheck", "a", 1, 1)], "not passed": [race]},
        "a check": {
            "summary": [outcomes("check", "a", 1000, 0), outcomes("check", "a", 500, 0)],
            "not passed": [],
        },
        "b check": {"summary": [outcomes("check", "b", 7, 0)], "not passed": []},
    }
    (folder / "verify.json").write_text(json.dumps(parts))
    head, _, check, races, _, said = tables.part("nvidia-test-1/verify", folder.parent).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, check, races)]
    assert cells[0] == ["kind", "a", "b"]
    assert cells[1] == ["check", "1,500 passed", "7 passed"]
    assert cells[2] == ["racecheck", "1 passed, 1 failed", ""]
    assert said == "- racecheck of `a`, stages 01, 02: failed"


def test_a_marker_that_cannot_be_filled_is_refused(folder):
    with pytest.raises(ValueError, match="expected FOLDER"):
        tables.part("nvidia-test-1/outer_product_mean/seed", folder.parent)
    for text in ("<!-- results:a -->\n", "<!-- /results:a -->", "<!-- results:a -->\n<!-- /results:b -->"):
        with pytest.raises(ValueError, match="has no"):
            tables.fill(text, folder.parent)


def test_nothing_committed_lags_the_recorded_results():
    assert report.lagging() == [], "run `python -m workbench report`"


def test_provenance_goes_into_the_file(folder, tmp_path):
    rows = results.load(folder, OUTER.name)
    figure = plots.error_by_precision(rows[rows["shape"] == "seed"], "Title", "caption")
    for ending in (".svg", ".png"):
        plots.save(figure, tmp_path / f"plot{ending}", "where it came from")
        assert b"where it came from" in (tmp_path / f"plot{ending}").read_bytes()
