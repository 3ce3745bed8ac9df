"""What was asked of making rows, as figures, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastpipe.bench.generate.peers import PEERS
from fastpipe.bench.runner import Sample, rates_by_round
from fastpipe.bench.targets import Asked, judged, judged_rates

__all__ = ["asked", "targets"]

OVERHEAD_US, ERROR_PERCENT, MORE_MB = 20.0, 15.0, 20.0
PREDICTED = ("slow", "quick")
_OF_CORES = 0.925  # of the cores is what workers bring at least: 1.85 with two


def asked(cores: int) -> tuple[Asked, ...]:
    """The figures that are rates.

    Args:
        cores: how many workers there are.
    """
    slow, quick = (tuple(f"{key}-{peer.kind}" for peer in PEERS) for key in ("slow", "quick"))
    wide = tuple(f"wide-{peer.kind}" for peer in PEERS)
    return (
        Asked(
            f"5 ms a row, {cores} workers, × the faster of the loop and workers=0",
            "slow-workers", ("slow-replaced", "slow-alone"), round(_OF_CORES * cores, 3),
        ),
        Asked("5 ms a row, × the best peer", "slow-workers", slow, 0.97),
        Asked("100 µs a row, × the best peer", "quick-workers", quick, 1.5),
        Asked("100 µs a row of 16 kB, × the best peer", "wide-workers", wide, 1.5),
    )  # fmt: skip


def targets(
    samples: Mapping[str, Sequence[Sample]],
    cores: int,
    predicted: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Any] | None,
    sections: Sequence[str],
) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
        cores: how many workers there were.
        predicted: of sections ``section`` and ``error``, as `Prediction.as_json` gives them.
        memory: from `memory.peaks`; None where it was not measured.
        sections: those that were run.
    """
    found = judged_rates(samples, [one for one in asked(cores) if one.row.split("-")[0] in sections])
    if "batch" in sections:
        text = "fn.batch, workers=0: time above fn.batch alone, a row"
        found.append(judged(text, OVERHEAD_US, "µs", _overheads(samples), is_most=True))
    for key in PREDICTED:
        if key in sections:
            errors = [abs(one) for row in predicted if row["section"] == key for one in row["error"]]
            label = {"slow": "5 ms a row", "quick": "100 µs a row"}[key]
            text = f"{label}: the predicted duration is off by"
            found.append(judged(text, ERROR_PERCENT, "%", errors, is_most=True))
    few, many = ([], []) if memory is None else (row["mb"] for row in memory["rows"])
    more = [high - low for low, high in zip(few, many, strict=True)]
    return [*found, judged("memory, 10⁶ rows against 10⁴, more", MORE_MB, "MB", more, is_most=True)]


def _overheads(samples: Mapping[str, Sequence[Sample]]) -> list[float]:
    """Microseconds of a row, round by round."""
    stored, bare = (rates_by_round(samples.get(f"batch-{kind}", ())) for kind in ("alone", "bare"))
    return [1e6 * (1 / rate - 1 / bare[number]) for number, rate in stored.items() if number in bare]
