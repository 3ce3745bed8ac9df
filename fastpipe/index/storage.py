"""The samples of a dataset as a few flat arrays.

A list of a million ``(path, class)`` tuples is two million Python objects.  A forked worker
that reads them writes their reference counts, and so copies the memory pages they lie in;
pickling them for a spawned worker takes seconds.  The classes here keep the same values in
two or three buffers and make the Python objects when they are asked for.

They never change; ``fastpipe.index.tables`` puts a list's methods around them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "FrozenSamples",
    "FrozenTargets",
    "Packed",
    "PackedPaths",
    "Sample",
    "pack_paths",
    "packed_paths",
    "paths_of",
]

Sample = tuple[str, int]
Int64Array = npt.NDArray[np.int64]

# Items made at a time while iterating: enough to pay for the slicing, small in memory.
_CHUNK = 1024


class Packed(NamedTuple):
    """Several paths in one block of bytes; ``lengths`` is an int64 array (N,) of bytes in each."""

    block: bytes | memoryview
    lengths: Int64Array


def pack_paths(prefix: str, names: Sequence[str]) -> Packed:
    """Put ``prefix + name`` of all names into one block of bytes.

    The encoding is UTF-8 with ``surrogatepass``: it can hold every Python string, also the
    ones that ``os.fsdecode`` makes of names that are not UTF-8, and unlike ``os.fsencode``
    it does not depend on the locale of the process that reads it.

    Args:
        prefix: what all paths begin with; may be empty.
        names: the rest of each path.

    Returns:
        The bytes, and the length of each path in them.

    >>> pack_paths("a/", ["x", "yz"])
    Packed(block=b'a/xa/yz', lengths=array([3, 4]))
    """
    if not names:
        return Packed(b"", np.zeros(0, dtype=np.int64))
    # One join and one encode for all names of a folder is what makes the scan cheap.
    block = (prefix + prefix.join(names)).encode("utf-8", "surrogatepass")
    if block.isascii():
        lengths = np.fromiter(map(len, names), dtype=np.int64, count=len(names))
        return Packed(block, lengths + len(prefix))
    sizes = (len((prefix + name).encode("utf-8", "surrogatepass")) for name in names)
    return Packed(block, np.fromiter(sizes, dtype=np.int64, count=len(names)))


class FrozenSamples(Sequence[Sample]):
    """A sequence of ``(path, class index)`` tuples in three buffers.

    Args:
        arena: what follows the prefix in each path, encoded, one after the other (see ``pack_paths``).
        offsets: int64 (N + 1,): path ``i`` is ``prefix + arena[offsets[i]:offsets[i + 1]]``.
        targets: int64 (N,): the class indices.
        prefix: what all paths begin with, kept once.
    """

    def __init__(self, arena: bytes, offsets: Int64Array, targets: Int64Array, prefix: str = "") -> None:
        self.prefix = prefix
        self.arena = arena
        self.offsets = _read_only(offsets)
        self.targets = _read_only(targets)

    @classmethod
    def from_items(cls, items: Sequence[Any]) -> FrozenSamples | None:
        """Freeze items, or return None if one is not exactly a (str, int64) tuple."""
        for item in items:
            if type(item) is not tuple or len(item) != 2 or type(item[0]) is not str:
                return None
        targets = FrozenTargets.from_items([item[1] for item in items])
        if targets is None:
            return None
        paths = pack_paths("", [item[0] for item in items])
        return cls(bytes(paths.block), offsets_of(paths.lengths), targets.array)

    def path(self, position: int) -> str:
        """Path of a sample; ``position`` must be from 0 to N - 1."""
        start = self.offsets.item(position)
        stop = self.offsets.item(position + 1)
        return self.prefix + self.arena[start:stop].decode("utf-8", "surrogatepass")

    @cached_property
    def is_of_file_system(self) -> bool:
        """Whether the arena holds paths as ``os.fsencode`` encodes them."""
        if self.arena.isascii():
            return True
        if sys.getfilesystemencoding() != "utf-8":
            return False
        try:
            self.arena.decode("utf-8")  # without surrogates, which the two encode differently
        except UnicodeDecodeError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.targets)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.path(index), self.targets.item(index)

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), _CHUNK):
            offsets = self.offsets[start : start + _CHUNK + 1].tolist()
            targets = self.targets[start : start + _CHUNK].tolist()
            for i, target in enumerate(targets):
                path = self.arena[offsets[i] : offsets[i + 1]].decode("utf-8", "surrogatepass")
                yield self.prefix + path, target

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenSamples):
            return NotImplemented
        if not np.array_equal(self.targets, other.targets):
            return False
        if self.prefix != other.prefix:  # the same paths may be cut elsewhere
            return all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return np.array_equal(self.offsets, other.offsets) and self.arena == other.arena

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenSamples:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.arena, self.offsets, self.targets, self.prefix)


class FrozenTargets(Sequence[int]):
    """A sequence of Python ints in one int64 array (N,)."""

    def __init__(self, array: Int64Array) -> None:
        self.array = _read_only(array)

    @classmethod
    def from_items(cls, items: Sequence[Any]) -> FrozenTargets | None:
        """Freeze items, or return None if one is not exactly an int in the range of int64."""
        if any(type(item) is not int for item in items):
            return None
        try:
            return cls(np.array(items, dtype=np.int64))
        except OverflowError:
            return None

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.array[index].tolist() if isinstance(index, slice) else self.array.item(index)

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), _CHUNK):
            yield from self.array[start : start + _CHUNK].tolist()

    def __contains__(self, value: object) -> bool:
        return self.count(value) > 0

    def count(self, value: object) -> int:
        """How many items equal ``value``."""
        # Comparing arrays equals comparing ints only where no value is rounded on the way.
        if type(value) is int and -(2**63) <= value < 2**63:
            return int(np.count_nonzero(self.array == value))
        return sum(item == value for item in self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenTargets):
            return NotImplemented
        return np.array_equal(self.array, other.array)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenTargets:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.array,)


def offsets_of(lengths: Int64Array) -> Int64Array:
    """Where each path begins, and where the last one ends: int64 (N + 1,)."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _read_only(array: Int64Array) -> Int64Array:
    """A view that cannot be written, so that it can be handed out and shared."""
    view: Int64Array = array.view()
    view.flags.writeable = False
    return view


class PackedPaths(NamedTuple):
    """Path ``i`` is ``prefix + arena[starts[i]:ends[i]]``, encoded as the file system takes it."""

    prefix: bytes
    arena: bytes
    starts: Int64Array
    ends: Int64Array


def paths_of(samples: Any, positions: Int64Array) -> PackedPaths:
    """The paths of some samples, without a Python object for each where they are stored flat.

    Args:
        samples: a ``FrozenSamples``, or a sequence of (path, target).
        positions: int64 (N,), from 0.
    """
    if isinstance(samples, FrozenSamples) and samples.is_of_file_system:
        starts, ends = samples.offsets[positions], samples.offsets[positions + 1]
        return PackedPaths(os.fsencode(samples.prefix), samples.arena, starts, ends)
    return packed_paths([samples[position][0] for position in positions.tolist()])


def packed_paths(paths: Sequence[Any]) -> PackedPaths:
    """Paths that are Python objects, in one piece of memory."""
    names = [os.fsencode(path) for path in paths]
    lengths = np.array([len(name) for name in names], np.int64)
    ends = np.cumsum(lengths)
    return PackedPaths(b"", b"".join(names), ends - lengths, ends)
