"""The indices that a loader will request next, for prefetchers."""

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
    """An iterator over a sampler's indices that can read indices before they are taken.  Thread-safe."""

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
        """Yield the sampler's items as arrays, int64 (N,).  The first item is the next item to be taken."""
        at = self._taken
        while (found := self._at(at)) is not None:
            at, given = found
            yield integers(given if hasattr(given, "__len__") else [given])

    def _at(self, at: int) -> tuple[int, Any] | None:
        """Return a pair: ``at`` + 1, and the sampler's item number ``at``.  If this item was already taken,
        use the next item that was not taken, and its number.  Return None after the last item."""
        with self._lock:
            at = max(at, self._taken)
            if at - self._taken < len(self._seen):
                return at + 1, self._seen[at - self._taken]
            if self._error is not None:
                return None
            try:
                given = next(self._sampler)
            except BaseException as error:  # also StopIteration; ``__next__`` raises it later
                self._error = DeferredError(error)
                return None
            self._seen.append(given)
            return at + 1, given


@dataclass(eq=False)
class UpcomingIndices:
    """The indices of the rest of an epoch and, if they are known, of the next epoch.

    Attributes:
        ours: the batches of each epoch if they depend only on the epoch, else None.  If ``ours`` is given,
            the next epoch's indices are also known.
        now: the position in the epoch's order of all ranks up to which batches were requested.
        peeked: the sampler's indices if ``ours`` is None.  None if the sampler must not be called early.
        by: the seed and the epoch from which the samples' random numbers are made.  None if unknown.
        goes_on: whether the random numbers of the next epoch are made from the same seed and the next number.
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
        """Yield pairs: the number of epochs after the current epoch (0 or 1), and an array of indices."""
        if self.ours is not None:
            for later, start in ((0, self._start), (1, 0)):
                for indices, _ in self.ours.indices(self.epoch + later, start):
                    yield later, np.array(indices, np.int64)
        elif self.peeked is not None:
            yield from ((0, indices) for indices in self.peeked.upcoming())

    def drawn_by(self, later: int = 0) -> tuple[int, int] | None:
        """Return the seed and the epoch from which the random numbers of the epoch ``later`` epochs after
        this epoch are made.  Return None if they are unknown."""
        if self.by is None or (later and not self.goes_on):
            return None
        return self.by[0], self.by[1] + later

    @property
    def count(self) -> int:
        """Number of samples of an epoch, on all ranks."""
        return 0 if self.ours is None else self.ours.count

    def whole(self, later: int) -> Int64Array:
        """Return the indices of all ranks, int64 (N,), in the order of the epoch ``later`` epochs ahead."""
        assert self.ours is not None
        return self.ours.order(self.epoch + later)

    def tag(self) -> bytes:
        """Return a digest of the settings that define the order.  The digest is the same for all epochs."""
        ours = self.ours
        assert ours is not None
        option = None if ours.arrangement is None else ours.arrangement.option
        return hashlib.blake2b(repr((ours.count, ours.seed, option)).encode(), digest_size=16).digest()


class Prefetcher(Protocol):
    """An object that fetches data before batches need them."""

    def begin_epoch(self, upcoming: UpcomingIndices) -> None:
        """Prepare for an epoch with these upcoming indices."""

    def requested(self, indices: Sequence[int]) -> None:
        """Note that a batch with these indices was requested."""
