"""Whether a cache of all that a dataset decodes fits, and what it would bring."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import fastpipe
from fastpipe.core.caches import AUTO_SHARE
from fastpipe.core.extras import require
from fastpipe.core.machine import free_memory
from fastpipe.core.text import in_bytes
from fastpipe.options import Cache
from fastpipe.profiling.tuning.settings import Base, Settings
from fastpipe.profiling.tuning.trials import Measured, measure

__all__ = ["cache_of_all", "decoded_bytes", "is_all_kept", "measure_kept", "part_of"]

_LOOKED_AT = 64  # images whose sizes stand for those of all


def cache_of_all(dataset: Any, budget: int | None) -> tuple[Cache | None, str]:
    """A cache for all that a dataset decodes.

    Args:
        dataset: one of fastpipe's.
        budget: bytes that may be taken.

    Returns:
        The cache, or None where there is no use in one; and in words why.
    """
    nbytes = decoded_bytes(dataset)
    if nbytes is None or getattr(dataset, "cache", None) != Cache():
        return None, ""
    if is_all_kept(Cache(), nbytes):
        return None, f"cache='auto' keeps all that is decoded, {in_bytes(nbytes)}, from the second epoch on"
    if budget is not None and nbytes > budget:
        return None, f"no cache holds all that is decoded: {in_bytes(nbytes)} of {in_bytes(budget)}"
    return Cache("ram", max_bytes=nbytes), ""


def is_all_kept(cache: Cache, nbytes: int) -> bool:
    """Whether so many bytes fit into a cache, as far as is known without making it."""
    if cache.where in ("off", "disk") or cache.max_bytes != "auto":
        return cache.where == "disk" or (cache.max_bytes != "auto" and nbytes <= cache.max_bytes)
    free = free_memory()
    return free is not None and nbytes <= free // AUTO_SHARE


def part_of(loader: Any, dataset: Any, count: int) -> Any:
    """A ``DataLoader`` of the first samples of a dataset, shuffled, in batches like a loader's."""
    data = require("torch.utils.data", extra="torch")
    first = data.Subset(dataset, range(min(len(dataset), count)))
    return data.DataLoader(first, loader.batch_size or 1, shuffle=True, collate_fn=loader.collate_fn)


def decoded_bytes(dataset: Any) -> int | None:
    """Bytes of all that a dataset decodes in an epoch; None where that is not known beforehand.

    Of images that is estimated, from the sizes of some.
    """
    if isinstance(dataset, fastpipe.FastHDF5Dataset):
        return int(len(dataset) * sum(dtype.itemsize * np.prod(shape) for dtype, shape in dataset.kinds))
    samples = getattr(dataset, "samples", None)
    if not samples or not os.path.isfile(samples[0][0]):  # those of a bucket would be fetched for this
        return None
    image = require("PIL.Image", extra="image")
    step = max(1, len(samples) // _LOOKED_AT)
    areas = []
    for path, _ in samples[::step]:
        try:
            with image.open(path) as opened:
                areas.append(opened.width * opened.height)
        except OSError:  # which is told when it is decoded
            continue
    return int(3 * np.mean(areas) * len(samples) * 1.05) if areas else None


def measure_kept(
    base: Base, settings: Settings, step: Callable[[Any], object] | None, seconds: float, batch_s: float
) -> Measured | None:
    """What a batch takes from the second epoch on: measured on as many samples as a first epoch of about
    that time has.

    Args:
        base: a loader of a dataset of fastpipe's.
        settings: of it, with a cache.
        step: called with each batch.
        seconds: that are measured.
        batch_s: seconds of a batch without a cache.
    """
    loader = base.loader
    count = (loader.batch_size or 1) * max(4, int(seconds / batch_s))
    part = part_of(loader, loader.dataset, count)
    with base.dataset_with(settings):
        kept = fastpipe.accelerate(part, **settings.of_loader)
        for _ in kept:
            pass
        return measure(kept, step, seconds, max(2, settings.workers), None)
