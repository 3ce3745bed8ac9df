"""How many bytes a stage holds, counted by all processes that use it."""

from __future__ import annotations

import mmap
import os
import struct

from fastpipe.stage.locks import LockFile

__all__ = ["Ledger"]

_FORM = 1
_NUMBERS = struct.Struct("<QqqQ")  # form, bytes, writes under way, counter for names
_LOCK = 0


class Ledger:
    """Counts what is reserved and freed.

    Bytes are reserved before a file is written and freed after it is gone: who is killed between the two
    leaves too large a number, and never a file that was not counted.

    Args:
        path: its file.
        lock: whose first byte guards it.
    """

    def __init__(self, path: str, lock: LockFile) -> None:
        self._lock = lock
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size < _NUMBERS.size:
                os.ftruncate(descriptor, _NUMBERS.size)
            self._memory = mmap.mmap(descriptor, _NUMBERS.size)
        finally:
            os.close(descriptor)

    @property
    def is_reliable(self) -> bool:
        """Whether everything was counted to the end; to be asked while nobody else uses it."""
        form, nbytes, writes, _ = _NUMBERS.unpack_from(self._memory)
        return bool(form == _FORM and nbytes >= 0 and writes == 0)

    @property
    def nbytes(self) -> int:
        """Bytes that are there or reserved."""
        return int(_NUMBERS.unpack_from(self._memory)[1])

    def reset(self, nbytes: int) -> None:
        """Begin anew with what was counted."""
        _NUMBERS.pack_into(self._memory, 0, _FORM, nbytes, 0, self._counter())

    def reserve(self, nbytes: int, limit: int) -> bool:
        """Begin to write a file; whether there is room for it."""
        with self._lock.alone(_LOCK):
            form, held, writes, counter = _NUMBERS.unpack_from(self._memory)
            if held + nbytes > limit:
                return False
            _NUMBERS.pack_into(self._memory, 0, form, held + nbytes, writes + 1, counter)
            return True

    def written(self, freed: int = 0) -> None:
        """A file that was begun is there; or it is not, and its bytes are free."""
        with self._lock.alone(_LOCK):
            form, held, writes, counter = _NUMBERS.unpack_from(self._memory)
            _NUMBERS.pack_into(self._memory, 0, form, held - freed, writes - 1, counter)

    def free(self, nbytes: int) -> None:
        """A file is gone."""
        with self._lock.alone(_LOCK):
            form, held, writes, counter = _NUMBERS.unpack_from(self._memory)
            _NUMBERS.pack_into(self._memory, 0, form, max(0, held - nbytes), writes, counter)

    def next_number(self) -> int:
        """A number that no other process has got."""
        with self._lock.alone(_LOCK):
            form, held, writes, counter = _NUMBERS.unpack_from(self._memory)
            _NUMBERS.pack_into(self._memory, 0, form, held, writes, counter + 1)
            return int(counter)

    def _counter(self) -> int:
        return int(_NUMBERS.unpack_from(self._memory)[3])
