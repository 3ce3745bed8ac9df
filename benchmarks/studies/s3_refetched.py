"""The downloads of the second epoch with a stage that holds half of the images."""

from __future__ import annotations

import statistics
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
from benchmarks.cases.s3_rows import Bucket
from fastpipe.bench.images import train_transform
from fastpipe.bench.runner import touch

__all__ = ["least_recently_used", "refetched"]


# Of all bytes: so many are in the stage, and so many fetched ahead; else memory would hold the rest.
PART, AHEAD = 2, 32


def refetched(
    bucket: Bucket, batch_size: int, runs: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Two epochs of a loader with a stage of half the images' bytes, several times.

    Args:
        bucket: what is read.
        batch_size: images in a batch.
        runs: with other seeds.
        say: told what is measured.

    Returns:
        ``part`` of the bytes that the stage holds, ``raw`` and ``median``: the share of objects that the
        second epoch downloads; ``lru``: the median share that, of random orders, a stage would download that
        makes room by removing what was used longest ago.
    """
    raw, lru = [], []
    sizes = [Path(bucket.local, key).stat().st_size for key in bucket.keys]
    for seed in range(runs):
        say("stage of half the size")
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as folder:
            dataset = fastpipe.FastImageFolder(
                bucket.url, train_transform("float32"), cache="off", seed=seed,
                storage_options=bucket.options,
                stage=fastpipe.Stage(
                    Path(folder, "stage"), max_bytes=bucket.nbytes // PART, read_ahead=bucket.nbytes // AHEAD
                ),
            )  # fmt: skip
            loader: Any = fastpipe.FastLoader(dataset, batch_size, shuffle=True)
            counts = [0]
            for _ in range(2):
                for batch in loader:
                    touch(batch)
                counts.append(dataset.downloaded[0])
            dataset.close()
            del loader, dataset
        raw.append(round((counts[2] - counts[1]) / len(bucket.keys), 4))
        draw = np.random.default_rng(seed).permutation
        orders = draw(len(sizes)).tolist(), draw(len(sizes)).tolist()
        lru.append(least_recently_used(*orders, sizes, bucket.nbytes // PART))
    return {
        "part": 1 / PART,
        "raw": raw,
        "median": statistics.median(raw),
        "lru": round(statistics.median(lru), 4),
    }


def least_recently_used(
    first: Sequence[int], second: Sequence[int], sizes: Sequence[int], room: int
) -> float:
    """The share of the second order that is fetched anew after the first.

    Args:
        first, second: orders of objects.
        sizes: their bytes.
        room: bytes that are held.

    >>> least_recently_used([0, 1, 2, 3], [3, 2, 1, 0], [1] * 4, 2)
    0.5
    """
    held: OrderedDict[int, None] = OrderedDict()
    used = fetched = 0
    for place, one in enumerate((*first, *second)):
        if one in held:
            held.move_to_end(one)
            continue
        fetched += place >= len(first)
        held[one] = None
        used += sizes[one]
        while used > room:
            used -= sizes[held.popitem(last=False)[0]]
    return fetched / len(second)
