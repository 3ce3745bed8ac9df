"""A list that is stored as arrays until somebody changes it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Table"]

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
