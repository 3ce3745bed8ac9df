"""Which file system a path is on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastpipe.core.file_identity import FileSystems

__all__ = ["FileSystem", "file_system"]

_NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs",
    "afs", "wekafs", "pvfs2", "orangefs", "panfs", "vboxsf", "davfs",
))  # fmt: skip


@dataclass(frozen=True)
class FileSystem:
    """A file system.

    Attributes:
        kind: as the system calls it, such as ``"ext4"`` or ``"fuse.s3fs"``; empty where nobody says.
        free: bytes that this user can still write.
    """

    kind: str
    free: int

    @property
    def is_fuse(self) -> bool:
        """Whether a program answers for it, often one that asks a bucket."""
        return self.kind.split(".")[0] in ("fuse", "fuseblk")

    @property
    def is_remote(self) -> bool:
        """Whether each answer comes from elsewhere, as far as the kind tells."""
        return self.is_fuse or self.kind in _NETWORK

    @property
    def name(self) -> str:
        """In words."""
        return self.kind or "a file system of unknown kind"


def file_system(path: str, mounts: str | None = None) -> FileSystem:
    """The file system of a path that exists.

    Args:
        path: it.
        mounts: content of ``/proc/self/mountinfo``; read from there if left out.

    Raises:
        OSError: there is no such path.
    """
    status, space = os.stat(path), os.statvfs(path)
    kind = FileSystems(mounts).kind(status.st_dev, path) or ""
    return FileSystem(kind, space.f_bavail * space.f_frsize)
