"""The temporary folder of an unfinished copy, in the same folder as the final file."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

from fastpipe.core.files import folder_below, open_regular, remove_tree, who_else_may_write
from fastpipe.core.locks import locks_are_possible, try_to_lock
from fastpipe.errors import FastpipeError, OptionError

LOCK = "lock"

_Self = TypeVar("_Self", bound="GrowingFolder")


def folder_of(out: Path) -> Path:
    """Return the folder for the unfinished copy of ``out``: ``OUT.partial``."""
    return out.with_name(f"{out.name}.partial")


def has_empty_lock(folder: Path) -> bool:
    """Return whether a copy may have begun in ``folder``.  The first file of a copy is an empty lock file."""
    try:
        status = os.lstat(folder / LOCK)
        return stat.S_ISREG(status.st_mode) and status.st_size == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def opened_folder(out: Path) -> Iterator[str]:
    """Give the ``with`` block a path of an unfinished copy's folder ``OUT.partial``.

    The path leads to the same folder even if another folder replaces it.  The caller continues the content of
    the folder.  So an OptionError is raised if other users may write there, or if it is not a folder.
    """
    folder = folder_of(out)
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(folder_below(folder.parent, folder.name))
        except NotADirectoryError as error:
            raise OptionError(f"{folder} is a link, or not a folder: move it away") from error
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            why = who_else_may_write(descriptor, os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if why:
            raise OptionError(
                f"{folder} {why}: an unfinished copy is continued only if no other user may write there. "
                "Move it away, or name another file; if it is yours, close it with  chmod go-w"
            )
        yield path


def remove_folder(out: Path, names: Iterable[str]) -> None:
    """Remove ``names`` from the temporary folder of a finished copy, in this order, and then the folder.

    If the folder contains other files, these files and the folder stay.  Errors are ignored, because the copy
    is complete.
    """
    with contextlib.suppress(OSError, OptionError):
        with opened_folder(out) as folder:
            for name in names:
                remove_tree(os.path.join(folder, name))
        os.rmdir(folder_of(out))


class GrowingFolder(ABC):
    """The folder ``OUT.partial``, locked until ``close``.  The constructor raises ``busy`` if another process
    or thread uses the folder."""

    # The file lock excludes only other processes.  This set excludes other threads of this process.
    _held: ClassVar[set[str]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, out: Path, busy: type[FastpipeError]) -> None:
        self._out, self.folder, self._lock = out, folder_of(out), -1
        self._held_name = os.path.realpath(self.folder)
        with self._guard:
            if self._held_name in self._held:
                raise busy(f"another thread is writing {out}; wait for it")
            self._held.add(self._held_name)
        try:
            self._open(busy)
        except BaseException:
            GrowingFolder.close(self)  # not the subclass's ``close``: the subclass is not initialised yet
            raise

    def _open(self, busy: type[FastpipeError]) -> None:
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(0o700)
        with opened_folder(self._out):  # checks that the folder may be used
            pass
        self._check_own()  # checked before a file is added, because the folder may not be fastpipe's
        self._lock = open_regular(self.folder / LOCK, os.O_RDWR | os.O_CREAT)
        if locks_are_possible() and not try_to_lock(self._lock):
            raise busy(f"another process is writing {self._out}; wait for it, or end it")

    @abstractmethod
    def _check_own(self) -> None:
        """Raise an ``OptionError`` if the folder contains a file that a copy does not create."""

    def close(self) -> None:
        """Release the folder.  The folder's content stays."""
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)
        with self._guard:
            name, self._held_name = self._held_name, ""
            self._held.discard(name)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
