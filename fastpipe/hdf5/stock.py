"""What a script without fastpipe does: h5py, one row after the other.  For comparing, and for going back."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fastpipe.core.array_samples import Form
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.objects import raw_name
from fastpipe.hdf5.opening import open_library

__all__ = ["H5pyRows"]


class H5pyRows:
    """Samples, read through h5py alone.

    Args:
        files: where they are.
        form: what a sample is made of.
    """

    def __init__(self, files: SampleFiles, form: Form) -> None:
        self._files, self._form = files, form
        self._open: tuple[int, dict[int, Any]] = os.getpid(), {}

    def __len__(self) -> int:
        return self._files.count

    def values(self, index: int) -> list[Any]:
        """The values of a sample, as h5py gives them."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of a dataset of {length}")
        position = index + length if index < 0 else index
        ((number, _),) = self._files.located(np.array([position]))
        one, first = self._files.files[number], int(self._files.firsts[number])
        place = np.unravel_index(position - first, one.layouts[0].shape[: one.sample_dims])
        file = self._file(number)
        return [file[raw_name(name)][tuple(map(int, place))] for name in self._form.names]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}

    def _file(self, number: int) -> Any:
        if self._open[0] != os.getpid():  # a file of the parent's must not be used in a child
            self._open = os.getpid(), {}
        files = self._open[1]
        if number not in files:
            files[number] = open_library(self._files.files[number].path)
        return files[number]
