"""What ``samples`` and ``targets`` of a dataset are: lists, stored as flat arrays.

A table answers like the list it stands for, and its first change turns it into that list
inside.  So a script may read and change ``dataset.samples`` as it always did, and a
dataset that nobody changes costs forked and spawned workers next to nothing.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.index.storage import FrozenSamples, FrozenTargets, Packed, Sample, offsets_of, pack_paths

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SampleTable", "SampleTableBuilder", "Table", "TargetTable"]

Int64Array = npt.NDArray[np.int64]

T = TypeVar("T")

# repr: longer tables show only so many items at either end.
_REPR_WHOLE, _REPR_ENDS = 1000, 3


class Table(MutableSequence[T]):
    """A list that is stored as arrays until it is first changed.

    Reading from several threads is safe.  Changing is as safe as changing a list, but for
    the very first change, which must not meet another one.
    """

    # One attribute holds either form, so that a reader in another thread sees one or the other.
    _data: Sequence[T]

    @classmethod
    def _holding(cls, data: Sequence[Any]) -> Self:
        table = cls.__new__(cls)
        table._data = data
        return table

    def _thaw(self) -> list[T]:
        """The list that holds the items from now on."""
        data = self._data
        if not isinstance(data, list):
            self._data = data = list(data)
        return data

    def _position(self, index: SupportsIndex) -> int:
        """An index as the user gives it, from 0 to length - 1."""
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
        """Like a list's iterator: a change made on the way shows from the next item on."""
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
        if isinstance(index, slice):
            self._thaw()[index] = value
        else:
            self._thaw()[self._position(index)] = value

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        if isinstance(index, slice):
            del self._thaw()[index]
        else:
            del self._thaw()[self._position(index)]

    def insert(self, index: SupportsIndex, value: T) -> None:
        """Put an item before position ``index``, as ``list.insert`` does."""
        self._thaw().insert(index, value)

    def extend(self, values: Iterable[T]) -> None:
        """Append all items of an iterable, which may be this table."""
        self._thaw().extend(list(values))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Position of the first item equal to ``value``, as ``list.index`` gives it."""
        try:
            return self._data.index(value, start, sys.maxsize if stop is None else stop)
        except ValueError:
            raise ValueError(f"{value!r} is not in this {type(self).__name__}") from None

    def count(self, value: Any) -> int:
        """How many items equal ``value``."""
        return self._data.count(value)

    def __contains__(self, value: object) -> bool:
        return value in self._data

    def copy(self) -> Self:
        """A table with the same items; changing one leaves the other as it is."""
        data = self._data
        return self._holding(data.copy() if isinstance(data, list) else data)

    __copy__ = copy

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        """Sort the items in place, as ``list.sort`` does."""
        self._thaw().sort(key=key, reverse=reverse)

    def reverse(self) -> None:
        """Reverse the items in place."""
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
    """The ``samples`` of a dataset: a list of ``(path, class index)``.

    Stored flat it takes the bytes of each path (of a scan, those after the root) and 16 more
    for each sample.  Items that do not fit in (paths that are no ``str``, targets that are no
    ``int``) are kept as a list.

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
    def from_list(cls, samples: Iterable[Sample]) -> SampleTable:
        """A table of these items; the list itself is not kept."""
        return cls(samples)

    @classmethod
    def from_arrays(cls, arena: bytes, offsets: npt.ArrayLike, targets: npt.ArrayLike) -> SampleTable:
        """A table of paths that are encoded already.

        Args:
            arena: all paths, one after the other, as UTF-8 with ``surrogatepass``.
            offsets: integers (N + 1,): path ``i`` is ``arena[offsets[i]:offsets[i + 1]]``.
            targets: integers (N,): the class indices.

        Returns:
            The table.  It keeps copies of the arrays.

        Raises:
            OptionError: the arrays do not fit together, or the arena is not UTF-8.

        >>> SampleTable.from_arrays(b"a.jpgb.jpg", [0, 5, 10], [0, 1])
        [('a.jpg', 0), ('b.jpg', 1)]
        """
        starts = _int64("offsets", offsets)
        if not isinstance(arena, bytes):
            raise TypeError(f"from_arrays(arena=…) must be bytes, got {type(arena).__name__}")
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(arena) or (np.diff(starts) < 0).any():
            raise OptionError(
                f"from_arrays(offsets=…) must rise from 0 to the arena's length {len(arena)}, got {starts}"
            )
        classes = _int64("targets", targets)
        if len(classes) != len(starts) - 1:
            raise OptionError(
                f"from_arrays: {len(starts)} offsets ask for one target less, got {len(classes)}"
            )
        _check_utf8(arena, starts)
        return cls._holding(FrozenSamples(arena, starts, classes))

    @property
    def is_flat(self) -> bool:
        """Return whether all paths are ``str`` and all targets ``int`` within int64, stored as arrays."""
        return isinstance(self._data, FrozenSamples)

    @property
    def frozen(self) -> FrozenSamples | None:
        """The arrays that hold the samples; None where they are a list."""
        data = self._data
        return data if isinstance(data, FrozenSamples) else None

    def has_items_of(self, other: SampleTable) -> bool:
        """Whether both still hold what one of them was copied from; a look, not a comparison."""
        return self._data is other._data

    def path(self, index: SupportsIndex) -> str:
        """Path of a sample.

        Raises:
            IndexError: there is no such sample.
            TypeError: somebody stored something there that is no path.
        """
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
        """Class index of a sample, or what was stored in its place."""
        position, data = self._position(index), self._data
        return data.targets.item(position) if isinstance(data, FrozenSamples) else data[position][1]

    def targets_array(self) -> Int64Array:
        """All class indices: a read-only int64 array (N,).

        It is a picture of the moment: later changes of the table do not show in it.

        Raises:
            TypeError: a target is not an integer in the range of int64.
        """
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


class TargetTable(Table[int]):
    """The ``targets`` of a dataset: a list of class indices.

    ``np.asarray(table)`` gives a new int64 array, as it does for a list.

    Args:
        targets: the class indices.  A read-only int64 array (as ``SampleTable.targets_array``
            gives) is kept as it is, others are copied.

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
    """Collects a table folder by folder, without a Python object for every sample.

    Args:
        prefix: what all paths begin with, before what is added.

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
        """Append the paths ``folder + name``, all of one class."""
        self.add_packed(pack_paths(folder, names), target)

    def add_packed(self, paths: Packed, target: int) -> None:
        """Append paths that are packed already, all of one class."""
        self._blocks.append(paths.block)
        self._lengths.append(paths.lengths)
        self._targets.append(target)
        self._length += len(paths.lengths)

    def build(self) -> SampleTable:
        """The table of everything added so far."""
        counts = [len(lengths) for lengths in self._lengths[1:]]
        arena, offsets = b"".join(self._blocks), offsets_of(np.concatenate(self._lengths))
        classes = FrozenTargets.from_items(self._targets)
        if classes is not None:
            targets = np.repeat(classes.array, counts)
            return SampleTable._holding(FrozenSamples(arena, offsets, targets, self._prefix))
        # Class indices that are no plain integers are rare, and kept as they are.
        paths = FrozenSamples(arena, offsets, np.zeros(self._length, dtype=np.int64), self._prefix)
        items = [target for target, count in zip(self._targets, counts, strict=True) for _ in range(count)]
        return SampleTable([(path, target) for (path, _), target in zip(paths, items, strict=True)])


def _int64(name: str, values: npt.ArrayLike, *, copy: bool = True) -> Int64Array:
    """One-dimensional integers as an int64 array."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, np.int64, "safe")):
        raise OptionError(
            f"{name} must be a one-dimensional array of int64, got shape {array.shape}, dtype {array.dtype}"
        )
    return array.astype(np.int64, copy=copy)


def _check_utf8(arena: bytes, offsets: Int64Array) -> None:
    """Refuse an arena whose paths could not be decoded when they are asked for."""
    if arena.isascii():
        return
    try:
        arena.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise OptionError(f"from_arrays(arena=…) must be UTF-8: {error}") from error
    starts = offsets[offsets < len(arena)]
    # Bytes 0b10xxxxxx go on with a character that began before them.
    if (np.frombuffer(arena, dtype=np.uint8)[starts] & 0xC0 == 0x80).any():
        raise OptionError("from_arrays(offsets=…) must not point into the middle of a character")
