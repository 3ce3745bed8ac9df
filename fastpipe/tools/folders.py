"""Find a folder's file system, and make temporary folders that are removed even after a kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fastpipe.core.file_identity import FileSystems
from fastpipe.core.files import folder_below, open_regular
from fastpipe.errors import OptionError

if sys.platform != "win32":
    import fcntl

_PREFIX, _LOCK = "fastpipe-profile-", ".lock"
_YOUNG_S = 60.0  # age within which a folder may not have its lock yet

_NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs",
    "afs", "wekafs", "pvfs2", "orangefs", "panfs", "vboxsf", "davfs",
))  # fmt: skip


@dataclass(frozen=True)
class FileSystem:
    kind: str
    free: int

    @property
    def is_fuse(self) -> bool:  # a user-space program, often with requests to a bucket
        return self.kind.split(".")[0] in ("fuse", "fuseblk")

    @property
    def is_remote(self) -> bool:
        return self.is_fuse or self.kind in _NETWORK

    @property
    def name(self) -> str:
        return self.kind or "a file system of unknown kind"


def file_system(path: str, mounts: str | None = None) -> FileSystem:
    """Return an existing path's file system.  ``mounts`` replaces the text of ``/proc/self/mountinfo``."""
    status, space = os.stat(path), os.statvfs(path)
    kind = FileSystems(mounts).kind(status.st_dev, path) or ""
    return FileSystem(kind, space.f_bavail * space.f_frsize)


def shown_path(path: str) -> str:
    """Return a file's path from the current folder, or only its name if the file is elsewhere."""
    inside = "" if "://" in path else os.path.relpath(path)
    return os.path.basename(path) if inside.startswith("..") or not inside else inside


def require_folder_of(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise OptionError(f"{file} cannot be written: there is no folder {file.absolute().parent}")


class Scratch:
    """A temporary folder with a lock.  If this process is killed, the next ``Scratch`` removes the folder."""

    def __init__(self) -> None:
        _remove_left()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        # A file object is closed with its last reference, also if ``close`` was interrupted.
        self._lock = os.fdopen(open_regular(os.path.join(self.path, _LOCK), os.O_RDWR | os.O_CREAT), "r+b")
        _is_locked(self._lock.fileno())

    def close(self) -> None:
        for _ in range(2):  # ``ignore_errors`` also ignores an error of a signal handler
            if os.path.isdir(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds the lock, or there are no locks
        return False
    return True


def _remove_left() -> None:
    temporary = tempfile.gettempdir()
    for name in os.listdir(temporary):
        if not name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):  # another process removes it, or it is not a folder of ``Scratch``
            status = os.lstat(os.path.join(temporary, name))
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with folder_below(temporary, name) as folder:
                if time.time() - os.lstat(os.path.join(folder, _LOCK)).st_mtime < _YOUNG_S:
                    continue
                lock = open_regular(os.path.join(folder, _LOCK), os.O_RDWR)
                try:
                    if _is_locked(lock):
                        shutil.rmtree(os.path.join(temporary, name), ignore_errors=True)
                finally:
                    os.close(lock)
