"""Memory shared by the processes of one user on one machine, found through notes in a private folder.

A note says which process has what at which descriptors; these are opened through ``/proc``.  Who joins leaves
a note as well, so what was found outlives who made it.
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
    """Return a file in memory without a name: it goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def mapped(descriptor: int, nbytes: int, protection: int = mmap.PROT_READ) -> npt.NDArray[np.uint8] | None:
    """Return a file as an array; None where there is no room for it among the process's addresses."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection), np.uint8)
    except (OSError, ValueError, OverflowError):
        return None


def descriptor_of(pid: int, number: int, inode: int) -> int:
    """Open the file in memory that another process has at a descriptor; an OSError if there is none, or
    another one."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)  # nobody's lock: what was announced has this inode
        raise FileNotFoundError(path)
    return descriptor


LOCK = "lock"
_PATIENCE_S = 1.0
# Age of what was announced elsewhere, from where nobody here can ask whether it still is.
_FORGOTTEN_S = 30 * 86400.0


class Announced(NamedTuple):
    """What a process said that it has, in a note: descriptors of files there, their inodes, and what else it
    said."""

    note: str
    about: dict[str, Any]
    pid: int
    numbers: list[int]
    inodes: list[int]

    def opened(self) -> list[int]:
        """Return descriptors of the files in this process, which the caller closes."""
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
    """Return a name on which processes agree that can share memory, and want the same."""
    return f"{_place()}.{what}"


def _place() -> str:
    """Return the same for all processes of one machine, that was started once, which see each other's
    numbers."""
    facts = []
    with contextlib.suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256(os.fsencode("\n".join(facts))).hexdigest()[:16]


@contextmanager
def meeting_folder() -> Iterator[PrivateFolder]:
    """Give the folder of the notes, to this process alone; notes of processes that are gone are removed."""
    with PrivateFolder(user_cache_folder() / "shared-memory") as folder, alone(folder):
        _clear(folder)
        yield folder


@contextmanager
def alone(folder: PrivateFolder) -> Iterator[None]:
    """Be alone among the processes that open a cache in this folder; without it after a second, in which
    nobody needs it: two caches instead of one are no error."""
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
    """Tell other processes what this one has, until ``owner`` is collected: files in memory, and ``about``
    for JSON."""
    inodes = [os.fstat(one).st_ino for one in descriptors]
    told = {**about, "pid": os.getpid(), "descriptors": list(descriptors), "inodes": inodes}
    file = f"{name}.{os.getpid()}.{descriptors[0]}.json"
    folder.write(file, lambda out: out.write(json.dumps(told).encode()), sync=False)
    weakref.finalize(owner, _withdraw, folder.path / file, os.getpid())


def _withdraw(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a child of a fork
        with contextlib.suppress(OSError):
            path.unlink()


def _clear(folder: PrivateFolder) -> None:
    """Remove what was announced by processes that are gone."""
    place = _place()
    for name in folder.names():
        with contextlib.suppress(OSError):
            if name.startswith(f"{place}."):
                gone = not os.path.exists(f"/proc/{name.split('.')[2]}")
            else:  # on another machine or before this one was started, or in another container
                gone = time.time() - folder.stat(name).st_mtime > _FORGOTTEN_S
            if gone and name != LOCK:
                folder.remove(name)


def announced(folder: PrivateFolder, name: str) -> Iterator[Announced]:
    """Yield what processes said that they have under a name.  Who finds a note to be wrong removes it."""
    for file in sorted(folder.names()):
        if not file.startswith(f"{name}."):
            continue
        try:
            told = json.loads(folder.read(file) or b"")
            numbers, inodes = ([int(one) for one in told[what]] for what in ("descriptors", "inodes"))
            yield Announced(file, told, int(told["pid"]), numbers, inodes)
        except (OSError, ValueError, KeyError, TypeError):
            folder.remove(file)
