"""How many bytes a stage holds, counted by all processes that use it."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from typing import NamedTuple

from fastpipe.stage.locks import LockFile

__all__ = ["Ledger"]

_FORM = 0x4750465354414702
_NUMBERS = struct.Struct("<QQqqqq")
_LOCK = 0


class _Count(NamedTuple):
    """What is counted.

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


class Ledger:
    """Counts what is reserved and freed, at the beginning of the file that is locked.

    Bytes are reserved before a file is written and freed after it is gone: who is killed between the two
    leaves too large a number, and never a file that was not counted; and it shows that it is too large.

    The numbers are read and written, not mapped to memory: a process lives on when the file was cut or the
    disk is full.

    Args:
        lock: the file; its first byte guards the numbers.
    """

    def __init__(self, lock: LockFile) -> None:
        self._lock = lock

    @property
    def is_reliable(self) -> bool:
        """Whether everything was counted to the end; to be asked while nobody else uses it."""
        count = self._read()
        return count.form == _FORM and count.boot == _boot() and count.nbytes >= 0 and count.under_way == 0

    @property
    def nbytes(self) -> int:
        """Bytes that are there or reserved."""
        return max(0, self._read().nbytes)

    @property
    def tables(self) -> int:
        """How many tables were opened so far."""
        return self._read().tables

    def reset(self, nbytes: int) -> None:
        """Begin anew with what was counted."""
        with self._lock.alone(_LOCK):
            count = self._read()
            self._write(count._replace(form=_FORM, boot=_boot(), nbytes=nbytes, under_way=0))

    def reserve(self, nbytes: int, limit: int) -> int:
        """Begin to write a file: a number that no other one has got, or -1 where there is no room for it."""
        with self._lock.alone(_LOCK):
            count = self._read()
            if count.form != _FORM or count.nbytes + nbytes > limit:
                return -1
            self._write(
                count._replace(
                    nbytes=count.nbytes + nbytes, under_way=count.under_way + 1, files=count.files + 1
                )
            )
            return count.files

    def written(self, freed: int = 0) -> None:
        """A file that was begun is there; or it is not, and its bytes are free."""
        self._add(-freed, -1)

    def remove(self) -> None:
        """Begin to remove a file."""
        self._add(0, 1)

    def removed(self, nbytes: int) -> None:
        """A file is gone, or was not there: then its bytes are none."""
        self._add(-nbytes, -1)

    def doubt(self) -> None:
        """Have it counted anew when somebody is the only user: a file is gone, and nobody here did it."""
        self._add(0, 1)

    def note_table(self) -> None:
        """Hear that a table was opened."""
        with self._lock.alone(_LOCK):
            count = self._read()
            self._write(count._replace(tables=count.tables + 1))

    def _add(self, nbytes: int, under_way: int) -> None:
        with self._lock.alone(_LOCK):
            count = self._read()
            self._write(
                count._replace(
                    nbytes=max(0, count.nbytes + nbytes), under_way=max(0, count.under_way + under_way)
                )
            )

    def _read(self) -> _Count:
        data = os.pread(self._lock.descriptor, _NUMBERS.size, 0)
        return _Count._make(_NUMBERS.unpack(data)) if len(data) == _NUMBERS.size else _Count(0, 0, 0, 0, 0, 0)

    def _write(self, count: _Count) -> None:
        os.pwrite(self._lock.descriptor, _NUMBERS.pack(*count), 0)


@functools.cache
def _boot() -> int:
    """Tells this start of the machine from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return int.from_bytes(hashlib.blake2b(file.read(), digest_size=8).digest(), "little")
    except OSError:
        return 0
