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
from fastpipe.hdf5.opening import dataset_named, dataset_names, library_errors, lies_in, opened

Int64Array = npt.NDArray[np.int64]


class SampleFile:
    """Datasets of one file with the same number of samples, and the places of their bytes.  Picklable.

    The first ``sample_dims`` dimensions count samples.  ``shown`` is the file's name in messages, for example
    the URL from which the file was copied.  If ``shown`` is empty, messages contain the path.  If the file
    has no dataset with one of the ``names``, a ``KeyError`` lists the file's datasets.
    """

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

    def sample_shape(self, number: int) -> tuple[int, ...]:
        return self.layouts[number].shape[self.sample_dims :]

    def geometry(self, number: int) -> Geometry:
        """Return how samples lie in a dataset's chunks; contiguous data count as chunks of about 1 MiB."""
        layout = in_blocks(self.layouts[number])
        return Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, self.sample_dims)

    def check_unchanged(self) -> None:
        self.state.check(self.path, self.shown)


class SampleFiles:
    """Several files as one: datasets that have the same name in all files are concatenated.  Picklable.

    ``firsts`` contains the index of each file's first sample, and ``count`` at the end: int64 (files + 1,).
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: FileArrays | None = None,
        shown: Sequence[str] | None = None,
    ) -> None:
        if not paths:
            raise OptionError("no HDF5 file was named")
        self.files = [
            SampleFile(path, names, sample_dims, tables, name)
            for path, name in zip(paths, shown or [""] * len(paths), strict=True)
        ]
        for file in self.files[1:]:
            self._check_like_first(file, names)
        self.firsts = np.cumsum([0, *(file.count for file in self.files)], dtype=np.int64)
        self.count = int(self.firsts[-1])

    @property
    def layouts(self) -> list[Layout]:
        return self.files[0].layouts

    def sample_shape(self, number: int) -> tuple[int, ...]:
        return self.files[0].sample_shape(number)

    def located(self, samples: Int64Array) -> list[tuple[int, Int64Array | None]]:
        """Return pairs: the number of a file, and the indices in ``samples`` of the samples in this file.

        Files that contain none of ``samples`` are left out.  If there is only one file, None replaces the
        indices, because the file contains all samples.
        """
        if len(self.files) == 1:
            return [(0, None)] if len(samples) else []
        owners = np.searchsorted(self.firsts, samples, side="right") - 1
        return [(int(number), np.flatnonzero(owners == number)) for number in np.unique(owners)]

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
        return np.concatenate(found)

    def samples_in_group(self, number: int) -> int:
        """Return the largest number of samples that share chunks of dataset ``number`` in the first file."""
        return self.files[0].geometry(number).group_size

    def shown_of(self, sample: int) -> str:
        return self.files[int(np.searchsorted(self.firsts, sample, side="right")) - 1].shown

    def _check_like_first(self, file: SampleFile, names: Sequence[str]) -> None:
        first = self.files[0]
        for number, name in enumerate(names):
            one, other = ((each.sample_shape(number), each.layouts[number].dtype) for each in (first, file))
            if one != other:
                raise OptionError(
                    f"the samples of {name!r} are {one[0]} {one[1]} in {first.shown} and {other[0]} "
                    f"{other[1]} in {file.shown}: files of one dataset must be alike"
                )


def _dataset(file: Any, name: str, shown: str) -> Any:
    found = dataset_named(file, name, shown)
    if found is None:
        raise KeyError(f"{shown} has no dataset {name!r}; it has {dataset_names(file, shown)}")
    try:
        found.dtype  # noqa: B018
    except TypeError as error:
        raise OptionError(
            f"{shown}: the elements of {name!r} have a type that NumPy does not support"
        ) from error
    if found.shape is None:
        raise OptionError(f"{shown}: {name!r} is empty: it has neither values nor a shape")
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
