"""Augmentations of one spectrogram, as scripts write them with slices of torch tensors.

Arguments are those of ``fastpipe.augment``; torchvision has none of them.
"""

from __future__ import annotations

import random
from typing import Any

__all__ = ["RandomGain", "SpecAugment", "TimeShift"]


class SpecAugment:
    """Masks of time and of frequency, filled with the mean.

    Args:
        n_time_masks, n_freq_masks: how many.
        time_mask_param, freq_mask_param: what they are narrower than.
    """

    def __init__(
        self, n_time_masks: int, time_mask_param: int, n_freq_masks: int, freq_mask_param: int
    ) -> None:
        self._time = [time_mask_param] * n_time_masks
        self._freq = [freq_mask_param] * n_freq_masks

    def __call__(self, spectrogram: Any) -> Any:
        found, value = spectrogram.clone(), spectrogram.mean()
        bands, frames = spectrogram.shape
        for most in self._time:
            begin, end = _span(most, frames)
            found[:, begin:end] = value
        for most in self._freq:
            begin, end = _span(most, bands)
            found[begin:end] = value
        return found


class RandomGain:
    """Another loudness.

    Args:
        gain_db: decibels are drawn from [-gain_db, gain_db].
    """

    def __init__(self, gain_db: float) -> None:
        self._gain_db = gain_db

    def __call__(self, spectrogram: Any) -> Any:
        return spectrogram * 10 ** (random.uniform(-self._gain_db, self._gain_db) / 20)


class TimeShift:
    """Frames move, those at the end to the begin.

    Args:
        most: frames are drawn from [-most, most].
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, spectrogram: Any) -> Any:
        return spectrogram.roll(random.randint(-self._most, self._most), -1)


def _span(most: int, size: int) -> tuple[int, int]:
    """Begin and end of a mask."""
    width = int(random.random() * most)
    begin = int(random.random() * (size - width))
    return begin, begin + width
