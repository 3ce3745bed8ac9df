"""Normalise patches by statistics of their whole volumes, which are computed once and kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.errors import OptionError, VolumeError
from fastpipe.options import Rescale, ZScore
from fastpipe.volumes.scans import kept_arrays, scan
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import Int64Array

Float32Array = npt.NDArray[np.float32]

_DIGIT = 16  # bits of an element by which one pass sorts; elements of more bits need several passes
_LARGEST = float(np.finfo(np.float32).max) / 2  # so that differences fit as well


class Normalizer(NamedTuple):
    """The numbers with which patches of a volume are normalised.

    Each array is float32, and has one number, or one for each channel: (1, …) or (*channels, 1, …).
    """

    option: ZScore | Rescale
    low: Float32Array  # subtracted first
    width: Float32Array  # then divided by
    factor: Float32Array  # then multiplied with, by ``Rescale``

    def normalize(self, stored: npt.NDArray[Any], out: Float32Array) -> None:
        """Write the normalised values of ``stored``, elements of the volume's dtype, into ``out``.

        The operations, and their order, are MONAI's.
        """
        out[...] = stored
        out -= self.low
        out /= self.width
        if isinstance(self.option, ZScore):
            if self.option.nonzero:
                np.copyto(out, 0, where=stored == 0)
            return
        low, high = self.option.to
        if (low, high) != (0.0, 1.0):
            out *= self.factor
            out += np.float32(low)
        if self.option.clip:
            np.clip(out, np.float32(low), np.float32(high), out=out)


def image_values(
    stored: npt.NDArray[Any], nan: str | float, normalizer: Normalizer | None
) -> npt.NDArray[Any]:
    """Return elements of a volume as a dataset's patches have them: NaN is replaced, then normalised."""
    if stored.dtype.kind in "fc" and not isinstance(nan, str):
        stored = np.where(np.isnan(stored), stored.dtype.type(nan), stored)
    if normalizer is None:
        return stored
    out = np.empty(stored.shape, np.float32)
    normalizer.normalize(stored, out)
    return out


def normalizers(
    option: Any, role: Role, nan: str | float, kept: FileArrays | None
) -> list[Normalizer] | None:
    """Return a ``Normalizer`` for each volume; None if ``option`` is None.

    ``nan`` is the dataset's option: if it is a number, the number replaces NaN.
    """
    if option is None:
        return None
    if not isinstance(option, (ZScore, Rescale)):
        raise OptionError(f"normalize must be ZScore(…), Rescale(…) or None, got {option!r}")
    if role.dtype.kind == "c" or role.dtype.itemsize > 8:
        raise OptionError(
            f"normalize= needs real numbers of at most 8 bytes, and {role.volumes[0].name} has {role.dtype}"
        )
    return [_normalizer(option, role, number, nan, kept) for number in range(len(role.volumes))]


def _normalizer(
    option: ZScore | Rescale, role: Role, number: int, nan: str | float, kept: FileArrays | None
) -> Normalizer:
    groups = math.prod(role.lead) if option.channel_wise else 1
    what = f"moments, nonzero={option.nonzero}" if isinstance(option, ZScore) else f"at {option.percentiles}"
    about = f"statistics of version 1: {what}, {groups} of {role.volumes[number].shape}, nan={nan}"
    low, high = kept_arrays(
        role.volumes[number], about, lambda: _statistics(option, role, number, groups, nan), kept
    )
    shape = (*role.lead, *[1] * len(role.spatial(number))) if option.channel_wise else (1,)
    width = high if isinstance(option, ZScore) else high - low
    factor = np.full(groups, 1.0 if isinstance(option, ZScore) else option.to[1] - option.to[0])
    is_flat = width.astype(np.float32) == 0
    width, factor = np.where(is_flat, 1.0, width), np.where(is_flat, 1.0, factor)
    return Normalizer(option, *(one.astype(np.float32).reshape(shape) for one in (low, width, factor)))


def _statistics(
    option: ZScore | Rescale, role: Role, number: int, groups: int, nan: str | float
) -> list[npt.NDArray[Any]]:
    """Return the means and the standard deviations, or the percentiles: float64 (groups,) each."""
    volume, elements = role.volumes[number], math.prod(role.volumes[number].shape) // groups
    wanted = () if isinstance(option, ZScore) else option.percentiles
    at = [(elements - 1) * (one / 100) for one in wanted]  # as ``numpy.percentile`` computes it
    ranks = sorted({rank for one in at for rank in (math.floor(one), math.ceil(one))})
    sorting = [_Ranks(ranks, volume.dtype) for _ in range(groups)] if wanted not in ((), (0.0, 100.0)) else []
    moments = [_Moments() for _ in range(groups)]
    lows, highs = np.full(groups, np.inf), np.full(groups, -np.inf)

    def look(start: Sequence[int], part: npt.NDArray[Any]) -> None:
        for group, values in enumerate(part.reshape(groups, -1)):
            if values.dtype.kind == "f" and not isinstance(nan, str):
                values[np.isnan(values)] = nan
            low, high = float(values.min()), float(values.max())
            if not -_LARGEST <= low <= high <= _LARGEST:
                raise _unsuitable(volume.name, start, low, high)
            lows[group], highs[group] = min(lows[group], low), max(highs[group], high)
            if isinstance(option, ZScore):
                moments[group].add(values[values != 0] if option.nonzero else values)
            if sorting:
                sorting[group].add(values)

    for _ in range(-(-8 * volume.dtype.itemsize // _DIGIT) if sorting else 1):
        scan([role], number, look)
        for one in sorting:
            one.next_digit()
    if isinstance(option, ZScore):
        return [np.array([one.mean for one in moments]), np.array([one.deviation for one in moments])]
    if not sorting:
        return [lows, highs]
    found = [dict(zip(ranks, one.values(), strict=True)) for one in sorting]
    return [np.array([_between(each, one) for each in found]) for one in at]


def _unsuitable(name: str, start: Sequence[int], low: float, high: float) -> VolumeError:
    found = f"{max(low, high, key=abs)}, which is too large for float32"
    if math.isnan(low):
        found = "NaN; give nan= a number that replaces NaN"
    return VolumeError(
        f"{name} has no statistics for normalize=: in the part at {tuple(start)} it has {found}"
    )


def _between(values: dict[int, float], at: float) -> float:
    """Interpolate between the values at the ranks beside ``at``, as ``numpy.percentile`` does."""
    low, high, share = values[math.floor(at)], values[math.ceil(at)], at - math.floor(at)
    step = high - low
    return low + step * share if share < 0.5 else high - step * (1 - share)


class _Moments:
    """The mean and the standard deviation of numbers that come in parts, in float64."""

    def __init__(self) -> None:
        self._count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: npt.NDArray[Any]) -> None:
        if not len(values):
            return
        # The update of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979.
        numbers, before = values.astype(np.float64), self._count
        mean = float(numbers.mean())
        numbers -= mean
        self._count += len(values)
        step = mean - self.mean
        self._squares += float(np.square(numbers, out=numbers).sum())
        self._squares += step * step * before * (len(values) / self._count)
        self.mean += step * (len(values) / self._count)

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / max(1, self._count))


class _Ranks:
    """The numbers at some ranks, counted from 0, of all numbers of a dtype in ascending order.

    The numbers come in parts, and all of them come once for each digit of 16 bits.  A pass counts the next
    digit of the numbers that begin like a wanted one.
    """

    def __init__(self, ranks: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("=")
        self._bits = 8 * self._dtype.itemsize
        self._digit = min(self._bits, _DIGIT)
        self._left = self._bits - self._digit  # bits below the current digit
        # For each rank: the digits so far, and the rank among the numbers that begin with them.
        self._found = [(0, rank) for rank in ranks]
        self._counts = {0: self._none()}

    def _none(self) -> Int64Array:
        return np.zeros(1 << self._digit, np.int64)

    def add(self, values: npt.NDArray[Any]) -> None:
        keys = self._sortable(values)
        for begin, counts in self._counts.items():
            some = keys
            if self._left + self._digit < self._bits:
                some = keys[keys >> (self._left + self._digit) == begin]
            digits = (some >> self._left) & ((1 << self._digit) - 1)
            counts += np.bincount(digits.astype(np.intp), minlength=len(counts))

    def next_digit(self) -> None:
        """Find the current digit of the wanted numbers, when all numbers have come, and go on."""
        found = []
        for begin, rank in self._found:
            ends = np.cumsum(self._counts[begin])
            digit = int(np.searchsorted(ends, rank, side="right"))
            found.append((begin << self._digit | digit, rank - (int(ends[digit - 1]) if digit else 0)))
        self._found, self._left = found, self._left - self._digit
        self._counts = {begin: self._none() for begin, _ in found}

    def values(self) -> list[float]:
        keys = np.array([begin for begin, _ in self._found], f"u{self._dtype.itemsize}")
        sign = keys.dtype.type(1 << (self._bits - 1))
        if self._dtype.kind == "f":
            keys = np.where(keys & sign, keys ^ sign, ~keys)
        elif self._dtype.kind == "i":
            keys ^= sign
        return [float(value) for value in keys.view(self._dtype)]

    def _sortable(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return unsigned integers in the same order as the numbers."""
        keys = np.ascontiguousarray(values).view(f"u{self._dtype.itemsize}")
        sign = keys.dtype.type(1 << (self._bits - 1))
        if self._dtype.kind == "f":  # negative floats are in descending order of their bits
            return np.where(keys & sign, ~keys, keys | sign)
        return keys ^ sign if self._dtype.kind == "i" else keys
