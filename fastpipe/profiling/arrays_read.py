"""Which arrays of HDF5 files a dataset reads, and how much of them for a sample."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fastpipe.profiling.observed import observe

__all__ = ["ArrayRead", "ArrayReads"]

_MOST_READS = 256  # that are looked at: a dataset reads the same arrays for each sample


class ArrayRead(NamedTuple):
    """An array that is read.

    Attributes:
        file, name: of the HDF5 file, and of the dataset in it.
        shape, part: of the whole, and of what one read takes.
        chunks: shape of its chunks; None where it has none.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    chunks: tuple[int, ...] | None

    @property
    def sample_dims(self) -> int | None:
        """Dimensions that count samples, if a read takes one: the part has the others, whole; else None."""
        count = len(self.shape) - len(self.part)
        return count if count > 0 and self.shape[count:] == self.part else None

    @classmethod
    def from_json(cls, content: list[Any]) -> ArrayRead:
        """From what a JSON file makes of it."""
        file, name, shape, part, chunks = content
        return cls(file, name, tuple(shape), tuple(part), None if chunks is None else tuple(chunks))


class ArrayReads:
    """Sees what h5py's datasets are asked for, until enough was seen.

    >>> import h5py
    >>> path = getfixture("tmp_path") / "x.h5"
    >>> with h5py.File(path, "w") as file, ArrayReads() as reads:
    ...     file["x"] = [[1, 2], [3, 4]]
    ...     _ = file["x"][1]
    >>> [(read.name, read.shape, read.part) for read in reads.found]
    [('/x', (2, 2), (2,))]
    """

    def __init__(self) -> None:
        self.found: list[ArrayRead] = []
        self._count = 0
        self._end: Callable[[], None] | None = None

    def begin(self) -> None:
        """Look, if h5py is loaded; or do so when this is called again."""
        if self._end is None and not self._count and "h5py" in sys.modules:
            self._end = observe(sys.modules["h5py"].Dataset, "__getitem__", self._see)

    def end(self) -> None:
        """Look no more."""
        if self._end is not None:
            self._end()
            self._end = None

    def __enter__(self) -> ArrayReads:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _see(self, value: Any, dataset: Any, *_: Any, **__: Any) -> None:
        self._count += 1
        if self._count >= _MOST_READS:
            self.end()
        part = getattr(value, "shape", ())
        file = os.path.realpath(os.fsdecode(dataset.file.filename))
        read = ArrayRead(file, dataset.name, tuple(dataset.shape or ()), tuple(part), dataset.chunks)
        if read not in self.found:
            self.found.append(read)
