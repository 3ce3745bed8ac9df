"""The folder in which a copy grows, beside where it will be, until it takes its name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from fastpipe.cache.locks import locks_are_possible, try_to_lock
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.files.checkpoints import DATA, NOTE, REDO, CheckpointedFile, sync_folder, unfinished_name

__all__ = ["Partial", "clear", "exists_already", "identity", "left_behind"]

_LOCK = "lock"
_OWN = (DATA, unfinished_name(NOTE), REDO, unfinished_name(REDO), _LOCK, NOTE)  # as they are removed
_NAMED = "named"  # in the note: the file that has its name


def identity(path: str) -> list[int]:
    """What tells a file from others, and from itself after a change: device, inode, size, modification."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def left_behind(out: Path) -> dict[str, Any] | None:
    """The note of a run that gave ``out`` its name and was killed before the folder was gone."""
    try:
        content = json.loads((_folder_of(out) / NOTE).read_bytes())
        status = os.stat(out)
        if content["note"][_NAMED] == [status.st_dev, status.st_ino] and content["size"] == status.st_size:
            return dict(content["note"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def clear(out: Path) -> None:
    """Remove the folder of a file that has its name; an error of this is none of the file's.

    What others have put into it stays, and the folder with it.
    """
    folder = _folder_of(out)
    with contextlib.suppress(OSError):
        # The note last: it tells that the file is complete.
        for name in _OWN:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / name)
        os.rmdir(folder)


class Partial:
    """The folder ``OUT.partial``, locked.

    Args:
        out: where the file will be.

    Attributes:
        file: that grows.

    Raises:
        OptionError: the folder holds what no copy has left there.
        HDF5Error: another process is at work there.
        OSError: the folder cannot be made.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._folder = _folder_of(out)
        self._folder.mkdir(exist_ok=True)
        _check_own(self._folder)  # before there is anything more in a folder that is somebody else's
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._lock = os.open(self._folder / _LOCK, flags, 0o666)
        try:
            if locks_are_possible() and not try_to_lock(self._lock):
                raise HDF5Error(f"another process is writing {out}; wait for it, or end it")
            # A file that has another name already is complete, and not to be written to.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._folder / DATA).st_nlink > 1:
                    os.unlink(self._folder / DATA)
            self.file = CheckpointedFile(self._folder)
        except BaseException:
            os.close(self._lock)
            raise

    def finish(self, *, force: bool) -> None:
        """Give the file its name, at once and for good, and remove the folder.

        Raises:
            OptionError: there is a file of this name, and it may not be replaced.
        """
        status = os.stat(self.file.path)
        self.file.update_note({**(self.file.note or {}), _NAMED: [status.st_dev, status.st_ino]})
        self._name(force)
        sync_folder(self._out.parent)
        self.remove()

    def _name(self, force: bool) -> None:
        if force:
            os.replace(self.file.path, self._out)
            return
        try:
            # Unlike a rename, a link never replaces a file that came meanwhile.
            os.link(self.file.path, self._out)
        except FileExistsError:
            raise exists_already(self._out) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            if os.path.lexists(self._out):
                raise exists_already(self._out) from None
            os.rename(self.file.path, self._out)

    def remove(self) -> None:
        """Remove the folder."""
        self.close()
        clear(self._out)

    def close(self) -> None:
        """Let go of it; what is there at the last checkpoint stays."""
        self.file.close()
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _check_own(folder: Path) -> None:
    # A copy has the lock before all else, and empty.
    there = set(os.listdir(folder))
    is_own = NOTE in there or REDO in there or not there
    if not is_own and there <= {*_OWN} and _LOCK in there:
        with contextlib.suppress(FileNotFoundError):
            is_own = os.stat(folder / _LOCK).st_size == 0
    if not is_own:
        raise OptionError(
            f"{folder} is not that of an unfinished copy; move it away, or remove it, and try again"
        )


def exists_already(out: Path) -> OptionError:
    """The error for a name that is taken."""
    return OptionError(f"{out} exists; name another file, or replace it with --force")


def _folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")
