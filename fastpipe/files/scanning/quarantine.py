"""A folder for corrupt files, with a list by which all of them can be put back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
from typing import Any

from fastpipe.core.files import folder_below, open_regular, sync_folder, who_else_may_write, write_whole
from fastpipe.core.locks import locks_are_possible, try_to_lock
from fastpipe.core.private_folder import made_folder
from fastpipe.errors import OptionError
from fastpipe.files.scanning.moving import check_free, move, remove_unfinished
from fastpipe.files.scanning.verdicts import Verdict, check_is_the_same

__all__ = ["LIST", "Quarantine", "check_apart"]

LIST = "bad_samples.jsonl"
_MODE = 0o644  # of the list


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

    Files go where the list says, so nobody else may have written to it, or to the folder.  No link is
    followed in the folder, or below the one to which files go back.

    Args:
        folder: it; made if it is missing.
        make: whether to make it.

    Raises:
        OptionError: another process is moving files there; nothing was ever moved there; or others may
            write to it.
        OSError: it cannot be made, or written to.
    """

    def __init__(self, folder: str, *, make: bool = True) -> None:
        self.folder = os.path.abspath(folder)
        if make:
            made_folder(self.folder, 0o755)
        elif not os.path.isfile(os.path.join(self.folder, LIST)):
            raise OptionError(f"nothing was moved to {folder}: it has no {LIST}")
        self._descriptor = -1
        self._opened = contextlib.ExitStack()
        try:
            # By this path it is the folder that is looked at now, whatever is put in its place.
            self._here = self._opened.enter_context(folder_below(self.folder, ""))
            self._list = os.path.join(self._here, LIST)
            self._open()
            self._records = self._read()
            if self._records:  # else nothing has begun to come here
                for inside, _, _ in os.walk(os.path.join(self._here, ".")):
                    remove_unfinished(inside)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others have it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._opened.close()

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
        inside, name = os.path.split(path)
        before = self._records.get(path)
        with folder_below(root, inside) as old, folder_below(self._here, inside, makes=True) as new:
            source, target = os.path.join(old, name), os.path.join(new, name)
            check_is_the_same(source, verdict)
            is_ours = before is not None and before["root"] == root
            if not is_ours and os.path.lexists(target):  # another folder's, say
                raise FileExistsError(errno.EEXIST, "a file of this name is there already", target)
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
        named = None if root is None else os.path.realpath(root)  # whoever names a link means where it leads
        for path, record in list(self._records.items()):
            inside, name = os.path.split(path)
            target = os.path.join(root or record["root"], path)
            if not os.path.lexists(os.path.join(self._here, path)):  # it never came here, or is back already
                del self._records[path]
                continue
            try:
                with contextlib.ExitStack() as opened:
                    here = opened.enter_context(folder_below(self._here, inside))
                    base = _root_opened(named or record["root"], opened)
                    there = opened.enter_context(folder_below(base, inside, makes=True))
                    if os.path.dirname(target) not in cleaned:
                        cleaned.add(os.path.dirname(target))
                        remove_unfinished(there)
                    move(os.path.join(here, name), os.path.join(there, name))
            except OSError as error:
                left.append((target, error.strerror or str(error)))
                continue
            back.append(target)
            del self._records[path]
            self._remove_empty(inside)
        self._finish()
        return back, left

    def _open(self) -> None:
        """Open and lock the list, of which another process may just put another one there."""
        while True:
            try:
                descriptor = open_regular(self._list, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
            except OSError as error:
                what = os.path.join(self.folder, LIST)
                raise OptionError(f"{what} cannot be used: {error.strerror}") from error
            self._check_own(descriptor)
            if locks_are_possible() and not try_to_lock(descriptor):
                os.close(descriptor)
                raise OptionError(f"another process is moving files to {self.folder}, or from there: wait")
            try:
                is_it = os.path.samestat(os.fstat(descriptor), os.lstat(self._list))
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
                is_inside = (
                    not os.path.isabs(path)
                    and path.split(os.sep)[0] != os.pardir
                    and path not in (os.curdir, LIST)
                )
                if is_inside and "\0" not in path and _is_whole_path(record["root"]):
                    found[path] = record
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def _write(self, line: bytes) -> None:
        os.write(self._descriptor, line)
        os.fsync(self._descriptor)
        sync_folder(self._here)

    def _finish(self) -> None:
        """Leave in the list what is still here; without anything, no list and no folder."""
        if not self._records:
            os.unlink(self._list)
            with contextlib.suppress(OSError):  # there is something else
                os.rmdir(self.folder)
            return
        lines = [json.dumps(record).encode() + b"\n" for record in self._records.values()]
        write_whole(self._list, lambda file: file.writelines(lines), sync=True, mode=_MODE)

    def _check_own(self, descriptor: int) -> None:
        """Refuse a list, or a folder, to which others may write, and close it.

        Raises:
            OptionError: they may.
        """
        try:
            folder = os.open(self._here, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            try:
                for path, status in (
                    (self.folder, os.fstat(folder)), (os.path.join(self.folder, LIST), os.fstat(descriptor)),
                ):  # fmt: skip
                    why = who_else_may_write(folder, status, root_may=True)
                    if why:
                        raise OptionError(
                            f"{path} {why}: whoever writes there says what is moved where. Name "
                            f"another folder; or look at what {LIST} says, and make both yours alone, with  "
                            f"chown  and  chmod go-w {shlex.quote(self.folder)} "
                            f"{shlex.quote(os.path.join(self.folder, LIST))}"
                        )
            finally:
                os.close(folder)
        except BaseException:
            os.close(descriptor)
            raise

    def _remove_empty(self, inside: str) -> None:
        """Remove folders in which nothing is left."""
        with contextlib.suppress(OSError):
            while inside:
                os.rmdir(os.path.join(self._here, inside))
                inside = os.path.dirname(inside)


def _root_opened(root: str, opened: contextlib.ExitStack) -> str:
    """Open the folder to which files go back, by way of no link: where one is now, it was not when they came.

    Raises:
        OSError: there is no such folder.
    """
    try:
        return opened.enter_context(folder_below(os.sep, root.lstrip(os.sep)))
    except FileNotFoundError:
        why = f"there is no folder {root}: make it first, or name another one"
        raise FileNotFoundError(errno.ENOENT, why, root) from None


def _is_whole_path(root: object) -> bool:
    """Whether something is a whole path, as that of a folder is noted."""
    if not isinstance(root, str) or "\0" in root:
        return False
    return os.path.isabs(root) and os.path.normpath(root) == root
