"""The indices to come, for what prepares for them."""

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
    """What a sampler gives, which can be looked at before it is taken.  From any threads."""

    def __init__(self, sampler: Iterator[Any]) -> None:
        self._sampler = sampler
        self._lock = threading.Lock()
        self._seen: deque[Any] = deque()  # looked at and not taken
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
        """Indices as int64 (N,), from the next to be taken on."""
        at = self._taken
        while (found := self._at(at)) is not None:
            at, given = found
            yield integers(given if hasattr(given, "__len__") else [given])

    def _at(self, at: int) -> tuple[int, Any] | None:
        """Return what is at a place, or next to be taken, and the place behind it; None at the end."""
        with self._lock:
            at = max(at, self._taken)
            if at - self._taken < len(self._seen):
                return at + 1, self._seen[at - self._taken]
            if self._error is not None:
                return None
            try:
                given = next(self._sampler)
            except BaseException as error:  # for who takes what comes there; a sampler's end as well
                self._error = DeferredError(error)
                return None
            self._seen.append(given)
            return at + 1, given


@dataclass(eq=False)
class UpcomingIndices:
    """The rest of an epoch, and the next one as far as it is known.

    Attributes:
        ours: the epochs' batches, where they are a function of the epoch: then the next one's are known too.
        now: how much of the order of all ranks was asked for.
        peeked: else what the sampler gives; None where it must not be asked early.
        by: seed and epoch by which the epoch's samples are drawn; None where that is not known.
        goes_on: the next epoch's are drawn by the same seed, and the next number.
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
        """Yield the same, each with the number of epochs from this one on."""
        if self.ours is not None:
            for later, start in ((0, self._start), (1, 0)):
                for indices, _ in self.ours.indices(self.epoch + later, start):
                    yield later, np.array(indices, np.int64)
        elif self.peeked is not None:
            yield from ((0, indices) for indices in self.peeked.upcoming())

    def drawn_by(self, later: int = 0) -> tuple[int, int] | None:
        """Return seed and epoch by which samples of a later epoch are drawn; None if unknown."""
        if self.by is None or (later and not self.goes_on):
            return None
        return self.by[0], self.by[1] + later

    @property
    def count(self) -> int:
        """Samples of an epoch, on all ranks."""
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
    """Prepares for what will be asked for."""

    def begin_epoch(self, upcoming: UpcomingIndices) -> None:
        """An epoch begins, with these indices."""

    def requested(self, indices: Sequence[int]) -> None:
        """A batch of these indices was requested."""
