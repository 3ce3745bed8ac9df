"""Says when an order makes chunks be decoded again and again."""

from __future__ import annotations

import threading
import warnings

from fastpipe._sizes import in_bytes
from fastpipe.arrays.hdf5.keeping import ChunkKeeper, decoded_nbytes
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.recent import RecentChunks

__all__ = ["AmplificationWatch"]

_WORTH_A_WARNING = 4.0
_FEWEST_LOOKS = 8  # a batch that is half read counts otherwise than a whole one; of eight it hardly matters


class AmplificationWatch:
    """Compares what was decoded with what was used of it, and warns once.

    Compared each time that twice as much was decoded as is remembered: before that, an order that takes
    a window of chunks apart looks like one that goes all over the file.

    Args:
        files: the dataset's.
        keeper: where their decoded chunks are kept.
        recent: counts both.
        remembered: bytes of decoded chunks that are, here or in memory that processes share.
        workers: processes that do the same side by side; 0 without.
    """

    def __init__(
        self, files: SampleFiles, keeper: ChunkKeeper, recent: RecentChunks, remembered: int, workers: int
    ) -> None:
        self._files, self._keeper, self._recent, self._remembered = files, keeper, recent, remembered
        self._workers = workers
        self._lock = threading.Lock()
        self._decoded, self._used, self._looks = 0, 0.0, 0
        is_packed = any(layout.filters for layout in files.layouts)
        self._is_over = not is_packed or (keeper.store is not None and keeper.keeps_all)

    def look(self) -> None:
        """Before each batch: warn where each chunk was decoded many times."""
        if self._is_over:
            return
        with self._lock:
            decoded, used = self._recent.decoded_nbytes, self._recent.used_nbytes
            self._looks += 1
            is_early = self._looks < _FEWEST_LOOKS or decoded - self._decoded < 2 * self._remembered
            if self._is_over or is_early:
                return
            times = (decoded - self._decoded) / max(1.0, used - self._used)
            self._decoded, self._used, self._looks = decoded, used, 0
            if times < _WORTH_A_WARNING:
                return
            self._is_over = True
        warnings.warn(self._message(times), stacklevel=2)

    def _message(self, times: float) -> str:
        first = self._files.files[0]
        whole = decoded_nbytes([layout for file in self._files.files for layout in file.layouts])
        each = ""
        if self._workers:
            each = f" by each of {self._workers} worker processes, where threads share them"
        return (
            f"{first.shown}: samples are compressed together, and the order takes them apart: {times:.0f} "
            f"times as much is decoded as is used{each}.  Shuffle(unit='group') decodes each chunk once: it "
            "shuffles chunks, and then the samples of some chunks at a time; or keep what was decoded, "
            f"{in_bytes(whole)}, which is now {self._keeper.note}: cache=Cache('ram', max_bytes={whole})"
        )
