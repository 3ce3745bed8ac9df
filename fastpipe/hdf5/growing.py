"""The folder in which a copy grows, beside where it will be, until it takes its name."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, TypeVar

from fastpipe.cache.locks import locks_are_possible, try_to_lock
from fastpipe.errors import FastpipeError

__all__ = ["LOCK", "GrowingFolder", "folder_of", "has_empty_lock", "remove_folder"]

LOCK = "lock"

_Self = TypeVar("_Self", bound="GrowingFolder")


def folder_of(out: Path) -> Path:
    """The folder of a copy: ``OUT.partial``."""
    return out.with_name(f"{out.name}.partial")


def has_empty_lock(folder: Path) -> bool:
    """Whether a copy may have begun there: it has the lock before all else, and empty."""
    try:
        return os.stat(folder / LOCK).st_size == 0
    except FileNotFoundError:
        return False


def remove_folder(out: Path, names: Iterable[str]) -> None:
    """Remove the folder of a copy that has its name; an error of this is none of the copy's.

    What others have put into it stays, and the folder with it.

    Args:
        out: the copy.
        names: of files, as they are removed: last the one that tells that the copy is complete.
    """
    folder = folder_of(out)
    with contextlib.suppress(OSError):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / name)
        os.rmdir(folder)


class GrowingFolder(ABC):
    """The folder ``OUT.partial``, locked.

    Args:
        out: where the copy will be.
        busy: the error where another process, or thread, is at work there.

    Attributes:
        folder: this folder.

    Raises:
        OptionError: the folder holds what no copy has left there.
        OSError: the folder cannot be made.
    """

    # The lock keeps other processes out, and not other threads of this one.
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
            GrowingFolder.close(self)  # not a subclass's, which has not begun
            raise

    def _open(self, busy: type[FastpipeError]) -> None:
        self.folder.mkdir(exist_ok=True)
        self._check_own()  # before there is anything more in a folder that is somebody else's
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._lock = os.open(self.folder / LOCK, flags, 0o666)
        if locks_are_possible() and not try_to_lock(self._lock):
            raise busy(f"another process is writing {self._out}; wait for it, or end it")

    @abstractmethod
    def _check_own(self) -> None:
        """Raise an ``OptionError`` where the folder holds what no copy has left there."""

    def close(self) -> None:
        """Let go of it; what is there stays."""
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
