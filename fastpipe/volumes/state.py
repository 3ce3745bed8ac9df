"""In which state a volume's files are."""

from __future__ import annotations

import os
from typing import NamedTuple

from fastpipe.errors import VolumeError

__all__ = ["FileState", "folder_state"]


class FileState(NamedTuple):
    """The state of a file, or folder, when it was opened.

    Attributes:
        name: for messages.
        state: device, inode, size, and when it was modified.
    """

    name: str
    state: tuple[int, int, int, int]

    @classmethod
    def of(cls, name: str, status: os.stat_result | None = None) -> FileState:
        """The state of a file now, or as it was found to be before."""
        return cls(name, _numbers(os.stat(name) if status is None else status))

    def check(self, where: int | str | None = None) -> None:
        """Raise an error if the file is not as it was.

        Args:
            where: a descriptor of it, or its path; None asks at its name.

        Raises:
            VolumeError: it has changed.
        """
        if _numbers(os.stat(self.name if where is None else where)) != self.state:
            raise self.changed()

    def changed(self) -> VolumeError:
        """The error that the file is not as it was."""
        return VolumeError(
            f"{self.name} has changed since it was opened; make the dataset anew when it is complete"
        )


def _numbers(status: os.stat_result) -> tuple[int, int, int, int]:
    # Not the time of change: a file that is renamed, or loses a name, has the same content.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def folder_state(path: str) -> tuple[int, int, int]:
    """Of all files in a folder and those in it: how many, their bytes, and when one last changed, in ns."""
    count = nbytes = latest = 0
    for entry in os.scandir(path):
        if entry.is_dir():
            found = folder_state(entry.path)
        else:
            status = entry.stat()
            found = 1, status.st_size, max(status.st_mtime_ns, status.st_ctime_ns)
        count, nbytes, latest = count + found[0], nbytes + found[1], max(latest, found[2])
    return count, nbytes, latest
