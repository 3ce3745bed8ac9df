"""What clients of stores must not take along into a forked process."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["PerProcess", "may_use_obstore"]

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Something that each process makes for itself when it first needs it.

    Args:
        make: makes it; called by one thread at a time.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[T] | None = None
        self._lock = threading.Lock()
        _all.add(self)

    def get(self) -> T:
        """This process's own."""
        made = self._made
        if made is None:
            with self._lock:
                made = self._made = self._made or (self._make(),)
        return made[0]

    def drop(self) -> T | None:
        """Forget it, and return it if there was one."""
        made, self._made = self._made, None
        return None if made is None else made[0]

    def begin_anew(self) -> None:
        """In a forked child: the parent's stays as it is, with its connections; a thread of the parent's may
        have held the lock, and here it does for ever."""
        if self._made is not None:
            _of_parents.append(self._made)
        self._made, self._lock = None, threading.Lock()


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()
_of_parents: list[object] = []  # not freed, as that would close what is the parent's

# obstore's threads are not in a forked child, where its calls then wait for ever or panic.  Whether the
# parent has used it is told by nothing else than that it was loaded, which here is done at the first use.
_is_child_of_user = False


def may_use_obstore() -> bool:
    """Whether this process was not forked from one that had loaded obstore."""
    return not _is_child_of_user


def _after_fork() -> None:
    global _is_child_of_user
    _is_child_of_user = _is_child_of_user or "obstore" in sys.modules
    for one in list(_all):
        one.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
