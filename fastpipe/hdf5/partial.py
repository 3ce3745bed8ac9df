"""The folder in which a copy grows, beside where it will be, until it takes its name."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from fastpipe.core.files import rename_anew, sync_folder
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.checkpoints import DATA, NOTE, REDO, CheckpointedFile, unfinished_name
from fastpipe.hdf5.growing import LOCK, GrowingFolder, has_empty_lock, opened_folder, read_note, remove_folder

__all__ = ["Partial", "clear", "exists_already", "identity", "left_behind"]

_OWN = (DATA, unfinished_name(NOTE), REDO, unfinished_name(REDO), LOCK, NOTE)  # as they are removed
_NAMED = "named"  # in the note: the file that has its name


def identity(path: str) -> list[int]:
    """What tells a file from others, and from itself after a change: device, inode, size, modification."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def left_behind(out: Path) -> dict[str, Any] | None:
    """The note of a run that gave ``out`` its name and was killed before the folder was gone."""
    try:
        content = json.loads(read_note(out, NOTE))
        status = os.stat(out)
        if content["note"][_NAMED] == [status.st_dev, status.st_ino] and content["size"] == status.st_size:
            return dict(content["note"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def clear(out: Path) -> None:
    """Remove the folder of a file that has its name."""
    remove_folder(out, _OWN)


class Partial(GrowingFolder):
    """The folder ``OUT.partial``, locked, of one file.

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
        super().__init__(out, HDF5Error)
        try:
            # A file that has another name already is complete, and not to be written to.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.folder / DATA).st_nlink > 1:
                    os.unlink(self.folder / DATA)
            self.file = CheckpointedFile(self.folder)
        except BaseException:
            super().close()
            raise

    def _check_own(self) -> None:
        there = set(os.listdir(self.folder))
        is_own = NOTE in there or REDO in there or not there
        if not is_own and there <= {*_OWN}:
            is_own = has_empty_lock(self.folder)
        if not is_own:
            raise OptionError(
                f"{self.folder} is not that of an unfinished copy; move it away, or remove it, and try again"
            )

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
        with opened_folder(self._out) as folder:
            made = os.path.join(folder, DATA)
            if force:
                os.replace(made, self._out)
                return
            try:
                rename_anew(made, self._out)
            except FileExistsError:
                raise exists_already(self._out) from None

    def remove(self) -> None:
        """Remove the folder."""
        self.close()
        clear(self._out)

    def close(self) -> None:
        """Let go of it; what is there at the last checkpoint stays."""
        self.file.close()
        super().close()


def exists_already(out: Path) -> OptionError:
    """The error for a name that is taken."""
    return OptionError(f"{out} exists; name another file, or replace it with --force")
