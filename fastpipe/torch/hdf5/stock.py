"""What a script without fastpipe does: h5py, one row after the other.  For comparing, and for going back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from fastpipe._extras import require
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.torch.hdf5.samples import Form

__all__ = ["H5pyDataset"]


class H5pyDataset(Dataset[Any]):
    """The samples of a ``FastHDF5Dataset``, read through h5py alone.

    Args:
        files: where they are.
        form: what a sample is made of.
        transform, target_transform: as of the fast one.
    """

    def __init__(
        self,
        files: SampleFiles,
        form: Form,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
    ) -> None:
        self._paths, self._firsts = [file.path for file in files.files], files.firsts
        self._leads = [file.layouts[0].shape[: file.sample_dims] for file in files.files]
        self._form = form
        self.transform, self.target_transform = transform, target_transform
        self._open: tuple[int, dict[int, Any]] = os.getpid(), {}

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Any:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of a dataset of {length}")
        position = index + length if index < 0 else index
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        place = np.unravel_index(position - int(self._firsts[number]), self._leads[number])
        file = self._file(number)
        values = [file[name][tuple(map(int, place))] for name in self._form.names]
        if self._form.kind == "dict":
            sample = self._form.sample(values)
            return sample if self.transform is None else self.transform(sample)
        if self.transform is not None:
            values[0] = self.transform(values[0])
        if self.target_transform is not None:
            values[1] = self.target_transform(values[1])
        return self._form.sample(values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}

    def _file(self, number: int) -> Any:
        if self._open[0] != os.getpid():  # a file of the parent's must not be used in a child
            self._open = os.getpid(), {}
        files = self._open[1]
        if number not in files:
            files[number] = require("h5py", extra="hdf5").File(self._paths[number], "r")
        return files[number]
