"""What a training step waits for its batches: steps that take a given time, by a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Timeline", "timeline_of"]


@dataclass(frozen=True)
class Timeline:
    """The steps of an epoch, or of its beginning.

    Attributes:
        wait_s: of each step, how long it waited for its batch.
        busy_s: of each step, how long it took.
        end_s: how long it was waited for the epoch's end, after the last.
    """

    wait_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    end_s: float = 0.0

    @property
    def total_s(self) -> float:
        """From asking for an iterator on."""
        return sum(self.wait_s) + sum(self.busy_s) + self.end_s

    @property
    def share(self) -> float:
        """The part of the time in which there was nothing to do."""
        return (sum(self.wait_s) + self.end_s) / self.total_s

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        waits, busy = ([round(one, 5) for one in times] for times in (self.wait_s, self.busy_s))
        return {
            "wait_s": waits,
            "busy_s": busy,
            "total_s": round(self.total_s, 5),
            "share": round(self.share, 4),
        }


def timeline_of(batches: Iterable[Any], busy_s: Callable[[Any], float], steps: int | None = None) -> Timeline:
    """Go through batches, and sleep for the time of a step after each, as a device would compute.

    Args:
        batches: a loader.
        busy_s: the time of a step, of its batch.
        steps: how many; all of an epoch if none is given.
    """
    waits, busy, end = list[float](), list[float](), 0.0
    asked = time.perf_counter()
    iterator = iter(batches)
    while steps is None or len(waits) < steps:
        batch = next(iterator, None)
        got = time.perf_counter()
        if batch is None:
            end = got - asked
            break
        waits.append(got - asked)
        time.sleep(busy_s(batch))
        asked = time.perf_counter()
        busy.append(asked - got)
    return Timeline(tuple(waits), tuple(busy), end)
