"""Decoded chunks that will probably be wanted again soon: a batch seldom takes all of a chunk's samples."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Decoded", "RecentChunks"]

UInt8Array = npt.NDArray[np.uint8]


def new_memory(nbytes: int) -> UInt8Array:
    """Uninitialised memory: uint8 (nbytes,)."""
    return np.empty(nbytes, np.uint8)


class Decoded(NamedTuple):
    """A decoded chunk.

    Attributes:
        data: uint8 (N,).
        address: of its memory, which takes NumPy longer to tell than a kernel to copy a sample.
    """

    data: UInt8Array
    address: int

    @classmethod
    def of(cls, data: UInt8Array) -> Decoded:
        """A chunk in this memory."""
        return cls(data, data.__array_interface__["data"][0])


class _Chunk:
    """A chunk that is decoded, or is being decoded by the thread that has the lock."""

    __slots__ = ("counted", "left", "lock", "made")

    def __init__(self, samples: int) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()  # by who makes this object, to decode it
        self.made: Decoded | None = None
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

    def expect(self, keys: Iterable[Hashable]) -> list[bool]:
        """Hear that chunks are about to be asked for; for each, whether it is there or was on its way."""
        found = []
        for key in keys:
            is_there = key in self._chunks or key in self._expected
            if not is_there:
                self._expected.add(key)
            found.append(is_there)
        return found

    def count(self, decoded: int, used: float) -> None:
        """Count bytes of chunks: those decoded, and their share that was taken."""
        with self._lock:
            self.decoded_nbytes += decoded
            self.used_nbytes += used

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are kept."""
        return self._nbytes

    def get(
        self,
        keys: Sequence[Hashable],
        taken: Sequence[int],
        samples: Sequence[int],
        decode: Callable[[list[int]], Sequence[UInt8Array]],
    ) -> list[Decoded]:
        """Decoded chunks.

        Args:
            keys: which; each once.
            taken: how many of the samples of each the caller takes.
            samples: how many it has.
            decode: makes those at these places among the keys; its errors are raised here.
        """
        found: list[_Chunk | None] = []  # None: nobody else will want it
        mine = []
        with self._lock:
            for place, key in enumerate(keys):
                self._expected.discard(key)
                chunk = self._chunks.get(key)
                if chunk is not None:
                    self._chunks.move_to_end(key)
                else:
                    mine.append(place)
                    if taken[place] < samples[place]:
                        chunk = self._chunks[key] = _Chunk(samples[place])
                if chunk is not None:
                    chunk.left -= taken[place]
                    if chunk.left <= 0:
                        self._drop(key)  # who waits for it has it
                found.append(chunk)
        own = dict(zip(mine, self._decoded(mine, keys, found, decode), strict=True))
        decoded, used = sum(chunk.data.nbytes for chunk in own.values()), 0.0
        chunks = []
        for place, chunk in enumerate(found):
            made = own.get(place) if chunk is None or chunk.made is None else chunk.made
            if made is None:
                assert chunk is not None
                made = self._waited_for(chunk, place, decode)
            used += made.data.nbytes * taken[place] / samples[place]
            chunks.append(made)
        self.count(decoded, used)  # both at once: whoever compares them in between is not misled
        return chunks

    def _decoded(
        self,
        mine: list[int],
        keys: Sequence[Hashable],
        found: Sequence[_Chunk | None],
        decode: Callable[[list[int]], Sequence[UInt8Array]],
    ) -> Sequence[Decoded]:
        """Decode the chunks that this call has found missing, and remember them."""
        if not mine:
            return ()
        chunks = [(keys[place], found[place]) for place in mine]
        try:
            made = []
            for data, (_, chunk) in zip(decode(mine), chunks, strict=True):
                if chunk is None:
                    made.append(Decoded.of(data))
                else:
                    chunk.made = Decoded.of(_own(data))
                    made.append(chunk.made)
            with self._lock:
                for key, chunk in chunks:
                    if chunk is not None and chunk.made is not None and self._chunks.get(key) is chunk:
                        chunk.counted = chunk.made.data.nbytes
                        self._nbytes += chunk.counted
                while self._nbytes > self.max_bytes and self._chunks:
                    self._drop(next(iter(self._chunks)))
        except BaseException:
            with self._lock:
                for key, chunk in chunks:
                    if chunk is not None and self._chunks.get(key) is chunk:
                        self._drop(key)
            raise
        finally:
            for _, chunk in chunks:
                if chunk is not None:
                    chunk.lock.release()
        return made

    def _waited_for(
        self, chunk: _Chunk, place: int, decode: Callable[[list[int]], Sequence[UInt8Array]]
    ) -> Decoded:
        with chunk.lock:
            if chunk.made is None:  # who was to decode it has failed
                (data,) = decode([place])
                chunk.made = Decoded.of(data)
                with self._lock:
                    self.decoded_nbytes += data.nbytes
            return chunk.made

    def _drop(self, key: Hashable) -> None:
        self._nbytes -= self._chunks.pop(key).counted


def _own(data: UInt8Array) -> UInt8Array:
    """A chunk in memory of its own: one of a block of many would keep all of them."""
    return data.copy() if getattr(data.base, "nbytes", 0) > data.nbytes else data
