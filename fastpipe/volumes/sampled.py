"""Where the patches of a dataset are, by its sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.errors import OptionError
from fastpipe.index.arrays import FileArrays
from fastpipe.sampling import Foreground, Grid, Positions, Sampling, Uniform
from fastpipe.volumes.masks import MaskDensity, MaskedPatches, PatchCells
from fastpipe.volumes.places import (
    FixedPatches,
    ForegroundPatches,
    PatchPlaces,
    PatchSpace,
    Places,
    UniformPatches,
    given_places,
    grid_places,
)
from fastpipe.volumes.scanning import label_voxels, mask_density
from fastpipe.volumes.sources import Role

__all__ = ["places_of"]

_log = logging.getLogger("fastpipe.patches")
_MOST_SHOWN = 10  # labels in a message

# Where a seed's numbers for places begin, far from those for the transforms of any sample; attempts to find
# a place near to a mask have others, and so have patches around the foreground.
_PLACES, _FOREGROUND = 1 << 62, 1 << 20


def drawn(
    number: int, seed: int, epoch: int, indices: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float64]:
    """Random numbers for the places of patches: others than those for their transforms."""
    return uniforms(sample_seed(seed, number, _PLACES), epoch, indices, count)


class Shares:
    """The part of patches that is in the masks of their volumes at least."""

    def __init__(self, space: PatchSpace, densities: Sequence[MaskDensity]) -> None:
        self._space, self._densities = space, densities

    def __call__(self, places: Places) -> npt.NDArray[np.float64]:
        """Of patches at places: float64 (N,)."""
        found = np.zeros(len(places.volumes))
        for volume in np.unique(places.volumes).tolist():
            rows = np.flatnonzero(places.volumes == volume)
            found[rows] = self._densities[volume].fractions(places.starts[rows], self._space.patch)
        return found


def places_of(
    sampling: Sampling, space: PatchSpace, roles: Sequence[Role], pads: bool, kept: FileArrays | None
) -> PatchPlaces:
    """The patches of epochs.

    Args:
        sampling: the dataset's option.
        space: where patches can be.
        roles: the arrays.
        pads: whether patches may reach beyond volumes.
        kept: where what is found out about labels and masks is kept from one time to the next.

    Raises:
        OptionError: the sampling does not fit the volumes.
    """
    if isinstance(sampling, Uniform):
        return _anywhere(sampling, space, roles, kept)
    if isinstance(sampling, Grid):
        return FixedPatches(grid_places(space, _stride(sampling, space)))
    if isinstance(sampling, Positions):
        return FixedPatches(given_places(space, sampling.array, pads))
    if isinstance(sampling, Foreground):
        labels = _role(roles, "labels", "Foreground draws patches around labels")
        if labels.dtype.kind == "c":
            raise OptionError(
                f"Foreground needs labels that are above 0 or not, and these are {labels.dtype}"
            )
        found = [
            label_voxels(labels, number, sampling.voxels, sampling.classes, kept)
            for number in range(len(labels.volumes))
        ]
        voxels = [one.each() for one in found]
        if sampling.fraction and not any(voxels):
            which = "above 0" if sampling.classes is None else f"of {list(sampling.classes)}"
            there = [] if sampling.classes is None else label_voxels(labels, 0, 1, None, kept).labels.tolist()
            more = f"; above 0 it has {', '.join(map(repr, there[:_MOST_SHOWN]))}" if there else ""
            raise OptionError(
                f"{labels.volumes[0].name} has no label {which}, around which to draw patches{more}"
            )
        missing = [
            one for one in sampling.classes or () if not any((some.labels == one).any() for some in found)
        ]
        if missing:
            _log.warning("No volume has the labels %s that are in Foreground(classes=…)", missing)
        elsewhere = _anywhere(sampling, space, roles, kept)
        return ForegroundPatches(space, elsewhere, sampling.fraction, voxels, partial(drawn, _FOREGROUND))
    raise OptionError(
        "sampling must be one of fastpipe.sampling: Uniform(n), Foreground(n), Grid() or Positions(array); "
        f"got {sampling!r}"
    )


def _anywhere(
    sampling: Uniform | Foreground, space: PatchSpace, roles: Sequence[Role], kept: FileArrays | None
) -> PatchPlaces:
    """Patches anywhere, or where there is enough of the mask."""
    by_size = sampling.volumes == "size"
    base = UniformPatches(space, sampling.samples_per_epoch, by_size, partial(drawn, 0))
    least = sampling.mask_fraction
    if not least:
        return base
    mask = _role(roles, "mask", "mask_fraction= is a part of the mask")
    found = [mask_density(mask, number, space.patch.tolist(), kept) for number in range(len(mask.volumes))]
    return MaskedPatches(base, PatchCells(space, by_size, least, found), least, Shares(space, found), drawn)


def _role(roles: Sequence[Role], name: str, why: str) -> Role:
    for role in roles:
        if role.name == name:
            return role
    raise OptionError(f"{why}: give {name}=")


def _stride(sampling: Grid, space: PatchSpace) -> Sequence[int]:
    patch: list[int] = space.patch.tolist()
    if sampling.stride is None:
        return patch
    if isinstance(sampling.stride, int):
        return [sampling.stride] * len(patch)
    if len(sampling.stride) != len(patch):
        raise OptionError(f"Grid(stride=…) must have {len(patch)} numbers, got {sampling.stride!r}")
    return sampling.stride
