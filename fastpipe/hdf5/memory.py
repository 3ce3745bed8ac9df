"""Memory for decoded chunks of which samples are still to come: a batch seldom takes all of a chunk's.

In one process threads share it; the worker processes of a loader share the chunks of a window, as each makes
other batches of the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from fastpipe.core.shared_chunks import UnitFile, private_units
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.kept import chunk_nbytes

__all__ = ["ChunkMemory", "SharedChunks"]

_log = logging.getLogger("fastpipe.cache")

_LEAST_NBYTES = 1 << 22  # of decoded chunks that are remembered: without a window there are few
_LEAST_SHARED = 1 << 15  # bytes of a chunk, below which sharing it takes longer than decoding it
_WHY = "worker processes decode their chunks each for itself: %s"


class _Chunks(NamedTuple):
    """Chunks of one size, of all datasets and files.

    Attributes:
        total: how many there are.
        first_keys: by file and dataset the number of its first one among them.
        in_group: of a group of samples, how many at most.
    """

    total: int
    first_keys: dict[tuple[int, int], int]
    in_group: int


def _sizes(files: SampleFiles, leading: int) -> dict[int, _Chunks]:
    """The chunks that have to be decoded, by their bytes.

    Args:
        files: whose chunks.
        leading: of whose datasets groups are counted.
    """
    found: dict[int, _Chunks] = {}
    samples = files.samples_in_group(leading)
    for number, file in enumerate(files.files):
        for place, layout in enumerate(file.layouts):
            if not layout.filters:
                continue
            nbytes, geometry = chunk_nbytes(layout), file.geometry(place)
            size = found.get(nbytes, _Chunks(0, {}, 0))
            size.first_keys[number, place] = size.total
            more = geometry.parts * -(-samples // max(geometry.group_size, 1)) if number == 0 else 0
            found[nbytes] = _Chunks(size.total + len(layout.offsets), size.first_keys, size.in_group + more)
    return found


class SharedChunks:
    """Memory for the chunks of a window, made by the parent of the worker processes that share it.

    Picklable, as ``UnitFile`` is.

    Args:
        files: whose chunks.
        leading: the dataset whose groups of samples are counted.
        groups: how many of these there is to be room for.
    """

    def __init__(self, files: SampleFiles, leading: int, groups: int) -> None:
        self._files: dict[int, UnitFile | None] = {}
        try:
            for nbytes, size in _sizes(files, leading).items():
                if nbytes >= _LEAST_SHARED and size.total:
                    self._files[nbytes] = UnitFile(size.total, max(1, groups * size.in_group), nbytes)
        except OSError as error:
            _log.info(_WHY, error)

    def opened(self) -> Iterator[tuple[int, Any]]:
        """For each size of chunks, in bytes, the ``native.UnitMemory`` of this process."""
        try:
            for nbytes, file in self._files.items():
                if file is not None:
                    yield nbytes, file.opened()
        except OSError as error:
            _log.info(_WHY, error)


class ChunkMemory:
    """The memory in one process.

    Args:
        files: whose chunks.
        leading: the dataset whose groups of samples are counted.
        groups: that are used at a time; 0 where samples come in any order.
        shared: what worker processes share, in one of several.

    Attributes:
        nbytes: of chunks that are remembered.
    """

    def __init__(
        self, files: SampleFiles, leading: int, groups: int, shared: SharedChunks | None = None
    ) -> None:
        self._sizes = _sizes(files, leading)
        self._units: dict[int, Any] = dict(shared.opened()) if shared is not None else {}
        self.nbytes = sum(nbytes * units.slots for nbytes, units in self._units.items())
        for nbytes, size in self._sizes.items():
            if nbytes in self._units or not size.total:
                continue
            few = max(4 * size.in_group, _LEAST_NBYTES // nbytes)
            slots = min(size.total, max(few, groups * size.in_group))
            try:
                self._units[nbytes] = private_units(size.total, slots, nbytes)
            except (OSError, ValueError, OverflowError):  # each batch decodes what it needs
                continue
            self.nbytes += slots * nbytes

    def of(self, number: int, place: int, nbytes: int) -> tuple[Any, int]:
        """The ``native.UnitMemory`` of a dataset's chunks, or None; and the number there of the first.

        Args:
            number, place: of the file, and of the dataset in it.
            nbytes: of a chunk.
        """
        size = self._sizes.get(nbytes)
        first = None if size is None else size.first_keys.get((number, place))
        return (None, 0) if first is None else (self._units.get(nbytes), first)
