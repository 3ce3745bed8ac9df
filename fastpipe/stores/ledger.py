"""How many bytes a stage holds, counted by all processes that use it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
from typing import NamedTuple

from fastpipe.core.locks import LockFile

_FORM = 0x4750465354414702
_NUMBERS = struct.Struct("<QQqqqq")
_LOCK = 0


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

    form: int = 0
    boot: int = 0
    nbytes: int = 0
    under_way: int = 0
    files: int = 0
    tables: int = 0


class Ledger:
    """Counts what is reserved and freed, at the beginning of the file whose first byte, locked, guards the
    numbers.

    Bytes are reserved before a file is written and freed after it is gone: who is killed between the two
    leaves too large a number, and never a file that was not counted; and it shows that it is too large.

    The numbers are read and written, not mapped to memory: a process lives on when the file was cut or the
    disk is full.
    """

    def __init__(self, lock: LockFile) -> None:
        self._lock = lock

    @property
    def is_reliable(self) -> bool:
        """Return whether everything was counted to the end; only for the only user of the stage."""
        count = self._read()
        return count.form == _FORM and count.boot == _boot() and count.nbytes >= 0 and count.under_way == 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that are there or are being written."""
        return max(0, self._read().nbytes)

    @property
    def tables(self) -> int:
        """Return how many tables were opened so far."""
        return self._read().tables

    def reset(self, nbytes: int) -> None:
        """Begin again with what was counted; no file may be in writing."""
        with self._lock.alone(_LOCK):
            self._write(self._read()._replace(form=_FORM, boot=_boot(), nbytes=nbytes, under_way=0))

    def reserve(self, nbytes: int, limit: int) -> int:
        """Begin to write a file: return a number of its own, or -1 where there is no room."""
        with self._lock.alone(_LOCK):
            count = self._read()
            if count.form != _FORM or count.nbytes + nbytes > limit:
                return -1
            more = {"nbytes": count.nbytes + nbytes, "under_way": count.under_way + 1}
            self._write(count._replace(**more, files=count.files + 1))
        return count.files

    def written(self, freed: int = 0) -> None:
        """Note that a file that was begun is there, or is not, and its bytes are free."""
        with contextlib.suppress(
            OSError
        ):  # the stage was closed meanwhile: it shows that too much is counted
            self._add(-freed, -1)

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
        self._add(0, 0, tables=1)

    def _add(self, nbytes: int, under_way: int, tables: int = 0) -> None:
        with self._lock.alone(_LOCK):
            count = self._read()
            nbytes, under_way = max(0, count.nbytes + nbytes), max(0, count.under_way + under_way)
            self._write(count._replace(nbytes=nbytes, under_way=under_way, tables=count.tables + tables))

    def _read(self) -> _Count:
        data = os.pread(self._lock.descriptor, _NUMBERS.size, 0)
        return _Count(*_NUMBERS.unpack(data)) if len(data) == _NUMBERS.size else _Count()

    def _write(self, count: _Count) -> None:
        os.pwrite(self._lock.descriptor, _NUMBERS.pack(*count), 0)


@functools.cache
def _boot() -> int:
    """Return what tells this start of the machine from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return int.from_bytes(hashlib.blake2b(file.read(), digest_size=8).digest(), "little")
    except OSError:
        return 0
