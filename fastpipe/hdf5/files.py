"""Open and check the HDF5 datasets that form samples together, and locate their bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.chunks import FileState
from fastpipe.hdf5.layout import Geometry, Layout, in_blocks, read_layout
from fastpipe.hdf5.library import require_filters
from fastpipe.hdf5.members import MemberKey, join_members
from fastpipe.hdf5.opening import (
    check_values,
    dataset_named,
    dataset_names,
    library_errors,
    lies_in,
    opened,
    raw_name,
)

Int64Array = npt.NDArray[np.int64]


class SampleFile:
    """Datasets of one file with the same number of samples, and the places of their bytes.  Picklable.

    The first ``sample_dims`` dimensions count samples.  ``shown`` is the file's name in messages, for example
    the URL from which the file was copied.  If ``shown`` is empty, messages contain the path.  If the file
    has no dataset with one of the ``names``, a ``KeyError`` lists the file's datasets.  ``matches`` is what
    ``*`` stands for in the names of joined datasets.
    """

    matches: Sequence[str] = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: FileArrays | None = None,
        shown: str = "",
    ) -> None:
        self.path = os.fsdecode(path)
        self.shown = shown or self.path
        status = os.stat(self.path)
        with opened(self.path, self.shown) as file, library_errors(self.shown):
            self.state = FileState.of(status, is_written=file.swmr_mode)
            datasets = [_dataset(file, name, self.shown) for name in names]
            _check_samples(datasets, names, sample_dims, self.shown)
            self.layouts: list[Layout] = [
                read_layout(dataset, tables, status, "" if lies_in(dataset, file) else name)._replace(
                    shown=shown
                )
                for dataset, name in zip(datasets, names, strict=True)
            ]
            for dataset, layout in zip(datasets, self.layouts, strict=True):
                if layout.kind == "h5py":
                    require_filters(dataset, self.shown)
        self.sample_dims = sample_dims
        self.count = math.prod(self.layouts[0].shape[:sample_dims])

    @classmethod
    def joined(
        cls, path: str, keys: Sequence[MemberKey], dims: int, tables: FileArrays | None, shown: str
    ) -> tuple[list[SampleFile], list[Int64Array]]:
        """Return the samples of a file that are datasets of their own (``join_members``), with an object for
        all that are alike.  The second result is the positions of each object's samples, int64 (count,)."""
        status, made, positions = os.stat(path), list[SampleFile](), list[Int64Array]()
        with opened(path, shown) as file, library_errors(shown):
            state = FileState.of(status, is_written=file.swmr_mode)
            for layouts, matches, samples in join_members(file, keys, dims, shown, tables, status):
                one = cls.__new__(cls)
                one.path, one.shown, one.state, one.layouts = path, shown, state, layouts
                one.sample_dims, one.count, one.matches = dims + 1, len(samples), matches
                made.append(one)
                positions.append(samples)
                for layout in layouts:
                    if layout.kind == "h5py" and layout.values is None:
                        require_filters(file[raw_name(layout.members[0])], shown)
        return made, positions

    def sample_shape(self, number: int) -> tuple[int, ...]:
        return self.layouts[number].shape[self.sample_dims :]

    def kind(self, number: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the dtype and the shape of a sample's value."""
        dtype = self.layouts[number].dtype
        base, inner = dtype.subdtype or (dtype, ())
        return base, (*self.sample_shape(number), *inner)

    def where(self, number: int) -> str:
        """Return the place of a dataset for messages; of the first of joined datasets."""
        members = self.layouts[number].members
        return f"{self.shown}, {members[0]}" if members else self.shown

    def geometry(self, number: int) -> Geometry:
        """Return how samples lie in a dataset's chunks; contiguous data count as chunks of about 1 MiB."""
        layout = in_blocks(self.layouts[number])
        return Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, self.sample_dims)

    def check_unchanged(self) -> None:
        self.state.check(self.path, self.shown)


class SampleFiles:
    """Several files as one: datasets that have the same name in all files are concatenated.  Picklable.

    With ``keys``, samples are datasets of their own or attributes, and several of ``files`` may be parts of
    one file.

    Attributes:
        firsts: int64 (files + 1,): the index of each file's first sample, and ``count`` at the end.
        order: int64 (count,): the index of each sample in this sense; None if samples have this order.
        numbers: for each of ``files``, the number of its path.
        differ: for each dataset, whether the files' samples have several shapes or dtypes.
    """

    order: Int64Array | None = None

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: FileArrays | None = None,
        shown: Sequence[str] | None = None,
        *,
        keys: Sequence[MemberKey] | None = None,
    ) -> None:
        if not paths:
            raise OptionError("no HDF5 file was named")
        self.keys = keys
        self.files: list[SampleFile] = []
        self.numbers: list[int] = []
        positions, count = list[Int64Array](), 0
        for number, (path, name) in enumerate(zip(paths, shown or [""] * len(paths), strict=True)):
            if keys is not None:
                where = os.fsdecode(path)
                found, places = SampleFile.joined(where, keys, sample_dims, tables, name or where)
                positions += [place + count for place in places]
            else:
                found = [SampleFile(path, names, sample_dims, tables, name)]
            self.files += found
            self.numbers += [number] * len(found)
            count += sum(file.count for file in found)
        self.firsts = np.cumsum([0, *(file.count for file in self.files)], dtype=np.int64)
        self.count = int(self.firsts[-1])
        if len(self.files) > self.numbers[-1] + 1:
            self.order = np.empty(self.count, np.int64)
            self.order[np.concatenate(positions)] = np.arange(self.count)
        first = self.files[0]
        self.differ = [
            any(file.kind(number) != first.kind(number) for file in self.files)
            for number in range(len(names))
        ]

    @property
    def layouts(self) -> list[Layout]:
        return self.files[0].layouts

    def sample_shape(self, number: int) -> tuple[int, ...]:
        return self.files[0].sample_shape(number)

    def owners(self, samples: Int64Array) -> Int64Array:
        """Return the number of the file of each sample, int64 (N,)."""
        found = samples if self.order is None else self.order[samples]
        return np.searchsorted(self.firsts, found, side="right") - 1

    def located(self, samples: Int64Array) -> list[tuple[int, Int64Array | None, Int64Array]]:
        """Return for each file with some of the samples: the file's number, the indices in ``samples`` of
        its samples, and the samples' numbers in the file.

        If there is only one file, None replaces the indices, because the file contains all samples.
        """
        if len(self.files) == 1:
            return [(0, None, samples)] if len(samples) else []
        found = samples if self.order is None else self.order[samples]
        owners = np.searchsorted(self.firsts, found, side="right") - 1
        places = [(int(number), np.flatnonzero(owners == number)) for number in np.unique(owners)]
        return [(number, which, found[which] - self.firsts[number]) for number, which in places]

    def groups(self, number: int) -> Int64Array:
        """Return the group of each sample: int64 (count,).

        Samples of a group lie in the same chunks of the dataset with index ``number``.
        """
        found, first = [np.zeros(0, np.int64)], 0
        for file in self.files:
            geometry = file.geometry(number)
            try:
                found.append(geometry.groups_of(np.arange(file.count)) + first)
            except (MemoryError, ValueError) as error:
                raise HDF5Error(
                    f"{file.shown} declares {file.count:,} samples, more than there is memory to number"
                ) from error
            first += geometry.groups
        every = np.concatenate(found)
        return every if self.order is None else every[self.order]

    def samples_in_group(self, number: int) -> int:
        """Return the largest number of samples that share chunks of dataset ``number`` in the first file."""
        return self.files[0].geometry(number).group_size

    def shown_of(self, sample: int) -> str:
        return self.files[int(self.owners(np.array([sample]))[0])].shown

    def names(self) -> list[tuple[str, str]]:
        """Return for each sample the file's name and what ``*`` stands for in the sample's names."""
        found = [
            (file.shown, match)
            for file in self.files
            for match in file.matches or [""]
            for _ in range(file.count // max(1, len(file.matches)))
        ]
        return found if self.order is None else [found[place] for place in self.order.tolist()]

    def cells(self, sample_dims: int) -> Int64Array | None:
        """Return the number of each sample's dataset, or, with ``sample_dims`` of 2 or more, of its index
        along the dataset's first dimension: int64 (count,).  If a dataset is a sample, return the number of
        its file.  Return None if all samples would have the same number."""
        first, total, found = self.files[0], 0, list[Int64Array]()
        axes = first.sample_dims - sample_dims + (sample_dims >= 2)
        if not axes or not sample_dims:
            if self.numbers[-1] == 0:
                return None
            return np.repeat(self.numbers, [file.count for file in self.files])
        for file in self.files:
            lead = math.prod(file.layouts[0].shape[:axes])
            found.append(total + np.repeat(np.arange(lead), file.count // max(1, lead)))
            total += lead
        every = np.concatenate(found)
        if self.order is None:
            return every
        # In the order of the samples: those of a dataset follow each other.
        return np.cumsum(np.diff(every[self.order], prepend=every[:1] - 1) != 0) - 1

    def check_alike(self) -> None:
        """Raise an ``OptionError`` if samples differ in shape or dtype."""
        first = self.files[0]
        for number, layout in enumerate(first.layouts):
            for file in self.files if self.differ[number] else ():
                one, other = first.kind(number), file.kind(number)
                if one != other:
                    raise OptionError(
                        f"the samples of {layout.name!r} are {one[1]} {one[0]} in {first.where(number)} and "
                        f"{other[1]} {other[0]} in {file.where(number)}: here all samples must be alike"
                    )


def _dataset(file: Any, name: str, shown: str) -> Any:
    found = dataset_named(file, name, shown)
    if found is None:
        raise KeyError(f"{shown} has no dataset {name!r}; it has {dataset_names(file, shown)}")
    check_values(found, name, shown)
    if not found.shape:
        raise OptionError(f"{shown}: {name!r} is a single value, without samples")
    return found


def _check_samples(datasets: Sequence[Any], names: Sequence[str], sample_dims: int, shown: str) -> None:
    if sample_dims < 1:
        raise OptionError(f"sample_dims must be a number from 1, got {sample_dims}")
    if not names:
        raise OptionError(f"{shown}: no dataset was named")
    for dataset, name in zip(datasets, names, strict=True):
        if dataset.ndim < sample_dims:
            raise OptionError(
                f"{shown}: {name!r} has {dataset.ndim} dimensions, and sample_dims={sample_dims} of them "
                "should count samples"
            )
    leads = {name: tuple(dataset.shape[:sample_dims]) for name, dataset in zip(names, datasets, strict=True)}
    if len(set(leads.values())) > 1:
        shapes = ", ".join(f"{name!r} {lead}" for name, lead in leads.items())
        raise OptionError(
            f"{shown}: the datasets have different samples along the first dimensions: {shapes}"
        )
