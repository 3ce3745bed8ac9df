"""Augmentations of spectrograms: (N, F, T) or (N, C, F, T), floats."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import Shape
from fastpipe.augment.chains import BatchTransform, Columns
from fastpipe.augment.distributions import between
from fastpipe.augment.parameters import Float64Array, limits_of, probability
from fastpipe.augment.steps import Step
from fastpipe.errors import AugmentError


class _OfSpectrograms(BatchTransform, ABC):
    ranks = (3, 4)

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.uint8:
            raise AugmentError(
                f"{type(self).__name__} takes floats, got uint8: spectrograms.float() makes them"
            )
        return dtype


class SpecAugment(_OfSpectrograms):
    """Mask bands of time and of frequency (D. S. Park et al., "SpecAugment", 2019, arXiv:1904.08779).

    Args:
        n_time_masks, n_freq_masks: the number of masks of each sample.
        time_mask_param, freq_mask_param: a mask is narrower than this number of frames, or of bins.
        p: the greatest fraction of the frames, or of the bins, that one mask may cover.
        zero_masking: whether to fill with 0 instead of the sample's mean.

    Arguments and results match ``torchaudio.transforms.SpecAugment`` for each sample. A mask's width is drawn
    uniformly below ``mask_param``. Then the mask's start is drawn uniformly from the starts that fit.  All
    channels have the same masks.

    >>> SpecAugment(2, 30, 2, 20, zero_masking=True)(torch.ones(8, 80, 400)).shape
    torch.Size([8, 80, 400])
    """

    def __init__(
        self,
        n_time_masks: int,
        time_mask_param: int,
        n_freq_masks: int,
        freq_mask_param: int,
        p: float = 1.0,
        zero_masking: bool = False,
    ) -> None:
        self.n_time_masks, self.time_mask_param = n_time_masks, time_mask_param
        self.n_freq_masks, self.freq_mask_param = n_freq_masks, freq_mask_param
        for name in ("n_time_masks", "time_mask_param", "n_freq_masks", "freq_mask_param"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise AugmentError(f"{name} must be a whole number of at least 0, got {value!r}")
        self.p, self.zero_masking = probability(p), zero_masking
        count = n_time_masks + n_freq_masks
        self.draws = 2 * count
        kinds = ["time"] * n_time_masks + ["freq"] * n_freq_masks
        self.names = tuple(f"{kind}{at}_{edge}" for at, kind in enumerate(kinds) for edge in ("begin", "end"))

    def check(self, shape: Sequence[int]) -> None:
        for name, size in (("time", shape[3]), ("freq", shape[2])):
            most = getattr(self, f"{name}_mask_param")
            if self.p == 1.0 and most > size and getattr(self, f"n_{name}_masks"):
                raise AugmentError(
                    f"{name}_mask_param={most} is more than there is: {size} of spectrograms {tuple(shape)}. "
                    f"At most {size}, or p= below 1, which limits it for each input"
                )

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        table = np.empty((len(u), self.draws))
        for at in range(self.draws // 2):
            is_time = at < self.n_time_masks
            size, most = (shape[2], self.time_mask_param) if is_time else (shape[1], self.freq_mask_param)
            most = most if self.p == 1.0 else min(most, int(size * self.p))
            extent = u[:, 2 * at] * most
            begin = np.floor(u[:, 2 * at + 1] * (size - extent))
            table[:, 2 * at], table[:, 2 * at + 1] = begin, begin + np.floor(extent)
        return table

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("mask", column, (self.n_time_masks, self.n_freq_masks, int(self.zero_masking)))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        value = images.new_zeros(()) if self.zero_masking else images.mean(dim=(1, 2, 3), keepdim=True)
        time = torch.arange(images.shape[3], device=images.device)
        bins = torch.arange(images.shape[2], device=images.device).view(-1, 1)
        for begin, end in zip(self.names[::2], self.names[1::2], strict=True):
            places = time if begin.startswith("time") else bins
            first, last = (columns[name].view(-1, 1, 1, 1) for name in (begin, end))
            images = torch.where((places >= first) & (places < last), value, images)
        return images


class RandomGain(_OfSpectrograms):
    """Make each sample louder or quieter.

    Args:
        gain_db: gains in decibels are drawn from [-gain_db, gain_db], or between the two given numbers.
        scale: the unit of the values: ``"amplitude"``, ``"power"`` or ``"decibel"``. Gains are added to
            decibels.

    Amplitudes are multiplied by ``10 ** (dB / 20)``, as in ``torchaudio.functional.gain``.

    >>> RandomGain((20.0, 20.0))(torch.ones(1, 2, 2)).unique()
    tensor([10.])
    """

    names = ("gain_db",)
    applied_names = ("change",)

    def __init__(
        self,
        gain_db: float | Sequence[float] = 6.0,
        scale: Literal["amplitude", "power", "decibel"] = "amplitude",
    ) -> None:
        if scale not in ("amplitude", "power", "decibel"):
            raise AugmentError(f"scale must be 'amplitude', 'power' or 'decibel', got {scale!r}")
        self.gain_db, self.scale = limits_of(gain_db, "gain_db", about=0.0), scale

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return between(u, *self.gain_db)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        if self.scale == "decibel":
            return table
        return np.asarray(10.0 ** (table / (20 if self.scale == "amplitude" else 10)))

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("gain", column, (int(self.scale == "decibel"),))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        change = columns["change"].view(-1, 1, 1, 1)
        return images + change if self.scale == "decibel" else images * change


class TimeShift(_OfSpectrograms):
    """Shift each sample in time.

    Args:
        most: the greatest shift. An int is a number of frames, and a float is a fraction of the sample's
            frames, from 0 to 1.
        rolls: whether frames that leave at one end enter at the other end. If ``rolls`` is False, frames of
            the value ``fill`` enter.
        fill: the value that enters if ``rolls`` is False.

    Shifts are whole frames. Positive shifts move frames to later times, as in ``torch.roll``.

    >>> TimeShift(0.25)(torch.ones(8, 80, 400)).shape
    torch.Size([8, 80, 400])
    """

    names = ("shift",)

    def __init__(self, most: float, rolls: bool = True, fill: float = 0.0) -> None:
        is_valid = most >= 0 if isinstance(most, int) else 0.0 <= most <= 1.0
        if not is_valid:
            raise AugmentError(
                f"most must be a number of frames of at least 0, or a fraction of at most 1.0, got {most!r}"
            )
        self.most, self.rolls, self.fill = most, rolls, float(fill)

    def check(self, shape: Sequence[int]) -> None:
        if self._most(shape[3]) > shape[3]:
            raise AugmentError(f"most={self.most} frames is more than there are: shape {tuple(shape)}")

    def _most(self, width: int) -> int:
        return self.most if isinstance(self.most, int) else int(self.most * width)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        most = self._most(shape[2])
        return np.floor(u * (2 * most + 1)) - most

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("shift", column, (int(self.rolls),), (self.fill,))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        width = images.shape[3]
        source = torch.arange(width, device=images.device) - columns["shift"].view(-1, 1, 1, 1)
        index = source.remainder(width).long().expand(-1, *images.shape[1:3], -1)
        found = images.gather(3, index)
        if self.rolls:
            return found
        return torch.where((source >= 0) & (source < width), found, found.new_full((), self.fill))
