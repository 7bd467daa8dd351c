"""Hardware counters of a stage's kernels from Nsight Compute (`ncu`), where it is present and allowed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from io import StringIO

import pandas as pd
import torch

from workbench.paths import environment
from workbench.selection import select

METRICS = {
    "gpu__time_duration.sum": "time (ns)",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors busy (%)",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory busy (%)",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 busy (%)",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed": "L1 and shared memory busy (%)",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident (% of most)",
}


def counters(target: str, shape: str = "seed") -> pd.DataFrame:
    """Each kernel of a stage (OP/NN) with what it kept busy. Raises RuntimeError saying what is missing."""
    if not torch.cuda.is_available():
        raise RuntimeError("counters are read from a GPU as it runs, and there is none here")
    if not shutil.which("ncu"):
        raise RuntimeError("ncu is not on PATH; it comes with the CUDA toolkit and with Nsight Compute")
    command = ["ncu", "--csv", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "workbench.counters", target, shape]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=600, check=False
    )
    if done.returncode or '"Metric Name"' not in done.stdout:
        raise RuntimeError(f"ncu failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return parse(done.stdout)


def parse(text: str) -> pd.DataFrame:
    """One row a kernel from ncu's CSV, whose lines begin after its own messages."""
    start = text.index('"ID"')
    table = pd.read_csv(StringIO(text[start:]), thousands=",")
    wide = table.pivot_table(index=["ID", "Kernel Name"], columns="Metric Name", values="Metric Value")
    return wide.rename(columns=METRICS)[list(METRICS.values())].droplevel("ID").rename_axis(columns=None)


def run_once(target: str, shape: str) -> None:
    """Run a stage once between the marks at which ncu starts and stops."""
    ((operator, (stage,)),) = select(target)
    sizes = operator.shapes[shape]
    module = operator.module(sizes, device="cuda", dtype=stage.dtype)
    inputs = operator.inputs(sizes, device="cuda", dtype=stage.dtype)
    stage(module, *inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    stage(module, *inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    run_once(*sys.argv[1:3])
