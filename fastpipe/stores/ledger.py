"""How many bytes a stage holds, counted by all processes that use it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import threading
import weakref
from typing import NamedTuple

from fastpipe.core.locks import LockFile, renew_in_children

_FORM = 0x4750465354414702
_NUMBERS = struct.Struct("<QQqqqq")
_LOCK = 0
# Reserved at a time: a part of what may be there, and no more than the most; and numbers of files.
_PARTS, _MOST, _NUMBERED = 256, 32 << 20, 1024


class _Count(NamedTuple):
    """The numbers in the file.

    Attributes:
        form: that it is counted at all.
        boot: since which start of the machine.  One that fell may have lost what was written last.
        nbytes: bytes that are there or reserved.
        under_way: files that are being written or removed.
        files: that were begun so far; names them while they are written.
        tables: that were opened so far.
    """

    form: int
    boot: int
    nbytes: int
    under_way: int
    files: int
    tables: int


class _Reserve:
    """What a process has reserved and not used yet, for files that it is going to write."""

    def __init__(self) -> None:
        self._after_fork()

    def _after_fork(self) -> None:
        self.lock = threading.Lock()
        self.nbytes = 0
        self.number, self.numbers = 0, 0  # the next number, and how many there are
        self.writing = 0  # files that are being written
        self.is_counted = False  # among what is under way


class Ledger:
    """Counts what is reserved and freed, at the beginning of the file that is locked.

    Bytes are reserved before a file is written and freed after it is gone: who is killed between the two
    leaves too large a number, and never a file that was not counted; and it shows that it is too large.

    Where there is much room, bytes are reserved for many files at a time, as a lock among processes costs as
    much as writing a small file.  What is left of them is given back by ``settle``, when this object is
    collected, and by the interpreter's end.

    The numbers are read and written, not mapped to memory: a process lives on when the file was cut or the
    disk is full.

    Args:
        lock: the file; its first byte guards the numbers.
    """

    def __init__(self, lock: LockFile) -> None:
        self._lock, self._advance = lock, _Reserve()
        weakref.finalize(self, _settle, lock, self._advance)
        renew_in_children(self._advance)

    @property
    def is_reliable(self) -> bool:
        """Return whether everything was counted to the end; only for the only user of the stage."""
        count = _read(self._lock)
        return count.form == _FORM and count.boot == _boot() and count.nbytes >= 0 and count.under_way == 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that are there, are being written, or that other processes have reserved."""
        return max(0, _read(self._lock).nbytes - self._advance.nbytes)

    @property
    def tables(self) -> int:
        """Return how many tables were opened so far."""
        return _read(self._lock).tables

    def reset(self, nbytes: int) -> None:
        """Begin again with what was counted; no file may be in writing."""
        advance = self._advance
        with advance.lock, self._lock.alone(_LOCK):
            count = _read(self._lock)
            _write(self._lock, count._replace(form=_FORM, boot=_boot(), nbytes=nbytes, under_way=0))
            advance.nbytes, advance.is_counted = 0, False

    def reserve(self, nbytes: int, limit: int) -> int:
        """Begin to write a file: return a number of its own, or -1 where there is no room."""
        advance = self._advance
        with advance.lock:
            if (advance.nbytes < nbytes or not advance.numbers) and not self._reserve_more(nbytes, limit):
                return -1
            advance.nbytes -= nbytes
            advance.writing += 1
            advance.numbers -= 1
            advance.number += 1
            return advance.number - 1

    def _reserve_more(self, nbytes: int, limit: int) -> bool:
        """Have at least so many bytes, and a number."""
        advance = self._advance
        missing = nbytes - advance.nbytes
        with self._lock.alone(_LOCK):
            count = _read(self._lock)
            room = limit - count.nbytes
            if count.form != _FORM or missing > room:
                return False
            more = max(0, missing, min(room, limit // _PARTS, _MOST))
            _write(
                self._lock,
                count._replace(
                    nbytes=count.nbytes + more, under_way=count.under_way + (not advance.is_counted),
                    files=count.files + _NUMBERED,
                ),
            )  # fmt: skip
        advance.nbytes += more
        advance.number, advance.numbers = count.files, _NUMBERED
        advance.is_counted = True
        return True

    def written(self, freed: int = 0) -> None:
        """Note that a file that was begun is there, or is not, and its bytes are free."""
        advance = self._advance
        with advance.lock:
            advance.writing -= 1
            advance.nbytes += freed
            is_idle = not advance.writing and (freed > 0 or not advance.nbytes)
        if is_idle:
            self.settle()

    def settle(self) -> None:
        """Give back what is reserved and not used."""
        _settle(self._lock, self._advance)

    def remove(self) -> None:
        """Begin to remove a file."""
        self._add(0, 1)

    def removed(self, nbytes: int) -> None:
        """Note that a file is gone."""
        self._add(-nbytes, -1)

    def mark_uncertain(self) -> None:
        """Have the next sole user count again: a file is gone that was not removed here."""
        self._add(0, 1)

    def note_table(self) -> None:
        """Count a table that was opened."""
        with self._lock.alone(_LOCK):
            count = _read(self._lock)
            _write(self._lock, count._replace(tables=count.tables + 1))

    def _add(self, nbytes: int, under_way: int) -> None:
        with self._lock.alone(_LOCK):
            count = _read(self._lock)
            _write(
                self._lock,
                count._replace(
                    nbytes=max(0, count.nbytes + nbytes), under_way=max(0, count.under_way + under_way)
                ),
            )


def _read(lock: LockFile) -> _Count:
    data = os.pread(lock.descriptor, _NUMBERS.size, 0)
    return _Count._make(_NUMBERS.unpack(data)) if len(data) == _NUMBERS.size else _Count(0, 0, 0, 0, 0, 0)


def _write(lock: LockFile, count: _Count) -> None:
    os.pwrite(lock.descriptor, _NUMBERS.pack(*count), 0)


def _settle(lock: LockFile, advance: _Reserve) -> None:
    with advance.lock:
        if not advance.is_counted or lock.is_closed:
            return
        is_last = not advance.writing
        with contextlib.suppress(OSError), lock.alone(_LOCK):  # else it shows that it is too large
            count = _read(lock)
            nbytes, under_way = max(0, count.nbytes - advance.nbytes), max(0, count.under_way - is_last)
            _write(lock, count._replace(nbytes=nbytes, under_way=under_way))
        advance.nbytes = 0
        advance.is_counted = not is_last


@functools.cache
def _boot() -> int:
    """Return what tells this start of the machine from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return int.from_bytes(hashlib.blake2b(file.read(), digest_size=8).digest(), "little")
    except OSError:
        return 0
