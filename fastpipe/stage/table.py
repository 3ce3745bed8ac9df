"""The objects of one listing in a stage."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import open_regular
from fastpipe.core.types import NextUses
from fastpipe.errors import StageError
from fastpipe.stage.eviction import Leftovers, NeededLast
from fastpipe.stage.files import move_file, read_file, write_file
from fastpipe.stage.table_files import HEAD, NAME, open_table_file

if TYPE_CHECKING:
    from fastpipe.stage.folder import StageFolder

__all__ = ["StageTable"]

Int64Array = npt.NDArray[np.int64]

_FOLLOWERS = (1 << 60) + 1  # a byte that is locked by who follows the table's order
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
        self._locks = open_table_file(path, HEAD + len(sizes) * NAME.itemsize)
        self._map()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._claimed: set[int] = set()  # rows, by threads of this process
        self._order: NeededLast | None = None
        self._follows = False
        self._leftovers = Leftovers(folder, path, self._adopt)
        self._failures = self._to_pass = 0
        _tables.add(self)

    def _map(self) -> None:
        # By a descriptor of its own: that of the locks would stay open as long as the memory.
        descriptor = open_regular(self._path, os.O_RDWR)
        try:
            if not os.path.samestat(os.fstat(descriptor), os.fstat(self._locks.descriptor)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self._path)
            nbytes = HEAD + len(self._sizes) * NAME.itemsize
            memory = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self._memory: mmap.mmap | None = memory
        self._names = np.frombuffer(memory, NAME, offset=HEAD)
        self._first = self._names["first"]

    def has(self, row: int) -> bool:
        """Whether an object is there, as far as is known without looking."""
        return bool(self._first[row])

    def have(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether objects are there, as far as is known without looking."""
        found: npt.NDArray[np.bool_] = self._first[rows] != 0
        return found

    def file(self, row: int) -> str:
        """Where an object is that is there, as far as is known without looking."""
        first, second = self._names[row].item()
        return self._folder.object_path(first.to_bytes(8, "little") + second.to_bytes(8, "little"))

    def read(self, row: int) -> bytes | None:
        """An object's content; None where it is not there, or not whole."""
        first, second = self._names[row].item()
        known = first != 0
        name = first.to_bytes(8, "little") + second.to_bytes(8, "little") if known else self._name_of(row)
        path, size = self._folder.object_path(name), int(self._sizes[row])
        try:
            data = read_file(path, size)
        except FileNotFoundError:
            data = None
        except OSError as error:
            self._folder.complain(error)
            return None
        if data is not None and len(data) == size:
            if not known:
                self._note(row, name)
            return data
        with contextlib.suppress(OSError):
            if data is not None:  # cut short, by a crash of the machine
                self._folder.remove(path, size)
            elif known and self._first[row]:  # who makes room forgets first: somebody has removed a file
                self._folder.ledger.doubt()
        if known:
            self._forget(row)
        return None

    def keep(self, row: int, data: bytes) -> bool:
        """Put an object there; whether it is there now."""
        if len(data) != self._sizes[row] or self._locks.is_closed:
            return False
        if self._to_pass:  # after a failure not every object tries again
            self._to_pass -= 1
            return False
        try:
            name = self._name_of(row)
            number = self._reserve(row, name, len(data))
            if number < 0:
                return self.has(row)
            self._write(row, name, partial(write_file, data=data), len(data), number)
        except OSError as error:
            self._failures += 1
            self._to_pass = min(_MOST_PASSED, 1 << self._failures)
            self._folder.complain(error)
            return False
        self._failures = 0
        return True

    def path(self, row: int) -> str | None:
        """An object's file, which stays while this is open; None where it is not there, or not whole."""
        name = self._name_of(row)
        path, size = self._folder.object_path(name), int(self._sizes[row])
        self._note(row, name)  # before looking: who makes room leaves it then
        try:
            found = os.lstat(path).st_size
        except FileNotFoundError:
            found = -1
        if found == size:
            return path
        self._forget(row)
        if found >= 0:  # cut short, by a crash of the machine
            self._folder.remove(path, size)
        return None

    def put(self, row: int, write: Callable[[str], None]) -> str:
        """Put an object there that somebody writes; where it is then.

        Args:
            row: which one.
            write: makes a file of its size at a path.

        Raises:
            StageError: there is no room for it, or it cannot be written to.
            Others: as of ``write``.
        """
        name, nbytes, where = self._name_of(row), int(self._sizes[row]), self._folder.path
        try:
            number = self._reserve(row, name, nbytes)
            if number >= 0:
                self._write(row, name, write, nbytes, number)
            path = self.path(row)
        except OSError as error:
            if error.errno is None:  # a store's
                raise
            raise StageError(
                f"the stage {where!r} cannot be written to: {error.strerror}. Free the disk, or name a "
                "folder of your own on a local disk"
            ) from error
        if path is None:
            raise StageError(
                f"the stage {where!r} has no room for a file of {nbytes:,} bytes: it may hold "
                f"{self._folder.max_bytes:,}, and what is in use stays. Give it a larger max_bytes, "
                "free the disk, or name a folder on a larger one"
            )
        return path

    def forget(self, row: int) -> None:
        """Remove an object."""
        self._forget(row)
        try:
            self._folder.remove(self._folder.object_path(self._name_of(row)), int(self._sizes[row]))
        except OSError as error:
            self._folder.complain(error)

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
                    with contextlib.suppress(OSError):  # it was closed, which unlocks as well
                        locks.release(byte)
        finally:
            if is_mine:
                with self._changed:
                    self._claimed.discard(row)
                    self._changed.notify_all()

    def follow(self, uses: NextUses | None) -> None:
        """Hear when objects are needed, by which room is made; None where nobody knows."""
        self._order = None
        self._folder.ledger.settle()  # an epoch that needs nothing new holds nothing
        with self._lock:
            try:
                self._follows = not self._locks.is_closed and self._may_follow(uses)
            except OSError as error:
                self._follows = False
                self._folder.complain(error)
            if uses is not None and self._follows:
                self._order = NeededLast(uses, lambda: np.flatnonzero(self._first), self.has)

    def used(self, rows: Int64Array) -> None:
        """Hear that objects are being used: they are needed at another time then."""
        if self._order is not None:
            self._order.note(rows)

    def close(self) -> None:
        """Let go of it, and of the folder; there is nothing in it then."""
        self._order = None
        self._locks.close()
        self._folder.close()
        # Who is reading them has the memory as long as it takes.
        self._names = np.broadcast_to(np.zeros((), NAME), len(self._sizes))
        self._first = self._names["first"]
        self._memory = None

    # ---- making room ---------------------------------------------------------------------------

    def _reserve(self, row: int, name: bytes, nbytes: int) -> int:
        """Reserve bytes for a row, if need be in the place of others: a number, -1 where there is no room."""
        ledger, limit = self._folder.ledger, self._folder.max_bytes
        number = ledger.reserve(nbytes, limit)
        if number >= 0 or nbytes > limit:
            return number
        if os.path.exists(self._folder.object_path(name)):
            self._note(row, name)
            return -1
        # Above the limit it is where another process has a larger one: what that one has is its own affair.
        # None, where there is no room, says that the count was lost.
        while number < 0 < ledger.nbytes <= limit and self._make_room(row):
            number = ledger.reserve(nbytes, limit)
        return number

    def _make_room(self, row: int) -> bool:
        """Remove an object for the sake of a row; False where all others are worth more."""
        if self._leftovers.remove_one():
            return True
        order = self._order
        if order is None:
            return False
        needed = order.use_of(row)
        while (other := order.take(needed)) is not None:
            first, second = self._names[other].item()
            if first and not self._leftovers.is_used_elsewhere(first):
                self._forget(other)
                name = first.to_bytes(8, "little") + second.to_bytes(8, "little")
                if self._folder.remove(self._folder.object_path(name), int(self._sizes[other])):
                    return True
                self._folder.ledger.doubt()
        return False

    def _adopt(self, begins: set[int]) -> set[int]:
        """Note objects that are rows of this table, staged by those who had another one; which they are."""
        own = set()
        for row in np.flatnonzero(self._first == 0).tolist():
            name = self._name_of(row)
            begin = int.from_bytes(name[:8], "little")
            if begin in begins:
                self._note(row, name)
                own.add(begin)
        return own

    def _may_follow(self, uses: NextUses | None) -> bool:
        """Whether this process may make room: all who do follow the same order."""
        locks, memory = self._locks, self._memory
        if uses is None or memory is None:
            locks.release(_FOLLOWERS)
            return False
        tag = hashlib.blake2b(uses.tag, digest_size=HEAD).digest()
        if self._follows and memory[:HEAD] == tag:
            return True
        if locks.take(_FOLLOWERS):  # nobody else follows any
            memory[:HEAD] = tag
        locks.take(_FOLLOWERS, shared=True, waits=True)  # for those who are writing a tag just now
        if memory[:HEAD] == tag:
            return True
        locks.release(_FOLLOWERS)
        return False

    # ---- files -----------------------------------------------------------------------------------

    def _write(self, row: int, name: bytes, write: Callable[[str], None], nbytes: int, number: int) -> None:
        """Write an object whose bytes are reserved."""
        folder, path = self._folder, self._folder.object_path(name)
        temporary = folder.unfinished_path(number)
        # Before it is there, so that nobody takes it for one that no table has.
        self._note(row, name)
        is_new = False
        try:
            try:
                write(temporary)
                is_new = move_file(temporary, path)
            finally:
                if not is_new:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
        except BaseException:
            self._forget(row)
            raise
        finally:
            folder.ledger.written(0 if is_new else nbytes)
        self._note(row, name)  # whoever looked for it too early has forgotten it
        if is_new and self._order is not None:
            self._order.note(np.array([row], np.int64))

    def _note(self, row: int, name: bytes) -> None:
        names = self._names
        if names.flags.writeable:  # else it was closed
            # The first half last: it is what says that the row is there.
            names["second"][row] = int.from_bytes(name[8:], "little")
            names["first"][row] = int.from_bytes(name[:8], "little")

    def _forget(self, row: int) -> None:
        first = self._first
        if first.flags.writeable:
            first[row] = 0

    def _after_fork(self) -> None:
        # What other threads of the parent were at is not this process's affair.
        self._lock, self._changed, self._claimed = threading.Lock(), threading.Condition(), set()
        self._order, self._follows = None, False
        self._leftovers = Leftovers(self._folder, self._path, self._adopt)


_tables: weakref.WeakSet[StageTable] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    for table in list(_tables):
        table._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_in_child)
