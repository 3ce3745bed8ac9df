"""Judges an image file as the replaced loader would: by decoding all of it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fastpipe.core.bad_samples import Item, bad_sample_error, means_damage
from fastpipe.core.files import read_file
from fastpipe.core.types import Box
from fastpipe.errors import MissingDependencyError
from fastpipe.files.scanning.oddities import content_kind, name_fits, oddities, orientation
from fastpipe.files.scanning.verdicts import Verdict, identity
from fastpipe.images.reader import ImageReader
from fastpipe.options import Decode

__all__ = ["Judge"]


class Judge:
    """Reads and decodes files with the decoders of ``FastImageFolder``.  For threads at once.

    What is corrupt is what ``ImageFolder``'s loader, ``Image.open(file).convert("RGB")``, raises on.

    >>> path = getfixture("tmp_path") / "x.jpg"
    >>> _ = path.write_bytes(b"no image")
    >>> Judge().judge(0, str(path)).state
    'corrupt'
    """

    def __init__(self) -> None:
        self._reader = ImageReader(Decode())
        self._local = threading.local()

    def describe(self) -> str:
        """Which decoders are in use, in one line."""
        return self._reader.describe()

    @contextmanager
    def hearing_warnings(self) -> Iterator[None]:
        """Have what decoders warn of become notes about the file, in all threads.

        For the main thread: which warnings are shown is set for the whole process.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._heard
            yield

    def _heard(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self._local.__dict__.setdefault("warnings", []).append(" ".join(str(message).split()))

    def judge(self, index: int, path: str, target: Any = None) -> Verdict:
        """Judge one file.

        Args:
            index: the sample's number in the dataset.
            path: its file.
            target: its class.

        Raises:
            OSError: it cannot be read for a reason that is the machine's, such as too many open files.
        """
        item = Item(index, path, target)
        self._local.warnings = []
        known = None
        with suppress(OSError, ValueError):
            known = identity(path)  # from before it is read: what changes meanwhile is another file then
        nbytes = None if known is None else known[2]
        try:
            blob = read_file(path)
        except Exception as error:
            return _bad(item, error, Verdict(path, nbytes, "unreadable", identity=known))
        kind = content_kind(blob)
        verdict = Verdict(path, len(blob), "corrupt", kind=kind, identity=known)
        try:
            image = self._reader.open(blob, path)
            image.region(Box(0, 0, *image.size))
        except Exception as error:
            return _bad(item, error, verdict)
        turned = orientation(blob, kind, lambda: self._reader.open_pillow(blob, path))
        notes = oddities(path, blob, kind, turned)
        notes += self._local.warnings
        told = tuple(map(sys.intern, dict.fromkeys(notes)))  # of a million photographs many have the same
        known = None if name_fits(path, kind) else known
        return Verdict(path, len(blob), "good", notes=told, kind=kind, identity=known)


def _bad(item: Item, error: Exception, verdict: Verdict) -> Verdict:
    """A verdict with its reason; nothing is known of a file that lacks memory, a right or a library."""
    is_unknown = isinstance(error, (MemoryError, PermissionError, MissingDependencyError))
    if not is_unknown and not means_damage(error):
        raise error
    text = str(error).replace(repr(item.path), "").replace(item.path, "").strip()
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif not verdict.nbytes and verdict.state == "corrupt":
        text = "the file is empty"
    return Verdict(
        verdict.path, verdict.nbytes, "unreadable" if is_unknown else verdict.state,
        f"{type(error).__name__}: {text}", str(bad_sample_error(item, error)),
        kind=verdict.kind, identity=verdict.identity,
    )  # fmt: skip
