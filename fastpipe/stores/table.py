"""The table of one listing's staged objects (copies on a local disk), and the choice of objects to evict."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import open_regular, rename_anew
from fastpipe.core.locks import LockFile, renew_in_children
from fastpipe.core.types import NextUses
from fastpipe.errors import StageError

if TYPE_CHECKING:
    from fastpipe.stores.stage import StageFolder

Int64Array = npt.NDArray[np.int64]


NAME = np.dtype([("first", "<u8"), ("second", "<u8")])
HEAD = 16  # number of bytes before the names; the bytes identify the order that allows evictions
_USERS = 1 << 60  # users of the table lock this byte, which is far beyond the end of the file


def open_table_file(path: str, nbytes: int) -> LockFile:
    """Open a table's file, extend the file to ``nbytes``, and mark it as in use."""
    while True:
        locks = LockFile(path)
        try:
            is_alone = locks.take(_USERS)
            if is_alone and os.fstat(locks.descriptor).st_size != nbytes:  # the file is new, or unusable
                os.ftruncate(locks.descriptor, 0)
            locks.stay(_USERS)
            if os.fstat(locks.descriptor).st_size < nbytes:
                # Allocate the disk blocks: without them, a write to mapped memory would kill the process if
                # the disk is full.
                os.posix_fallocate(locks.descriptor, 0, nbytes)
            if locks.is_at_its_path():  # the file was not removed between opening and locking
                return locks
        except BaseException:
            locks.close()
            raise
        locks.close()


def names_in_use(path: str) -> npt.NDArray[np.uint64]:
    """Return the first halves of a table's object names.  Remove a table that no process uses."""
    none = np.zeros(0, np.uint64)
    try:
        locks = LockFile(path, makes=False)
    except FileNotFoundError:
        return none
    try:
        if locks.take(_USERS):
            with contextlib.suppress(FileNotFoundError):
                if locks.is_at_its_path():
                    os.unlink(path)
            return none
        data = os.pread(locks.descriptor, os.fstat(locks.descriptor).st_size, HEAD)
        firsts = np.frombuffer(data, NAME, count=len(data) // NAME.itemsize)["first"]
        staged: npt.NDArray[np.uint64] = firsts[firsts != 0]
        return staged
    finally:
        locks.close()


def read_file(path: str, size: int) -> bytes:
    """Return the first ``size + 1`` bytes of a file, or less if the file is shorter."""
    descriptor = open_regular(path)
    try:
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def new_file(path: str) -> int:
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def write_file(path: str, data: bytes) -> None:
    descriptor = new_file(path)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def move_file(path: str, name: str) -> bool:
    """Rename ``path`` to ``name``.  Return False, and do nothing, if a file ``name`` exists.  If the folder
    of ``name`` is missing, create this folder, but no folder above it."""
    try:
        try:
            _rename(path, name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(name), 0o700)
            _rename(path, name)
    except FileExistsError:
        return False
    return True


def _rename(path: str, name: str) -> None:
    """Rename a file, but never overwrite another file."""
    if not rename_anew(path, name):
        os.unlink(path)


_ROWS = 1 << 40  # more rows than any listing has
_GLANCES = 1 << 10  # minimum number of lookups before the tables of other listings are read again


class EvictionOrder:
    """Finds the staged object to evict: the object whose next use is last.  Thread-safe.  This is Belady's
    rule ("A study of replacement algorithms for a virtual-storage computer", 1966).  Objects are given by
    their rows in the listing.  ``staged`` returns the rows of all staged objects."""

    def __init__(
        self, uses: NextUses, staged: Callable[[], Int64Array], is_staged: Callable[[int], bool]
    ) -> None:
        self._uses, self._staged, self._is_staged = uses, staged, is_staged
        self._lock = threading.Lock()
        # A heap of rows that begins with the last next use, created on first use.  An entry has the next use
        # at the time when the row was inserted or noted.
        self._heap: list[int] | None = None

    def use_of(self, row: int) -> int:
        return int(self._uses.next_uses(np.array([row], np.int64))[0])

    def note(self, rows: Int64Array) -> None:
        """Record that the objects ``rows`` were just used or staged.  Their next uses have then changed."""
        if self._heap is None or not len(rows):
            return
        entries = self._entries(rows)
        with self._lock:
            for entry in entries:
                heapq.heappush(self._heap, entry)

    def take(self, after: int) -> int | None:
        """Return the row whose next use is last.  Return None if this use is not later than ``after``.  The
        caller removes the row's object."""
        with self._lock:
            if self._heap is None:
                self._heap = []  # from now on ``note`` waits for the lock
                self._heap += self._entries(self._staged())
                heapq.heapify(self._heap)
            while self._heap:
                use, row = divmod(-self._heap[0], _ROWS)
                if use <= after:
                    return None
                heapq.heappop(self._heap)
                if not self._is_staged(row):
                    continue
                if self.use_of(row) == use:
                    return row
                # Another process has used the row, so insert the row with its new next use.
                heapq.heappush(self._heap, self._entries(np.array([row]))[0])
        return None

    def _entries(self, rows: Int64Array) -> list[int]:
        """Return a number for each row.  It is smaller for later uses, and takes less memory than a pair."""
        uses = self._uses.next_uses(rows).tolist()
        return [-(use * _ROWS + row) for use, row in zip(uses, rows.tolist(), strict=True)]


class UnlistedObjects:
    """The objects in a stage that one table does not list.  Thread-safe.  Other tables list some of these
    objects.  No table lists the rest, which may be removed."""

    def __init__(self, folder: StageFolder, table: str, adopt: Callable[[set[int]], set[int]]) -> None:
        self._folder, self._table, self._adopt = folder, table, adopt
        self._lock = threading.Lock()
        self._free: list[tuple[str, int]] | None = None  # result of ``unlisted``, with the oldest object last
        self._listed = np.zeros(0, np.uint64)
        self._tables, self._glances = -1, 0

    def remove_one(self) -> bool:
        """Remove the oldest object that no table in use lists.  Return False if there is no such object."""
        with self._lock:
            if self._free is None:
                self._free = self._find()
            while self._free:
                path, begin = self._free.pop()
                if not self._is_listed(begin) and self._folder.remove(path):
                    return True
        return False

    def is_used_elsewhere(self, begin: int) -> bool:
        """Return whether another table in use lists an object whose name begins with the half ``begin``."""
        with self._lock:
            return self._is_listed(begin)

    def _find(self) -> list[tuple[str, int]]:
        found = self._folder.unlisted()
        own = self._adopt({begin for _, begin in found}) if found else set()
        return [one for one in reversed(found) if one[1] not in own]

    def _is_listed(self, begin: int) -> bool:
        tables = self._folder.ledger.tables
        if tables != self._tables or self._glances <= 0:
            self._tables, self._listed = tables, self._folder.listed(self._table)
            # Objects that other tables list later are found at the next reading.  Reading takes longer for
            # longer tables, and is then repeated less often.
            self._glances = _GLANCES + len(self._listed) // 64
        self._glances -= 1
        at = int(np.searchsorted(self._listed, np.uint64(begin)))
        return at < len(self._listed) and int(self._listed[at]) == begin


_FOLLOWERS = (1 << 60) + 1  # processes lock this byte while they follow the table's order
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # shortest and longest interval between two tries to lock a claim
_MOST_PASSED = 1 << 10


class StageTable:
    """Says which objects of a listing are staged, and reads and stores them.  Thread-safe.

    An object is given by its row in the listing.  The table says whether an object is present, without a
    check of the file.  ``sizes``, int64 (N,), are the objects' sizes in bytes.  ``name_of`` returns the name
    of a row's object in the stage, 16 bytes.
    """

    def __init__(
        self, folder: StageFolder, path: str, sizes: Int64Array, name_of: Callable[[int], bytes]
    ) -> None:
        self._folder, self._path, self._sizes, self._name_of = folder, path, sizes, name_of
        self._locks = open_table_file(path, HEAD + len(sizes) * NAME.itemsize)
        self._map()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._claimed: set[int] = set()  # rows claimed by threads of this process
        self._order: EvictionOrder | None = None
        self._follows = False
        self._unlisted = UnlistedObjects(folder, path, self._adopt)
        self._failures = self._to_pass = 0
        renew_in_children(self)

    def _map(self) -> None:
        # A mapping keeps its file open as long as the memory lives.  So map a second open file, and not the
        # open file that holds the locks.
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
        return bool(self._first[row])

    def have(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._first[rows] != 0
        return found

    def file(self, row: int) -> str:
        return self._folder.object_path(self._names[row].tobytes())

    def read(self, row: int) -> bytes | None:
        """Return an object's content; None if the object is missing or incomplete."""
        name = self._names[row].tobytes()
        known = name[:8] != bytes(8)
        name = name if known else self._name_of(row)
        path, size = self._folder.object_path(name), int(self._sizes[row])
        try:
            data = read_file(path, size)
        except FileNotFoundError:
            data = None
        except OSError as error:
            self._folder.warn_once(error)
            return None
        if data is not None and len(data) == size:
            if not known:
                self._note(row, name)
            return data
        with contextlib.suppress(OSError):
            if data is not None:  # truncated by a crash of the machine
                self._folder.remove(path, size)
            # An eviction would have removed the row from the table before the file.
            elif known and self._first[row]:
                self._folder.ledger.mark_uncertain()
        if known:
            self._forget(row)
        return None

    def keep(self, row: int, data: bytes) -> bool:
        """Store an object, and return whether the object is staged now."""
        if len(data) != self._sizes[row] or self._locks.is_closed:
            return False
        if self._to_pass:  # after a failure, only some objects are tried
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
            self._folder.warn_once(error)
            return False
        self._failures = 0
        return True

    def path(self, row: int) -> str | None:
        """Return the path of an object's file; None if the file is missing or incomplete.  The file stays
        while this table is open."""
        name = self._name_of(row)
        path, size = self._folder.object_path(name), int(self._sizes[row])
        self._note(row, name)  # before the check, so that no other process evicts the file after the check
        try:
            found = os.lstat(path).st_size
        except FileNotFoundError:
            found = -1
        if found == size:
            return path
        self._forget(row)
        if found >= 0:  # truncated by a crash of the machine
            self._folder.remove(path, size)
        return None

    def put(self, row: int, write: Callable[[str], None]) -> str:
        """Store an object, and return its path.  ``write`` gets a temporary path, and writes the object."""
        name, nbytes, where = self._name_of(row), int(self._sizes[row]), self._folder.path
        try:
            number = self._reserve(row, name, nbytes)
            if number >= 0:
                self._write(row, name, write, nbytes, number)
            path = self.path(row)
        except OSError as error:
            if error.errno is None:  # the error of a store
                raise
            raise StageError(
                f"the stage {where!r} cannot be written to: {error.strerror}. Free the disk, or name a "
                "folder of your own on a local disk"
            ) from error
        if path is None:
            raise StageError(
                f"the stage {where!r} has no room for a file of {nbytes:,} bytes: it may hold "
                f"{self._folder.max_bytes:,}, and files in use are kept. Give it a larger max_bytes, "
                "free the disk, or name a folder on a larger one"
            )
        return path

    def forget(self, row: int) -> None:
        self._forget(row)
        try:
            self._folder.remove(self._folder.object_path(self._name_of(row)), int(self._sizes[row]))
        except OSError as error:
            self._folder.warn_once(error)

    @contextlib.contextmanager
    def claim(self, row: int, wait_s: float) -> Iterator[bool]:
        """Get exclusive access to an object among threads and processes.

        Yield False if another holder has stored the object during the wait.  Otherwise yield True.  After
        ``wait_s`` seconds, True is yielded even if another holder still has access.  Access is then not
        exclusive.
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
                    self._folder.warn_once(error)
                    break
                if is_locked or time.monotonic() >= deadline:
                    break
                is_first = False
                time.sleep(pause)
                pause = min(_LONGEST_S, pause * 1.5)
            try:
                # The previous holder has stored the object, or failed.
                yield is_first or not os.path.exists(self._folder.object_path(name))
            finally:
                if is_locked:
                    with contextlib.suppress(OSError):  # the file was closed, which released the lock
                        locks.release(byte)
        finally:
            if is_mine:
                with self._changed:
                    self._claimed.discard(row)
                    self._changed.notify_all()

    def follow(self, uses: NextUses | None) -> None:
        """Say when each object is needed next, for evictions.  None means that this is unknown."""
        self._order = None
        with self._lock:
            try:
                self._follows = not self._locks.is_closed and self._may_follow(uses)
            except OSError as error:
                self._follows = False
                self._folder.warn_once(error)
            if uses is not None and self._follows:
                self._order = EvictionOrder(uses, lambda: np.flatnonzero(self._first), self.has)

    def used(self, rows: Int64Array) -> None:
        """Record that the objects ``rows`` are being used.  Their next uses have then changed."""
        if self._order is not None:
            self._order.note(rows)

    def close(self) -> None:
        """Release the table and the folder.  A closed table contains no objects."""
        self._order = None
        self._locks.close()
        self._folder.close()
        # A thread that is reading the names keeps the mapped memory alive.
        self._names = np.broadcast_to(np.zeros((), NAME), len(self._sizes))
        self._first = self._names["first"]
        self._memory = None

    def _reserve(self, row: int, name: bytes, nbytes: int) -> int:
        """Reserve bytes for a row's object, and evict other objects if necessary.  Return the number for the
        unfinished file's name.  Return -1 if there is no room, or if the object is staged already."""
        ledger, limit = self._folder.ledger, self._folder.max_bytes
        number = ledger.reserve(nbytes, limit)
        if number >= 0 or nbytes > limit:
            return number
        if os.path.exists(self._folder.object_path(name)):
            self._note(row, name)
            return -1
        # If more bytes than ``limit`` are used, another process has a higher limit, and this process evicts
        # nothing.  A count of 0 although there is no room means that the count was lost.
        while number < 0 < ledger.nbytes <= limit and self._make_room(row):
            number = ledger.reserve(nbytes, limit)
        return number

    def _make_room(self, row: int) -> bool:
        """Evict an object to make room for a row's object.  Return False if no object may be evicted."""
        if self._unlisted.remove_one():
            return True
        order = self._order
        if order is None:
            return False
        needed = order.use_of(row)
        while (other := order.take(needed)) is not None:
            name = self._names[other].tobytes()
            first = int.from_bytes(name[:8], "little")
            if first and not self._unlisted.is_used_elsewhere(first):
                self._forget(other)
                if self._folder.remove(self._folder.object_path(name), int(self._sizes[other])):
                    return True
                self._folder.ledger.mark_uncertain()
        return False

    def _adopt(self, begins: set[int]) -> set[int]:
        """Record rows as staged whose object names begin with one of ``begins``.  Return these ``begins``."""
        own = set()
        for row in np.flatnonzero(self._first == 0).tolist():
            name = self._name_of(row)
            begin = int.from_bytes(name[:8], "little")
            if begin in begins:
                self._note(row, name)
                own.add(begin)
        return own

    def _may_follow(self, uses: NextUses | None) -> bool:
        """Return whether this process may evict.  All evicting processes must follow the same order."""
        locks, memory = self._locks, self._memory
        if uses is None or memory is None:
            locks.release(_FOLLOWERS)
            return False
        tag = hashlib.blake2b(uses.tag, digest_size=HEAD).digest()
        if self._follows and memory[:HEAD] == tag:
            return True
        if locks.take(_FOLLOWERS):  # no other process follows an order
            memory[:HEAD] = tag
        locks.take(_FOLLOWERS, shared=True, waits=True)  # wait for a process that is writing a tag
        if memory[:HEAD] == tag:
            return True
        locks.release(_FOLLOWERS)
        return False

    def _write(self, row: int, name: bytes, write: Callable[[str], None], nbytes: int, number: int) -> None:
        """Write an object.  Its bytes were reserved before."""
        folder, path = self._folder, self._folder.object_path(name)
        temporary = folder.unfinished_path(number)
        # List the object before the file exists, so that no process takes the object as unlisted.
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
        self._note(row, name)  # note again, because a reader may have found no file and removed the note
        if is_new and self._order is not None:
            self._order.note(np.array([row], np.int64))

    def _note(self, row: int, name: bytes) -> None:
        names = self._names
        if names.flags.writeable:  # otherwise the table was closed
            # Write the first half last, because it marks the row as present.
            names["second"][row] = int.from_bytes(name[8:], "little")
            names["first"][row] = int.from_bytes(name[:8], "little")

    def _forget(self, row: int) -> None:
        first = self._first
        if first.flags.writeable:
            first[row] = 0

    def _after_fork(self) -> None:
        # This process does not have the parent's other threads, and resets their locks and claims.
        self._lock, self._changed, self._claimed = threading.Lock(), threading.Condition(), set()
        self._order, self._follows = None, False
        self._unlisted = UnlistedObjects(self._folder, self._path, self._adopt)
