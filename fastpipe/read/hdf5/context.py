"""What the readers of some files have in common in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fastpipe.protocols import KeptChunks, SharedChunks, Stopwatch
from fastpipe.read.hdf5.layout import Layout
from fastpipe.read.hdf5.recent import RecentChunks

__all__ = ["ALONE", "ReadContext"]


class ReadContext(NamedTuple):
    """What reading may use, and tell.

    Attributes:
        keep: for a file's descriptor and a dataset's layout, where its decoded chunks are kept, or None.
        recent: decoded chunks that other batches of this process will want soon.
        shared: decoded chunks that other processes want as well, or None.
        clock: hears how long was read (``"read"``), decoded (``"decode"``) and copied (``"copy"``).
        threads: how many share the work.
        count_jobs: how many other jobs these have at the moment.
    """

    keep: Callable[[int, Layout], KeptChunks | None] | None = None
    recent: RecentChunks | None = None
    shared: SharedChunks | None = None
    clock: Stopwatch | None = None
    threads: int = 1
    count_jobs: Callable[[], int] = lambda: 0


ALONE = ReadContext()
