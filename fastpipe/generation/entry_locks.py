"""One at a time for each key, among threads and processes, until they end, however they do.

Each key has a lock of its own, in a file that is there only while somebody holds it.  With a fixed number of
files two keys would share one, and whoever computes one of them could wait for the other for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from fastpipe.core.private_folder import PrivateFolder

try:
    import fcntl
except ImportError:  # on Windows, where nothing is kept
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK_SUFFIX", "computing", "is_computing"]

LOCK_SUFFIX = ".lock"
_log = logging.getLogger("fastpipe.memoize")
_held: set[int] = set()  # descriptors


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()


_mine = _OfThread()


def is_computing(folder: PrivateFolder, name: str) -> bool:
    """Whether this very thread is inside ``computing`` of the same name: it must not wait for itself."""
    return (str(folder.path), name) in _mine.names


@contextlib.contextmanager
def computing(folder: PrivateFolder, name: str) -> Iterator[None]:
    """Alone with a key; whoever comes later waits.

    Where the file system has no locks, nobody waits.

    Args:
        folder: where the lock's file is.
        name: the key's.
    """
    own = str(folder.path), name
    descriptor = _locked(folder, name + LOCK_SUFFIX)
    _mine.names.add(own)
    try:
        yield
    finally:
        _mine.names.discard(own)
        if descriptor in _held:  # else this is a forked child
            with contextlib.suppress(OSError):
                folder.remove(name + LOCK_SUFFIX)  # whoever waits for it notices, and makes another one
            _drop(descriptor)


def _locked(folder: PrivateFolder, name: str) -> int:
    """A descriptor of the lock's file, locked; -1 where there are no locks."""
    while True:
        descriptor = folder.open(name, os.O_RDWR | os.O_CREAT)
        _held.add(descriptor)
        try:
            _wait(descriptor, name)
            if _is_there(folder, name, descriptor):
                return descriptor
        except OSError as error:
            _log.warning("two processes may compute the same: %s cannot be locked (%s)", name, error)
            _drop(descriptor)
            return -1
        except BaseException:
            _drop(descriptor)
            raise
        _drop(descriptor)


def _wait(descriptor: int, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("%s: somebody else computes it just now, and is waited for", name.removesuffix(LOCK_SUFFIX))
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_there(folder: PrivateFolder, name: str, descriptor: int) -> bool:
    """Whether the file was not removed while its lock was waited for."""
    try:
        found = folder.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(found), os.fstat(descriptor))
    finally:
        os.close(found)


def _drop(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _leave_to_the_parent() -> None:
    """In a forked child, which would hold the locks after its parent's end."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
