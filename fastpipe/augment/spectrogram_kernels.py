"""The CPU kernels of spectrograms: batches of float32, (N, C, F, T), changed in place.

A spectrogram is so small that calls for each one would take longer than the work.

Every function releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.augment.sum_kernels import mean

__all__ = ["mask", "shift"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_batch = _t.Array(_t.float32, 4, "C")
_table = _t.Array(_t.float64, 2, "C", readonly=True)


@compiled(_t.void(_batch, _table, _t.int64, _t.boolean))
def mask(batch: Any, edges: Any, time_masks: Any, with_zero: Any) -> None:
    """Fill bands of time, and then of frequency.

    Args:
        edges: (N, 2 · masks): where each mask begins and ends.
        time_masks: how many of them are of time.
        with_zero: fill with 0, in the place of the sample's mean.
    """
    count, channels, bins, frames = batch.shape
    for n in range(count):
        value = np.float32(0) if with_zero else mean(batch[n].reshape(channels * bins * frames))
        for at in range(edges.shape[1] // 2):
            begin, end = int(edges[n, 2 * at]), int(edges[n, 2 * at + 1])
            for c in range(channels):
                if at < time_masks:
                    for f in range(bins):
                        for t in range(begin, end):
                            batch[n, c, f, t] = value
                else:
                    for f in range(begin, end):
                        for t in range(frames):
                            batch[n, c, f, t] = value


@compiled(_t.void(_batch, _table, _t.boolean, _t.float32))
def shift(batch: Any, shifts: Any, rolls: Any, fill: Any) -> None:
    """Move in time.

    Args:
        shifts: (N, 1), frames, at most all of them.
        rolls: what leaves at one end comes in at the other; else ``fill`` does.
    """
    count, channels, bins, frames = batch.shape
    row = np.empty(frames, np.float32)
    for n in range(count):
        by = int(shifts[n, 0])
        for c in range(channels):
            for f in range(bins):
                for t in range(frames):
                    row[t] = batch[n, c, f, t]
                for t in range(frames):
                    source = t - by
                    if source >= 0 and source < frames:
                        batch[n, c, f, t] = row[source]
                    else:
                        batch[n, c, f, t] = row[source % frames] if rolls else fill
