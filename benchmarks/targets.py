"""Targets of fastpipe, as figures, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe.bench.runner import Sample, ratios, summarise

__all__ = ["Asked", "judged", "judged_rates"]


@dataclass(frozen=True)
class Asked:
    """A rate that was asked for.

    Attributes:
        text: what it is.
        row: the row it is about.
        against: the row it is a multiple of, or several: then the best of those that were measured.  None
            where it is a rate.
        least: the least that is enough.
    """

    text: str
    row: str
    against: str | tuple[str, ...] | None
    least: float

    @property
    def is_of_replaced(self) -> bool:
        """Return True if it is a multiple of the replaced loader."""
        return isinstance(self.against, str) and self.against.endswith("-replaced")


def judged_rates(samples: Mapping[str, Sequence[Sample]], asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Return the targets that are rates, with the measured figures.

    Args:
        samples: of a finished run, by row.
        asked: the figures.

    Returns:
        For each: ``text``, ``asked``, ``is_most``, ``unit``, ``got`` (``median``, ``low``,
        ``high``; None where it was not measured) and ``is_met`` by the median (or None); and
        ``row``, where it is a multiple of the replaced loader.
    """
    made = []
    for one in asked:
        figures: list[float] = []
        names = (one.against,) if isinstance(one.against, str) else one.against or ()
        others = [name for name in names if samples.get(name)]
        if samples.get(one.row) and one.against is None:
            figures = [sample.rate for sample in samples[one.row]]
        elif samples.get(one.row) and others:
            figures = ratios(samples, one.row, others)
        target = judged(one.text, one.least, "×" if one.against else "samples/s", figures)
        made.append({**target, "row": one.row if one.is_of_replaced else None})
    return made


def judged(
    text: str, asked: float, unit: str, figures: Sequence[float], *, is_most: bool = False
) -> dict[str, Any]:
    """Return a target with its measured figure.

    Args:
        text: what it is.
        asked: the least that is enough, or the most.
        unit: of it.
        figures: what was measured; nothing where it was not.
        is_most: whether less is better.

    Returns:
        An entry as of `judged_rates`, without ``row``.
    """
    got = summarise(figures) if figures else None
    is_met = None
    if got is not None:
        is_met = got.median <= asked if is_most else got.median >= asked
    told = None if got is None else {name: round(value, 4) for name, value in got._asdict().items()}
    return {"text": text, "asked": asked, "is_most": is_most, "unit": unit, "got": told, "is_met": is_met}
