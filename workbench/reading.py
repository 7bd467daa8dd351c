"""What a plot of times says, in sentences made from its rows, so that words never outlive numbers."""

from __future__ import annotations

import pandas as pd

from workbench.baselines import IGNORES_MASK
from workbench.plots import in_order
from workbench.results import is_baseline, is_stage
from workbench.units import time_text
from workbench.versions import FUSED

NOTABLE = 1.05  # times closer than this count as equal: cards of one kind differ by more


def reading(rows: pd.DataFrame) -> list[str]:
    """Sentences about the times of one shape and dtype: who is fastest, by how much, and what lost."""
    rows = in_order(rows)
    stages = rows[rows.stage.map(is_stage)]
    peers = rows[rows.stage.map(is_baseline) & ~rows.stage.str.endswith(IGNORES_MASK)]
    if not len(stages):
        return ["No stage has been measured at this shape and dtype."]
    best = stages.loc[stages.p50_us.idxmin()]
    said = [f"The fastest stage is `{best.stage}`: {time_text(best.p50_us)}, {_of_bound(best)}."]
    if len(peers):
        peer = peers.loc[peers.p50_us.idxmin()]
        said.append(
            f"The fastest of PyTorch and the libraries is `{peer.stage}`: {time_text(peer.p50_us)}, "
            f"{_times(peer.p50_us / best.p50_us)} the stage's."
        )
        said += _first_ahead(stages, peers)
    return [*said, *_losses(stages), *_calls(best, rows[rows.stage == FUSED])]


def _of_bound(row: pd.Series) -> str:
    bound = time_text(row.p50_us * row.percent_of_bound / 100)
    if row.percent_of_bound > 100:  # a stage may give exponentials to the FMA units too
        return f"less than the {bound} that exponentials would take the special-function units alone"
    return f"where the card's ceilings allow {bound} at best"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"


def _first_ahead(stages: pd.DataFrame, peers: pd.DataFrame) -> list[str]:
    """Which stage first beats eager's own kernels: fusion alone did not make the ones before it faster."""
    eager = peers[peers.stage.isin(("eager", "eager_graph"))]
    if not len(eager):
        return []
    ahead = stages[stages.p50_us * NOTABLE < eager.p50_us.min()]
    name = f"eager PyTorch's own kernels ({time_text(eager.p50_us.min())})"
    if not len(ahead):
        return [f"No stage is ahead of {name}."]
    return [f"The first stage ahead of {name} is `{ahead.iloc[0].stage}`."]


def _losses(stages: pd.DataFrame) -> list[str]:
    """Stages slower than the one before them."""
    pairs = zip(stages.itertuples(), stages.iloc[1:].itertuples(), strict=False)
    slower = [
        f"`{new.stage}` ({time_text(new.p50_us)} after {time_text(old.p50_us)})"
        for old, new in pairs
        if new.p50_us > NOTABLE * old.p50_us
    ]
    return [f"Slower than the stage before: {', '.join(slower)}."] if slower else []


def _calls(best: pd.Series, fused: pd.DataFrame) -> list[str]:
    """What a call from Python adds to the kernel's own time, where it is much."""
    if best.call_us < 1.5 * best.p50_us:
        return []
    if len(fused):
        return [
            f"Called from Python without a graph it takes {time_text(best.call_us)}, and the fused module, "
            f"which checks less of a call like one before, {time_text(fused.call_us.iloc[0])}."
        ]
    return [
        f"Called from Python without a graph it takes {time_text(best.call_us)}: launching it costs more "
        "than running it."
    ]
