"""What a script without fastpipe does, as a dataset of torch's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fastpipe.core.array_samples import Form
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.stock import H5pyRows
from fastpipe.torch.rows.batch import UserCode

__all__ = ["H5pyDataset"]


class H5pyDataset(Dataset[Any]):
    """The samples of a ``FastHDF5Dataset``, read through h5py alone.

    Args:
        files: where they are.
        form: what a sample is made of.
        code: what the script does to samples.
    """

    def __init__(self, files: SampleFiles, form: Form, code: UserCode) -> None:
        self._rows, self._code = H5pyRows(files, form), code

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._code.sample(self._code.transformed(self._rows.values(index), None))
