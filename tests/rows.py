"""Result rows with invented numbers, for tests of what is made from rows."""

from __future__ import annotations

import random

from workbench.roofline import Ceilings, bound, element_bytes, work

CEILINGS = Ceilings(4000, 50, 400, 750, 3.5e6)
RUN = {
    "gpu": "NVIDIA Test 1",
    "driver": "1.2",
    "cuda": "13.0",
    "torch": "2.11.0",
    "commit": "0" * 40,
    "dirty": False,
    "date": "2026-01-02 03:04 UTC",
    "command": "python -m workbench bench",
    "ceilings": CEILINGS._asdict(),
}


def row(operator, stage, shape="seed", dtype="fp32", p50_us=None, **changes):
    """One row that hangs together: 80 % to 120 % of its median, speeds from the operator's formulas."""
    sizes = operator.shapes[shape]
    least = bound(operator, sizes, dtype, CEILINGS).us
    us = p50_us or least * random.Random(f"{stage} {shape} {dtype}").uniform(2, 90)
    return {
        "operator": operator.name,
        "stage": stage,
        "shape": shape,
        "dtype": dtype,
        "precision": dtype,
        "p20_us": 0.8 * us,
        "p50_us": us,
        "p80_us": 1.2 * us,
        "call_us": 3 * us,
        "peak_mib": 12.5,
        "tflops": work(operator, sizes)[0] / us / 1e6,
        "gb_per_s": operator.least_bytes(sizes, element_bytes(dtype)) / us / 1e3,
        "percent_of_bound": 100 * least / us,
        "max_error": 2e-7 if dtype == "fp32" else 3e-3,
        **changes,
    }
