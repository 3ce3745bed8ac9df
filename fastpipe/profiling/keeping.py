"""A cache for all that a dataset of fastpipe's decodes, measured as later epochs find it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import fastpipe
from fastpipe.core.machine import free_memory
from fastpipe.core.text import in_bytes
from fastpipe.options import Cache
from fastpipe.profiling.candidate import Candidate, place_of
from fastpipe.profiling.tuning.caching import decoded_bytes, is_all_kept, part_of
from fastpipe.profiling.tuning.settings import folders_behind
from fastpipe.profiling.watching import Watched

__all__ = ["of_kept"]

_PART = 0.5  # of the memory that is free: more is not asked for
_BATCHES = 16  # that are kept to be measured


def of_kept(watched: Watched) -> Iterator[Candidate]:
    """The same loader with a cache that holds all, where there is memory for that and no such cache.

    Args:
        watched: a loader of fastpipe's.
    """
    dataset, free = watched.loader.dataset, free_memory()
    if folders_behind(dataset) != [dataset] or not hasattr(dataset, "cache"):
        return
    nbytes = decoded_bytes(dataset)
    if nbytes is None or free is None or nbytes > _PART * free or is_all_kept(dataset.cache, nbytes):
        return
    cache = Cache("ram", max_bytes=nbytes)
    yield Candidate(
        f"cache={cache!r} of the {type(dataset).__name__}{place_of(watched)}",
        f"all that it decodes is {in_bytes(nbytes)}, and {in_bytes(free)} of memory are free; measured on "
        "some of your samples, from their second epoch on",
        _Kept(watched.loader, cache).begin, max(2, watched.loader.num_workers),
    )  # fmt: skip


class _Kept:
    """Epochs of some samples after one in which they were kept.

    Args:
        loader: of fastpipe's.
        cache: that a copy of its dataset gets.
    """

    def __init__(self, loader: Any, cache: Cache) -> None:
        self._loader, self._cache = loader, cache
        self._part: Any = None

    def begin(self) -> Iterator[Any]:
        """An iterator of one."""
        if self._part is None:
            dataset = copy.copy(self._loader.dataset)  # with threads of its own
            dataset.cache = self._cache
            part = part_of(self._loader, dataset, _BATCHES * (self._loader.batch_size or 1))
            self._part = fastpipe.accelerate(part, num_workers=self._loader.num_workers)
            for _ in self._part:
                pass
        return iter(self._part)
