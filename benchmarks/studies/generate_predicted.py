"""Does ``probe`` say how long ``generate`` will take?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastpipe
from fastpipe.bench.generate import Section
from fastpipe.bench.samples import SEED
from fastpipe.generation import ProbeReport, probe

__all__ = ["Prediction", "predictions"]


@dataclass
class Prediction:
    """The prediction for a section, and its measurement.

    Attributes:
        section: which one.
        rows: that were made each time.
        reports: what was said each time.
        seconds: that it took.
    """

    section: Section
    rows: int
    reports: list[ProbeReport]
    seconds: list[float]

    @property
    def errors(self) -> list[float]:
        """By how many percent what was said is above what it took."""
        return [
            100 * (report.seconds / took - 1) for report, took in zip(self.reports, self.seconds, strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "section": self.section.key,
            "label": self.section.label,
            "rows": self.rows,
            "predicted_s": [round(report.seconds, 4) for report in self.reports],
            "seconds": [round(took, 4) for took in self.seconds],
            "error": [round(error, 2) for error in self.errors],
        }


def predictions(
    sections: Sequence[tuple[Section, int]], folder: Path, workers: int, times: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Prediction]:  # fmt: skip
    """Have it said how long rows will take, right before they are made, one section after the other.

    Args:
        sections: each with how many rows are made.
        folder: in which files are made.
        workers: how many rows are made at a time.
        times: how often.
        say: told what is measured.
    """
    found = [Prediction(section, count, [], []) for section, count in sections]
    for _ in range(times):
        for one in found:
            say(f"a prediction: {one.section.label}")
            _predict(one, folder, workers)
    return found


def _predict(one: Prediction, folder: Path, workers: int) -> None:
    function, count = one.section.function, one.rows
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        out = Path(empty, "rows.h5")
        one.reports.append(probe(function, count, out, seed=SEED, workers=workers))
        start = time.perf_counter()
        fastpipe.generate(function, count, out, seed=SEED, workers=workers, probe=False, progress=False)
        one.seconds.append(time.perf_counter() - start)
