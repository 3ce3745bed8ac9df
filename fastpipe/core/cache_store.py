"""A cache that several processes use at the same time: a data file, and a log with the entries' offsets.

Both files only grow.  An entry's bytes are written first and its record in the log is written last.  So a
process that is killed in between leaves only some unused bytes.  Entries are never moved or evicted, so every
epoch finds the entries of the epochs before it.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import read_at
from fastpipe.core.locks import FileLockedError, lock_of
from fastpipe.core.native import native
from fastpipe.core.shared_memory import mapped

# The native core holds the table of the log's records (``native.EntryTable``), because its threads use it.

RECORD_SIZE = 64  # bytes of a record in the log
_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Return the space for an entry of ``nbytes`` (note included): ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Entry(NamedTuple):
    """A cached array.

    Attributes:
        number: the entry's number in the log.
        offset, nbytes: offset and size of the array in the data file.
        shape: shape of the uint8 array (height, width, channels).
        flags: the number that was passed to ``put`` as ``flags``.
        sum: the checksum of the array's bytes, as ``native.sum_of`` computes it.
        note: number of bytes of the note.  The note is stored behind the array.
    """

    number: int
    offset: int
    nbytes: int
    shape: tuple[int, int, int]
    flags: int
    sum: int
    note: int


class Part(NamedTuple):
    pid: int
    start: int
    stop: int


UInt8Array = npt.NDArray[np.uint8]

_MOST_PARTS = 1024  # maximum number of parts that Linux writes in one call


def write_all(descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write ``parts`` to a file one after another, from ``offset`` on."""
    left = deque(part for part in parts if len(part))
    while left:
        written = os.pwritev(descriptor, list(islice(left, _MOST_PARTS)), offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if left:
            left[0] = left[0][written:]


def read_into(descriptor: int, array: UInt8Array, offset: int) -> None:
    """Fill ``array`` with bytes of a file from ``offset`` on.  Raise an OSError if the file is too short."""
    if read_at(descriptor, array.reshape(-1), offset) < array.size:
        raise OSError(errno.EIO, "a cache's data file is shorter than it was")


_log = logging.getLogger("fastpipe.cache")

_MAGIC = b"fastpipe cache 1\n".ljust(32, b"\0")
_ALLOCATED = struct.Struct("<Q")  # the number after the magic: where free space begins in the data file
_HEADER = 64
_LOOK_AFTER = 1 << 24  # bytes between two checks for free memory or disk
_PART = 1 << 23  # maximum bytes of the data file that a process reserves at a time
_PAUSE_S = 2.0  # no entries are added for this time after another process did not release the lock


class DamagedStoreError(OSError):
    """The two files of a store do not belong together, or are not files of a store."""


class EntryStore:
    """A store of byte arrays.  An array is found by the digest (hash) of a description of its content.

    Several threads and processes may use the store at the same time.  A store has two files, ``data`` and
    ``log``, which are closed with the store.  After an error, ``put`` stores nothing more, but ``find`` still
    finds the entries that this process knows.

    Args:
        max_bytes: the limit for the entries' bytes.
        verify: whether this process compares an entry's bytes with the checksum at the first read.
        marks: the number of bytes that ``mark`` uses at the beginning of the data file.  All processes that
            share the file must pass the same number.
        is_in_memory: whether the data file is in memory, and always has its full size.  The file is then read
            through a memory map, without a copy.
        is_short: a function that is called now and then.  It returns whether the machine has no room left for
            more entries.
    """

    def __init__(
        self,
        data: int,
        log: int,
        max_bytes: int,
        *,
        verify: bool = False,
        marks: int = 0,
        is_in_memory: bool = False,
        is_short: Callable[[], bool] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self._data, self._log = data, log
        self.is_in_memory = is_in_memory
        self._end = marks + max_bytes  # of the data file
        self.mapped = mapped(data, self._end) if is_in_memory else None
        self._verify = verify
        self._marks, self._is_short = marks, is_short
        self._table = native.EntryTable()
        self._lock = lock_of(log)
        self._allocated = marks  # last known value, which only grows
        self._part, self._part_size = Part(os.getpid(), 0, 0), 0
        # Bytes that this process has put so far, and the number of bytes at which to check for room again.
        self._taken, self._look_at = 0, 0
        self._not_before = 0.0
        self._why_closed, self._has_said = "", False
        close = weakref.finalize(self, self._lock.close, data, log)
        close.atexit = False
        try:
            self._begin()
        except BaseException:
            close()
            raise

    @property
    def allocated(self) -> int:
        return self._allocated

    @property
    def descriptors(self) -> tuple[int, int]:
        return self._data, self._log

    def __len__(self) -> int:
        return len(self._table)

    def refreshed(self) -> int:
        """Return the number of entries, including entries that other processes have added."""
        self._refresh()
        return len(self._table)

    def find(self, digest: bytes) -> Entry | None:
        """Return the entry with a 16-byte digest; None if there is none.  An entry that another process has
        added is also found."""
        while True:
            entry = self._known(digest)
            if entry is None and self._refresh():
                entry = self._known(digest)
            if entry is None or not self._verify or self._verified(entry):
                return entry  # if the entry is damaged, search again: a later entry may have this digest

    def _known(self, digest: bytes) -> Entry | None:
        found = self._table.find(digest)
        return None if found is None else Entry(*found)

    def images(self, tag: bytes, *, marks: bool, form: int = 0) -> Any:
        """Return the native core's object that finds images in this store.

        ``tag`` is explained at ``identify``.  With ``marks``, an image is stored only at its second use.
        ``form`` is what is stored of an image, a number of ``KeptForm`` in fastpipe/native/kept.h.
        """
        return native.KeptImages(
            self._table,
            self._data,
            self.mapped,
            self._end,
            tag,
            self._verify,
            self._marks if marks else 0,
            form,
            self,
        )

    def chunks(self, tag: bytes, count: int, nbytes: int, *, marks: bool) -> Any:
        """Return the native core's object that finds decoded chunks in this store: ``count`` chunks of
        ``nbytes`` each.  ``tag`` and ``marks`` are as for ``images``."""
        return native.kept_chunks(
            self._table, self._data, self.mapped, self._end, tag, self._verify, self._marks if marks else 0,
            count, nbytes, self,
        )  # fmt: skip

    def read(self, entry: Entry, first: int, count: int) -> UInt8Array:
        """Return ``count`` rows of an entry's array from row ``first`` on: uint8 (count, width, channels)."""
        _, width, channels = entry.shape
        offset, nbytes = entry.offset + first * width * channels, count * width * channels
        if self.mapped is not None:
            return self.mapped[offset : offset + nbytes].reshape(count, width, channels)
        rows: UInt8Array = np.empty((count, width, channels), np.uint8)
        read_into(self._data, rows, offset)
        return rows

    def note(self, entry: Entry) -> bytes:
        note = np.empty(entry.note, np.uint8)
        read_into(self._data, note, entry.offset + entry.nbytes)
        return note.tobytes()

    def entries(self) -> list[Entry]:
        self._refresh()
        return [Entry(*one) for one in self._table.entries()]

    def mark(self, digest: bytes) -> bool:
        """Set the mark of a digest, and return whether any process had set this mark before.  Several digests
        share a mark."""
        place = int.from_bytes(digest[:8], "little") % self._marks
        try:
            if os.pread(self._data, 1, place) == b"\1":
                return True
            os.pwrite(self._data, b"\1", place)
        except OSError as error:
            self._stop(error)
        return False

    def has_room(self, nbytes: int) -> bool:
        """Return whether the store accepts a new entry of ``nbytes``."""
        part = self._part
        left = self._end - (part.start if part.stop == self._allocated else self._allocated)
        left = max(left, part.stop - part.start)
        if self._why_closed:
            return False
        if nbytes > left:
            self._say_full()
            return False
        return not self._not_before or time.monotonic() >= self._not_before

    def freeze(self) -> None:
        """Accept no more entries from this process."""
        self._why_closed = "it is only read"

    @property
    def why_refused(self) -> str:
        """Return why an entry was refused; "" if none was."""
        return self._why_closed or (f"it may hold {self.max_bytes:,} bytes" if self._has_said else "")

    def put(self, digest: bytes, pixels: UInt8Array, flags: int = 0, note: bytes = b"") -> bool:
        """Store a C-contiguous uint8 (H, W, C) array, and the bytes ``note`` with it.  Return whether the
        store has an entry for ``digest`` now."""

        height, width, channels = pixels.shape
        # Another process may have added the entry first.
        is_put = self._put([digest], [pixels], (height, width, channels), flags, note) >= 0
        return is_put or self._table.find(digest) is not None

    def put_all(self, digests: Sequence[bytes], arrays: Sequence[UInt8Array], note: bytes = b"") -> int:
        """Store new arrays of equal length, uint8 (N,), if there is room for all of them.

        Return the offset of the first array, or -1 if the arrays are not stored.  The distance from each
        array to the next is ``aligned(N + len(note))``.  This method is for small arrays: storing small
        arrays one by one would take longer than computing them.
        """
        return self._put(digests, arrays, (1, arrays[0].nbytes, 1), 0, note)

    def _put(
        self, digests: Sequence[bytes], arrays: Sequence[UInt8Array], shape: tuple[int, int, int], flags: int,
        note: bytes,
    ) -> int:  # fmt: skip
        if any(self._table.find(digest) is not None for digest in digests):
            return -1
        nbytes = arrays[0].nbytes + len(note)
        whole = (len(arrays) - 1) * aligned(nbytes) + nbytes
        if not self.has_room(whole) or self._is_too_late(whole):
            return -1
        behind = memoryview(note + bytes(aligned(nbytes) - nbytes if len(arrays) > 1 else 0))
        sums = [native.sum_of(one.reshape(-1)) if self._verify else 0 for one in arrays]
        try:
            offset = self._room_for(whole)
            if offset is None:
                return -1
            write_all(self._data, [part for one in arrays for part in (one.reshape(-1).data, behind)], offset)
            records = native.pack_records(
                b"".join(digests), offset, aligned(nbytes), arrays[0].nbytes, shape, flags, sums, len(note)
            )
            with self._lock.alone(self._log):
                return offset if self._append_locked(digests, records) else -1
        except FileLockedError:  # a stopped process holds the lock: do not wait for it each time
            self._not_before = time.monotonic() + _PAUSE_S
        except OSError as error:
            self._stop(error)
        return -1

    def _begin(self) -> None:
        with self._lock.alone(self._log):
            if os.fstat(self._log).st_size < _HEADER:
                if os.fstat(self._data).st_size and not self.is_in_memory:
                    # The log was removed, and a process that has it open may still use the data file.
                    raise DamagedStoreError(errno.EINVAL, "a cache's data file without its log")
                os.ftruncate(self._log, 0)
                self._write_log((_MAGIC + _ALLOCATED.pack(0)).ljust(_HEADER, b"\0"), 0)
            elif os.pread(self._log, len(_MAGIC), 0) != _MAGIC:
                raise DamagedStoreError(errno.EINVAL, "this is no log of a cache")
        with self._lock.threads:  # reading a long log takes time, so other processes are not locked out
            self._refresh_locked()

    def _refresh(self) -> bool:
        """Read the entries that other processes have added; return whether there are new entries."""
        known = _HEADER + len(self._table) * RECORD_SIZE
        try:
            if os.fstat(self._log).st_size < known + RECORD_SIZE:
                return False
            with self._lock.threads:
                return self._refresh_locked()
        except OSError as error:
            self._stop(error)
            return False

    def _refresh_locked(self) -> bool:
        start = _HEADER + len(self._table) * RECORD_SIZE
        size = os.fstat(self._log).st_size - start
        if size < 0:
            raise OSError(errno.EIO, "a cache's log is shorter than it was")
        allocated = int.from_bytes(os.pread(self._log, _ALLOCATED.size, len(_MAGIC)), "little")
        count = size // RECORD_SIZE
        if count:
            log = os.pread(self._log, count * RECORD_SIZE, start)
            # After a crash of the machine, the header may be older than the records.
            allocated = max(allocated, self._table.extend(log[: len(log) - len(log) % RECORD_SIZE]))
        self._allocated = max(self._allocated, allocated)
        return count > 0

    def _append_locked(self, digests: Sequence[bytes], records: bytes) -> bool:
        end = os.fstat(self._log).st_size
        end -= (end - _HEADER) % RECORD_SIZE  # an incomplete record is overwritten
        if end != _HEADER + len(self._table) * RECORD_SIZE:
            self._refresh_locked()
            if any(self._table.find(digest) is not None for digest in digests):  # another process was first
                return False
        self._write_log(records, end)
        self._table.extend(records)
        return True

    def _room_for(self, nbytes: int) -> int | None:
        """Return the offset of free space for ``nbytes``; None if there is no room."""
        needed = aligned(nbytes)
        with self._lock.threads:
            part = self._part
            if part.pid == os.getpid() and part.start + needed <= part.stop:
                self._part = part._replace(start=part.start + needed)
                return part.start
        with self._lock.alone(self._log):
            self._refresh_locked()
            start, part = aligned(self._allocated), self._part
            if part.pid == os.getpid() and part.stop == start:  # this process's part can be extended
                start = part.start
            if start + nbytes > self._end:
                return None
            # Reserve more than this entry takes, so that the next entries need no lock.  Begin with small
            # parts and double the size each time, because the unused rest is lost when the process ends.
            size = max(needed, min(self._part_size, self.max_bytes // 64))
            self._part_size = min(2 * size, _PART)
            stop = min(max(start + size, self._allocated), self._end)
            self._write_log(_ALLOCATED.pack(stop), len(_MAGIC))
            self._allocated = stop
            self._part = Part(os.getpid(), start + needed, stop)
        return start

    def _write_log(self, data: bytes, offset: int) -> None:
        if os.pwrite(self._log, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _verified(self, entry: Entry) -> bool:
        if self._table.is_verified(entry.number):
            return True
        try:
            is_right = native.sum_of(self.read(entry, 0, entry.shape[0]).reshape(-1)) == entry.sum
        except OSError:
            is_right = False
        if is_right:
            self._table.note_verified(entry.number)
        else:
            self._table.forget(entry.number)
        return is_right

    def _is_too_late(self, nbytes: int) -> bool:
        """Return whether the store accepts no more entries.  Count ``nbytes`` as stored, and check now and
        then whether the machine has run out of room."""
        if self._is_short is not None and self._taken >= self._look_at:
            self._look_at = self._taken + _LOOK_AFTER
            try:
                if self._is_short():
                    self._close_for_more("little memory or disk is left on this machine")
            except OSError as error:
                self._stop(error)
        self._taken += nbytes
        return bool(self._why_closed)

    def _say_full(self) -> None:
        if not self._has_said:
            self._has_said = True
            _log.info(
                "a cache is full (%d entries, %.1f GB): its entries are kept, all other samples are "
                "decoded each time",
                len(self), self.max_bytes / 1e9,
            )  # fmt: skip

    def _stop(self, error: OSError) -> None:
        self._close_for_more(f"it cannot be used: {error.strerror or error}")

    def _close_for_more(self, why: str) -> None:
        with self._lock.threads:
            if self._why_closed:
                return
            self._why_closed = why
        _log.warning(
            "a cache accepts no more entries, those it has stay in use (%d entries, %.1f GB): %s",
            len(self), self._allocated / 1e9, why,
        )  # fmt: skip
