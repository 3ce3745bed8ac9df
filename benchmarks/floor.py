"""Decoding alone: the part of the job that no loader around the native core's decoder can avoid."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.bench.images import SIDE, train_transform
from fastpipe.bench.results import MAIN_ROW, rounded
from fastpipe.bench.runner import Contender, ContenderError, Sample, ratios, summarise
from fastpipe.core.native import native
from fastpipe.core.pool import NativeJob
from fastpipe.core.sample_tables import PackedPaths, paths_of
from fastpipe.images.plan import compile_plan

_MADE = 1  # an outcome of fastpipe/native/status.h


class DecodeRow(Contender):
    """A `Contender` that decodes crops of JPEGs in the native core's threads and does nothing else.

    A measurement is one batch of the core, whose images are not resampled: headers are read, crops drawn
    as those of ``RandomResizedCrop``, and decoded.  Python submits it and waits for its end.

    Raises:
        ContenderError: no photo is a JPEG that the core decodes.
    """

    def __init__(
        self,
        files: Sequence[str],
        threads: int,
        batch_size: int,
        key: str = "floor",
        from_memory: bool = True,
    ) -> None:
        self.key, self.chunk = key, batch_size
        self.note = "the native core, crops only, " + ("from memory" if from_memory else "from files")
        blobs = {file: Path(file).read_bytes() for file in files}
        self._files = [(file,) for file, blob in blobs.items() if native.read_jpeg_header(blob)[2]]
        if not self._files:
            raise ContenderError("no photo is a JPEG that the native core decodes")
        self._blobs = [blobs[file] for (file,) in self._files] if from_memory else None
        plan = compile_plan(train_transform("uint8"))
        self._plan, self._draws = plan.native(None, False, False), plan.draws
        self._threads, self._channel = threads, native.Channel(threads)
        self._rng = np.random.default_rng(0)

    def measure(self, images: int) -> float:
        """Decode so many crops; return the seconds it took."""
        which = np.resize(self._rng.permutation(len(self._files)), images)
        inputs: list[object] | None
        if self._blobs is None:
            inputs, paths = None, paths_of(self._files, which)
        else:
            nowhere = np.zeros(images, np.int64)
            inputs, paths = [self._blobs[i] for i in which.tolist()], PackedPaths(b"", b"", nowhere, nowhere)
        # One image's memory for all: nothing is written to it.
        memory, statuses = np.zeros(3 * SIDE * SIDE, np.uint8), np.zeros((images, 8), np.uint8)
        batch = native.image_batch(
            self._plan, *paths, self._rng.random((images, self._draws)), memory, np.zeros(images, np.int64),
            (SIDE, SIDE), False, statuses, inputs,
        )  # fmt: skip
        with _decoding_only():
            start = time.perf_counter()
            NativeJob(batch, self._channel, self._threads, _nothing).wait()
            seconds = time.perf_counter() - start
        failed = int((statuses[:, 0] != _MADE).sum())
        if failed:
            raise ContenderError(f"decoding alone failed for {failed} of {images} photos")
        return seconds

    def close(self) -> None:
        """Drop the photos."""
        self._blobs, self._files = None, []


_lock = threading.Lock()


@contextmanager
def _decoding_only() -> Iterator[None]:
    """Have the core's threads decode, and not resample, for a time in which no loader works."""
    with _lock:
        native.skip_resampling(True)
        try:
            yield
        finally:
            native.skip_resampling(False)


def _nothing() -> Any:
    return


def floor_share(
    samples: Mapping[str, Sequence[Sample]], main: str = MAIN_ROW, floor: str = "floor"
) -> dict[str, float] | None:
    """Return FastLoader's rate over that of decoding alone, round by round; ``None`` if not measured."""
    if not samples.get(main) or not samples.get(floor):
        return None
    return rounded(summarise(ratios(samples, main, [floor])))
