"""What notebook cells call: variants and their verdicts, tables and sentences from results, own operators."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

pytest.importorskip("IPython")  # a GPU's machine may do without
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output
from torch import nn

from kernels_src import MSA_COLUMN_ATTENTION as ATTENTION
from kernels_src import OUTER_PRODUCT_MEAN as OPM
from workbench import counters, header, notebook, own, precision, results, session, sweep, timeline, variants
from workbench.check import Check, check
from workbench.reading import reading
from workbench.sweep import most_warps
from workbench.traffic import totals, traffic_of

FIRST = ATTENTION.stages[0]
RUN = {"gpu": "NVIDIA Test", "date": "2026-01-02 03:04 UTC", "torch": "2", "cuda": "13", "driver": "5"}
CEILINGS = dict(copy_gb_per_s=4000.0, fp32_tflops=50.0, tf32_tflops=400.0, bf16_tflops=750.0, exp_per_us=4e6)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant or row of one test is seen by another."""
    monkeypatch.setattr(session, "_variants", {})
    monkeypatch.setattr(session, "_measured", {})


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython with the magics."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "workbench.notebook")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recorded results of two stages and two baselines at the seed size."""
    folder = tmp_path / "nvidia-test"
    names = ("eager", "eager_graph", FIRST.name, ATTENTION.stages[1].name)
    rows = [row(name, us) for name, us in zip(names, (700, 46, 50, 40), strict=True)]
    results.store(folder, ATTENTION, rows, RUN | {"ceilings": CEILINGS})
    monkeypatch.setattr(session, "folder", lambda: folder)
    return folder


def row(stage: str, us: float, **fields: object) -> dict[str, object]:
    times = {"p20_us": 0.99 * us, "p50_us": us, "p80_us": 1.01 * us, "call_us": us + 20}
    rates = {"peak_mib": 1.0, "tflops": 1.0, "gb_per_s": 1.0, "percent_of_bound": 10.0, "max_error": 1e-6}
    key = {"operator": ATTENTION.name, "stage": stage, "shape": "seed", "dtype": "fp32", "precision": "fp32"}
    return key | times | rates | fields


def shown(captured: CapturedIO) -> str:
    """Everything that was displayed, as one text."""
    texts = [str(value) for output in captured.outputs for value in output.data.values()]
    return "\n".join([*texts, captured.stdout])


# Variants


def edited(old: str, new: str) -> str:
    assert old in FIRST.code
    return FIRST.code.replace(old, new)


def run_stage_cell(
    shell: InteractiveShell, text: str, options: str = "--as mine"
) -> tuple[CapturedIO, object]:
    """Run a cell that begins with %%stage; what it displayed, and what it raised or None."""
    with capture_output() as captured:
        done = shell.run_cell(f"%%stage {ATTENTION.name} {FIRST.number} {options}\n{text}")
    return captured, done.error_in_exec or done.error_before_exec


def test_load_stage_puts_the_source_into_a_new_cell(shell, monkeypatch):
    cells = []
    monkeypatch.setattr(shell, "set_next_input", lambda text, replace: cells.append((text, replace)))
    shell.run_line_magic("load_stage", f"{ATTENTION.name} {FIRST.number}")
    ((text, replaces),) = cells
    first, _, rest = text.partition("\n")
    assert first == f"%%stage {ATTENTION.name} {FIRST.number} --as my_{FIRST.number}"
    assert rest == FIRST.code and not replaces


def test_a_right_variant_is_shown_and_joins_tables(shell):
    captured, error = run_stage_cell(shell, edited("kThreads = 256", "kThreads = 128"))
    assert error is None
    text = shown(captured)
    assert "is right in all" in text and "registers a thread" in text
    assert re.search(r'class="old">.*256.*class="new">.*128', text)
    assert session.find(ATTENTION, "mine").code != FIRST.code
    if not torch.cuda.is_available():
        assert "not timed" in text and not re.search(r"\d µs", text)


def test_a_wrong_variant_is_rejected_with_the_case(shell):
    """A missing barrier: the check on the CPU names the orders of threads that disagree."""
    without_barriers = FIRST.code.replace("__syncthreads();", "")
    assert without_barriers != FIRST.code
    captured, error = run_stage_cell(shell, without_barriers)
    assert isinstance(error, variants.Rejected)
    assert re.search(r"mine is wrong in \d of \d cases", str(error))
    assert "random" in shown(captured)
    with pytest.raises(KeyError):
        session.find(ATTENTION, "mine")


def test_a_mistake_is_marked_at_its_line_in_the_cell(shell):
    text = edited("constexpr int kThreads", "constexpr itn kThreads")
    captured, error = run_stage_cell(shell, text)
    assert isinstance(error, variants.Rejected) and "does not compile" in str(error)
    line = 2 + text.splitlines().index("constexpr itn kThreads = 256;")  # %%stage is line 1
    marked = re.search(r'<tr class="here"><td>(\d+)</td><td>(.*?)</td>', shown(captured))
    assert marked and int(marked[1]) == line and "constexpr itn" in marked[2]


def test_a_wrong_stage_is_rejected_and_said_why(shell, monkeypatch):
    wrong = FIRST.variant(FIRST.code.replace("__syncthreads();", ""), "wrong")
    monkeypatch.setattr(session, "find", lambda operator, name: wrong)
    with capture_output() as captured, pytest.raises(variants.Rejected, match="wrong is wrong in 1 of 1"):
        notebook.check(ATTENTION, "wrong", cases=("masked column",))
    assert "FAILED" in shown(captured) and "**masked column** at seed: " in shown(captured)


def test_a_variant_cannot_take_a_stages_name(shell):
    _, error = run_stage_cell(shell, FIRST.code, f"--as {ATTENTION.stages[1].number}")
    assert isinstance(error, ValueError) and "--as" in str(error)


def test_save_takes_the_next_number_and_keeps_what_is_there(tmp_path: Path):
    (tmp_path / "07_last.cu").write_text("")
    variant = replace(FIRST, source=tmp_path / "07_last.cu").variant(FIRST.code, "My wider tiles")
    path = variants.save(ATTENTION, variant)
    assert path.name == "08_my_wider_tiles.cu"
    assert path.read_text() == FIRST.code.replace("// Stage 01:", "// Stage 08:")
    with pytest.raises(FileExistsError, match="my_wider_tiles"):
        variants.save(ATTENTION, variant)


def test_tweak_names_what_it_did_not_find():
    with pytest.raises(ValueError, match="no such text"):
        notebook.tweak(ATTENTION, FIRST.number, "no such text", "", "mine")


def test_a_sweep_checks_every_size():
    table = notebook.sweep(ATTENTION, "05", (64, 128))
    assert list(table.index) == [64, 128]
    assert (table["registers a thread"] > 0).all()
    assert session.find(ATTENTION, "05 with 64 threads").load(ATTENTION.shapes["seed"]) is not None


@pytest.mark.parametrize(
    ("threads", "registers", "warps"),
    [(256, 32, 64), (256, 64, 32), (512, 40, 48), (32, 16, 32), (1024, 65, 0), (128, 255, 8)],
)
def test_most_warps(threads: int, registers: int, warps: int):
    """By hand: 65,536 registers in units of 256 a warp, 64 warps, 32 blocks."""
    assert most_warps(threads, registers) == warps


# With a GPU: what is timed is made up here, all else is as it is


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A GPU on which each stage takes the time, in µs, that a test gives it here."""
    us: dict[str, float] = {}

    def measure(group, ceilings, *, baselines, **options):
        names = [*(["eager"] if baselines else []), *(stage.name for stage in group.stages)]
        return [row(name, us[name], shape=group.shape, dtype=group.dtype) for name in names]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Here")
    monkeypatch.setattr(session, "ceilings", lambda: None)
    monkeypatch.setattr(session, "folder", lambda: None)
    monkeypatch.setattr(session.bench, "measure", measure)
    return us


@pytest.mark.parametrize(
    ("us", "words"),
    [(40, "**20.0 % faster**"), (60, "**20.0 % slower**"), (50.5, "by less than the spread (+1.0 %)")],
)
def test_verdict_on_a_variants_time(shell, timed, monkeypatch, us: float, words: str):
    variant = FIRST.variant(edited("kThreads = 256", "kThreads = 128"), "mine")
    passed = Check(ATTENTION.name, "mine", "seed", "random", 0, 1e-7, 1e-7, 1e-7, 1e-6, True, "")
    kernel = {"kernel": ["k"], "registers": [40], "shared_bytes": [0], "spill_stores": [0]}
    monkeypatch.setattr(variants, "check", lambda *arguments: [passed])
    monkeypatch.setattr(variants.views, "resources", lambda *arguments: pd.DataFrame(kernel))
    timed.update({FIRST.name: 50, "mine": us})
    with capture_output() as captured:
        variants.try_variant(ATTENTION, variant)
    text = shown(captured)
    assert words in text
    assert f"{100 * (us / 50 - 1):+.1f} %" in text and f"50 µs ({0.99 * 50:.3g} to {1.01 * 50:.3g})" in text
    assert "mine" in set(session.rows_of(ATTENTION).stage)


def test_time_measures_a_stage_beside_the_one_it_builds_on(timed):
    second = ATTENTION.stages[1]
    timed.update({FIRST.name: 50, second.name: 44})
    text = notebook.time(ATTENTION, second.number).data
    assert "44 µs for the operator's kernels" in text and f"`{FIRST.name}`" in text
    assert "measured in this session on NVIDIA Here: all" in text


def test_a_sweep_is_plotted_with_its_occupancy():
    times = {"p20_us": [9.0, 5.0], "p50_us": [10.0, 5.5], "p80_us": [11.0, 6.0]}
    table = pd.DataFrame({"occupancy": ["50%", "100%"], **times}, index=[128, 256])
    (axes,) = sweep.draw(table, "title", "caption").axes
    assert [text.get_text() for text in axes.texts] == ["10 µs\noccupancy ≤ 50%", "5.5 µs\noccupancy ≤ 100%"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "256"]


def test_measure_times_stages_and_pytorch(timed):
    timed.update({"eager": 700, **{stage.name: 10 for stage in ATTENTION.stages}})
    notebook.measure(ATTENTION)
    rows = session.rows_of(ATTENTION)
    assert set(rows.stage) == set(timed)
    assert set(rows[rows.stage == "eager"].dtype) == {"fp32", "bf16"}


def test_what_another_gpu_lacks_is_said_and_not_measured(timed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    timed.update({"eager": 700, **{stage.name: 10 for stage in ATTENTION.stages}})
    notebook.measure(ATTENTION)
    assert set(timed) - set(session.rows_of(ATTENTION).stage) == {ATTENTION.stage("12").name}
    said = notebook.check(ATTENTION, "12", "af2").data
    assert "needs a GPU of compute capability 9.0, this one has 8.0" in said


# Results


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, times are measured")
def test_time_shows_what_was_recorded_and_where(recorded):
    text = notebook.time(ATTENTION, ATTENTION.stages[1].number).data
    assert "40\u00a0µs" in text and "50\u00a0µs" in text and "700\u00a0µs" in text
    assert "recorded on NVIDIA Test · 2026-01-02" in text
    assert header.predicted(ATTENTION.stages[1]) in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, times are measured")
def test_nothing_recorded_is_said(monkeypatch):
    monkeypatch.setattr(session, "folder", lambda: None)
    assert "nothing recorded yet" in notebook.time(ATTENTION, FIRST.number).data
    assert "nothing recorded yet" in notebook.table(ATTENTION).data
    assert "nothing recorded yet" in repr(notebook.plot_stages(ATTENTION))


def test_every_stage_predicts():
    for operator in (ATTENTION, OPM):
        for stage in operator.stages:
            said = header.predicted(stage)
            assert re.search(r"\d", said), f"{operator.name}/{stage.name}: {said}"
            assert not re.search(
                r"\b(Bytes|Operations|Shapes)\b[^.]{0,30}:", said + str(header.outcome(stage))
            )
            assert "Outcome" not in said


HEADER = """// Stage 01: attention core in one kernel
// Bytes: 4. Predicts at seed: 4 µs: latency. Outcome at seed: 9 µs, since every block
// waits twice. Shared memory a block: 3 KB.
"""


def test_prediction_and_outcome_are_read_from_the_header(recorded, monkeypatch):
    stage = FIRST.variant(HEADER + FIRST.code.partition("\n")[2], FIRST.name)
    assert header.predicted(stage) == "at seed: 4 µs: latency."
    assert header.outcome(stage) == ["**In hindsight:** at seed: 9 µs, since every block waits twice."]
    monkeypatch.setattr(session, "find", lambda operator, name: stage)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = notebook.time(ATTENTION, FIRST.number).data.split("\n\n")
    assert said[0] == "**Predicted** at seed: 4 µs: latency."
    assert said[1].startswith("**Measured** at seed: 50 µs")  # the recorded number
    assert said[2] == header.outcome(stage)[0]


def test_a_picture_exports_itself_with_rows_and_provenance(recorded, tmp_path: Path):
    picture = notebook.plot_stages(ATTENTION)
    svg, png, csv = picture.export(tmp_path / "plots" / "mine")
    assert "NVIDIA Test" in svg.read_text() and png.read_bytes().startswith(b"\x89PNG")
    assert csv.read_text().startswith("# recorded on NVIDIA Test")
    rows = pd.read_csv(csv, comment="#")
    assert set(rows.stage) == {"eager", "eager_graph", FIRST.name, ATTENTION.stages[1].name}
    data, size = picture._repr_png_()
    assert data.startswith(b"\x89PNG") and size["width"] > 300


def test_measured_rows_take_the_place_of_recorded_ones(recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Here")
    session._measured[ATTENTION.name] = pd.DataFrame([row(FIRST.name, 45), row("mine", 30)])
    rows = session.rows_of(ATTENTION, "seed", "fp32").set_index("stage")
    assert rows.p50_us[FIRST.name] == 45 and rows.p50_us["mine"] == 30 and rows.p50_us["eager"] == 700
    caption = session.caption(ATTENTION, rows.reset_index())
    assert caption.startswith("recorded on NVIDIA Test")
    assert caption.endswith(f"measured in this session on NVIDIA Here: {FIRST.name}, mine")


def test_sentences_follow_the_numbers():
    rows = pd.DataFrame(
        [row("eager_graph", 46), row("01_a", 50), row("02_b", 60), row("03_c", 23, call_us=24)]
    )
    said = " ".join(reading(rows))
    assert "fastest stage is `03_c`: 23 µs" in said and "2 times" in said
    assert "first stage ahead of eager PyTorch's own kernels (46 µs) is `03_c`" in said
    assert "Slower than the stage before: `02_b` (60 µs after 50 µs)." in said
    assert "launching" not in said
    slow_call = pd.DataFrame([row("01_a", 5, call_us=25)])
    assert "launching it costs more" in " ".join(reading(slow_call))
    past_the_bound = pd.DataFrame([row("12_a", 20, percent_of_bound=110.0)])
    assert "20 µs, less than the 22 µs that exponentials" in " ".join(reading(past_the_bound))


def test_a_timeline_counts_kernels_and_busy_time():
    eager = pd.DataFrame({"start_us": [0.0, 10.0], "duration_us": [2.0, 3.0], "kernel": ["a", "b"]})
    fused = pd.DataFrame({"start_us": [0.0], "duration_us": [4.0], "kernel": ["c"]})
    figure = timeline.draw({"eager": eager, "03_single_kernel": fused}, "title")
    (axes,) = figure.axes
    said = [text.get_text() for text in axes.texts]
    assert said == ["2 kernels, busy for 5 µs", "1 kernel, busy for 4 µs"]
    assert [len(bars.get_paths()) for bars in axes.collections] == [2, 1]


def test_counters_are_read_from_ncus_csv():
    columns = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    values = {
        "gpu__time_duration.sum": '"1,234"',
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": '"12.5"',
    }
    lines = [
        f'"{number}","7","{kernel}","{metric}","-",{values.get(metric, 0)}'
        for number, kernel in enumerate(("first(int)", "second(int)"))
        for metric in counters.METRICS
    ]
    table = counters.parse("\n".join(["==PROF== Connected", columns, *lines]))
    assert list(table.index) == ["first(int)", "second(int)"]
    assert table["time (ns)"].tolist() == [1234, 1234] and table["memory busy (%)"].tolist() == [12.5, 12.5]


# Traffic


class Small(nn.Module):
    """For counting by hand."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)
        y = y.transpose(0, 1) + 1
        return self.linear(y)


def test_traffic_counts_kernels_and_not_views():
    lines = traffic_of(Small().to("meta"), torch.empty(5, 4, device="meta"))
    by_text = {line.text.strip(): line for line in lines}
    view = by_text["y = x.transpose(0, 1)"]
    assert not view.operations and view.bytes_read == view.bytes_written == 0
    add = by_text["y = y.transpose(0, 1) + 1"]
    assert (len(add.operations), add.bytes_read, add.bytes_written) == (1, 80, 80)
    product = by_text["return self.linear(y)"]
    assert (product.bytes_read, product.bytes_written) == (80 + 4 * (12 + 3), 4 * 15)
    assert totals(lines)["kernels"] == 2


def test_traffic_of_the_outer_product_is_what_the_tensor_takes():
    B, S, N, D, C, P = OPM.shapes["seed"]
    lines = {line.text.strip()[:8]: line for line in notebook.traffic.traffic(OPM, OPM.shapes["seed"])}
    assert lines["outer = "].bytes_written == 4 * B * N * N * C * C


# Precision


def test_rounding_is_torchs(seed):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(seed)).exp()
    assert torch.equal(precision.rounded(x, "bf16"), x.bfloat16().float())
    assert torch.equal(precision.rounded(x, "fp32"), x)
    error = (precision.rounded(x, "tf32") - x).abs() / x
    assert 2**-13 < error.max() <= 2**-11


def test_parts_add_up(seed):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(sum(precision.split(x, "bf16", 3)), x)
    left_out = (sum(part.double() for part in precision.split(x, "tf32", 2)) - x).abs() / x.abs()
    assert left_out.max() <= 2**-21


def test_three_tf32_products_are_as_good_as_fp32_and_three_bf16_are_not(seed):
    errors = precision.product_errors(seed)["typical error"].astype(float)
    assert errors["tf32 in 2 parts"] < 2 * errors["fp32"]
    assert errors["bf16 in 3 parts"] < 2 * errors["fp32"]
    assert errors["bf16 in 2 parts"] > 5 * errors["fp32"]
    assert errors["bf16"] > errors["tf32"] > 100 * errors["fp32"]


# An operator of one's own

KERNEL = r"""
#include "cuda.cuh"
__global__ void last_row_kernel(const float* msa, float* out, int N) {
    const int64_t at = (int64_t(blockIdx.y) * S + S - 1) * N + blockIdx.x;
    out[(int64_t(blockIdx.y) * N + blockIdx.x) * D + threadIdx.x] = msa[at * D + threadIdx.x];
}
EXPORT cudaError_t last_row(const float* msa, float* out, int B, int N, cudaStream_t stream) {
    return LAUNCH(last_row_kernel, dim3(N, B), D, 0, stream)(msa, out, N);
}
"""


class LastRow(nn.Module):
    """The last row of an alignment."""

    def forward(self, msa, mask):
        return msa[:, -1]


def run(kernels, module, msa, mask):
    out = torch.empty(msa.shape[0], *msa.shape[2:], device=msa.device)
    kernels.last_row(msa, out, msa.shape[0], msa.shape[2])
    return out


def last_row_files() -> own.Files:
    return own.files_of(
        LastRow, KERNEL, run, name="last_row", title="Last row", idea="A block a residue",
        operations="0", outputs="B * N * D",
    )  # fmt: skip


def test_own_operator_is_checked():
    operator = own.operator_of(last_row_files())
    assert operator.stages[0].title == "A block a residue"
    for shape in operator.shapes:
        assert all(case.passed for case in check(operator, operator.stages[0], shape))


def test_own_operator_that_is_wrong_fails():
    files = last_row_files()
    operator = own.operator_of(files._replace(stage=files.stage.replace("S - 1", "0")))
    assert not all(case.passed for case in check(operator, operator.stages[0]))


def test_the_two_files_are_kept_and_work():
    """In the same place each time, so that later runs find the builds."""
    files, folder = last_row_files(), Path(__file__).parent / "artefacts" / "last_row"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    module, stage = files.keep(folder)
    assert (module.name, stage.name) == ("__init__.py", "01_a_block_a_residue.cu")
    spec = importlib.util.spec_from_file_location("last_row", module)
    kept = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kept)
    assert all(case.passed for case in check(kept.OPERATOR, kept.OPERATOR.stages[0]))
    with pytest.raises(FileExistsError):
        files.keep(folder)
