"""The arrays that patches are cut from: images, and labels and masks of the same places."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.array_cache import default_file_arrays
from fastpipe.core.text import in_bytes, natural_sorted, printable
from fastpipe.errors import OptionError
from fastpipe.options import Stage
from fastpipe.volumes.converted import ConvertedFiles
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.remote import RemoteVolumes, remote_volumes
from fastpipe.volumes.tables import matched_volumes
from fastpipe.volumes.volume import DIMS, Volume

__all__ = ["PatchPlan", "Role", "opened_roles"]


class Role(NamedTuple):
    """One of the values of a sample, in all volumes.

    Attributes:
        name: ``"volume"``, ``"labels"`` or ``"mask"``.
        volumes: where it comes from.
        lead: the dimensions in front of those that patches are cut along, such as channels.
        dtype: of its elements.
    """

    name: str
    volumes: list[Volume]
    lead: tuple[int, ...]
    dtype: np.dtype[Any]

    def spatial(self, number: int) -> tuple[int, ...]:
        """The shape of a volume, along the dimensions that patches are cut along."""
        return self.volumes[number].shape[len(self.lead) :]


def opened_roles(
    volume: Any,
    labels: Any,
    mask: Any,
    dims: int,
    *,
    may_write: bool,
    storage_options: Mapping[str, Any] | None = None,
    stage: Stage | None = None,
) -> tuple[list[Role], RemoteVolumes | None]:
    """Open volumes, and what belongs to them.

    Args:
        volume, labels, mask: as for ``matched_volumes``.
        dims: along how many dimensions patches are cut: the last ones.
        may_write: whether something may be kept in the user's cache folder.
        storage_options, stage: as for ``remote_volumes``.

    Returns:
        The arrays; and what brings chunks here of those that are somewhere else.

    Raises:
        OptionError: they do not fit together.
        Others: as for ``open_volume`` and ``remote_volumes``.
    """
    columns = matched_volumes(volume, labels, mask)
    remote = remote_volumes(itertools.chain(*columns.values()), storage_options, stage)
    tables, convert = (default_file_arrays(), ConvertedFiles()) if may_write else (None, None)

    def opened(what: Any, name: str) -> Volume:
        is_path = remote is not None and isinstance(what, (str, os.PathLike))
        found = remote.volume(os.fspath(what), name) if remote is not None and is_path else None
        return found or open_volume(what, name, convert=convert, tables=tables)

    roles = [_role(name, [opened(what, name) for what in column], dims) for name, column in columns.items()]
    for role in roles[1:]:
        for number in range(len(role.volumes)):
            if role.spatial(number) != roles[0].spatial(number):
                raise OptionError(
                    f"{role.volumes[number].name} has {role.spatial(number)} voxels, and "
                    f"{roles[0].volumes[number].name} has {roles[0].spatial(number)}: {role.name} must be "
                    "of the same places"
                )
    return roles, remote


def _role(name: str, volumes: Sequence[Volume], dims: int) -> Role:
    for volume in volumes:
        if len(volume.shape) > DIMS:
            raise OptionError(f"{volume.name} has {len(volume.shape)} dimensions; {DIMS} can be read")
        if 0 in volume.shape:
            raise OptionError(f"{volume.name} has no voxels: its shape is {volume.shape}")
        if len(volume.shape) < dims:
            raise OptionError(
                f"{volume.name} has {len(volume.shape)} dimensions, and patch_size {dims}: give a size for "
                "each dimension along which patches are cut"
            )
    first = volumes[0]
    lead = first.shape[: len(first.shape) - dims]
    for volume in volumes[1:]:
        if volume.dtype != first.dtype:
            raise OptionError(
                f"{volume.name} has elements of {volume.dtype}, and {first.name} of {first.dtype}: a batch "
                "has one type; convert one of them"
            )
        if volume.shape[: len(volume.shape) - dims] != lead:
            raise OptionError(
                f"{volume.name} has {volume.shape[: len(volume.shape) - dims]} in front of the dimensions "
                f"that patches are cut along, and {first.name} {lead}: a batch has one shape"
            )
    return Role(name, list(volumes), lead, first.dtype)


class PatchPlan:
    """What a dataset of patches does with its volumes.  ``print`` it.

    Attributes:
        lines: one for each array, and one for what is remembered.

    Args:
        roles: the arrays.
        patch_size: of the patches.
        remembered: how much is remembered, in words.
        amplification: bytes that were decoded so far for each that was used; None before the first.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        patch_size: Sequence[int],
        remembered: str,
        amplification: float | None,
    ) -> None:
        self.lines = [printable(_line(role, patch_size)) for role in roles]
        self.lines.append(f"decoded parts  →  {remembered}")
        if amplification is not None:
            self.lines.append(f"so far  →  {amplification:.2f} bytes were decoded for each that was used")

    def __repr__(self) -> str:
        return "PatchPlan(\n" + "".join(f"  {line}\n" for line in self.lines) + ")"


def _order(role: Role) -> str:
    names = [volume.name for volume in role.volumes]
    is_natural = names == natural_sorted(set(names))  # arrays in memory have all the same name
    return "natural order" if is_natural else "the given order"


def _line(role: Role, patch_size: Sequence[int]) -> str:
    first, count = role.volumes[0], len(role.volumes)
    patch = (*role.lead, *patch_size)
    nbytes = math.prod(patch) * role.dtype.itemsize
    where = first.name if count == 1 else f"{count} volumes in {_order(role)}, from {first.name}"
    shape = "×".join(map(str, first.shape))
    hows = list(dict.fromkeys(volume.how for volume in role.volumes))
    more = f", and {len(hows) - 1} other ways" if len(hows) > 1 else ""
    return (
        f"{role.name}: {where}, {shape} {role.dtype}  →  patches of {'×'.join(map(str, patch))} "
        f"({in_bytes(nbytes)}) from {hows[0]}{more}"
    )
