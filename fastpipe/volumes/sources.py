"""Find and open the arrays from which patches are cut: images with their labels and masks."""

from __future__ import annotations

import csv
import glob
import itertools
import operator
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.files import is_url, open_file
from fastpipe.core.text import natural_sorted, printable
from fastpipe.errors import OptionError
from fastpipe.volumes.axes import Axes
from fastpipe.volumes.opening import open_volume, seen
from fastpipe.volumes.remote import RemoteVolumes, remote_volumes
from fastpipe.volumes.volume import DIMS, Volume, chunk_text, sides_text

ROLES = ("volume", "labels", "mask")

_HOW = "give a table, a list of tuples (volume, labels[, mask]), or lists of paths in the same order"
# The wildcards of ``glob``.  This pattern accepts any bracket set, because ``glob`` matches its characters.
_WILDCARDS = re.compile(r"(\*+|\?|\[!?[^/][^/\]]*\])")


def matched_volumes(volume: Any, labels: Any = None, mask: Any = None) -> dict[str, list[Any]]:
    """Return lists of equal length: the volumes, their labels and their masks.

    If an argument is None, the result has no list for it.  Each argument is a path, a pattern such as
    ``"cases/*/image.zarr"``, an array, or a sequence of paths, patterns and arrays.  ``volume`` may instead
    be a table, which is a sequence of tuples (volume, labels[, mask]) or the path of a ``.csv`` file.  The
    columns of the file have the names ``volume``, ``labels`` and ``mask``.

    Matches of a pattern are in natural order: ``case_2`` comes before ``case_10``.  A list keeps its order.
    If several arguments are patterns, such as ``"images/*_0000.npy"`` and ``"labels/*.npy"``, files belong
    together if the wildcards match the same text.
    """
    if _is_table(volume):
        if labels is not None or mask is not None:
            raise OptionError("labels= and mask= are columns of the table that volume= is: leave them out")
        columns = _columns(volume)
    else:
        given = zip(ROLES, (volume, labels, mask), strict=True)
        columns = {
            name: list(some) if isinstance(some, (list, tuple)) else [some]
            for name, some in given
            if name == "volume" or some is not None
        }
    columns = _expanded(columns)
    if not columns["volume"]:
        raise OptionError("volume= names no volumes")
    return columns


def _is_table(volume: Any) -> bool:
    if isinstance(volume, (str, os.PathLike)):
        is_array = os.path.isdir(volume) or _is_inside_file(volume)
        return os.fspath(volume).endswith(".csv") and not is_array
    return isinstance(volume, Sequence) and bool(volume) and all(isinstance(row, tuple) for row in volume)


def _columns(table: Any) -> dict[str, list[Any]]:
    if isinstance(table, (str, os.PathLike)):
        return _columns_of_file(os.fspath(table))
    widths = {len(row) for row in table}
    if len(widths) > 1 or not 1 <= len(table[0]) <= len(ROLES):
        raise OptionError(
            f"a table's rows must be tuples (volume, labels[, mask]), got some of {sorted(widths)} values"
        )
    return {name: [row[place] for row in table] for place, name in enumerate(ROLES[: len(table[0])])}


def _columns_of_file(path: str) -> dict[str, list[Any]]:
    """Read the columns of a ``.csv`` file; paths in the file are relative to the file's folder."""
    with open(path, newline="", encoding="utf-8-sig", opener=open_file) as file:
        rows = list(csv.DictReader(file))
        names = list(rows[0]) if rows else []
    if "volume" not in names or not set(names) <= set(ROLES):
        raise OptionError(f"{path} must have a column volume, and may have labels and mask; it has {names}")
    empty = [number for number, row in enumerate(rows) if not all(row.values())]
    if empty:
        raise OptionError(f"{path}: row {empty[0] + 2} is not filled in")
    folder = os.path.dirname(path)
    return {
        name: [path if is_url(path) else os.path.join(folder, path) for path in (row[name] for row in rows)]
        for name in ROLES
        if name in names
    }


def _expanded(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if len({len(column) for column in columns.values()}) == 1:
        rows = [
            _expanded_row(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
        ]
        return {name: [one for row in rows for one in row[name]] for name in columns}
    with_patterns = [name for name, column in columns.items() if any(map(_is_pattern, column))]
    if len(with_patterns) > 1:
        raise OptionError(
            f"the patterns of {'= and '.join(with_patterns)}= cannot be matched, as there are not equally "
            f"many: {_HOW}"
        )
    found = {
        name: [one for item in column for one in (_found(item, name) if _is_pattern(item) else [item])]
        for name, column in columns.items()
    }
    _check_counts(found)
    for name in with_patterns:
        parts = [_found(item, name) for item in columns[name] if _is_pattern(item)]
        if any(part != sorted(part) for part in parts):
            raise OptionError(
                f"{name}= is a pattern, whose matches are in natural order (2 before 10), and the others "
                f"are lists, perhaps in the order of characters (10 before 2): {_HOW}"
            )
    return found


def _expanded_row(row: dict[str, Any]) -> dict[str, list[Any]]:
    patterns = {name: os.fspath(item) for name, item in row.items() if _is_pattern(item)}
    matches = {name: _found(pattern, name) for name, pattern in patterns.items()}
    if len(patterns) > 1:
        matches = _matched(patterns, matches)
    found = {name: [item] for name, item in row.items()} | matches
    _check_counts(found)
    return found


def _check_counts(columns: dict[str, list[Any]]) -> None:
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} for {name}=" for name, count in counts.items())
        raise OptionError(f"there must be equally many of volume, labels and mask, got {said}")


def _is_pattern(given: Any) -> bool:
    if not isinstance(given, (str, os.PathLike)):
        return False
    path = os.fspath(given)
    return not (is_url(path) or not glob.has_magic(path) or os.path.exists(path) or _is_inside_file(path))


def _is_inside_file(path: str | os.PathLike[str]) -> bool:
    """Return True if a path names an array inside a file: the path does not exist, and a parent is a file."""
    path = os.fspath(path)
    if os.path.exists(path):
        return False
    while path := os.path.dirname(path.rstrip("/")):
        if os.path.exists(path):
            return not os.path.isdir(path)
    return False


def _found(pattern: str | os.PathLike[str], name: str) -> list[str]:
    path = os.fspath(pattern)
    found = natural_sorted(glob.glob(path, recursive=True))
    if not found:
        raise OptionError(f"{name}={path!r} matches nothing")
    return found


def _matched(patterns: dict[str, str], matches: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the matches of several patterns, combined by the text that the wildcards match.

    The result has the order of the first pattern's matches.
    """
    regexes = {name: _regex(pattern) for name, pattern in patterns.items()}
    counts = {name: regex.groups for name, regex in regexes.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} in {name}={patterns[name]!r}" for name, count in counts.items())
        raise OptionError(f"patterns must have equally many wildcards, got {said}: {_HOW}")
    by_text: dict[str, dict[tuple[str, ...], str]] = {}
    for name, pattern in patterns.items():
        by_text[name] = {}
        for path in matches[name]:
            match = regexes[name].fullmatch(path)
            if match is not None and (other := by_text[name].setdefault(match.groups(""), path)) != path:
                raise OptionError(f"{name}={pattern!r} has both {other!r} and {path!r}: {_HOW}")
    leading = next(iter(patterns))
    for name in patterns:
        for some, other in ((leading, name), (name, leading)):
            missing = [text for text in by_text[some] if text not in by_text[other]]
            if missing:
                raise OptionError(
                    f"{other}={patterns[other]!r} has nothing for {'/'.join(missing[0])!r}, of "
                    f"{by_text[some][missing[0]]!r}, and {len(missing) - 1} more of {some}=: {_HOW}"
                )
    return {name: [by_text[name][text] for text in by_text[leading]] for name in patterns}


def _regex(pattern: str) -> re.Pattern[str]:
    """Return a regex with a group for each wildcard; a wildcard for the extension (``x.*``) has no group."""
    parts = re.split(r"/+", pattern)
    text = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":  # any number of folders
            text += "(.*)" if last else "(?:(.*)/+)?"
        else:
            has_any_ending = last and part.endswith(".*")
            pieces = _WILDCARDS.split(part.removesuffix("*") if has_any_ending else part)
            # Every second piece is a wildcard.
            pieces[0::2] = map(re.escape, pieces[0::2])
            pieces[1::2] = ["([^/]*)" if piece[0] == "*" else "([^/])" for piece in pieces[1::2]]
            text += "".join(pieces) + ("[^/]*" if has_any_ending else "" if last else "/+")
    return re.compile(text, re.DOTALL)


class Role(NamedTuple):
    """All arrays of one kind: volumes, labels or masks.  Each sample has one patch for each role."""

    name: str  # ``"volume"``, ``"labels"`` or ``"mask"``
    volumes: list[Volume]  # the arrays of this role, one for each volume
    lead: tuple[int, ...]  # leading dimensions, such as channels, which patches contain completely
    dtype: np.dtype[Any]  # the dtype of the arrays' elements

    def spatial(self, number: int) -> tuple[int, ...]:
        return self.volumes[number].shape[len(self.lead) :]


class Given(NamedTuple):
    """The arguments that name a dataset's volumes, and the options for remote volumes."""

    volume: Any
    labels: Any
    mask: Any
    stage: Any
    storage_options: Mapping[str, Any] | None
    channel_dim: int | Sequence[int] | None = None
    orientation: str | None = None


def opened_roles(
    given: Given, patch: Sequence[int], *, pads: bool, may_write: bool
) -> tuple[list[Role], RemoteVolumes | None]:
    """Open the volumes, labels and masks; return them by role, and a ``RemoteVolumes`` if some are remote.

    ``pads`` says whether patches may be larger than volumes.
    """
    columns = matched_volumes(*given[:3])
    axes = Axes.of(given.channel_dim, given.orientation, len(patch))
    remote = remote_volumes(itertools.chain(*columns.values()), given.storage_options, given.stage)

    def opened(what: Any, name: str) -> Volume:
        is_path = remote is not None and isinstance(what, (str, os.PathLike))
        found = remote.volume(os.fspath(what), name) if remote is not None and is_path else None
        if found is not None:
            return seen(found, axes)
        return open_volume(what, name, may_write=may_write, axes=axes)

    roles = [
        _role(name, [opened(what, name) for what in column], patch, pads) for name, column in columns.items()
    ]
    for role in roles[1:]:
        for number in range(len(role.volumes)):
            if role.spatial(number) != roles[0].spatial(number):
                raise OptionError(
                    f"{role.volumes[number].name} has {role.spatial(number)} voxels, and "
                    f"{roles[0].volumes[number].name} has {roles[0].spatial(number)}: {role.name} must be "
                    "of the same places"
                )
    return roles, remote


def _role(name: str, volumes: Sequence[Volume], patch: Sequence[int], pads: bool) -> Role:
    dims = len(patch)
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
        if not pads and _has_channels_last(volume.shape, patch):
            raise OptionError(
                f"{volume.name} has the shape {volume.shape}, and patches of {tuple(patch)} are cut along "
                "its last dimensions: channels must come first. Give channel_dim=-1, or store the array with "
                "its last axis moved to the front (numpy.moveaxis)"
            )
    first = volumes[0]
    lead = first.shape[: len(first.shape) - dims]
    for volume in volumes[1:]:
        if volume.dtype != first.dtype:
            raise OptionError(
                f"{volume.name} has elements of {volume.dtype}, and {first.name} of {first.dtype}: a batch "
                "has one type; convert one of them"
            )
        own = volume.shape[: len(volume.shape) - dims]
        if own != lead:
            raise OptionError(
                f"{volume.name} has {own} in front of the dimensions that patches are cut along, and "
                f"{first.name} {lead}: a batch has one shape"
            )
    return Role(name, list(volumes), lead, first.dtype)


def _has_channels_last(shape: Sequence[int], patch: Sequence[int]) -> bool:
    """Return True if patches fit into an array only if its last dimension, of at most 4, is left out."""
    before = shape[len(shape) - len(patch) - 1 : -1]
    return (
        len(before) == len(patch)
        and shape[-1] <= min(4, patch[-1] - 1)
        and all(map(operator.le, patch, before))
    )


class PatchPlan:
    """A description of how a dataset of patches reads its volumes, for ``print``."""

    def __init__(
        self, roles: Sequence[Role], patch_size: Sequence[int], remembered: str, amplification: float | None,
        normalize: object,
    ) -> None:  # fmt: skip
        self.lines = [printable(_line(role, patch_size)) for role in roles]
        if normalize is not None:
            self.lines.append(f"volume, normalised  →  float32 by {normalize!r} of each whole volume")
        self.lines.append(f"decoded parts  →  {remembered}")
        if amplification is not None:
            self.lines.append(f"so far  →  {amplification:.2f} bytes were decoded for each that was used")

    def __repr__(self) -> str:
        return "PatchPlan(\n" + "".join(f"  {line}\n" for line in self.lines) + ")"


def _line(role: Role, patch_size: Sequence[int]) -> str:
    first, count = role.volumes[0], len(role.volumes)
    names = [volume.name for volume in role.volumes]
    is_natural = names == natural_sorted(set(names))  # all arrays in memory have equal names
    order = "natural order" if is_natural else "the given order"
    where = first.name if count == 1 else f"{count} volumes in {order}, from {first.name}"
    hows = list(dict.fromkeys(volume.how for volume in role.volumes))
    more = f", and {len(hows) - 1} other ways" if len(hows) > 1 else ""
    return (
        f"{role.name}: {where}, {sides_text(first.shape)} {role.dtype}  →  patches of "
        f"{chunk_text((*role.lead, *patch_size), role.dtype)} from {hows[0]}{more}"
    )
