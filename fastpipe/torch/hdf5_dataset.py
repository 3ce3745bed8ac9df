"""``FastHDF5Dataset``: samples of HDF5 files, which are read and decoded a batch at a time."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.hdf5.samples import H5pyRows, HDF5Samples
from fastpipe.options import BadSamples, Cache, Stage
from fastpipe.torch.array_dataset import RowsDataset, StockSamples, UserCode
from fastpipe.torch.samples import Value
from fastpipe.torch.threads import process_of


class FastHDF5Dataset(HDF5Samples, RowsDataset):
    """A dataset whose samples are rows of HDF5 datasets, or whole ones, with the values that ``h5py`` reads.

    It is many times as fast as ``h5py``.  The HDF5 library locates the chunks of a file once.  Threads then
    read and decode the chunks without the library's lock.  One call copies the rows of a batch from many
    chunks into the batch's memory.  The dataset works in any ``DataLoader``.  In a
    :class:`fastpipe.FastLoader`, the next batches are read while the current batch is used.

    Args:
        path: an HDF5 file, or a sequence of files whose samples are concatenated.  With a ``stage``, a file
            may be a URL, such as ``"s3://bucket/mels.h5"``, of any file system that fsspec supports.
        keys: paths of HDF5 datasets in the file.  With one path, each sample is a single value.  With a
            sequence of paths, each sample is a tuple.  With a mapping from names to paths, each sample is a
            dict.  All HDF5 datasets must have the same first ``sample_dims`` dimensions.  A ``*`` stands for
            any characters of a name: ``"*/image"`` names a dataset in each group, in h5py's order of
            iteration (by name, if the file was not written with ``track_order``).  The matches of the first
            key with most ``*`` are the samples, and must have the other keys' datasets.  ``"path@name"`` is
            an attribute of a group or dataset, such as ``"*@label"``, and ``"@name"`` one of the file.
        sample_dims: number of leading dimensions of each HDF5 dataset that enumerate the samples, in C order.
            With 2, ``dataset[i]`` is ``h5["x"][i // n, i % n]`` for an HDF5 dataset of shape (m, n, …).
            With 0, each HDF5 dataset is a sample: ``h5["x"][()]``.  Default: 1, or 0 if a key has ``*``.
        transform: a function that is called with the first value of a tuple, or with the whole sample if the
            sample is a single value or a dict.
        target_transform: a function that is called with the second value of a tuple.
        seed: with a seed, order and augmentation in a ``FastLoader`` depend only on the seed and the epoch.
            In any other loader, random numbers come from torch's global generator.
        cache: where to keep decoded chunks, a :class:`fastpipe.Cache` or its ``where``.  ``"auto"`` keeps
            a chunk in memory from its second use on, if all chunks fit into a quarter of the free memory.
        bad_samples: how to handle samples that cannot be read, a :class:`fastpipe.BadSamples` or its
            policy's name.  ``"replace"`` uses a randomly chosen other sample instead.
        threads: number of reading threads.  ``"auto"`` is cores ÷ (ranks on this machine × workers), minus
            one if this is 8 or more and the loader has at most one worker.
        thread_safe: promise that ``transform`` may be called from several threads at once.
        stage: a folder on a local disk, or a :class:`fastpipe.Stage`.  The constructor copies each file that
            is a URL to this folder, once for all processes of the machine.  If no file is a URL, all files
            are copied, for example from a network drive.  Files that are already in the folder are not copied
            again.
        storage_options: credentials and endpoint for URLs, as the URLs' fsspec file system accepts them.

    Attributes:
        path, keys, transform, target_transform, seed: as given.
        sample_dims: as given, or the default.
        names: for each sample, the path of its file and what ``*`` stands for, for example to choose samples
            by name for a ``torch.utils.data.Subset``.

    ``dataset[i]`` contains NumPy arrays or scalars, exactly as ``h5["x"][i]`` returns them, and attributes as
    ``h5["x"].attrs`` returns them.  Batches are collated to tensors.  Samples may differ in shape and dtype
    if a ``collate_fn`` or a ``transform`` makes them alike, or if those of a batch are alike.
    ``print(dataset)`` shows how each HDF5 dataset is read.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        StageError: a file does not fit into the stage folder, or the folder is not writable.
        StoreError: a store does not answer, or sends a wrong answer.
        KeyError: the file has no such dataset or attribute.
        HDF5Error: the file is not an HDF5 file, is damaged, or is open for writing.
        OptionError: an option's value cannot work, or the datasets do not fit together.

    >>> import h5py, os, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "speech.h5")
    >>> with h5py.File(path, "w") as file:
    ...     file["mels"] = np.zeros((100, 64, 128), np.float32)
    ...     file["words"] = np.arange(100)
    >>> dataset = FastHDF5Dataset(path, ["mels", "words"])
    >>> mel, word = dataset[7]
    >>> mel.shape, int(word)
    ((64, 128), 7)

    A group for each sample:

    >>> path = os.path.join(folder.name, "scans.h5")
    >>> with h5py.File(path, "w") as file:
    ...     for number in range(3):
    ...         file[f"{number:04}/image"] = np.full((8, 8), number, np.float32)
    ...         file[f"{number:04}"].attrs["label"] = number % 2
    >>> dataset = FastHDF5Dataset(path, ["*/image", "*@label"])
    >>> image, label = dataset[2]
    >>> image.shape, int(label), dataset.names[2][1]
    ((8, 8), 0, '0002')
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keys: str | Sequence[str] | Mapping[Any, str],
        *,
        sample_dims: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        seed: int | None = None,
        cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
        bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
        threads: int | Literal["auto"] = "auto",
        thread_safe: bool = False,
        stage: Stage | str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            process_of, path, keys, sample_dims=sample_dims, cache=cache, bad_samples=bad_samples,
            threads=threads, stage=stage, storage_options=storage_options,
        )  # fmt: skip
        if target_transform is not None and (self._form.kind != "tuple" or len(self._form.names) < 2):
            raise OptionError(
                "target_transform is called with the second value of a tuple: give keys=[inputs, targets], "
                f"got keys={keys!r}"
            )
        self.transform, self.target_transform = transform, target_transform
        self.seed = seed if seed is None else operator.index(seed)
        self.thread_safe = thread_safe
        self._values = [Value.of(*kind) for kind in self.kinds]

    def __repr__(self) -> str:
        paths = list(dict.fromkeys(file.shown for file in self._files.files))
        where = repr(paths[0]) if len(paths) == 1 else f"{len(paths)} files from {paths[0]!r}"
        lines = [f"Number of samples: {len(self):,}", f"File: {where}", *self.plan.lines]
        options = {"Target transform": self.target_transform}
        return self._shown(lines, Staged=self.stage, Transform=self.transform, **options)

    # ---- how a batch is made ------------------------------------------------------------------

    @property
    def _wants_key(self) -> bool:
        return self.transform is not None

    def _values_of(self, samples: npt.NDArray[np.int64]) -> Sequence[Value]:
        if not any(self._files.differ):
            return self._values
        return [Value.of(*kind) for kind in self.kinds_of(samples)]

    def _code(self) -> UserCode:
        return UserCode(self._form, self.transform, self.thread_safe, target_transform=self.target_transform)

    def _places_in_files(self) -> npt.NDArray[np.int64] | None:
        return self._files.cells(self.sample_dims)

    def _stock(self) -> StockSamples:
        return StockSamples(H5pyRows(self._files, self._form), self._code())
