"""A folder for corrupt files, with a list by which all of them can be put back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import Any

from fastpipe.cache.locks import locks_are_possible, try_to_lock
from fastpipe.errors import OptionError
from fastpipe.files.scanning.moving import check_free, move, remove_unfinished, sync_folder
from fastpipe.files.scanning.verdicts import Verdict

__all__ = ["LIST", "Quarantine", "check_apart"]

LIST = "bad_samples.jsonl"


def check_apart(folder: str, root: str) -> None:
    """Refuse a quarantine in the folder that is scanned, or around it.

    Raises:
        OptionError: it is.
    """
    inner, outer = os.path.realpath(folder), os.path.realpath(root)
    for one, other in ((inner, outer), (outer, inner)):
        if os.path.commonpath((one, other)) == other:
            raise OptionError(
                f"--quarantine {folder}: it and {root} are one inside the other, where the "
                "files would still be in the way: name a folder elsewhere"
            )


class Quarantine:
    """The folder, for this process alone.

    A file's line is in the list, on the disk, before the file moves.  So whenever the process is ended,
    each file is at its old place or in the list.

    Args:
        folder: it; made if it is missing.
        make: whether to make it.

    Raises:
        OptionError: another process is moving files there; or nothing was ever moved there.
        OSError: it cannot be made, or written to.
    """

    def __init__(self, folder: str, *, make: bool = True) -> None:
        self.folder = os.path.abspath(folder)
        self._list = os.path.join(self.folder, LIST)
        if make:
            os.makedirs(self.folder, exist_ok=True)
        elif not os.path.isfile(self._list):
            raise OptionError(f"nothing was moved to {folder}: it has no {LIST}")
        self._descriptor = -1
        self._open()
        try:
            self._records = self._read()
            if self._records:  # else nothing has begun to come here
                for inside, _, _ in os.walk(self.folder):
                    remove_unfinished(inside)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others have it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, root: str, path: str, verdict: Verdict) -> None:
        """Move a file there.

        Args:
            root: the folder that was scanned.
            path: the file's, below it.
            verdict: about it.

        Raises:
            OSError: it cannot be moved, and so stays where it is.
        """
        source, target = os.path.join(root, path), os.path.join(self.folder, path)
        before = self._records.get(path)
        if os.path.lexists(target) and (before is None or before["root"] != root):
            raise FileExistsError(errno.EEXIST, f"{target} is there already", target)  # another folder's, say
        check_free(source, target)  # it may be this one's, of a move that was ended
        record = {"path": path, "root": root, "nbytes": verdict.nbytes, "reason": verdict.reason}
        if before != record:
            self._write(json.dumps(record).encode() + b"\n")
            self._records[path] = record
        move(source, target)

    def restore(self, root: str | None = None) -> tuple[list[str], list[tuple[str, str]]]:
        """Move everything back.

        Args:
            root: the folder that has the place of the one where they were; None for that one.

        Returns:
            The files that are back, by their whole paths; and of those that are not, the path and why.
        """
        back: list[str] = []
        left: list[tuple[str, str]] = []
        cleaned: set[str] = set()
        for path, record in list(self._records.items()):
            source, target = os.path.join(self.folder, path), os.path.join(root or record["root"], path)
            if not os.path.lexists(source):  # it never came here, or is back already
                del self._records[path]
                continue
            try:
                folder = os.path.dirname(target)
                if folder not in cleaned:
                    cleaned.add(folder)
                    remove_unfinished(folder)
                move(source, target)
            except OSError as error:
                left.append((target, error.strerror or str(error)))
                continue
            back.append(target)
            del self._records[path]
            self._remove_empty(os.path.dirname(source))
        self._finish()
        return back, left

    def _open(self) -> None:
        """Open and lock the list, of which another process may just put another one there."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            descriptor = os.open(self._list, flags, 0o666)
            if locks_are_possible() and not try_to_lock(descriptor):
                os.close(descriptor)
                raise OptionError(f"another process is moving files to {self.folder}, or from there: wait")
            try:
                is_it = os.path.samestat(os.fstat(descriptor), os.stat(self._list))
            except FileNotFoundError:
                is_it = False
            if is_it:
                self._descriptor = descriptor
                return
            os.close(descriptor)

    def _read(self) -> dict[str, dict[str, Any]]:
        """By path the last record, whose file it is; by this descriptor, as closing another one would end
        the lock."""
        blocks = []
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        while block := os.read(self._descriptor, 1 << 20):
            blocks.append(block)
        text = b"".join(blocks)
        if text and not text.endswith(b"\n"):  # a write that was cut off: the file was not moved then
            self._write(b"\n")
        found: dict[str, dict[str, Any]] = {}
        for line in text.split(b"\n"):
            try:
                record = json.loads(line)
                path = os.path.normpath(record["path"])
                if not os.path.isabs(path) and path.split(os.sep)[0] != os.pardir and record["root"]:
                    found[path] = record
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def _write(self, line: bytes) -> None:
        os.write(self._descriptor, line)
        os.fsync(self._descriptor)
        sync_folder(self.folder)

    def _finish(self) -> None:
        """Leave in the list what is still here; without anything, no list and no folder."""
        if not self._records:
            os.unlink(self._list)
            with contextlib.suppress(OSError):  # there is something else
                os.rmdir(self.folder)
            return
        beside = f"{self._list}.new"
        with open(beside, "wb") as file:
            for record in self._records.values():
                file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._list)

    def _remove_empty(self, folder: str) -> None:
        """Remove folders in which nothing is left."""
        with contextlib.suppress(OSError):
            while folder != self.folder:
                os.rmdir(folder)
                folder = os.path.dirname(folder)
