"""The key of the batch that is being fetched, passed to the dataset out of band.

A wrapper such as ``Subset`` rebuilds plain indices, so a key cannot travel with them.  It is
put here, in the thread that fetches, and the dataset at the end of the chain takes from it
as many draws as it is asked for samples.

Without a loader's key a seed comes from torch's global generator, as the numbers of torch's own
transforms do: one 64-bit number for a batch (``__getitems__``) or a sample (``dataset[i]``), when
the first of its samples draws.  Where nothing is drawn the generator stays as it is, as under the
dataset that is replaced, and so do shuffles and dropout after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fastpipe.core.types import Key

__all__ = ["key_for", "keyed", "take_key"]


class _Current(threading.local):
    key: Key | None = None
    used: int = 0


_current = _Current()


@contextmanager
def keyed(key: Key) -> Iterator[None]:
    """Within the block, ``take_key`` in this thread takes from ``key``."""
    before = _current.key, _current.used
    _current.key, _current.used = key, 0
    try:
        yield
    finally:
        _current.key, _current.used = before


class _DrawnKey(Key):
    """A key whose seed is drawn from torch's global generator when it is first asked for, in any thread."""

    _drawn: int | None = None

    def __init__(self, *_: object) -> None:
        self._lock = threading.Lock()  # of its own: a child that is forked meanwhile has other keys

    @property
    def seed(self) -> int:
        with self._lock:
            if self._drawn is None:
                # On the CPU, whatever the default device is: its generator is the script's.
                drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), 2**63 - 1)
                self._drawn = int(drawn.item())
            return self._drawn


def take_key(count: int) -> tuple[Key, bool]:
    """Return the key for the next ``count`` samples of this thread, and whether a loader set it.

    Without a loader's key, or when it has no draws left, the seed is a 64-bit number from
    torch's global generator, drawn when something asks for it first: as with torch's own
    transforms, ``torch.manual_seed`` makes it reproducible, no two calls give the same, and
    the generator is left alone where nothing is drawn.
    """
    key = _current.key
    if key is not None and _current.used + count <= len(key.draws):
        draws = key.draws[_current.used : _current.used + count]
        _current.used += count
        return Key(key.seed, key.epoch, draws), True
    return _DrawnKey(0, 0, np.arange(count, dtype=np.int64)), False


def key_for(seed: int, epoch: int, first: int, count: int, step: int = 1) -> Key:
    """The key of ``count`` samples, every ``step``-th of the epoch's order from position ``first``."""
    return Key(seed, epoch, np.arange(first, first + step * count, step, dtype=np.int64))
