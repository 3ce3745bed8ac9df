"""Decoded chunks that will probably be wanted again soon: a batch seldom takes all of a chunk's samples."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

__all__ = ["RecentChunks"]

UInt8Array = npt.NDArray[np.uint8]


def new_memory(nbytes: int) -> UInt8Array:
    """Uninitialised memory: uint8 (nbytes,)."""
    return np.empty(nbytes, np.uint8)


class _Chunk:
    """A chunk that is decoded, or is being decoded by the thread that has the lock."""

    __slots__ = ("counted", "data", "left", "lock")

    def __init__(self, samples: int) -> None:
        self.lock = threading.Lock()
        self.data: UInt8Array | None = None
        self.left = samples  # of its samples, that nobody has taken yet
        self.counted = 0  # bytes, of those that are kept


class RecentChunks:
    """Keeps decoded chunks until each of their samples was taken, or too many others have come since.

    Where every sample is taken once, as in an epoch, what is dropped when all were taken is not
    wanted again.  Of threads that want the same chunk at once, one decodes it and the others wait.

    Args:
        max_bytes: the most to keep.
        allocate: memory for a chunk of so many bytes; aligned to 8.

    Attributes:
        max_bytes, allocate: as given.
        decoded_nbytes: bytes of all chunks that were decoded so far.
        used_nbytes: of these, the share of the samples that were taken.
    """

    def __init__(self, max_bytes: int, allocate: Callable[[int], UInt8Array] = new_memory) -> None:
        self.max_bytes, self.allocate = max_bytes, allocate
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Hashable, _Chunk] = OrderedDict()
        self._expected: set[Hashable] = set()
        self._nbytes = 0
        self.decoded_nbytes, self.used_nbytes = 0, 0.0

    def expect(self, key: Hashable) -> bool:
        """Hear that a chunk is about to be asked for; whether it is there, or was on its way already."""
        if key in self._chunks or key in self._expected:
            return True
        self._expected.add(key)
        return False

    def count(self, decoded: int, used: float) -> None:
        """Count bytes of a chunk that is kept elsewhere."""
        with self._lock:
            self.decoded_nbytes += decoded
            self.used_nbytes += used

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are kept."""
        return self._nbytes

    def get(self, key: Hashable, decode: Callable[[], UInt8Array], taken: int, samples: int) -> UInt8Array:
        """A decoded chunk.

        Args:
            key: which.
            decode: makes it; its errors are raised here.
            taken: how many of its samples the caller takes.
            samples: how many it has.
        """
        with self._lock:
            self._expected.discard(key)
            chunk = self._chunks.get(key)
            if chunk is None:
                if taken >= samples:
                    chunk = _Chunk(0)  # nobody else will want it
                else:
                    chunk = self._chunks[key] = _Chunk(samples)
            else:
                self._chunks.move_to_end(key)
            chunk.left -= taken
            if chunk.left <= 0 and self._chunks.get(key) is chunk:
                self._drop(key)  # who waits for it has it
        with chunk.lock:
            data = chunk.data
            if data is not None:
                self.used_nbytes += data.nbytes * taken / samples  # roughly: nobody else is kept waiting
                return data
            try:
                data = chunk.data = decode()
            except BaseException:
                with self._lock:
                    if self._chunks.get(key) is chunk:
                        self._drop(key)
                raise
        with self._lock:
            self.decoded_nbytes += data.nbytes
            self.used_nbytes += data.nbytes * taken / samples
            if self._chunks.get(key) is chunk:
                chunk.counted = data.nbytes
                self._nbytes += chunk.counted
                while self._nbytes > self.max_bytes and self._chunks:
                    self._drop(next(iter(self._chunks)))
        return data

    def _drop(self, key: Hashable) -> None:
        self._nbytes -= self._chunks.pop(key).counted
