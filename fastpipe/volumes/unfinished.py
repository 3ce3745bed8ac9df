"""The folder in which a copy of a volume grows, beside where it will be, until it takes its name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from fastpipe.core.files import remove_tree, sync_folder
from fastpipe.errors import OptionError, VolumeError
from fastpipe.hdf5.checkpoints import unfinished_name, write_whole
from fastpipe.hdf5.growing import (
    LOCK,
    GrowingFolder,
    folder_of,
    has_empty_lock,
    opened_folder,
    read_note,
    remove_folder,
)

__all__ = ["Unfinished", "clear", "exists_already", "forget_empty", "is_left_behind"]

_STATE, _ARRAY, _TEMPORARY = "state.json", "array", "temporary"
_OWN = {LOCK, _STATE, unfinished_name(_STATE), _ARRAY, _TEMPORARY}
_WORDS = {
    "source": "its source was", "shape": "its shape was",
    "dtype": "its elements were", "chunks": "its --chunks were", "codec": "its --codec was",
    "level": "its --level was",
}  # fmt: skip


class Unfinished(GrowingFolder):
    """The folder ``OUT.partial``, locked, of an array.

    It has the array's folder, the state, and a folder for files that are not whole yet.

    Args:
        out: where the copy will be.
        job: what is copied, and how: for JSON.

    Attributes:
        array: the growing array's.
        temporary: for what is not whole yet.
        written, verified: how many bricks of ``brick`` were written, and were compared with the source, in
            their order.
        goes_on: whether something of a run before is there.

    Raises:
        OptionError: the folder holds another job, or what no copy has left there.
        VolumeError: another process is at work there.
        OSError: the folder cannot be made.
    """

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        folder = folder_of(out)
        self._job, self.array, self.temporary = job, folder / _ARRAY, folder / _TEMPORARY
        super().__init__(out, VolumeError)
        try:
            self._begin()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, VolumeError) and not self.array.exists():
                clear(out)  # nothing is lost: there was no room even for a note
            raise

    def _begin(self) -> None:
        self._check_own()
        state = _state_of(self._out)
        if state is not None:
            self._check_job(state["job"])
        remove_tree(self.temporary)
        self.temporary.mkdir()
        self.written, self.verified, self.brick = 0, 0, list[int]()
        self.goes_on = state is not None and self.array.is_dir()
        if state is not None and self.goes_on:
            self.written, self.verified = int(state["written"]), int(state["verified"])
            self.brick = list(state["brick"])
        # The state first: a folder without one is nobody's.
        self.save()
        self.array.mkdir(exist_ok=True)

    def _check_own(self) -> None:
        """Without a state there is no more than what a run has made before it wrote one."""
        if _state_of(self._out) is not None:
            return
        there = set(os.listdir(self.folder))
        is_own = there <= _OWN - {_ARRAY} and not any(self.temporary.glob("*"))
        is_own = is_own and (LOCK not in there or has_empty_lock(self.folder))
        # Between these looks somebody else may have begun.
        if not is_own and _state_of(self._out) is None:
            raise OptionError(
                f"{self.folder} is not that of an unfinished copy, or damaged; move it away, or remove it, "
                "and try again"
            )

    def _check_job(self, job: dict[str, Any]) -> None:
        other = [key for key, value in self._job.items() if job.get(key) != value]
        if other == ["state"]:
            raise OptionError(
                f"{self.folder} holds an unfinished copy whose source has changed since; remove the folder, "
                "and repack the source anew"
            )
        if other:
            what = next((key for key in other if key in _WORDS), "")
            said = f"{_WORDS[what]} {_in_words(job.get(what))}" if what else "it is of another version"
            raise OptionError(
                f"{self.folder} holds an unfinished copy that is not this one: {said}; finish that one with "
                "the same command, or remove the folder"
            )

    def save(self, named: list[int] | None = None) -> None:
        """Note how far it is."""
        state = {
            "job": self._job, "written": self.written, "verified": self.verified, "brick": self.brick,
            "named": named,
        }  # fmt: skip
        write_whole(self.folder / _STATE, [json.dumps(state).encode()])

    def finish(self) -> None:
        """Give the array its name, at once, and remove the folder.

        Raises:
            OptionError: there is something of this name.
        """
        status = os.stat(self.array)
        self.save([status.st_dev, status.st_ino])
        if os.path.lexists(self._out):
            raise exists_already(self._out)
        try:
            with opened_folder(self._out) as folder:
                os.rename(os.path.join(folder, _ARRAY), self._out)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise exists_already(self._out) from None
            raise
        sync_folder(self._out.parent)
        self.close()
        clear(self._out)


def is_left_behind(out: Path, job: dict[str, Any]) -> bool:
    """Whether a run of this job gave ``out`` its name and was killed before its folder was gone."""
    state = _state_of(out)
    if state is None or state["job"] != job or not out.is_dir():
        return False
    status = os.stat(out)
    return bool(state["named"] == [status.st_dev, status.st_ino])


def clear(out: Path) -> None:
    """Remove the folder of a copy that has its name."""
    remove_folder(out, (_TEMPORARY, unfinished_name(_STATE), LOCK, _STATE))


def forget_empty(out: Path) -> None:
    """Remove what is left of the folder if a run was killed at the very end: nothing but its name."""
    with contextlib.suppress(OSError):
        os.rmdir(folder_of(out))


def exists_already(out: Path) -> OptionError:
    """The error for a name that is taken."""
    return OptionError(f"{out} exists; name another folder, or remove it first")


def _state_of(out: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(read_note(out, _STATE))
        return state if {"job", "verified", "brick", "named"} <= state.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _in_words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) and value else str(value)
