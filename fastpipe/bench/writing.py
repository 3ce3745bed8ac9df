"""Files that are there whole, or as they were before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastpipe.errors import OptionError

__all__ = ["check_target", "whole"]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside that of the name, which takes its place when all is written.

    Args:
        path: the file; its folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, in which nobody else can put a link.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)


def check_target(path: Path, option: str) -> None:
    """Refuse at the beginning what could not be written at the end.

    Args:
        path: a file that is to be written.
        option: where it was given.

    Raises:
        OptionError: it is a folder, or there is no folder for it that may be written to.
    """
    if path.is_dir():
        raise OptionError(f"{option}: {str(path)!r} is a folder; give a file's name")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"{option}: {str(path)!r} cannot be written: {str(folder)!r} is no folder of yours")
