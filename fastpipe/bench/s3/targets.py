"""What was asked of fastpipe for buckets, as figures, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastpipe.bench.runner import Sample
from fastpipe.bench.targets import Asked, judged, judged_rates

__all__ = ["ASKED", "targets"]

MOST_STALL, MOST_REFETCHED = 5.0, 55.0  # %

ASKED = (
    Asked("first epoch with a stage, × the tuned rclone mount", "first-stage", "first-replaced", 2),
    Asked("first epoch with a stage, × the s3fs-fuse mount", "first-stage", "first-s3fs", 15),
    Asked("fetched in order, × obstore alone at its best", "fetch-ahead", "fetch-replaced", 0.85),
    Asked("later epochs, × the local folder", "later-stage", "later-replaced", 0.95),
)


def targets(
    samples: Mapping[str, Sequence[Sample]],
    stall: Mapping[str, Any] | None,
    refetch: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
        stall: from `stall.stalls`; None where it was not measured.
        refetch: from `refetched.refetched`; None where it was not measured.
    """
    rows = [] if stall is None else stall["rows"]
    waited = [100 * share for row in rows if row["key"] == "first-stage" for share in row["raw"]]
    again = [] if refetch is None else [100 * share for share in refetch["raw"]]
    return [
        *judged_rates(samples, ASKED),
        judged("part of the first epoch that a step at 300 images/s waits", MOST_STALL, "%", waited,
               is_most=True),
        judged("part of the objects that a stage of half the size downloads again", MOST_REFETCHED, "%",
               again, is_most=True),
    ]  # fmt: skip
