"""What a stage's header predicts, and what it says of the prediction once it was measured."""

from __future__ import annotations

import re

from kernels_src.operator import Stage

# What a sentence of a header begins with when it leaves the subject of the one before.
SUBJECTS = r"Outcome\b|(?:Bytes|Operations|Peak|Predicts|Shapes|Shared memory)\b[^.]{0,30}:"


def predicted(stage: Stage) -> str:
    """What a stage's header predicts, in the words after "Predicts"."""
    return _said(stage, "Predicts") or "nothing."


def outcome(stage: Stage) -> list[str]:
    """What a stage's header says of its prediction once it was measured, as a paragraph; none if nothing."""
    said = _said(stage, "Outcome")
    return [f"**In hindsight:** {said}"] if said else []


def _said(stage: Stage, word: str) -> str:
    """The words of a stage's header after `word`, up to the next that begins another subject."""
    header = re.match(r"(?://.*\n)+", stage.code)
    text = " ".join(line.removeprefix("//").strip() for line in header[0].splitlines()) if header else ""
    said = re.search(rf"(?:^|[.;:)] ){word}:? (.*?)(?=\s(?:{SUBJECTS})|$)", text)
    return said[1] if said else ""
