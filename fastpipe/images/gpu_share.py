"""The fraction of each batch's images that a GPU decodes (its share): given, or the fastest measured."""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Literal

_log = logging.getLogger("fastpipe.torch")

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_SECONDS = 1.0  # the time for measuring all shares
_LEAST = 4  # the minimum number of batches for each share
_KEEPS_UP = 0.02  # the CPU keeps up if waits are at most this fraction of the time between batches
_BETTER = 0.97  # a larger share must reach this fraction of the time that another share takes between batches


def takes(share: float, number: int) -> bool:
    """Return whether a GPU that decodes the fraction ``share`` of a batch decodes the sample ``number``. The
    samples that the GPU decodes are spread evenly over the batch.

    >>> [number for number in range(8) if takes(0.25, number)]
    [3, 7]
    """
    return int((number + 1) * share) > int(number * share)


class Share:
    """The fraction of each batch that a GPU decodes (its share): a given fraction, or the fastest.

    The fastest share is the share with the shortest time from one batch to the next, as the training script
    requests batches.  This time depends on the CPU time that training leaves for decoding, and on the GPU
    time that decoding takes from training steps.  Several shares are measured one after the other, for
    ``seconds`` in all, or longer if batches are slow.  The medians of these times are compared, so that
    pauses between epochs do not count.  If the CPU keeps up without the GPU, no other share is tried.  A
    larger share is chosen only if it is clearly faster, because a smaller share leaves more of the GPU to
    training.
    """

    def __init__(
        self,
        share: float | Literal["auto"],
        seconds: float = _SECONDS,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._seconds, self._clock = seconds / len(_SHARES), clock
        self._lock = threading.Lock()
        self._times: dict[float, list[float]] = {one: [] for one in _SHARES}
        self._waited = 0.0
        self._now = _SHARES[0] if share == "auto" else None  # the share being measured
        self._best = 1.0 if share == "auto" else share
        self._last: float | None = None  # when the previous batch was delivered, if it had this share
        self._is_first = True  # the first batch of a share is made together with batches of another share

    def begin(self) -> float:
        """Return the share of the next batch, from 0 to 1."""
        with self._lock:
            return self._best if self._now is None else self._now

    def given(self, share: float) -> None:
        """Record that a batch with this share was delivered."""
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
        """Record how long the script waited for the last delivered batch."""
        with self._lock:
            if self._now is not None and self._times[self._now]:
                self._waited += seconds

    def describe(self) -> str:
        """Return the share and the reason in a few words; return "" if the GPU decodes everything."""
        with self._lock:
            if self._now is not None:
                return "the share of each batch is being measured"
            times = {share: statistics.median(times) for share, times in self._times.items() if times}
        if not times:
            return "" if self._best == 1 else f"{self._best:.0%} of each batch"
        found = ", ".join(f"{share:.0%} → {1e3 * seconds:.1f} ms" for share, seconds in times.items())
        return f"{self._best:.0%} of each batch, by the time from batch to batch: {found}"

    def _go_on(self, share: float) -> None:
        """Measure the next share, or choose the best share if no share is left to measure."""
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
