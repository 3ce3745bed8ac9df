"""Figures of single operations: too many for bars, so they are told in lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastpipe.bench.augment.rows import Place
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Sample, ratios, summarise

__all__ = ["single_of"]


def single_of(
    places: Iterable[Place],
    infos: Mapping[str, RowInfo],
    samples: Mapping[str, Sequence[Sample]],
    count: Callable[[str], int],
) -> dict[str, Any]:
    """What came of single operations.

    Args:
        places: the operations, with what they are applied to.
        infos: all rows, by key.
        samples: of a finished run, by row.
        count: samples in a batch, by their unit.

    Returns:
        ``rows``: of each ``key``, ``label``, ``unit``, ``batch_size``, ``ms``, what fastpipe takes for a
        batch (median, low, high), and ``against``: the others' labels with their ``ratio``, how many times
        as fast fastpipe is in the same round.
    """
    rows = []
    for place in places:
        own = f"{place.key}-batch"
        if not samples.get(own):
            continue
        batch = count(place.recipe.unit)
        others = [info for info in infos.values() if info.section == place.key and info.key != own]
        against = [
            {"label": info.label, "note": info.note, "ratio": _told(ratios(samples, own, [info.key]))}
            for info in others
            if samples.get(info.key)
        ]
        rows.append(
            {
                "key": place.key,
                "label": place.label,
                "unit": place.recipe.unit,
                "batch_size": batch,
                "ms": _told(1000 * batch / sample.rate for sample in samples[own]),
                "against": against,
            }
        )
    return {"rows": rows}


def _told(figures: Iterable[float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in summarise(figures)._asdict().items()}
