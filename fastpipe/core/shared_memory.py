"""Memory that the processes of one user on one machine share, found through notes in a private folder.

A note is a file that says which process has which memory open at which descriptors.  Other processes open the
memory through ``/proc``.  A process that joins also writes a note, so the memory can still be found after the
process that created the memory has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.locks import try_to_lock
from fastpipe.core.private_folder import PrivateFolder, user_cache_folder

_NAME = "fastpipe-cache"


def anonymous_file() -> int:
    """Return an unnamed file in memory.  The system frees it when no process has it open any more."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def mapped(descriptor: int, nbytes: int, protection: int = mmap.PROT_READ) -> npt.NDArray[np.uint8] | None:
    """Return the memory-mapped content of a file as an array; None if the file cannot be mapped."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection), np.uint8)
    except (OSError, ValueError, OverflowError):
        return None


def descriptor_of(pid: int, number: int, inode: int) -> int:
    """Open the file in memory that process ``pid`` has open at descriptor ``number``.  Raise an OSError if
    the file is not a fastpipe file in memory, or does not have the inode ``inode``."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)  # this releases no lock, because a locked file would have the announced inode
        raise FileNotFoundError(path)
    return descriptor


LOCK = "lock"
_PATIENCE_S = 1.0
# Notes from other machines are removed at this age, because their processes cannot be checked here.
_FORGOTTEN_S = 30 * 86400.0


class Announced(NamedTuple):
    """The content of a note.

    Attributes:
        note: the name of the note.
        about: all values of the note, including the values that were passed to ``announce`` as ``about``.
        pid: the number of the process that has the files open.
        numbers: the descriptors of the files in that process.
        inodes: the inodes of the files.
    """

    note: str
    about: dict[str, Any]
    pid: int
    numbers: list[int]
    inodes: list[int]

    def opened(self) -> list[int]:
        """Open the files in this process, and return descriptors, which the caller closes."""
        found: list[int] = []
        try:
            for number, inode in zip(self.numbers, self.inodes, strict=True):
                found.append(descriptor_of(self.pid, number, inode))
        except (OSError, ValueError):
            for descriptor in found:
                os.close(descriptor)
            raise
        return found


def meeting_name(what: str) -> str:
    """Return a name for notes, the same for all processes that can share memory and use equal ``what``."""
    return f"{_place()}.{what}"


def _place() -> str:
    """Return an identifier of the current boot of the machine and of the namespace of process numbers."""
    facts = []
    with contextlib.suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256(os.fsencode("\n".join(facts))).hexdigest()[:16]


@contextmanager
def meeting_folder() -> Iterator[PrivateFolder]:
    """Give the ``with`` block exclusive access to the folder of notes.  Notes of processes that have ended
    are removed first."""
    with PrivateFolder(user_cache_folder() / "shared-memory") as folder, alone(folder):
        _clear(folder)
        yield folder


@contextmanager
def alone(folder: PrivateFolder) -> Iterator[None]:
    """Run the ``with`` block alone among all processes that open a cache in this folder.

    If the lock is not free after a second, the block runs without the lock.  The worst result is that two
    caches exist instead of one.
    """
    descriptor = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):  # the file system has no locks
            while not try_to_lock(descriptor) and time.monotonic() < deadline:
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def announce(
    folder: PrivateFolder, name: str, descriptors: Sequence[int], about: dict[str, Any], owner: Any
) -> None:
    """Write a note about files in memory that this process has open.  ``about`` is added to the note as JSON.
    The note is removed when ``owner`` is garbage-collected."""
    inodes = [os.fstat(one).st_ino for one in descriptors]
    told = {**about, "pid": os.getpid(), "descriptors": list(descriptors), "inodes": inodes}
    file = f"{name}.{os.getpid()}.{descriptors[0]}.json"
    folder.write(file, lambda out: out.write(json.dumps(told).encode()), sync=False)
    weakref.finalize(owner, _withdraw, folder.path / file, os.getpid())


def _withdraw(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child does not remove the note
        with contextlib.suppress(OSError):
            path.unlink()


def _clear(folder: PrivateFolder) -> None:
    """Remove the notes of processes that have ended."""
    place = _place()
    for name in folder.names():
        with contextlib.suppress(OSError):
            if name.startswith(f"{place}."):
                gone = not os.path.exists(f"/proc/{name.split('.')[2]}")
            else:  # the note is from another machine or container, or from before the last boot
                gone = time.time() - folder.stat(name).st_mtime > _FORGOTTEN_S
            if gone and name != LOCK:
                folder.remove(name)


def announced(folder: PrivateFolder, name: str) -> Iterator[Announced]:
    """Yield the content of all notes with a name.  The caller removes a note that turns out to be wrong."""
    for file in sorted(folder.names()):
        if not file.startswith(f"{name}."):
            continue
        try:
            told = json.loads(folder.read(file) or b"")
            numbers, inodes = ([int(one) for one in told[what]] for what in ("descriptors", "inodes"))
            yield Announced(file, told, int(told["pid"]), numbers, inodes)
        except (OSError, ValueError, KeyError, TypeError):
            folder.remove(file)
