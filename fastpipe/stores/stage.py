"""The folder on a local disk that contains staged objects (copies) for all processes of a user on a machine.

::

    fastpipe-stage/           mode 0700
      objects/ab/cdef…        a complete object; the name identifies the object and its version
      writing/12              an object that is being written
      tables/<listing>        for each object of a listing, its name if it is staged, or zeros
      locks                   processes lock bytes of this file while they use the folder, count bytes, or
                              download an object; the file also contains the numbers of the ``Ledger``

A table says whether an object is present, without a check of the file.  A table may be wrong.  This is
detected when the object is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.locks import LockFile, open_file_locks_are_possible
from fastpipe.core.private_folder import PrivateFolder
from fastpipe.errors import StageError
from fastpipe.options import Stage
from fastpipe.stores.table import StageTable, names_in_use

_log = logging.getLogger("fastpipe.stage")

Int64Array = npt.NDArray[np.int64]

_FOLDER = "fastpipe-stage"
_PARTS = ("objects", "writing", "tables")
_USERS = 1  # all users of the folder have a shared lock on this byte
_OPENING = 2  # a process locks this byte while it becomes a user; other processes wait
_CLAIMS = 1 << 20  # the bytes for claims of objects start here
_SHARE = 0.9  # fraction of a disk's free bytes that ``max_bytes="auto"`` means


_FORM = 0x4750465354414702
_NUMBERS = struct.Struct("<QQqqqq")
_LOCK = 0


class _Count(NamedTuple):
    """The numbers that a ``Ledger`` stores in the file ``locks``.

    ``form`` says whether the numbers are valid.  ``boot`` identifies the boot of the machine, because a crash
    may have lost the last writes.  ``nbytes`` is the number of bytes that are present or reserved.
    ``under_way`` counts the files that are being written or removed.  ``files`` counts the files started so
    far, and is the name of the next unfinished file.  ``tables`` counts the tables opened so far.
    """

    form: int = 0
    boot: int = 0
    nbytes: int = 0
    under_way: int = 0
    files: int = 0
    tables: int = 0


class Ledger:
    """Counts a stage's bytes, in numbers at the start of the file ``locks``.  A lock guards the numbers.

    Bytes are reserved before a file is written, and freed after a file is removed.  If a process is killed in
    between, the count is too large, but never too small.  A count that is too large can be detected.

    The numbers are read and written, not memory-mapped.  So a process survives if the file was truncated or
    the disk is full.
    """

    def __init__(self, lock: LockFile) -> None:
        self._lock = lock

    @property
    def is_reliable(self) -> bool:
        """Return whether the numbers are right.  Valid only if no other process uses the stage."""
        count = self._read()
        return count.form == _FORM and count.boot == _boot() and count.nbytes >= 0 and count.under_way == 0

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are present or being written."""
        return max(0, self._read().nbytes)

    @property
    def tables(self) -> int:
        """Return the number of tables opened so far."""
        return self._read().tables

    def reset(self, nbytes: int) -> None:
        """Set the number of bytes after counting them.  No file may be written at the same time."""
        with self._lock.alone(_LOCK):
            self._write(self._read()._replace(form=_FORM, boot=_boot(), nbytes=nbytes, under_way=0))

    def reserve(self, nbytes: int, limit: int) -> int:
        """Reserve bytes for a file that will be written.  Return a number that becomes the unfinished file's
        name, or -1 if there is no room."""
        with self._lock.alone(_LOCK):
            count = self._read()
            if count.form != _FORM or count.nbytes + nbytes > limit:
                return -1
            more = {"nbytes": count.nbytes + nbytes, "under_way": count.under_way + 1}
            self._write(count._replace(**more, files=count.files + 1))
        return count.files

    def written(self, freed: int = 0) -> None:
        """Record that the writing of a file has ended.  If it failed, ``freed`` is the file's size."""
        with contextlib.suppress(OSError):  # the file is closed: the count stays too large, which is detected
            self._add(-freed, -1)

    def remove(self) -> None:
        """Record that a file is about to be removed."""
        self._add(0, 1)

    def removed(self, nbytes: int) -> None:
        """Record that a file was removed."""
        self._add(-nbytes, -1)

    def mark_uncertain(self) -> None:
        """Make a process count the bytes again, once it is the only user.  A file's state is unknown."""
        self._add(0, 1)

    def note_table(self) -> None:
        """Record that a table was opened."""
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
    """Return an identifier of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return int.from_bytes(hashlib.blake2b(file.read(), digest_size=8).digest(), "little")
    except OSError:
        return 0


class Usage(NamedTuple):
    nbytes: int
    objects: int
    is_used: bool


class StageFolder:
    """A stage's folder, opened in one process."""

    def __init__(self, stage: Stage) -> None:
        self.path = os.path.join(os.fspath(stage.dir), _FOLDER)
        self.is_broken = False
        if not (open_file_locks_are_possible() and PrivateFolder.IS_PINNED):
            raise StageError(
                "a stage needs the locks of 64-bit Linux, and /proc; leave stage= out on this system"
            )
        # All paths start at the open folder, so the replacement of a folder above it has no effect.
        self._folder = PrivateFolder(self.path, called="stage", error=StageError)
        try:
            for part in _PARTS:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._folder.here(part), 0o700)
            self.locks = LockFile(self._folder.here("locks"))
            self.ledger = Ledger(self.locks)
            try:
                self.max_bytes = self._begin_use(stage)
            except BaseException:
                self.locks.close()  # an error that is kept must not keep the locks
                raise
        except BaseException as error:
            self._folder.close()
            if not isinstance(error, OSError):
                raise
            if isinstance(error, StageError):
                raise
            raise StageError(
                f"the stage {os.fspath(stage.dir)!r} cannot be used: {error.strerror or error}. Name a "
                "folder of your own on a local disk, or leave stage= out"
            ) from error

    @staticmethod
    def is_in(folder: str) -> bool:
        return os.path.isdir(os.path.join(folder, _FOLDER))

    def open_table(self, digest: bytes, sizes: Int64Array, name_of: Callable[[int], bytes]) -> StageTable:
        """Return the table of the staged objects of a listing.

        ``digest`` is the listing's digest, and ``sizes``, int64 (N,), are the sizes of the objects in bytes.
        ``name_of`` gets an object's row in the listing, and returns the object's name, 16 bytes.
        """
        # Equal listings of two stores have separate tables, because objects' names depend on the store.
        which = hashlib.blake2b(digest + (name_of(0) if len(sizes) else b""), digest_size=16).hexdigest()
        try:
            table = StageTable(self, self._folder.here(f"tables/{which}"), sizes, name_of)
            self.ledger.note_table()
        except OSError as error:
            self.close()
            raise StageError(f"the stage {self.path!r} cannot be used: {error.strerror or error}") from error
        return table

    def object_path(self, name: bytes) -> str:
        """Return the path of an object, which may be missing.  The path is valid in this process while this
        folder is open."""
        text = name.hex()
        return self._folder.here(f"objects/{text[:2]}/{text[2:]}")

    def unfinished_path(self, number: int) -> str:
        """Return the path of an object that is being written."""
        return self._folder.here(f"writing/{number}")

    @staticmethod
    def claim_byte(name: bytes) -> int:
        """Return the number of the byte whose lock gives exclusive access to an object."""
        return _CLAIMS + (int.from_bytes(name[:8], "little") >> 2)

    def usage(self) -> Usage:
        count = sum(1 for _ in self.objects())
        return Usage(self.ledger.nbytes, count, not self.locks.is_free(_USERS))

    def objects(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the path and the file status of each object."""
        for folder in _entries(self._folder.here("objects")):
            for entry in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):  # another process has removed the object
                    yield entry.path, entry.stat(follow_symlinks=False)

    def unlisted(self) -> list[tuple[str, int]]:
        """Return the objects that no table in use lists, oldest first.  An object is described by its path
        and the first half of its name (8 bytes, as an integer).  Tables that no process uses are removed."""
        # Read the objects before the tables, because a new object is listed before its file exists.
        found = [
            (max(status.st_mtime_ns, status.st_atime_ns), path, begin)
            for path, status in self.objects()
            if (begin := _begin_of(path)) is not None
        ]
        names = np.array([begin for _, _, begin in found], np.uint64)
        is_listed = np.isin(names, self.listed("")).tolist()
        free = [one for one, is_used in zip(found, is_listed, strict=True) if not is_used]
        return [(path, begin) for _, path, begin in sorted(free)]

    def listed(self, path: str) -> npt.NDArray[np.uint64]:
        """Return the first halves of the object names in all tables in use, except the table at ``path``.
        They are sorted."""
        found = [np.zeros(0, np.uint64)]
        for entry in _entries(self._folder.here("tables")):
            if entry.path != path:
                found.append(names_in_use(entry.path))
        return np.sort(np.concatenate(found))

    def remove(self, path: str, nbytes: int | None = None) -> bool:
        """Remove an object.  Return False if its file was missing already.  At most ``nbytes`` are counted as
        freed."""
        self.ledger.remove()
        freed = 0
        try:
            status = os.lstat(path)
            os.unlink(path)
            if status.st_nlink == 1:
                freed = status.st_size if nbytes is None else min(status.st_size, nbytes)
            else:  # a process was killed during the rename, and the object still has a name in writing/
                self.ledger.mark_uncertain()
        except FileNotFoundError:
            return False
        finally:
            self.ledger.removed(freed)
        return True

    def clear(self) -> None:
        """Remove everything that is staged.  Raise a StageError if the stage is in use or not writable."""
        self.locks.take(_OPENING, waits=True)
        self.locks.release(_USERS)
        try:
            if not self.locks.take(_USERS):
                raise StageError(f"the stage {self.path!r} is in use; end the programs that use it first")
            self.ledger.mark_uncertain()
            for path, _ in self.objects():
                os.unlink(path)
            for part in ("tables", "writing"):
                for entry in _entries(self._folder.here(part)):
                    os.unlink(entry.path)
            self.ledger.reset(0)
        except OSError as error:
            if isinstance(error, StageError):
                raise
            raise StageError(f"the stage {self.path!r} cannot be cleared: {error}") from error
        finally:
            self.locks.stay(_USERS)
            self.locks.release(_OPENING)

    def warn_once(self, error: OSError) -> None:
        """Log the first error of the folder.  Training continues without the folder."""
        if not self.is_broken and not self.locks.is_closed:
            self.is_broken = True
            _log.warning(
                "The stage %r cannot be written to or read: %s. Objects that it lacks are fetched each time",
                self.path, error.strerror or str(error),
            )  # fmt: skip

    def close(self) -> None:
        self.locks.close()
        self._folder.close()

    def _begin_use(self, stage: Stage) -> int:
        """Become a user of the folder, and return the stage's limit of bytes.  If this process is the only
        user, also remove unfinished files of killed processes, and correct the count of bytes."""
        self.locks.take(_OPENING, waits=True)
        if self.locks.take(_USERS):
            for entry in _entries(self._folder.here("writing")):
                os.unlink(entry.path)
            if not self.ledger.is_reliable:
                self.ledger.reset(sum(status.st_size for _, status in self.objects()))
            limit = self._limit(stage)
            if self.ledger.nbytes > limit:
                self._shrink(limit)
        self.locks.stay(_USERS)
        self.locks.release(_OPENING)
        return self._limit(stage)

    def _shrink(self, limit: int) -> None:
        """Remove objects until a lowered limit is met, beginning with the least recently used objects."""
        found = sorted((max(status.st_mtime_ns, status.st_atime_ns), path) for path, status in self.objects())
        for _, path in found:
            if self.ledger.nbytes <= limit:
                break
            self.remove(path)

    def _limit(self, stage: Stage) -> int:
        if stage.max_bytes != "auto":
            return int(stage.max_bytes)
        status = os.statvfs(self._folder.here())
        return self.ledger.nbytes + int(_SHARE * status.f_bavail * status.f_frsize)


def _begin_of(path: str) -> int | None:
    """Return the first half of an object's name from its path.  Return None for any other file."""
    text = "".join(path.rsplit("/", 2)[1:])
    try:
        return int.from_bytes(bytes.fromhex(text[:16]), "little") if len(text) == 32 else None
    except ValueError:
        return None


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
