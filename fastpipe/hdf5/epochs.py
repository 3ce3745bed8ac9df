"""What an epoch decodes, by the order in which it goes through the samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["uniform_decodes"]


def uniform_decodes(lead: Sequence[int], chunk: Sequence[int], batch_size: int) -> float:
    """How often an epoch in uniform order decodes a chunk, on average, if nothing decoded is kept.

    A chunk is decoded once for each batch that has at least one of its samples.  Of ``n`` samples in
    random order, a batch of ``b`` has none of a chunk's ``k`` samples with the probability

        C(n - b, k) / C(n, k)  =  product over i < b of  1 - k / (n - i)

    so a chunk is decoded, summed over the epoch's batches, ``sum of 1 - that`` times.  With many more
    chunks ``g`` than samples in a batch this is close to ``k``; for a batch alone it is the share of
    chunks in ``g (1 - (1 - 1/g)^b)``, had the samples been drawn with replacement.

    Args:
        lead: the dataset's shape, as far as it counts samples.
        chunk: a chunk's shape along the same dimensions.
        batch_size: samples of a batch.

    Returns:
        Decodes in an epoch, divided by chunks; 0 without samples.

    >>> round(uniform_decodes([1000], [16], 64), 2), round(uniform_decodes([1000], [1], 64), 2)
    (10.26, 1.0)
    """
    count = math.prod(lead)
    if not count:
        return 0.0
    whole, rest = divmod(count, batch_size)
    batches = {batch_size: whole, rest: 1 if rest else 0}
    total = chunks = 0.0
    for samples, times in _sizes(lead, chunk).items():
        chunks += times
        for size, how_many in batches.items():
            if how_many:
                total += times * how_many * (1 - _none_of(samples, count, size))
    return total / chunks


def _none_of(samples: int, count: int, batch: int) -> float:
    """The probability that a batch has none of some samples."""
    if samples + batch > count:
        return 0.0
    # The same product with the two exchanged: the shorter one.
    fewer, more = sorted((samples, batch))
    return float(np.exp(np.log1p(-more / (count - np.arange(fewer, dtype=np.float64))).sum()))


def _sizes(lead: Sequence[int], chunk: Sequence[int]) -> dict[int, int]:
    """How many chunks have how many samples: those at the ends have fewer."""
    sides = []
    for size, side in zip(lead, chunk, strict=True):
        whole, rest = divmod(size, side)
        sides.append([(length, times) for length, times in ((side, whole), (rest, 1)) if length and times])
    found: dict[int, int] = {}
    for combination in itertools.product(*sides):
        samples = math.prod(length for length, _ in combination)
        found[samples] = found.get(samples, 0) + math.prod(times for _, times in combination)
    return found
