"""Which part of each batch's images a device decodes: a given number, or what is found to be best."""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Literal, Protocol

_log = logging.getLogger("fastpipe.torch")

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_SECONDS = 1.0  # for all of them
_LEAST = 4  # batches of each
_KEEPS_UP = 0.02  # of the time from batch to batch that is waited at most by a step that needs no device
_BETTER = 0.97  # of another's time from batch to batch, for a larger share to be worth the device's time


class Share(Protocol):
    """Says which part of a batch is decoded on a device."""

    def begin(self) -> float:
        """That of a batch that begins, from 0 to 1."""

    def given(self, share: float) -> None:
        """Hear that a batch of that share is handed out."""

    def waited(self, seconds: float) -> None:
        """Hear how long the script waited for the batch that was handed out last."""

    def describe(self) -> str:
        """The share, and why, in a few words; empty where all is decoded there."""


def takes(share: float, number: int) -> bool:
    """Whether a sample of this number in its batch is of a share: evenly among the others.

    >>> [number for number in range(8) if takes(0.25, number)]
    [3, 7]
    """
    return int((number + 1) * share) > int(number * share)


def new_share(share: float | Literal["auto"]) -> Share:
    """The share that is asked for."""
    return MeasuredShare() if share == "auto" else GivenShare(share)


class GivenShare:
    """A share that does not change."""

    def __init__(self, share: float) -> None:
        self._share = share

    def begin(self) -> float:
        """The share."""
        return self._share

    def given(self, share: float) -> None:
        """Nothing is learnt from that."""

    def waited(self, seconds: float) -> None:
        """Nor from that."""

    def describe(self) -> str:
        """The share."""
        return "" if self._share == 1 else f"{self._share:.0%} of each batch"


class MeasuredShare:
    """The share with which batches follow each other fastest.

    What the CPU has left beside a training, and what a device's decoding takes of its steps, shows in one
    figure: the time from one batch to the next, as the script's own step asks for them.  That is measured for
    about a second, share after share, and its median decides, so that a pause between epochs does not count.
    Where the CPU alone keeps up, nothing else is tried; where a larger share is not clearly better it is not
    taken, since the step has the device for itself then.

    Args:
        seconds: for which is measured, and longer where batches are slow.
        clock: seconds, from any moment.
    """

    def __init__(self, seconds: float = _SECONDS, clock: Callable[[], float] = perf_counter) -> None:
        self._seconds, self._clock = seconds / len(_SHARES), clock
        self._lock = threading.Lock()
        self._times: dict[float, list[float]] = {share: [] for share in _SHARES}
        self._waited = 0.0
        self._now: float | None = _SHARES[0]  # what is measured
        self._best = 1.0
        self._last: float | None = None  # when the batch before was given, if it was of this share
        self._is_first = True  # the first of a share was made beside others

    def begin(self) -> float:
        """The share of the next batch."""
        with self._lock:
            return self._best if self._now is None else self._now

    def given(self, share: float) -> None:
        """Count the time since the batch before."""
        with self._lock:
            if self._now is None or share != self._now:
                return
            now, last = self._clock(), self._last
            self._last = now
            if last is None:
                return
            if self._is_first:
                self._is_first = False
                return
            times = self._times[share]
            times.append(now - last)
            if len(times) >= _LEAST and sum(times) >= self._seconds:
                self._go_on(share)

    def waited(self, seconds: float) -> None:
        """Count it, where it is of a batch that was counted."""
        with self._lock:
            if self._now is not None and self._times[self._now]:
                self._waited += seconds

    def describe(self) -> str:
        """What was measured."""
        with self._lock:
            if self._now is not None:
                return "the share of each batch is being measured"
            times = {share: statistics.median(times) for share, times in self._times.items() if times}
        found = ", ".join(f"{share:.0%} → {1e3 * seconds:.1f} ms" for share, seconds in times.items())
        return f"{self._best:.0%} of each batch, by the time from batch to batch: {found}"

    def _go_on(self, share: float) -> None:
        """Measure the next share, or decide."""
        keeps_up = share == 0 and self._waited < _KEEPS_UP * sum(self._times[share])
        rest = _SHARES[_SHARES.index(share) + 1 :]
        self._waited, self._last, self._is_first = 0.0, None, True
        if rest and not keeps_up:
            self._now = rest[0]
            return
        medians = {share: statistics.median(times) for share, times in self._times.items() if times}
        fastest = min(medians.values())
        self._now, self._best = None, next(s for s, time in medians.items() if _BETTER * time <= fastest)
        reason = ": the CPU keeps up" if keeps_up else ""
        _log.info(
            "gpu_share=%g%s (seconds from batch to batch, by share: %s)", self._best, reason,
            {share: round(time, 4) for share, time in medians.items()},
        )  # fmt: skip
