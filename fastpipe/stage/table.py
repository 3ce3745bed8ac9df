"""The objects of one listing in a stage."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastpipe.protocols import NextUses
from fastpipe.stage.eviction import NeededLast
from fastpipe.stage.locks import LockFile

if TYPE_CHECKING:
    from fastpipe.stage.folder import StageFolder

__all__ = ["StageTable", "names_in"]

Int64Array = npt.NDArray[np.int64]

_NAME = np.dtype([("first", "<u8"), ("second", "<u8")])
_HEAD = 16  # bytes before the names: which order those follow who may make room
# Bytes that are locked, far behind those that there are: by who uses the table; by who follows its order.
_USERS, _FOLLOWERS = 1 << 60, (1 << 60) + 1
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # between looks at a claim
_MOST_PASSED = 1 << 10


class StageTable:
    """The objects of a listing that are staged; rows are the listing's.  From any thread, in one process.

    Args:
        folder: the stage.
        path: the table's file.
        sizes: int64 (N,): bytes of the objects.
        name_of: gives the name of a row's object, 16 bytes.
    """

    def __init__(
        self, folder: StageFolder, path: str, sizes: Int64Array, name_of: Callable[[int], bytes]
    ) -> None:
        self._folder, self._path, self._sizes, self._name_of = folder, path, sizes, name_of
        self._locks = LockFile(path)
        self._locks.take(_USERS, shared=True, waits=True)
        nbytes = _HEAD + len(sizes) * _NAME.itemsize
        if os.fstat(self._locks.descriptor).st_size < nbytes:
            os.ftruncate(self._locks.descriptor, nbytes)
        self._memory = mmap.mmap(self._locks.descriptor, nbytes)
        self._names = np.frombuffer(self._memory, _NAME, offset=_HEAD)
        self._first = self._names["first"]
        self._changed = threading.Condition()
        self._claimed: set[int] = set()  # rows, by threads of this process
        self._order: NeededLast | None = None
        self._elsewhere: npt.NDArray[np.uint64] | None = None
        self._abandoned: list[tuple[str, int]] | None = None
        self._failures = self._to_pass = 0

    def has(self, row: int) -> bool:
        """Whether an object is there, as far as is known without looking."""
        return bool(self._first[row])

    def have(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether objects are there, as far as is known without looking."""
        found: npt.NDArray[np.bool_] = self._first[rows] != 0
        return found

    def path(self, row: int) -> str | None:
        """Where an object is; None where it is not there."""
        path = self._folder.object_path(self._name_of(row))
        return path if os.path.exists(path) else None

    def read(self, row: int) -> bytes | None:
        """An object's content; None where it is not there, or not whole."""
        first, second = self._names[row].item()
        known = first != 0
        name = first.to_bytes(8, "little") + second.to_bytes(8, "little") if known else self._name_of(row)
        path, size = self._folder.object_path(name), int(self._sizes[row])
        try:
            data = _read(path, size)
        except FileNotFoundError:
            data = None
        except OSError as error:
            self._folder.complain(error)
            return None
        if data is not None and len(data) == size:
            if not known:
                self._note(row, name)
            return data
        if known:
            self._forget(row)
        if data is not None:  # cut short, by a crash of the machine
            self._remove_damaged(path)
        return None

    def keep(self, row: int, data: bytes) -> bool:
        """Put an object there; whether it is there now."""
        if len(data) != self._sizes[row]:
            return False
        if self._to_pass:  # after a failure not every object tries again
            self._to_pass -= 1
            return False
        try:
            if not self._has_room(row, len(data)):
                return False
            kept = self._write(row, data)
        except OSError as error:
            self._failures += 1
            self._to_pass = min(_MOST_PASSED, 1 << self._failures)
            self._folder.complain(error)
            return False
        self._failures = 0
        return kept

    @contextlib.contextmanager
    def claim(self, row: int, wait_s: float) -> Iterator[bool]:
        """Be alone with an object among threads and processes.

        Yields:
            False when the object is there now, as another one has put it there; else True, also when another
            one is still at it after ``wait_s`` seconds.
        """
        name = self._name_of(row)
        byte, locks = self._folder.claim_byte(name), self._folder.locks
        deadline = time.monotonic() + wait_s
        is_first = True
        with self._changed:
            while row in self._claimed and self._changed.wait(max(0.0, deadline - time.monotonic())):
                is_first = False
            is_mine = row not in self._claimed
            if is_mine:
                self._claimed.add(row)
        try:
            is_locked, pause = False, _SHORTEST_S
            while is_mine:
                try:
                    is_locked = locks.take(byte)
                except OSError as error:
                    self._folder.complain(error)
                    break
                if is_locked or time.monotonic() >= deadline:
                    break
                is_first = False
                time.sleep(pause)
                pause = min(_LONGEST_S, pause * 1.5)
            try:
                # Whoever had it before has put the object there, or failed.
                yield is_first or not os.path.exists(self._folder.object_path(name))
            finally:
                if is_locked:
                    locks.release(byte)
        finally:
            if is_mine:
                with self._changed:
                    self._claimed.discard(row)
                    self._changed.notify_all()

    def follow(self, uses: NextUses | None) -> None:
        """Hear when objects are needed, by which room is made; None where nobody knows."""
        self._order = self._elsewhere = None
        if uses is not None and self._may_follow(uses.tag):
            self._order = NeededLast(uses, lambda: np.flatnonzero(self._first), self.has)

    def used(self, rows: Int64Array) -> None:
        """Hear that objects are being used: they are needed at another time then."""
        if self._order is not None:
            self._order.note(rows)

    def close(self) -> None:
        """Let go of it, and of the folder."""
        self._order = None
        self._locks.close()
        self._folder.close()

    # ---- making room ---------------------------------------------------------------------------

    def _has_room(self, row: int, nbytes: int) -> bool:
        """Reserve bytes for a row, if need be in the place of others."""
        folder = self._folder
        if folder.ledger.reserve(nbytes, folder.max_bytes):
            return True
        if nbytes > folder.max_bytes:
            return False
        if self._abandoned is None:
            self._abandoned = folder.abandoned()
            self._abandoned.reverse()
        while self._abandoned:
            folder.remove(*self._abandoned.pop())
            if folder.ledger.reserve(nbytes, folder.max_bytes):
                return True
        order = self._order
        if order is None:
            return False
        needed = order.use_of(row)
        while (other := order.take(needed)) is not None:
            if self._is_used_elsewhere(other):
                continue
            self._evict(other)
            if folder.ledger.reserve(nbytes, folder.max_bytes):
                return True
        return False

    def _is_used_elsewhere(self, row: int) -> bool:
        """Whether another listing that processes use has a row's object as well."""
        if self._elsewhere is None:
            self._elsewhere = self._folder.used_elsewhere(self._path)
        names, name = self._elsewhere, self._first[row]
        at = int(np.searchsorted(names, name))
        return at < len(names) and bool(names[at] == name)

    def _evict(self, row: int) -> None:
        first, second = self._names[row].item()
        self._forget(row)
        path = self._folder.object_path(first.to_bytes(8, "little") + second.to_bytes(8, "little"))
        self._folder.remove(path, int(self._sizes[row]))

    def _may_follow(self, tag: bytes) -> bool:
        """Whether this process may make room: all who do follow the same order."""
        locks = self._locks
        locks.release(_FOLLOWERS)
        if locks.take(_FOLLOWERS):
            self._memory[:_HEAD] = tag
        if locks.take(_FOLLOWERS, shared=True) and self._memory[:_HEAD] == tag:
            return True
        locks.release(_FOLLOWERS)
        return False

    # ---- files -----------------------------------------------------------------------------------

    def _write(self, row: int, data: bytes) -> bool:
        """Write an object whose bytes are reserved."""
        folder, name = self._folder, self._name_of(row)
        path = folder.object_path(name)
        is_new = False
        try:
            temporary = f"{folder.path}/writing/{os.getpid()}-{folder.ledger.next_number()}"
            try:
                _write(temporary, data)
                is_new = _move(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        finally:
            folder.ledger.written(0 if is_new else len(data))
        self._note(row, name)
        if is_new and self._order is not None:
            self._order.note(np.array([row], np.int64))
        return True

    def _remove_damaged(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._folder.remove(path, os.stat(path).st_size)

    def _note(self, row: int, name: bytes) -> None:
        # The first half last: it is what says that the row is there.
        self._names["second"][row] = int.from_bytes(name[8:], "little")
        self._first[row] = int.from_bytes(name[:8], "little")

    def _forget(self, row: int) -> None:
        self._first[row] = 0


def names_in(path: str) -> npt.NDArray[np.uint64] | None:
    """Beginnings of the names of the staged objects in a table that somebody uses; None if nobody does."""
    try:
        locks = LockFile(path)
    except OSError:
        return np.zeros(0, np.uint64)
    try:
        if locks.is_free(_USERS):
            return None
        size = os.fstat(locks.descriptor).st_size
        names = np.frombuffer(os.pread(locks.descriptor, size, 0)[_HEAD:], _NAME)
        staged: npt.NDArray[np.uint64] = names["first"][names["first"] != 0]
        return staged
    finally:
        locks.close()


def _read(path: str, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def _move(temporary: str, path: str) -> bool:
    """Give a file its name, unless there is one of that name; whether it was given."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return True
