"""One cache: a data file and a log of its entries' places, used by several processes at once.

Both files only grow.  An entry's bytes are written first and its record last, so a process that
is killed in between leaves only some unused bytes.  Entries are never moved or evicted: the
same entries are found in every epoch.
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

# The native core has the table over the log's records (``native.EntryTable``), for its own threads.

RECORD_SIZE = 64  # bytes of a record in the log
_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Return the bytes that an entry takes in a data file, with its note, rounded up to the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Entry(NamedTuple):
    """A cached array: its number in the log; offset and size in the data file; the uint8 shape (height,
    width, channels); flags as given to ``put``; ``native.sum_of`` its bytes; length of the note."""

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

_MOST_PARTS = 1024  # maximum that Linux writes at a time


def write_all(descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write parts one after the other."""
    left = deque(part for part in parts if len(part))
    while left:
        written = os.pwritev(descriptor, list(islice(left, _MOST_PARTS)), offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if left:
            left[0] = left[0][written:]


def read_into(descriptor: int, array: UInt8Array, offset: int) -> None:
    """Read an array's bytes; raise an OSError if the file is shorter than it was."""
    if read_at(descriptor, array.reshape(-1), offset) < array.size:
        raise OSError(errno.EIO, "a cache's data file is shorter than it was")


_log = logging.getLogger("fastpipe.cache")

_MAGIC = b"fastpipe cache 1\n".ljust(32, b"\0")
_ALLOCATED = struct.Struct("<Q")  # behind the magic: where free space begins in the data file
_HEADER = 64
_LOOK_AFTER = 1 << 24  # bytes between two checks for free memory or disk
_PART = 1 << 23  # maximum bytes of the data file that a process reserves at a time
_PAUSE_S = 2.0  # pause of keeping after another process did not release the lock


class DamagedStoreError(OSError):
    """The two files do not belong together, or are not a store's."""


class EntryStore:
    """Byte arrays by the digest of their identity, in two files (data and log), which are closed with the
    store; safe for concurrent threads and processes.

    A store is optional: after an error, ``find`` finds nothing and ``put`` keeps nothing.
    With ``verify``, this process compares an entry's bytes with their checksum at the first read.
    ``marks`` is the number of extra bytes before the entries that ``mark`` uses; the same for all sharers of
    the file.  ``is_in_memory``: the data file has its full size and never shrinks, so it is read through a
    map, without a copy.  ``is_short`` is called now and then, and returns whether the machine has no room
    left, whatever ``max_bytes`` is.
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
        self._allocated = marks  # last known value; it only grows
        self._part, self._part_size = Part(os.getpid(), 0, 0), 0
        self._taken, self._look_at = 0, 0  # bytes put here so far, and when to check for room again
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
        """Return the number of entries, including those of other processes."""
        self._refresh()
        return len(self._table)

    def find(self, digest: bytes) -> Entry | None:
        """Return the entry of a 16-byte digest, also if another process has just added it; else None."""
        while True:
            entry = self._known(digest)
            if entry is None and self._refresh():
                entry = self._known(digest)
            if entry is None or not self._verify or self._verified(entry):
                return entry  # behind a damaged one there may be another

    def _known(self, digest: bytes) -> Entry | None:
        found = self._table.find(digest)
        return None if found is None else Entry(*found)

    def images(self, tag: bytes, *, marks: bool) -> Any:
        """Return the ``native.KeptImages`` that finds images here, with ``tag`` as in ``identify``; with
        ``marks``, an image is kept only from its second use on."""
        return native.KeptImages(
            self._table,
            self._data,
            self.mapped,
            self._end,
            tag,
            self._verify,
            self._marks if marks else 0,
            self,
        )

    def chunks(self, tag: bytes, count: int, nbytes: int, *, marks: bool) -> Any:
        """Return the ``native.KeptChunks`` that finds ``count`` decoded chunks of ``nbytes`` each here."""
        return native.kept_chunks(
            self._table, self._data, self.mapped, self._end, tag, self._verify, self._marks if marks else 0,
            count, nbytes, self,
        )  # fmt: skip

    def read(self, entry: Entry, first: int, count: int) -> UInt8Array:
        """Return rows of an entry, uint8 (count, width, channels), read-only."""
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
        """Mark a digest; return whether any process marked it, or one with the same mark, before."""
        place = int.from_bytes(digest[:8], "little") % self._marks
        try:
            if os.pread(self._data, 1, place) == b"\1":
                return True
            os.pwrite(self._data, b"\1", place)
        except OSError as error:
            self._stop(error)
        return False

    def has_room(self, nbytes: int) -> bool:
        """Return whether an entry of this many bytes would fit."""
        part = self._part
        left = self._end - (part.start if part.stop == self._allocated else self._allocated)
        left = max(left, part.stop - part.start)
        if self._why_closed:
            return False
        if nbytes > left:
            self._say_full()
            return False
        return not self._not_before or time.monotonic() >= self._not_before

    def put(self, digest: bytes, pixels: UInt8Array, flags: int = 0, note: bytes = b"") -> bool:
        """Keep a C-contiguous uint8 (H, W, C) array with a note; return whether it is in the store
        now."""

        height, width, channels = pixels.shape
        # Another process may have added it first.
        is_put = self._put([digest], [pixels], (height, width, channels), flags, note) >= 0
        return is_put or self._table.find(digest) is not None

    def put_all(self, digests: Sequence[bytes], arrays: Sequence[UInt8Array], note: bytes = b"") -> int:
        """Keep new arrays uint8 (N,), all of the same N, if there is room for all of them.

        For small arrays, which would take longer to keep one by one than to make.  Return the first one's
        offset; each is ``aligned(N + len(note))`` after the one before.  Return -1 if they are not kept.
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
        except FileLockedError:  # by a stopped process: waiting each time would stall this one
            self._not_before = time.monotonic() + _PAUSE_S
        except OSError as error:
            self._stop(error)
        return -1

    def _begin(self) -> None:
        with self._lock.alone(self._log):
            if os.fstat(self._log).st_size < _HEADER:
                if os.fstat(self._data).st_size and not self.is_in_memory:
                    # A process with a removed log may still use these bytes.
                    raise DamagedStoreError(errno.EINVAL, "a cache's data file without its log")
                os.ftruncate(self._log, 0)
                self._write_log((_MAGIC + _ALLOCATED.pack(0)).ljust(_HEADER, b"\0"), 0)
            elif os.pread(self._log, len(_MAGIC), 0) != _MAGIC:
                raise DamagedStoreError(errno.EINVAL, "this is no log of a cache")
        with self._lock.threads:  # reading a long log takes a while: not while other processes wait
            self._refresh_locked()

    def _refresh(self) -> bool:
        """Read the entries that other processes have added; return whether there are any."""
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
            # The header may be older than the records, after a crash of the machine.
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
        """Return the offset of free space for this many bytes; None without room."""
        needed = aligned(nbytes)
        with self._lock.threads:
            part = self._part
            if part.pid == os.getpid() and part.start + needed <= part.stop:
                self._part = part._replace(start=part.start + needed)
                return part.start
        with self._lock.alone(self._log):
            self._refresh_locked()
            start, part = aligned(self._allocated), self._part
            if part.pid == os.getpid() and part.stop == start:  # the space after it is free
                start = part.start
            if start + nbytes > self._end:
                return None
            # Reserve more than this entry takes, so that the next ones need no lock.  Double the size each
            # time, because the unused rest is lost when the process ends.
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
        """Return whether the machine has run out of room, checked now and then."""
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
