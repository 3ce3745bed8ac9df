"""The ``samples`` and ``targets`` of a dataset: lists that are stored as flat arrays.

A table behaves like a Python list.  When a table is first changed, it is converted to a list internally.  So
a script may read and change ``dataset.samples`` as with torchvision.  An unchanged dataset needs almost no
memory and time in forked and spawned workers.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Self


# A list of a million ``(path, class)`` tuples consists of two million Python objects. A forked worker that
# reads the objects writes their reference counts, and thereby copies the memory pages that contain them.
# Pickling the objects for a spawned worker takes seconds. The classes of this module store the values in two
# or three buffers, and create Python objects only on access.

Sample = tuple[str, int]
Int64Array = npt.NDArray[np.int64]

# Number of items that an iterator creates at a time, which is fast and needs little memory.
_CHUNK = 1024


class Packed(NamedTuple):
    block: bytes | memoryview
    lengths: Int64Array


def pack_paths(prefix: str, names: Sequence[str]) -> Packed:
    """Join ``prefix + name`` of all names in one block of bytes.

    ``lengths``, int64 (N,), are the numbers of bytes of the joined strings.  The encoding is UTF-8 with
    ``surrogatepass``.  This encoding supports every Python string, including the strings that ``os.fsdecode``
    returns for names that are not UTF-8.  Unlike ``os.fsencode``, the encoding does not depend on the
    locale of a process.

    >>> pack_paths("a/", ["x", "yz"])
    Packed(block=b'a/xa/yz', lengths=array([3, 4]))
    """
    if not names:
        return Packed(b"", np.zeros(0, dtype=np.int64))
    # The scan is fast because all names of a folder are joined and encoded in one step.
    block = (prefix + prefix.join(names)).encode("utf-8", "surrogatepass")
    if block.isascii():
        lengths = np.fromiter(map(len, names), dtype=np.int64, count=len(names))
        return Packed(block, lengths + len(prefix))
    sizes = (len((prefix + name).encode("utf-8", "surrogatepass")) for name in names)
    return Packed(block, np.fromiter(sizes, dtype=np.int64, count=len(names)))


class FrozenSamples(Sequence[Sample]):
    """A sequence of ``(path, class index)`` tuples that are stored in three buffers.

    Path ``i`` is ``prefix + arena[offsets[i]:offsets[i + 1]]``, and its class index is ``targets[i]``.
    ``offsets`` and ``targets`` are int64.
    """

    def __init__(self, arena: bytes, offsets: Int64Array, targets: Int64Array, prefix: str = "") -> None:
        self.prefix = prefix
        self.arena = arena
        self.offsets = _read_only(offsets)
        self.targets = _read_only(targets)

    @classmethod
    def from_items(cls, items: Sequence[Any]) -> FrozenSamples | None:
        """Store items as arrays.  Return None if an item is not exactly a (str, int64) tuple."""
        for item in items:
            if type(item) is not tuple or len(item) != 2 or type(item[0]) is not str:
                return None
        targets = FrozenTargets.from_items([item[1] for item in items])
        if targets is None:
            return None
        return cls.from_columns([item[0] for item in items], targets.array)

    @classmethod
    def from_columns(cls, paths: Sequence[str], targets: Int64Array) -> FrozenSamples:
        packed = pack_paths("", paths)
        return cls(bytes(packed.block), offsets_of(packed.lengths), targets)

    def path(self, position: int) -> str:
        """Return the path of a sample.  ``position`` must be from 0 to N - 1."""
        start = self.offsets.item(position)
        stop = self.offsets.item(position + 1)
        return self.prefix + self.arena[start:stop].decode("utf-8", "surrogatepass")

    @cached_property
    def is_of_file_system(self) -> bool:
        """Return whether the bytes in ``arena`` are those that ``os.fsencode`` returns for these paths."""
        if self.arena.isascii():
            return True
        if sys.getfilesystemencoding() != "utf-8":
            return False
        try:
            self.arena.decode("utf-8")  # fails for surrogates, which ``os.fsencode`` encodes differently
        except UnicodeDecodeError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> Any:
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
        if self.prefix != other.prefix:  # equal paths may be split differently into prefix and arena
            return all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return np.array_equal(self.offsets, other.offsets) and self.arena == other.arena

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenSamples:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.arena, self.offsets, self.targets, self.prefix)


class FrozenTargets(Sequence[Any]):
    """A sequence of Python ints or floats that is stored as an array (N,), int64 or float64."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = _read_only(array)

    @classmethod
    def from_items(cls, items: Sequence[Any]) -> FrozenTargets | None:
        """Store items as an array.  Return None if an item is not exactly an int in the range of int64."""
        if any(type(item) is not int for item in items):
            return None
        try:
            return cls(np.array(items, dtype=np.int64))
        except OverflowError:
            return None

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        return self.array[index].tolist() if isinstance(index, slice) else self.array.item(index)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CHUNK):
            yield from self.array[start : start + _CHUNK].tolist()

    def __contains__(self, value: object) -> bool:
        return self.count(value) > 0

    def count(self, value: object) -> int:
        # The comparison of an int64 array is exact only if ``value`` is an int in the range of int64.
        if self.array.dtype == np.int64 and type(value) is int and -(2**63) <= value < 2**63:
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


class FrozenRecords(Sequence[Any]):
    """A sequence of tuples, or of dicts with the keys ``names``, that is stored as one sequence for each
    item of a tuple or dict.  Each access creates a new tuple or dict."""

    def __init__(self, columns: Sequence[Sequence[Any]], names: Sequence[Any] | None = None) -> None:
        self.columns = list(columns)
        self.names = None if names is None else list(names)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._record([column[index] for column in self.columns])

    def __iter__(self) -> Iterator[Any]:
        return map(self._record, zip(*self.columns, strict=True))

    def _record(self, values: Iterable[Any]) -> Any:
        return tuple(values) if self.names is None else dict(zip(self.names, values, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenRecords):
            return NotImplemented
        return self.names == other.names and self.columns == other.columns


class FrozenRows(Sequence[tuple[str, Any]]):
    """A sequence of ``(path, target)`` tuples with targets of any kind.

    Args:
        paths: the paths; the class indices that they are stored with are not used.
        targets: the targets, such as ``FrozenTargets``, ``FrozenRecords`` or a list.
    """

    def __init__(self, paths: FrozenSamples, targets: Sequence[Any]) -> None:
        self.paths, self.targets = paths, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.paths.path(index), self.targets[index]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((path, target) for (path, _), target in zip(self.paths, self.targets, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenRows):
            return NotImplemented
        return self.paths == other.paths and bool(self.targets == other.targets)


def offsets_of(lengths: Int64Array) -> Int64Array:
    """Return the offset at which each path begins, and the end of the last path: int64 (N + 1,)."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def checked_offsets(block: bytes, lengths: Int64Array) -> Int64Array:
    """Return ``offsets_of(lengths)``.  Raise a ValueError if ``block`` is not a result of ``pack_paths``."""
    offsets = offsets_of(lengths)
    if offsets[-1] != len(block) or (lengths < 0).any():
        raise ValueError(f"a block of {len(block)} bytes does not hold texts of {offsets[-1]} bytes")
    if not block.isascii():
        block.decode("utf-8", "surrogatepass")
        starts = offsets[offsets < len(block)]
        # A byte 0b10xxxxxx is not the first byte of a character.
        if (np.frombuffer(block, dtype=np.uint8)[starts] & 0xC0 == 0x80).any():
            raise ValueError("a text begins in the middle of a character")
    return offsets


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


class PackedPaths(NamedTuple):
    """Paths in the file system's encoding.  Path ``i`` is ``prefix + arena[starts[i]:ends[i]]``."""

    prefix: bytes
    arena: bytes
    starts: Int64Array
    ends: Int64Array


def paths_of(samples: Any, positions: Int64Array) -> PackedPaths:
    """Return the paths of the samples at ``positions``, int64 (N,).

    ``samples`` is a sequence of (path, target).  If ``samples`` is stored as arrays, no Python object is
    created for a path.
    """
    if isinstance(samples, FrozenSamples) and samples.is_of_file_system:
        starts, ends = samples.offsets[positions], samples.offsets[positions + 1]
        return PackedPaths(os.fsencode(samples.prefix), samples.arena, starts, ends)
    return packed_paths([samples[position][0] for position in positions.tolist()])


def packed_paths(paths: Sequence[Any]) -> PackedPaths:
    """Copy paths that are Python objects to one block of memory."""
    names = [os.fsencode(path) for path in paths]
    lengths = np.array([len(name) for name in names], np.int64)
    ends = np.cumsum(lengths)
    return PackedPaths(b"", b"".join(names), ends - lengths, ends)


T = TypeVar("T")

# ``repr`` of a table with more items than the first number shows only the second number of items at each end.
_REPR_WHOLE, _REPR_ENDS = 1000, 3


class Table(MutableSequence[T]):
    """A list that is stored as arrays until it is first changed.

    Reading from several threads is safe.  Changing a table is as safe as changing a list, except for
    the first change: no other thread may change the table at the same time.
    """

    # The arrays or the list.  One attribute stores either form, so other threads always see a valid form.
    _data: Sequence[T]

    @classmethod
    def _holding(cls, data: Sequence[Any]) -> Self:
        table = cls.__new__(cls)
        table._data = data
        return table

    def _thaw(self) -> list[T]:
        """Convert the table to a list, if it is not a list yet, and return the list."""
        data = self._data
        if not isinstance(data, list):
            self._data = data = list(data)
        return data

    def _position(self, index: SupportsIndex) -> int:
        try:
            position = operator.index(index)
        except TypeError:
            kind = type(self).__name__
            raise TypeError(
                f"{kind} indices must be integers or slices, got {index!r} of type {type(index).__name__}"
            ) from None
        length = len(self._data)
        if not -length <= position < length:
            raise IndexError(
                f"{type(self).__name__} index {position} is out of range: its length is {length}"
            )
        return position + length if position < 0 else position

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | list[T]:
        if isinstance(index, slice):
            return list(self._data[index])
        return self._data[self._position(index)]

    def __iter__(self) -> Iterator[T]:
        data = self._data
        return iter(data) if isinstance(data, list) else self._iterate(data)

    def _iterate(self, frozen: Sequence[T]) -> Iterator[T]:
        """Iterate as a list's iterator does: after a change, the next item is from the changed list."""
        position = 0
        for item in frozen:
            if self._data is not frozen:
                break
            yield item
            position += 1
        while position < len(self._data):
            yield self._data[position]
            position += 1

    @overload
    def __setitem__(self, index: SupportsIndex, value: T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        self._thaw()[index if isinstance(index, slice) else self._position(index)] = value

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        del self._thaw()[index if isinstance(index, slice) else self._position(index)]

    def insert(self, index: SupportsIndex, value: T) -> None:
        self._thaw().insert(index, value)

    def extend(self, values: Iterable[T]) -> None:
        self._thaw().extend(list(values))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        try:
            return self._data.index(value, start, sys.maxsize if stop is None else stop)
        except ValueError:
            raise ValueError(f"{value!r} is not in this {type(self).__name__}") from None

    def count(self, value: Any) -> int:
        return self._data.count(value)

    def __contains__(self, value: object) -> bool:
        return value in self._data

    def copy(self) -> Self:
        """Return a table with the same items.  A change of one table does not change the other table."""
        data = self._data
        return self._holding(data.copy() if isinstance(data, list) else data)

    __copy__ = copy

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        self._thaw().sort(key=key, reverse=reverse)

    def reverse(self) -> None:
        self._thaw().reverse()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            if not isinstance(self._data, list) and type(self._data) is type(other._data):
                return bool(self._data == other._data)
        elif not isinstance(other, list):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(mine is theirs or mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __add__(self, other: list[T] | Table[T]) -> list[T]:
        return [*self, *other] if isinstance(other, (list, Table)) else NotImplemented

    def __radd__(self, other: list[T]) -> list[T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> list[T]:
        return list(self) * times

    __rmul__ = __mul__

    def __imul__(self, times: SupportsIndex) -> Self:
        items = self._thaw()
        items *= times
        return self

    def __repr__(self) -> str:
        length = len(self)
        if length <= _REPR_WHOLE:
            return repr(list(self))
        first = ", ".join(map(repr, self[:_REPR_ENDS]))
        last = ", ".join(map(repr, self[-_REPR_ENDS:]))
        return f"[{first}, … {length - 2 * _REPR_ENDS} more …, {last}]"


class SampleTable(Table[Sample]):
    """The ``samples`` of a dataset, a list of ``(path, class index)``.

    The samples are stored as arrays if each path is a ``str`` and each target is an ``int``, else as a list.
    In arrays, a sample takes the bytes of its path and 16 bytes more.  If a scan has found the paths, they
    are stored without the root.

    Args:
        samples: the items.

    >>> table = SampleTable([("cat/1.jpg", 0), ("dog/1.jpg", 1)])
    >>> table.path(1), table.target(1)
    ('dog/1.jpg', 1)
    >>> table[0] = ("cat/2.jpg", 0)
    >>> table
    [('cat/2.jpg', 0), ('dog/1.jpg', 1)]
    """

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        if isinstance(samples, SampleTable):
            self._data = samples.copy()._data
        else:
            items = list(samples)
            frozen = FrozenSamples.from_items(items)
            self._data = items if frozen is None else frozen

    @classmethod
    def from_columns(cls, paths: Sequence[str], targets: Int64Array) -> Self:
        """Return a table of paths and class indices, int64 (N,)."""
        return cls._holding(FrozenSamples.from_columns(paths, targets))

    @property
    def is_flat(self) -> bool:
        """Return whether the samples are stored as arrays."""
        return isinstance(self._data, FrozenSamples)

    @property
    def frozen(self) -> FrozenSamples | None:
        """The samples stored as arrays; None if they are stored as a list."""
        data = self._data
        return data if isinstance(data, FrozenSamples) else None

    def has_items_of(self, other: SampleTable) -> bool:
        """Return whether this table and ``other`` share the same arrays.  The items are not compared."""
        return self._data is other._data

    def path(self, index: SupportsIndex) -> str:
        """Return the path of a sample.  Raise a TypeError if the stored object is not a path."""
        position, data = self._position(index), self._data
        if isinstance(data, FrozenSamples):
            return data.path(position)
        try:
            return os.fsdecode(data[position][0])
        except (TypeError, IndexError):
            raise TypeError(
                f"sample {position} must be a (path, class index) tuple, got {data[position]!r}"
            ) from None

    def target(self, index: SupportsIndex) -> int:
        """Return the class index of a sample, or the object that the user stored in its place."""
        position, data = self._position(index), self._data
        return data.targets.item(position) if isinstance(data, FrozenSamples) else data[position][1]

    def targets_array(self) -> Int64Array:
        """Return the current class indices of all samples as a read-only int64 array (N,)."""
        data = self._data
        if isinstance(data, FrozenSamples):
            return data.targets
        array = np.empty(len(data), dtype=np.int64)
        for position, sample in enumerate(data):
            try:
                array[position] = operator.index(sample[1])
            except (TypeError, IndexError, OverflowError):
                raise TypeError(
                    f"sample {position} must have an int64 class index as its second item, got {sample!r}"
                ) from None
        array.flags.writeable = False
        return array


class RowTable(Table[tuple[str, Any]]):
    """The ``samples`` of a dataset whose targets are not class indices: a list of ``(path, target)``.

    Args:
        paths: the paths.
        targets: the targets, in the form in which they are stored.

    >>> table = RowTable(["1.jpg", "2.jpg"], FrozenRecords([[1, 2], ["a", "b"]], ["x", "y"]))
    >>> table[1]
    ('2.jpg', {'x': 2, 'y': 'b'})
    """

    def __init__(self, paths: Sequence[str], targets: Sequence[Any]) -> None:
        zeros = np.zeros(len(paths), dtype=np.int64)
        self._data = FrozenRows(FrozenSamples.from_columns(paths, zeros), targets)

    def targets(self) -> Table[Any]:
        """Return the current targets as a list that is stored as in this table."""
        data = self._data
        targets = data.targets if isinstance(data, FrozenRows) else [target for _, target in data]
        # A change of the targets must not change this table.
        return Table._holding(list(targets) if isinstance(targets, list) else targets)


class TargetTable(Table[int]):
    """The ``targets`` of a dataset, a list of class indices.

    ``np.asarray(table)`` returns a new int64 array, as for a list.

    Args:
        targets: the class indices.  A read-only int64 array, as ``SampleTable.targets_array`` returns, is
            used without a copy.  All other values are copied.

    >>> table = TargetTable([0, 0, 1])
    >>> table[0] = 7
    >>> table, np.bincount(table).tolist()
    ([7, 0, 1], [1, 1, 0, 0, 0, 0, 0, 1])
    """

    def __init__(self, targets: Iterable[int] | npt.NDArray[np.integer[Any]] = ()) -> None:
        if isinstance(targets, TargetTable):
            self._data = targets.copy()._data
        elif isinstance(targets, np.ndarray) and np.can_cast(targets.dtype, np.int64, "safe"):
            self._data = FrozenTargets(_int64("targets", targets, copy=targets.flags.writeable))
        else:
            items = list(targets)
            frozen = FrozenTargets.from_items(items)
            self._data = items if frozen is None else frozen

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        data = self._data
        if copy is False:
            if isinstance(data, FrozenTargets) and (dtype is None or np.dtype(dtype) == np.int64):
                return data.array
            raise ValueError("an array of these targets cannot be made without a copy; pass copy=None")
        return np.array(data.array if isinstance(data, FrozenTargets) else data, dtype=dtype)


class SampleTableBuilder:
    """Builds a ``SampleTable`` folder by folder, without a Python object for each sample.

    >>> builder = SampleTableBuilder("root/")
    >>> builder.add("cat/", ["1.jpg", "2.jpg"], 0)
    >>> builder.build()
    [('root/cat/1.jpg', 0), ('root/cat/2.jpg', 0)]
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._blocks: list[bytes | memoryview] = []
        self._lengths: list[Int64Array] = [np.zeros(0, dtype=np.int64)]
        self._targets: list[Any] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, folder: str, names: Sequence[str], target: int) -> None:
        """Append the paths ``folder + name``, which all have the class ``target``."""
        self.add_packed(pack_paths(folder, names), target)

    def add_packed(self, paths: Packed, target: int) -> None:
        """Append paths from ``pack_paths``, which all have the class ``target``."""
        self._blocks.append(paths.block)
        self._lengths.append(paths.lengths)
        self._targets.append(target)
        self._length += len(paths.lengths)

    def build(self) -> SampleTable:
        counts = [len(lengths) for lengths in self._lengths[1:]]
        arena, offsets = b"".join(self._blocks), offsets_of(np.concatenate(self._lengths))
        classes = FrozenTargets.from_items(self._targets)
        if classes is not None:
            targets = np.repeat(classes.array, counts)
            return SampleTable._holding(FrozenSamples(arena, offsets, targets, self._prefix))
        # Class indices that are not plain integers are rare.  They are stored unchanged, in a list.
        paths = FrozenSamples(arena, offsets, np.zeros(self._length, dtype=np.int64), self._prefix)
        items = [target for target, count in zip(self._targets, counts, strict=True) for _ in range(count)]
        return SampleTable([(path, target) for (path, _), target in zip(paths, items, strict=True)])


def _int64(name: str, values: npt.ArrayLike, *, copy: bool = True) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, np.int64, "safe")):
        raise OptionError(
            f"{name} must be a one-dimensional array of int64, got shape {array.shape}, dtype {array.dtype}"
        )
    return array.astype(np.int64, copy=copy)
