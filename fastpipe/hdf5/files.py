"""The datasets of HDF5 files that make up samples together: opened, checked, and where their bytes are."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.core.files import open_file
from fastpipe.engine.bad import is_of_machine
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.chunks import FileState
from fastpipe.hdf5.geometry import Geometry
from fastpipe.hdf5.layout import Layout, in_blocks, read_layout
from fastpipe.hdf5.library import name_for_library, require_filters
from fastpipe.protocols import ChunkTables

__all__ = ["SampleFile", "SampleFiles", "check_is_in_file", "damage_as_error", "opened"]

Int64Array = npt.NDArray[np.int64]


class SampleFile:
    """Datasets with equally many samples: where their bytes are.  ``open`` reads them; this can be sent
    to other processes.

    Args:
        path: the file.
        names: the datasets' paths in it.
        sample_dims: how many of their first dimensions count samples; these must be equal in all.
        tables: where chunk tables are kept from one time to the next, or None.
        shown: what messages call the file, where it is not its path: the URL that it was copied from.

    Attributes:
        path: as given.
        shown: as given, or the path.
        layouts: of each dataset.
        count: samples.
        sample_dims: as given.
        state: of the file.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        KeyError: there is no such dataset; the message names those that there are.
        HDF5Error: it is no HDF5 file, it is damaged, or somebody has it open for writing.
        OptionError: the datasets do not have the same samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: ChunkTables | None = None,
        shown: str = "",
    ) -> None:
        self.path = os.fsdecode(path)
        self.shown = shown or self.path
        status = os.stat(self.path)
        self.state = FileState.of(status)
        with opened(self.path, self.shown) as file, damage_as_error(self.shown):
            datasets = [_dataset(file, name, self.shown) for name in names]
            _check_samples(datasets, names, sample_dims, self.shown)
            self.layouts: list[Layout] = [
                read_layout(dataset, tables, status)._replace(shown=shown) for dataset in datasets
            ]
            for dataset, layout in zip(datasets, self.layouts, strict=True):
                if layout.kind == "h5py":
                    require_filters(dataset, shown)
        self.sample_dims = sample_dims
        self.count = math.prod(self.layouts[0].shape[:sample_dims])

    def sample_shape(self, number: int) -> tuple[int, ...]:
        """The shape of a sample of one of the datasets."""
        return self.layouts[number].shape[self.sample_dims :]

    def geometry(self, number: int) -> Geometry:
        """The samples and chunks of one of the datasets; where it has none, blocks of about a megabyte."""
        layout = in_blocks(self.layouts[number])
        return Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, self.sample_dims)

    def check_unchanged(self) -> None:
        """Raise an error if the file is not as it was when it was laid out.

        Raises:
            OSError: it is not there any more.
            HDF5Error: it has changed.
        """
        self.state.check(self.path, self.shown)


class SampleFiles:
    """Files whose datasets of the same names follow each other.  Can be sent to other processes.

    Args:
        paths: at least one.
        names, sample_dims, tables: as for ``SampleFile``.
        shown: what messages call the files, where it is not by their paths.

    Attributes:
        files: in order.
        count: samples of all.
        firsts: int64 (files + 1,): the number of each file's first sample, and the end.

    Raises:
        OptionError: no path, or files whose samples are not of one kind.
        Others: as for ``SampleFile``.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: ChunkTables | None = None,
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
        """The first file's, for each dataset."""
        return self.files[0].layouts

    def sample_shape(self, number: int) -> tuple[int, ...]:
        """The shape of a sample of one of the datasets."""
        return self.files[0].sample_shape(number)

    def located(self, samples: Int64Array) -> list[tuple[int, Int64Array | None]]:
        """The files that have samples, and for each the places of its samples in the array; None for all of
        them, where there is one file.

        Args:
            samples: int64 (N,), each at least 0 and below ``count``.
        """
        if len(self.files) == 1:
            return [(0, None)] if len(samples) else []
        owners = np.searchsorted(self.firsts, samples, side="right") - 1
        return [(int(number), np.flatnonzero(owners == number)) for number in np.unique(owners)]

    def groups(self, number: int) -> Int64Array:
        """The group of each sample, by the chunks of one dataset: int64 (count,)."""
        found, first = [np.zeros(0, np.int64)], 0
        for file in self.files:
            geometry = file.geometry(number)
            found.append(geometry.groups_of(np.arange(file.count)) + first)
            first += geometry.groups
        return np.concatenate(found)

    def samples_in_group(self, number: int) -> int:
        """The most samples that a group of one dataset has in the first file."""
        return self.files[0].geometry(number).group_size

    def shown_of(self, sample: int) -> str:
        """What messages call the file of a sample."""
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


@contextmanager
def opened(path: str, shown: str = "") -> Iterator[Any]:
    """An open ``h5py.File``, or an error that says what to do, and calls the file ``shown`` or its path."""
    shown = shown or path
    h5py = require("h5py", extra="hdf5")
    os.close(open_file(path))  # its errors are clearer than the library's
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) or "lock file" in str(error):
            remedy = "close it there, or set HDF5_USE_FILE_LOCKING=FALSE if nobody writes to it any more"
            raise HDF5Error(f"{shown} is open for writing elsewhere: {remedy}") from error
        if not h5py.is_hdf5(path):
            raise HDF5Error(f"{shown} is no HDF5 file") from error
        raise HDF5Error(f"{shown} cannot be opened, it may be cut off: {error}") from error
    with file:
        if file.mode != "r":  # the library hands out the file as this process has it open already
            raise HDF5Error(f"{shown} is open for writing in this process: close it before it is read")
        yield file


@contextmanager
def damage_as_error(shown: str) -> Iterator[None]:
    """Turn what h5py raises because of a file's damaged records into an ``HDF5Error``.

    Errors that are raised elsewhere, or because of the machine, are passed on as they are.

    Args:
        shown: what the message calls the file.
    """
    try:
        yield
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        if is_of_machine(error) or not _is_raised_by_h5py(error):
            raise
        why = error.args[0] if isinstance(error, KeyError) else error
        raise HDF5Error(
            f"{shown} cannot be read, it may be damaged: {why}; restore it from a copy"
        ) from error


def _is_raised_by_h5py(error: BaseException) -> bool:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] == "h5py"


def _dataset(file: Any, name: str, shown: str) -> Any:
    h5py = require("h5py", extra="hdf5")
    in_library = name_for_library(name)
    found = file.get(in_library)
    if isinstance(found, h5py.Dataset):
        check_is_in_file(found, file, name, shown)
        try:
            found.dtype  # noqa: B018
        except TypeError as error:
            raise OptionError(
                f"{shown}: the elements of {name!r} are of a type that NumPy has not"
            ) from error
        if found.shape:
            return found
        raise OptionError(f"{shown}: {name!r} is a single value, without samples")
    # h5py cannot look for a name that is no UTF-8.
    if found is None and isinstance(in_library, str) and in_library in file:
        try:
            file[in_library]
        except KeyError as error:
            why = error.args[0]
            raise HDF5Error(f"{shown}: {name!r} cannot be opened, it may be damaged: {why}") from error
    names: list[str] = []
    with suppress(KeyError):  # a dataset that cannot be opened ends the list
        file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise KeyError(
        f"{shown} has no dataset {name!r}; it has {', '.join(sorted(map(os.fsdecode, names))) or 'none'}"
    )


def check_is_in_file(dataset: Any, file: Any, name: str, shown: str) -> None:
    """Raise an error for a dataset that lies in another file: its bytes would be sought in this one.

    Args:
        dataset: as the library found it.
        file: the open file.
        name: by which it was found there.
        shown: what messages call the file.

    Raises:
        HDF5Error: a link leads out of the file.
    """
    about = require("h5py.h5o", extra="hdf5").get_info
    if about(dataset.id).fileno != about(file.id).fileno:
        raise HDF5Error(
            f"{shown}: {name!r} is a link into another file: name that, {dataset.file.filename}, and its "
            f"dataset {dataset.name!r}"
        )


def _check_samples(datasets: Sequence[Any], names: Sequence[str], sample_dims: int, shown: str) -> None:
    if sample_dims < 1:
        raise OptionError(f"sample_dims must be a number from 1, got {sample_dims}")
    if not names:
        raise OptionError(f"{shown}: no dataset was named")
    for dataset, name in zip(datasets, names, strict=True):
        if dataset.ndim < sample_dims:
            raise OptionError(
                f"{shown}: {name!r} has {dataset.ndim} dimensions, and sample_dims={sample_dims} of them "
                "were to count samples"
            )
    leads = {name: tuple(dataset.shape[:sample_dims]) for name, dataset in zip(names, datasets, strict=True)}
    if len(set(leads.values())) > 1:
        shapes = ", ".join(f"{name!r} {lead}" for name, lead in leads.items())
        raise OptionError(
            f"{shown}: the datasets have different samples along the first dimensions: {shapes}"
        )
