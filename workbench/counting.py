"""Tables of what an operator must do and what a card can do: the two sides of a roofline."""

from __future__ import annotations

import pandas as pd
import torch
from IPython.display import Markdown

from kernels_src.operator import Operator
from workbench import results, session, tables
from workbench.plots import caption_of
from workbench.roofline import Ceilings, bound, element_bytes, intensity, work
from workbench.units import time_text
from workbench.views import headed

LIMITS = {"memory_us": "memory", "matrix_us": "matrix products", "exponential_us": "exponentials"}


def counts(operator: Operator) -> pd.DataFrame:
    """Sizes, operations, exponentials, least bytes and arithmetic intensity of each shape."""
    rows = []
    for name, shape in operator.shapes.items():
        operations, exponentials = work(operator, shape)
        rows.append(
            {
                "shape": name,
                **shape._asdict(),
                "operations": _amount(operations),
                "exponentials": _amount(exponentials) if exponentials else None,
                **{
                    f"{dtype} bytes": _amount(operator.least_bytes(shape, element_bytes(dtype)))
                    for dtype in ("fp32", "bf16")
                },
                **{
                    f"{dtype} intensity": _amount(intensity(operator, shape, dtype))
                    for dtype in ("fp32", "bf16")
                },
            }
        )
    return headed(pd.DataFrame(rows).dropna(axis="columns"), "shape")


def parts(operator: Operator, shape: str = "seed") -> pd.DataFrame:
    """Operations and exponentials of each part of an operator at one shape."""
    costs = operator.costs(operator.shapes[shape])
    rows = {
        name: [_amount(cost.matrix_operations), _amount(cost.exponentials)] for name, cost in costs.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["operations", "exponentials"])


def recorded_ceilings() -> Ceilings | None:
    """The ceilings of the card at hand, or of the one that was recorded; None without either."""
    if torch.cuda.is_available():
        return session.ceilings()
    found = session.folder()
    return Ceilings(**results.load_runs(found)[-1]["ceilings"]) if found else None


def ceilings() -> pd.DataFrame | Markdown:
    """What the card reached in the simplest programs that use one thing only."""
    card = recorded_ceilings()
    if card is None:
        return Markdown(f"*{session.NOTHING}*")
    slope = card.copy_gb_per_s / 1e3  # T operations a second, at one a byte
    rows = {
        "device copy": f"{slope:.3g} TB/s",
        "matrix product, fp32 on ordinary cores": f"{card.fp32_tflops:.3g} TFLOP/s",
        "matrix product, tf32": f"{card.tf32_tflops:.3g} TFLOP/s",
        "matrix product, fp32 accuracy": f"{card.matrix_tflops('fp32'):.3g} TFLOP/s",
        "matrix product, bf16": f"{card.bf16_tflops:.3g} TFLOP/s",
        "exponentials": f"{card.exp_per_us / 1e6:.3g} T/s",
        "ridge, fp32 accuracy": f"{card.matrix_tflops('fp32') / slope:.3g} operations a byte",
        "ridge, bf16": f"{card.bf16_tflops / slope:.3g} operations a byte",
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=[card_name()])


def bounds(operator: Operator) -> pd.DataFrame | Markdown:
    """The least time at each shape by what limits it, on the card that `ceilings` describes."""
    card = recorded_ceilings()
    if card is None:
        return Markdown(f"*{session.NOTHING}*")
    rows = []
    for name, shape in operator.shapes.items():
        for dtype in ("fp32", "bf16"):
            least = bound(operator, shape, dtype, card)
            times = {LIMITS[key]: time_text(value) for key, value in least._asdict().items() if value}
            limit = LIMITS[max(LIMITS, key=lambda key, least=least: getattr(least, key))]
            rows.append({"shape": name, "precision": dtype, **times, "bound by": limit})
    return pd.DataFrame(rows).set_index(["shape", "precision"])


def summary(operator: Operator) -> Markdown:
    """The fastest stage at each shape and dtype beside PyTorch's and the libraries' best."""
    rows = session.rows_of(operator)
    text = f"{tables.summary(rows)}\n\n" if len(rows) else ""
    return Markdown(f"{text}*{session.caption(operator, rows)}*")


def card_name() -> str:
    """The card that times and ceilings are of."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = session.folder()
    return caption_of(results.load_runs(found)[-1:]).split(" · ")[0] if found else "no card"


def _amount(count: float) -> str:
    """A large number with a letter for its size."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.3g}"
