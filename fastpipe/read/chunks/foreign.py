"""C libraries inside other packages, whose functions are called where those packages show them.

Through such a package's own interface a call costs a lock, a copy or new memory; from a kernel it could not
be called at all.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from fastpipe._extras import require
from fastpipe.errors import MissingDependencyError

__all__ = ["ContextOfThread", "address", "library_at", "library_of", "once"]

T = TypeVar("T")

Functions = Mapping[str, tuple[Any, Sequence[Any]]]


class _Lock:
    """A lock that a child of a fork has anew: another thread may have held it just then."""

    def __init__(self) -> None:
        self.threads = threading.Lock()
        _locks.add(self)


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_locks):
        lock.threads = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def once(make: Callable[[], T]) -> Callable[[], T]:
    """A function of no arguments that is called once, also by threads that call it at the same time.

    (``functools.cache`` lets each of these call it, and keeps one result: whoever has another has what is
    finalized as soon as it is dropped.)
    """
    lock = _Lock()
    made: list[T] = []

    @wraps(make)
    def found() -> T:
        if not made:
            with lock.threads:
                if not made:
                    made.append(make())
        return made[0]

    return found


def library_at(path: str | os.PathLike[str], functions: Functions) -> Any:
    """A library.

    Args:
        path: its file.
        functions: by their names the types of their results and arguments, as ``ctypes`` has them.

    Returns:
        A ``ctypes.CDLL``; None where it cannot be loaded or does not show all of the functions.
    """
    try:
        library = ctypes.CDLL(os.fspath(path))
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
    except (AttributeError, OSError):
        return None
    return library


def library_of(module: str, functions: Functions) -> Any:
    """The library that an extension module is, as for ``library_at``; None also without the module."""
    try:
        path = require(module, extra="hdf5").__file__
    except MissingDependencyError:
        return None
    return None if path is None else library_at(path, functions)


def address(library: Any, name: str) -> int:
    """Where a function is, for kernels; 0 without a library."""
    return 0 if library is None else ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class ContextOfThread(threading.local):
    """What a C library needs for a call, and may be used by one at a time: each thread has its own, which
    goes with it.

    Args:
        library: the library.
        make, free: the names of the functions that make one, without arguments, and free it.

    Attributes:
        library: the library.
    """

    def __init__(self, library: Any, make: str, free: str) -> None:
        self.library, self._make, self._free = library, make, free
        self._kept: _Context | None = None

    def __call__(self) -> int:
        """The address of this thread's."""
        if self._kept is None:
            self._kept = _Context(getattr(self.library, self._make), getattr(self.library, self._free))
        return self._kept.address


class _Context:
    def __init__(self, make: Any, free: Any) -> None:
        self.address: int = make() or 0
        if not self.address:
            raise MemoryError("no memory for a decompressor")
        weakref.finalize(self, free, self.address).atexit = False
