"""From what a script says of batches to ``Batching``."""

from __future__ import annotations

import operator
from typing import Literal

import numpy as np
import tensorflow as tf

from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Shard, Shuffle
from fastpipe.tf.ranks import shard_of
from fastpipe.tf.streaming import Batching

__all__ = ["batching_of"]

_SINGLES = 32  # samples made together, where the script wants single ones


def batching_of(
    batch_size: int | None, drop_remainder: bool, shuffle: bool | Shuffle, seed: int | None,
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"], *, draws: bool = False,
) -> Batching:  # fmt: skip
    """These arguments of a script; ``draws`` says whether something is random besides the order.

    Raises:
        OptionError: one cannot work.
    """
    if batch_size is not None and operator.index(batch_size) < 1:
        raise OptionError(f"batch_size must be a number from 1, or None for single samples, got {batch_size}")
    if not isinstance(shuffle, (bool, Shuffle)):
        raise OptionError(f"shuffle must be True, False or a fastpipe.Shuffle, got {shuffle!r}")
    # NumPy's generator is the script's: where nothing is random, no number of it is taken.
    is_random = bool(shuffle) or draws
    drawn = operator.index(seed) if seed is not None else np.random.randint(1_000_000) if is_random else 0
    part = shard_of(shard, is_shuffled=bool(shuffle), seed=seed)
    return Batching(
        batch_size or _SINGLES, drop_remainder and batch_size is not None, shuffle, int(drawn), part,
        BadSamples.of(bad_samples),
    )  # fmt: skip
