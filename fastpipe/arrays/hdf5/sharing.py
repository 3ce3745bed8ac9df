"""The chunks of a window, decoded once by the worker processes of a loader together."""

from __future__ import annotations

import logging

from fastpipe.arrays.hdf5.keeping import chunk_nbytes
from fastpipe.arrays.process import Process
from fastpipe.cache.window import SharedWindow, WindowSlots
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.reader import LEAST_SHARED

__all__ = ["shared_chunks", "shared_window"]

_log = logging.getLogger("fastpipe.cache")
_WHY = "worker processes decode their chunks each for itself: %s"


def shared_window(files: SampleFiles, groups: int, samples: int) -> SharedWindow | None:
    """Memory for the chunks of so many groups; None where there is nothing to decode, or no such memory.

    Args:
        files: whose chunks.
        groups: how many are used at a time.
        samples: of a group.
    """
    slots = largest = 0
    for number, layout in enumerate(files.layouts):
        if layout.filters and chunk_nbytes(layout) >= LEAST_SHARED:
            geometry = files.files[0].geometry(number)
            slots += groups * geometry.parts * -(-samples // geometry.group_size)
            largest = max(largest, *(chunk_nbytes(file.layouts[number]) for file in files.files))
    if not slots:
        return None
    try:
        return SharedWindow(slots, largest)
    except OSError as error:
        _log.info(_WHY, error)
        return None


def shared_chunks(window: SharedWindow | None, process: Process) -> WindowSlots | None:
    """The chunks in this process, if it is one of several workers: there is nothing to share with a parent,
    which reads only where there are none."""
    if process.workers < 2 or window is None:
        return None
    try:
        return WindowSlots(window, process.number / process.workers)
    except OSError as error:
        _log.info(_WHY, error)
        return None
