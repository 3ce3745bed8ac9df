"""Which file systems stamp a folder's every change with a time that can be relied on, and how fine it is."""

from __future__ import annotations

import os
import re

__all__ = ["FileSystems", "is_settled"]

# File systems of this machine alone.  A network's (nfs, cifs, 9p, virtiofs, lustre, …) may show
# times that are old, or its server's clock; what is behind a FUSE mount may not keep times at all.
_LOCAL = frozenset(
    (
        "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "tmpfs",
        "ramfs", "overlay", "squashfs", "iso9660", "erofs",
    )
)  # fmt: skip
_MOUNTS = "/proc/self/mountinfo"
# The coarsest, of FAT, has two seconds; the kernel's clock is up to a hundredth behind the one that is asked.
_RESOLUTION_NS = 2_100_000_000


class FileSystems:
    """The kinds of the file systems that are mounted, read once.

    Args:
        mounts: content of ``/proc/self/mountinfo``; read from there if left out.
    """

    def __init__(self, mounts: str | None = None) -> None:
        self._of_device: dict[int, str] = {}
        self._of_folder: dict[str, str] = {}
        for line in (_read_mounts() if mounts is None else mounts).splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(" "), after.split(" ")[0]
            if len(fields) < 5 or not kind:
                continue
            major, _, minor = fields[2].partition(":")
            if major.isdecimal() and minor.isdecimal():
                self._of_device[os.makedev(int(major), int(minor))] = kind
            # What is mounted later over the same folder hides what was there.
            self._of_folder[_unescaped(fields[4])] = kind

    def kind(self, device: int, folder: str) -> str | None:
        """The kind of a folder's file system; None where nobody tells.

        Args:
            device: the folder's ``st_dev``.  It names the file system whatever is mounted where.
            folder: its path, which decides where that fails: each of btrfs's subvolumes has a
                number of its own, which is listed nowhere.
        """
        kind = self._of_device.get(device)
        if kind is None and self._of_folder:
            kind = self._kind_at(os.path.realpath(folder))
            if kind is not None:
                self._of_device[device] = kind
        return kind

    def is_local(self, device: int, folder: str) -> bool:
        """Whether the folder's times change with its content."""
        return self.kind(device, folder) in _LOCAL

    def is_remote(self, device: int, folder: str) -> bool:
        """Whether answers may take long: known not to be on this machine alone."""
        return self.kind(device, folder) not in (None, *_LOCAL)

    def _kind_at(self, folder: str) -> str | None:
        while folder not in self._of_folder:
            above = os.path.dirname(folder)
            if above == folder:
                return None
            folder = above
        return self._of_folder[folder]


def is_settled(changed: int, now: int) -> bool:
    """Whether another change would have another time: within a file system's resolution it may not.

    Args:
        changed: the time of the last change, in nanoseconds.
        now: the time, on the same clock.
    """
    return now - changed > _RESOLUTION_NS


def _read_mounts() -> str:
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:  # not Linux, or a sandbox without /proc
        return ""


def _unescaped(path: str) -> str:
    """The kernel writes blanks and the like as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
