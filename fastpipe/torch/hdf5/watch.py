"""Says when an order makes chunks be decoded again and again."""

from __future__ import annotations

import threading
import warnings

from torch.utils.data import get_worker_info

from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.recent import RecentChunks
from fastpipe.torch.hdf5.keeping import ChunkKeeper, decoded_nbytes, gigabytes

__all__ = ["AmplificationWatch"]

_WORTH_A_WARNING = 4.0


class AmplificationWatch:
    """Compares what was decoded with what was read of it, and warns once.

    Looked at each time that twice as much was decoded as is remembered: before that, an order that takes
    a window of chunks apart looks like one that goes all over the file.

    Args:
        files: the dataset's.
        keeper: where their decoded chunks are kept.
        recent: counts what is decoded.
    """

    def __init__(self, files: SampleFiles, keeper: ChunkKeeper, recent: RecentChunks) -> None:
        self._files, self._keeper, self._recent = files, keeper, recent
        self._lock = threading.Lock()
        self._served, self._from = 0.0, 0
        packed = [number for number, layout in enumerate(files.layouts) if layout.filters]
        geometries = [files.files[0].geometry(number) for number in packed]
        # What must be decoded for a sample at least, where a chunk may reach beyond the data.
        self._sample_nbytes = sum(each.parts * each.chunk_nbytes / each.group_size for each in geometries)
        self._is_over = not packed or (keeper.store is not None and keeper.keeps_all)

    def served(self, samples: int) -> None:
        """Hear that so many samples were read.  Warns where each chunk was decoded many times for them."""
        if self._is_over:
            return
        with self._lock:
            self._served += samples * self._sample_nbytes
            decoded = self._recent.decoded_nbytes - self._from
            if self._is_over or decoded < 2 * self._recent.max_bytes:
                return
            times = decoded / max(1.0, self._served)
            self._served, self._from = 0.0, self._recent.decoded_nbytes
            if times < _WORTH_A_WARNING:
                return
            self._is_over = True
        warnings.warn(self._message(times), stacklevel=2)

    def _message(self, times: float) -> str:
        first = self._files.files[0]
        whole = decoded_nbytes([layout for file in self._files.files for layout in file.layouts])
        worker = get_worker_info()
        each = (
            f" by each of {worker.num_workers} worker processes, where threads share them" if worker else ""
        )
        return (
            f"{first.path}: samples are compressed together, and the order takes them apart: {times:.0f} "
            f"times as much is decoded as is used{each}.  Shuffle(unit='group') decodes each chunk once: it "
            "shuffles chunks, and then the samples of some chunks at a time; or keep what was decoded, "
            f"{gigabytes(whole)}, which is now {self._keeper.note}: cache=Cache('ram', max_bytes={whole})"
        )
