"""Larger batches for a training step, tried where a step with its data at once takes most of the time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from fastpipe.core.text import in_duration
from fastpipe.errors import OptionError
from fastpipe.profiling.candidate import place_of
from fastpipe.profiling.device_memory import memory_for
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.replays import Replay
from fastpipe.profiling.resizing import resized, size_of
from fastpipe.profiling.watching import Watched

__all__ = ["Growth", "learning_rate_rule"]

_log = logging.getLogger("fastpipe.profile")
_FACTORS = (2, 4)
_GAIN = 1.25  # of samples a second with twice the batch: less is not worth other results


class Growth:
    """What a step does with more samples of the same batch.

    Args:
        batch: of the script's loader.
        instant_s: seconds of a step that has it at once.
    """

    def __init__(self, batch: Any, instant_s: float) -> None:
        self._batch, self._instant_s, self._size = batch, instant_s, size_of(batch)
        self._memory = memory_for(batch, None)
        self._left = list(_FACTORS)
        self._factor = 0
        self._seconds: dict[int, float] = {}

    def next(self) -> Iterator[Any] | None:
        """The next larger batch, again and again; None where there is no room, or no use, for it."""
        if not self._left or (self._factor and not self._was_worth_it()):
            return None
        most, limit = self._memory.most(), self._memory.limit
        self._factor = self._left.pop(0)
        if most is None or limit is None or self._factor * most > limit:
            return None
        try:
            larger = resized(self._batch, self._factor * self._size)
        except (OptionError, IndexError, TypeError):  # a batch of a kind that nobody knows
            return None
        return Replay(larger)

    def note(self, seconds: float) -> None:
        """A step with the last larger batch took so long."""
        self._seconds[self._factor] = seconds

    def failed(self, error: Exception) -> bool:
        """The step has raised; whether that may be for a larger batch."""
        if self._factor:
            _log.warning("not tried: a larger batch: %s: %s", type(error).__name__, error)
        return bool(self._factor)

    def close(self) -> None:
        """Let go of the batch."""
        self._batch = None

    def advice(self, watched: Watched, step_s: Callable[[float], float]) -> Iterator[Advice]:
        """The largest that is worth it.

        Args:
            watched: the loop.
            step_s: of a step that takes so long with data at once, how long one takes with the loader.
        """
        worth = [factor for factor, seconds in self._seconds.items() if self._gain(factor, seconds) > _GAIN]
        if not worth:
            return
        factor = max(worth, key=lambda one: self._gain(one, self._seconds[one]))
        size, seconds = self._size, self._seconds[factor]
        now, then = in_duration(self._instant_s), in_duration(seconds)
        yield Advice(
            f"batch_size={factor * size} in the place of {size}{place_of(watched)}; "
            f"{learning_rate_rule(factor)}",
            f"for as many samples; a step with {factor}× as many takes {then} in the place of {now}, both "
            "with data at once, and memory did for it",
            step_s(seconds / factor), seconds / factor,
        )  # fmt: skip

    def _gain(self, factor: int, seconds: float) -> float:
        return factor * self._instant_s / seconds if seconds else 0.0

    def _was_worth_it(self) -> bool:
        """Whether the last one did more samples a second than the one before it."""
        before = self._seconds.get(self._factor // 2, self._instant_s)
        now = self._seconds.get(self._factor)
        return now is not None and 2 * before / now > _GAIN


def learning_rate_rule(factor: float) -> str:
    """What is usually done to the learning rate where an update sees so many times the samples.

    >>> learning_rate_rule(4).startswith("learning rate × 4 for SGD")
    True
    """
    return (
        f"learning rate × {factor:g} for SGD (Goyal et al. 2017, arXiv:1706.02677), "
        f"× {math.sqrt(factor):.3g} for Adam (Malladi et al. 2022, arXiv:2205.10287)"
    )
