"""Upcoming indices, for prefetchers."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.torch.delivery import DeferredError
from fastpipe.torch.samplers import EpochBatches
from fastpipe.torch.wrappers import integers

Int64Array = npt.NDArray[np.int64]


class PeekedIndices(Iterator[Any]):
    """A sampler's indices, which can be read before they are taken.  Thread-safe."""

    def __init__(self, sampler: Iterator[Any]) -> None:
        self._sampler = sampler
        self._lock = threading.Lock()
        self._seen: deque[Any] = deque()  # read but not taken
        self._taken = 0
        self._error: DeferredError | None = None

    def __next__(self) -> Any:
        with self._lock:
            if self._seen:
                self._taken += 1
                return self._seen.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise error.take()
            found = next(self._sampler)
            self._taken += 1
            return found

    def upcoming(self) -> Iterator[Int64Array]:
        """Yield indices as int64 (N,), from the next one to take."""
        at = self._taken
        while (found := self._at(at)) is not None:
            at, given = found
            yield integers(given if hasattr(given, "__len__") else [given])

    def _at(self, at: int) -> tuple[int, Any] | None:
        """Return the item at a place, or the next one to take, and the place after it; None at the end."""
        with self._lock:
            at = max(at, self._taken)
            if at - self._taken < len(self._seen):
                return at + 1, self._seen[at - self._taken]
            if self._error is not None:
                return None
            try:
                given = next(self._sampler)
            except BaseException as error:  # raised when the item is taken; includes a sampler's end
                self._error = DeferredError(error)
                return None
            self._seen.append(given)
            return at + 1, given


@dataclass(eq=False)
class UpcomingIndices:
    """The rest of an epoch, and the next one as far as it is known.

    Attributes:
        ours: the epochs' batches, if they are a function of the epoch; the next epoch's are then known too.
        now: how much of the order of all ranks was requested.
        peeked: otherwise the sampler's indices; None if the sampler must not be called early.
        by: seed and epoch that the epoch's samples are drawn with; None if unknown.
        goes_on: the next epoch's samples are drawn with the same seed, and the next number.
    """

    ours: EpochBatches | None
    epoch: int
    now: int
    peeked: PeekedIndices | None
    by: tuple[int, int] | None = None
    goes_on: bool = False

    def __post_init__(self) -> None:
        self._start = self.now

    def indices(self) -> Iterator[Int64Array]:
        return (indices for _, indices in self.parts())

    def parts(self) -> Iterator[tuple[int, Int64Array]]:
        """Yield the arrays of ``indices``, each with its number of epochs after this one."""
        if self.ours is not None:
            for later, start in ((0, self._start), (1, 0)):
                for indices, _ in self.ours.indices(self.epoch + later, start):
                    yield later, np.array(indices, np.int64)
        elif self.peeked is not None:
            yield from ((0, indices) for indices in self.peeked.upcoming())

    def drawn_by(self, later: int = 0) -> tuple[int, int] | None:
        """Return seed and epoch that samples of a later epoch are drawn with; None if unknown."""
        if self.by is None or (later and not self.goes_on):
            return None
        return self.by[0], self.by[1] + later

    @property
    def count(self) -> int:
        """Number of samples of an epoch, on all ranks."""
        return 0 if self.ours is None else self.ours.count

    def whole(self, later: int) -> Int64Array:
        """Return the order of all ranks in a later epoch: indices, int64 (N,)."""
        assert self.ours is not None
        return self.ours.order(self.epoch + later)

    def tag(self) -> bytes:
        """Return a digest of the order, the same in all epochs."""
        ours = self.ours
        assert ours is not None
        option = None if ours.arrangement is None else ours.arrangement.option
        return hashlib.blake2b(repr((ours.count, ours.seed, option)).encode(), digest_size=16).digest()


class Prefetcher(Protocol):
    """An object that prepares for upcoming requests."""

    def begin_epoch(self, upcoming: UpcomingIndices) -> None:
        """Handle the beginning of an epoch with these indices."""

    def requested(self, indices: Sequence[int]) -> None:
        """Handle the request of a batch of these indices."""
