"""A plot with the rows that it shows: displays itself in a notebook, and exports both."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from workbench import plots
from workbench.paths import EXECUTED

DOTS = 160  # an inch, on the screen at twice its density


@dataclass(frozen=True)
class Picture:
    """A figure, the rows in it and a line about where they came from."""

    figure: Figure
    rows: pd.DataFrame
    caption: str

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """The figure for a notebook, with the width to show it at."""
        buffer = BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DOTS, metadata={"Software": None})
        return buffer.getvalue(), {"width": int(self.figure.get_figwidth() * DOTS / 1.6)}

    def __repr__(self) -> str:
        """The caption, where there is no picture."""
        return f"<plot of {len(self.rows)} rows; {self.caption}>"

    def export(self, path: str | Path) -> list[Path]:
        """Write PATH.svg, PATH.png and PATH.csv, each with the caption inside.

        A bare name is put into results/executed/. Returns the files written.
        """
        stem = EXECUTED / path
        files = [stem.with_name(f"{stem.name}{ending}") for ending in (".svg", ".png", ".csv")]
        for file in files[:2]:
            plots.save(self.figure, file, self.caption)
        files[2].write_text(f"# {self.caption}\n{self.rows.to_csv(index=False, lineterminator=chr(10))}")
        return files
