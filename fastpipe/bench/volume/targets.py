"""What was asked of fastpipe for volumes, as figures, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastpipe.bench.runner import Sample
from fastpipe.bench.targets import Asked, judged, judged_rates
from fastpipe.bench.volume.peers import COLD_PEERS

__all__ = ["ASKED", "targets"]

AMPLIFICATION = 2.0
MEMORY_ABOVE_MB = 300.0

ASKED = (
    Asked("cold, tour, × one worker with zarr-python", "cold-tour", "cold-replaced", 8),
    Asked("cold, any order, × one worker with zarr-python", "cold-uniform", "cold-replaced", 5),
    Asked("warm, × one worker with zarr-python", "warm-uniform", "warm-replaced", 60),
    Asked(
        "cold, tour, × the best peer in the same memory",
        "cold-tour",
        tuple(peer.key for peer in COLD_PEERS),
        2,
    ),
    Asked("warm, × slices of arrays in memory", "warm-uniform", "warm-slices", 0.9),
)


def targets(
    samples: Mapping[str, Sequence[Sample]],
    amplification: Mapping[str, Any] | None,
    memory: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
        amplification: from `amplification.amplifications`; None where it was not measured.
        memory: from `memory.memory_of_topologies`; None where it was not measured.
    """
    raw = [] if amplification is None else amplification["tour"]["raw"]
    rows = [] if memory is None else memory["rows"]
    above = [max(entry["above_mb"] - entry["budget_mb"] for entry in rows)] if rows else []
    decoded = "bytes decoded for each that is used, tour, a tenth of the volume remembered"
    text = "memory above that of loading nothing, less the budget, most of all"
    return [
        *judged_rates(samples, ASKED),
        judged(decoded, AMPLIFICATION, "×", raw, is_most=True),
        judged(text, MEMORY_ABOVE_MB, "MB", above, is_most=True),
    ]
