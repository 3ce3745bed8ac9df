"""Which files are opened with Pillow, and what is cut out of them and how large that becomes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from fastpipe.profiling.observed import observe

__all__ = ["ImageRead", "ImageReads"]

_MOST_READS = 512  # that are kept


class ImageRead(NamedTuple):
    """An image that was read.

    Attributes:
        file: its path.
        box: left, top, right and bottom of the part that was used first; None of all.
        size: width and height that it was resized to first; None where it was not.
    """

    file: str
    box: tuple[float, ...] | None
    size: tuple[int, int] | None


class ImageReads:
    """Sees what Pillow is asked for, in all threads.

    >>> from PIL import Image
    >>> path = str(getfixture("tmp_path") / "x.png")
    >>> Image.new("RGB", (8, 8)).save(path)
    >>> with ImageReads() as reads:
    ...     _ = Image.open(path).convert("RGB").crop((0, 0, 4, 4)).resize((2, 2))
    >>> [(read.box, read.size) for read in reads.found], reads.count
    ([((0, 0, 4, 4), (2, 2))], 1)
    """

    def __init__(self) -> None:
        self.count = 0
        self._reads: list[list[Any]] = []
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []

    @property
    def files(self) -> list[str]:
        """Theirs, each once."""
        return list(dict.fromkeys(read[0] for read in list(self._reads)))

    @property
    def found(self) -> list[ImageRead]:
        """Some of them, in the order in which they were opened."""
        return [ImageRead(*read) for read in list(self._reads)]

    def begin(self) -> None:
        """Look, if Pillow is loaded; or do so when this is called again."""
        module = sys.modules.get("PIL.Image")
        if module is None or self._undo:
            return
        # Threads may be reading: what happens to an image last is looked at first, and no more first of all,
        # so that of an image whose size was seen the box was.
        for owner, name, see in (
            (module.Image, "resize", self._resized), (module.Image, "crop", self._cropped),
            (module, "open", self._opened),
        ):  # fmt: skip
            self._undo.append(observe(owner, name, see))

    def end(self) -> None:
        """Look no more."""
        while self._undo:
            self._undo.pop(0)()

    def __enter__(self) -> ImageReads:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _opened(self, _image: Any, fp: Any, *_: Any, **__: Any) -> None:
        self.count += 1
        self._local.read = None
        if not isinstance(fp, (str, bytes, os.PathLike)):
            fp = getattr(fp, "name", None)  # of a file that is open
        if len(self._reads) < _MOST_READS and isinstance(fp, (str, bytes, os.PathLike)):
            self._local.read = [os.path.abspath(os.fsdecode(fp)), None, None]
            self._reads.append(self._local.read)

    def _cropped(self, _part: Any, _image: Any, box: Any = None, *_: Any, **__: Any) -> None:
        read = getattr(self._local, "read", None)
        if read is not None and read[1] is None and read[2] is None and box is not None:
            read[1] = tuple(box)

    def _resized(self, _small: Any, _image: Any, size: Any, *_: Any, **__: Any) -> None:
        read = getattr(self._local, "read", None)
        if read is not None and read[2] is None:
            read[2] = tuple(size)
