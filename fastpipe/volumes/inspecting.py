"""What is known of a volume, measured or computed, and what patches of it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastpipe.core.machine import available_cpus, free_memory
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError
from fastpipe.volumes.measuring import Speed, copy_seconds, decode_speed
from fastpipe.volumes.model import PatchModel, Stored
from fastpipe.volumes.opened import chunk_of, stored_nbytes
from fastpipe.volumes.volume import Volume

__all__ = [
    "LIMITS",
    "Cost",
    "Fit",
    "PatchFacts",
    "Rates",
    "VolumeFacts",
    "checked_model",
    "default_budget",
    "patch_facts",
    "stored_as",
    "volume_facts",
]

_SECONDS = 0.8  # for each of the measurements
_ASSUMED = 1 << 30
LIMITS = (2.0, 1.2)


@dataclass(frozen=True)
class VolumeFacts:
    """A volume.

    Attributes:
        name: as it was named.
        how: it is stored, in words.
        shape, dtype: of the array.
        chunk: what is stored together.
        unit: what is decoded at once.
        unit_nbytes: of a unit.
        units: how many there are.
        decoded: bytes of the array.
        stored: bytes on disk; None where nobody knows.
        one, all: how fast it is decoded by one thread, and by as many as there are cores; None of an array
            without elements.
    """

    name: str
    how: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    unit: tuple[int, ...]
    unit_nbytes: int
    units: int
    decoded: int
    stored: int | None
    one: Speed | None
    all: Speed | None

    @property
    def ratio(self) -> float | None:
        """Decoded bytes for each on disk."""
        return self.decoded / self.stored if self.stored else None


@dataclass(frozen=True)
class Cost:
    """What patches in some order cost.

    Attributes:
        amplification: bytes that are decoded for each that is used.
        one, all: patches in a second by one thread, and by all.
    """

    amplification: float
    one: float
    all: float


@dataclass(frozen=True)
class Fit:
    """How a budget is best used.

    Attributes:
        threads: that fit.
        thread_nbytes: that each of them takes while it decodes.
        remembered: bytes for what is remembered.
    """

    threads: int
    thread_nbytes: int
    remembered: int


@dataclass(frozen=True)
class PatchFacts:
    """What patches of a size cost.

    Attributes:
        patch: their size.
        nbytes: of one, in all arrays.
        epoch: how many have the volume's size.
        budget: bytes of memory for it.
        fit: how that is used.
        all_nbytes: of all that can be remembered.
        keeps_all: whether there is room for all of the volume.
        alone: of one patch, if nothing is remembered.
        uniform: of patches from anywhere.
        tour: of a tour.
        fronts: places of the tour at a time.
        least: bytes that are decoded for each that is used in the first epoch, if all is remembered.
        needed: the least memory, that of the threads included, with which a tour from one place stays below
            some amplifications; None where less than all of it is not enough.
        copying: seconds that a thread takes to copy a patch from decoded units.
    """

    patch: tuple[int, ...]
    nbytes: int
    epoch: int
    budget: int
    fit: Fit
    all_nbytes: int
    keeps_all: bool
    alone: Cost
    uniform: Cost
    tour: Cost
    fronts: int
    least: float
    needed: dict[str, int | None]
    copying: float


def default_budget() -> int:
    """What ``cache="auto"`` takes."""
    return max(1, (free_memory() or 4 * _ASSUMED) // 4)


def volume_facts(path: str, volume: Volume, patch: Sequence[int] | None) -> VolumeFacts:
    """The facts about a volume, of which some is decoded to see how fast that goes.

    Args:
        path: as it was named.
        volume: opened.
        patch: decoded is what patches of this size need; None for anything.

    Raises:
        DamagedUnitError, OSError: it cannot be read.
    """
    cores = available_cpus()
    has_some = volume.grid.count > 0
    one = decode_speed(volume, patch, 1, _SECONDS) if has_some else None
    return VolumeFacts(
        name=path,
        how=volume.how,
        shape=volume.shape,
        dtype=str(volume.dtype),
        chunk=chunk_of(volume),
        unit=volume.grid.unit,
        unit_nbytes=volume.unit_nbytes,
        units=volume.grid.count,
        decoded=volume.nbytes,
        stored=stored_nbytes(path),
        one=one,
        all=decode_speed(volume, patch, cores, _SECONDS) if has_some and cores > 1 else one,
    )


def stored_as(volume: Volume) -> Stored:
    """A volume, for the model."""
    return Stored(volume.shape, volume.grid.unit, volume.dtype.itemsize)


def checked_model(volumes: Sequence[Volume], patch: Sequence[int]) -> PatchModel:
    """The model of patches.

    Raises:
        OptionError: they cannot be cut.
    """
    if not all(math.prod(volume.shape) for volume in volumes):
        raise OptionError(f"{volumes[0].name} is empty: there are no patches in it")
    try:
        return PatchModel(list(map(stored_as, volumes)), patch, available_cpus())
    except OptionError as error:
        raise OptionError(f"{volumes[0].name}: {error}") from None


def patch_facts(
    model: PatchModel, volumes: Sequence[Volume], facts: Sequence[VolumeFacts], budget: int
) -> PatchFacts:
    """What patches cost.

    Args:
        model: of the patches.
        volumes: the arrays that are read at the same place, the volume first.
        facts: about each.
        budget: bytes of memory.

    Raises:
        OptionError: patches cannot be read, or the budget is too little.
        DamagedUnitError, OSError: a volume cannot be read.
    """
    fit = fit_of(facts, budget)
    if fit.thread_nbytes > budget:
        raise OptionError(
            f"a budget of {in_bytes(budget)} is too little: a thread that decodes takes "
            f"{in_bytes(fit.thread_nbytes)}; give at least --budget {fit.thread_nbytes}B"
        )
    copying = sum(copy_seconds(volume, model.patch) for volume in volumes)
    rates = Rates(model, [(one.one, one.all) for one in facts], copying)
    tour = model.tour(fit.remembered)
    needed = [least and budget_for(least, fit.thread_nbytes) for least in model.least_budget(LIMITS)]
    return PatchFacts(
        patch=model.patch,
        nbytes=model.patch_nbytes,
        epoch=model.epoch,
        budget=budget,
        fit=fit,
        all_nbytes=model.total_nbytes,
        keeps_all=fit.remembered >= model.total_nbytes,
        alone=rates.cost(model.alone() / model.patch_nbytes),
        uniform=rates.cost(model.uniform(fit.remembered)),
        tour=rates.cost(tour.amplification),
        fronts=tour.fronts,
        least=model.uniform(model.total_nbytes),
        needed=dict(zip(map(str, LIMITS), needed, strict=True)),
        copying=copying,
    )


def fit_of(facts: Sequence[VolumeFacts], budget: int) -> Fit:
    """How a budget is best used: at least half of it for what is remembered.

    A thread that decodes has the bytes of a chunk as they are stored, and what becomes of them.  That is
    computed, not measured: of a chunk of the mean ratio; a codec's own buffers, and those of the batches
    that patches are copied to, are not in it.
    """
    each = 0
    for one in facts:
        itemsize = one.unit_nbytes // max(1, math.prod(one.unit))
        chunk = max(math.prod(one.chunk) * itemsize, one.unit_nbytes)
        each = max(each, chunk + int(chunk / max(1.0, one.ratio or 1.0)))
    threads = max(1, min(available_cpus(), budget // 2 // max(1, each)))
    return Fit(threads, each, max(0, budget - threads * each))


def budget_for(remembered: int, thread_nbytes: int) -> int:
    """The budget of which ``fit_of`` leaves so much for what is remembered."""
    return remembered + thread_nbytes * max(1, min(available_cpus(), remembered // max(1, thread_nbytes)))


class Rates:
    """How many patches there are in a second.

    Args:
        model: of the patches.
        speeds: for each array, by one thread and by all.
        copying: seconds for a patch and a thread.
    """

    def __init__(
        self, model: PatchModel, speeds: Sequence[tuple[Speed | None, Speed | None]], copying: float
    ) -> None:
        self._model, self._speeds, self._copying = model, speeds, copying

    def cost(self, amplification: float) -> Cost:
        """With so many bytes decoded for each that is used."""
        return Cost(amplification, self._patches(amplification, 0), self._patches(amplification, 1))

    def _patches(self, amplification: float, which: int) -> float:
        seconds, threads = 0.0, 1
        for number, pair in enumerate(self._speeds):
            speed = pair[which]
            if speed is not None:
                seconds += amplification * self._model.nbytes_of(number) / speed.nbytes_per_s
                threads = speed.threads
        return 1 / max(seconds + self._copying / threads, 1e-12)
