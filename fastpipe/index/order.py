"""The order of an epoch: a pure function, so that nothing has to store it."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

__all__ = ["epoch_order", "grouped_order", "tour_words"]

# Last word of Philox's 256-bit counter.  Whatever else draws from Philox under the same
# (seed, epoch) counts up from another place, so that the order of the samples and the
# random parameters of their transforms never come from the same random bits.
_DOMAIN = int.from_bytes(b"fp-order", "little")
_WORD = 2**64
_GROUP_DOMAIN = int.from_bytes(b"fp-group", "little")
_TOUR_DOMAINS = int.from_bytes(b"fp-tour0", "little"), int.from_bytes(b"fp-tour1", "little")
_LOW_BITS = 40  # of a sample's word that decide its place among those of a window


def epoch_order(length: SupportsIndex, *, seed: SupportsIndex, epoch: SupportsIndex) -> npt.NDArray[np.int64]:
    """The shuffled order in which one epoch visits the samples.

    Sample ``i`` gets the ``i``-th 64-bit word that NumPy's ``Philox`` gives for the key
    ``(seed mod 2**64, epoch)`` and the counter ``(0, 0, 0, _DOMAIN)``; the order sorts the
    samples by their words, equal words by ``i``.  NumPy keeps a bit generator's raw words
    the same in all versions (it does not promise that of ``Generator.permutation``), so
    the order is the same on every machine and with every release.

    Args:
        length: number of samples, ≥ 0.
        seed: any integer; taken modulo 2**64.
        epoch: number of the epoch, from 0.

    Returns:
        int64 array (length,): a permutation of ``range(length)``.

    Raises:
        OptionError: ``length`` or ``epoch`` is negative, or ``epoch`` is 2**64 or more.
        TypeError: an argument is not an integer.

    >>> epoch_order(6, seed=0, epoch=0)
    array([3, 4, 2, 5, 1, 0])
    >>> epoch_order(6, seed=0, epoch=1)
    array([3, 5, 1, 4, 2, 0])
    """
    count = _integer("length", length)
    if count < 0:
        raise OptionError(f"epoch_order(length=…) must be ≥ 0, got {count}")
    return _sorted(_words(count, seed, epoch, _DOMAIN))


def grouped_order(
    groups: npt.NDArray[np.integer[Any]], window: SupportsIndex, *, seed: SupportsIndex, epoch: SupportsIndex
) -> npt.NDArray[np.int64]:
    """An order that visits the groups of samples ``window`` at a time.

    The groups are shuffled as ``epoch_order`` shuffles samples, by words of another counter,
    ``(0, 0, 0, _GROUP_DOMAIN)``, and cut into windows.  Within each, the samples are sorted by the
    upper bits of the words that ``epoch_order`` takes.  So the samples of one window come in any
    order with the same probability, and each before or after all samples of another.

    Args:
        groups: integers (N,): the group of each sample, from 0; those without samples take a place in a
            window as well.
        window: groups in a window, from 1.
        seed, epoch: as for ``epoch_order``.

    Returns:
        int64 array (N,): a permutation of ``range(N)``.

    Raises:
        OptionError, TypeError: as for ``epoch_order``.

    >>> grouped_order(np.array([0, 0, 1, 1, 2, 2]), 1, seed=0, epoch=0)
    array([4, 5, 3, 2, 1, 0])
    """
    size = _integer("window", window)
    if size < 1:
        raise OptionError(f"grouped_order(window=…) must be ≥ 1, got {size}")
    if len(groups) and groups.min() < 0:
        raise OptionError(f"grouped_order(groups=…) must be ≥ 0, got {groups.min()}")
    shuffled = _sorted(_words(int(groups.max(initial=-1)) + 1, seed, epoch, _GROUP_DOMAIN))
    windows = np.empty(len(shuffled), np.uint64)
    windows[shuffled] = np.arange(len(shuffled)) // size
    words = _words(len(groups), seed, epoch, _DOMAIN)
    places = windows[groups] << np.uint64(_LOW_BITS) | words >> np.uint64(64 - _LOW_BITS)
    return _sorted(places)


def tour_words(
    count: int, seed: SupportsIndex, epoch: SupportsIndex, *, other: bool = False
) -> npt.NDArray[np.uint64]:
    """Random words of an epoch for tours through volumes: uint64 (count,).

    Args:
        count: how many.
        seed, epoch: as for ``epoch_order``.
        other: of another sequence.
    """
    return _words(count, seed, epoch, _TOUR_DOMAINS[other])


def _words(count: int, seed: SupportsIndex, epoch: SupportsIndex, domain: int) -> npt.NDArray[np.uint64]:
    seed_word = _integer("seed", seed) % _WORD
    epoch_word = _integer("epoch", epoch)
    if not 0 <= epoch_word < _WORD:
        raise OptionError(f"epoch_order(epoch=…) must be from 0 to 2**64 - 1, got {epoch_word}")
    key = np.array([seed_word, epoch_word], dtype=np.uint64)
    counter = np.array([0, 0, 0, domain], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def _sorted(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _integer(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"epoch_order({name}=…) must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None
