"""Processes, threads, memory and descriptors of ``FastHDF5Dataset``."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastpipe import FastHDF5Dataset, FastLoader

pytestmark = pytest.mark.usefixtures("same_generators")

KEYS = ["mels", "text", "label"]


def test_paths_may_be_text_bytes_or_paths(file: Path) -> None:
    for path in (str(file), file, os.fsencode(file), [os.fsencode(file)]):
        assert FastHDF5Dataset(path, KEYS).sample_dims == 1  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not int"):
        FastHDF5Dataset([0], KEYS)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
def test_labels_that_are_kept_do_not_keep_the_rest(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpipe.torch import hdf5_dataset as module

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["n"] = np.zeros((40, 1 << 17), np.uint8), np.arange(40)
    arrays: list[Any] = []
    real = module.FastHDF5Dataset._memory

    def memory(self: Any, *arguments: Any) -> Any:
        parts = real(self, *arguments)
        arrays.append(weakref.ref(parts[0].array))
        return parts

    monkeypatch.setattr(module.FastHDF5Dataset, "_memory", memory)
    kept = [batch[1] for batch in kind(FastHDF5Dataset(tmp_path / "x.h5", ["x", "n"]), 4)]
    gc.collect()
    assert torch.cat(kept).tolist() == list(range(40))
    assert len(arrays) == 10
    assert [array() for array in arrays] == [None] * 10


def test_errors_that_were_not_due_yet_leave_nothing(file: Path, tmp_path: Path) -> None:
    """Several batches could not be begun; the first of them ended the loop."""
    path = tmp_path / "x.h5"
    path.write_bytes(file.read_bytes())
    dataset = FastHDF5Dataset(path, KEYS, threads=2)
    refer = weakref.ref(dataset)
    dataset[0]
    os.truncate(path, path.stat().st_size + 1)
    with pytest.raises(OSError, match="has changed"):
        list(FastLoader(dataset, 2))
    dataset._running().pool.close()  # a thread may be inside a task
    del dataset
    gc.collect()
    assert refer() is None
