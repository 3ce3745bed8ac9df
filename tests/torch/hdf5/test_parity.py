"""Batches are those of a stock ``DataLoader`` over a dataset that opens the file with h5py."""

from __future__ import annotations

import functools
import gc
import os
import random
import weakref
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from dataset_kinds import H5pyRows
from failure import failure
from same import same
from torch.utils.data import ConcatDataset, DataLoader, default_collate

from fastpipe import FastHDF5Dataset, FastLoader

BY_PROCESSES = functools.partial(FastLoader, workers="processes")

pytestmark = pytest.mark.usefixtures("same_generators")

KEYS = ["mels", "label"]


@pytest.mark.parametrize("index", [-75, 74])
def test_indices_of_several_datasets_are_checked_as_by_torch(file: Path, other: Path, index: int) -> None:
    def both(kind: Any) -> Any:
        return ConcatDataset([kind(file, "label"), kind(other, "label")])

    with pytest.raises((ValueError, IndexError)) as theirs:
        list(DataLoader(both(H5pyRows), 2, sampler=[index]))
    with pytest.raises(type(theirs.value)):
        list(FastLoader(both(FastHDF5Dataset), 2, sampler=[index]))
    negative = {"batch_size": 2, "sampler": [-1, -74, -22]}
    wanted = list(DataLoader(both(H5pyRows), **negative))
    assert same(list(FastLoader(both(FastHDF5Dataset), **negative)), wanted)


def test_several_files_are_one_dataset(file: Path, other: Path) -> None:
    paths, order = [file, other, file], torch.randperm(127).tolist()
    dataset = FastHDF5Dataset(paths, KEYS)
    assert len(dataset) == 127
    wanted = list(DataLoader(H5pyRows(paths, KEYS), 6, sampler=order))
    for kind in (DataLoader, BY_PROCESSES):
        assert same(list(kind(dataset, 6, sampler=order)), wanted)


def _sorting(samples: Any) -> Any:
    samples.sort(key=lambda sample: -int(sample[1]))
    return default_collate(samples)


def _indexing(samples: Any) -> Any:
    found = samples[0][1], samples[-1][1], samples[1][0].sum(), *(one[1] for one in samples[1:3])
    return len(samples), np.array(found, float).tolist()


def _shuffling(samples: Any) -> Any:
    random.Random(5).shuffle(samples)
    samples.append(samples.pop(0))
    samples.insert(1, samples[2])
    del samples[0]
    samples[0] = samples[1]
    samples.reverse()
    return default_collate(samples)


def _twice(samples: Any) -> Any:
    return default_collate(samples), default_collate(samples)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [_sorting, _indexing, _shuffling, _twice])
def test_collate_functions_may_change_the_list_of_samples(file: Path, collate: Any, workers: int) -> None:
    options = {"batch_size": 6, "collate_fn": collate, "sampler": [7, 9, 8, 3, 52, 41, 2, 2, 0, 11]}
    wanted = list(DataLoader(H5pyRows(file, KEYS), **options))
    for kind in (DataLoader, BY_PROCESSES):
        made = list(kind(FastHDF5Dataset(file, KEYS), num_workers=workers, **options))
        assert same(made, wanted)


def test_the_samples_of_a_batch_are_a_mutable_sequence(file: Path) -> None:
    for first, second in FastLoader(FastHDF5Dataset(file, KEYS), 6, collate_fn=_twice):
        before = second[0].clone()
        first[0].fill_(-1)
        assert torch.equal(second[0], before), "two collations do not share memory"
    samples = FastHDF5Dataset(file, KEYS).__getitems__([3, 1, 2])
    assert [int(label) for _, label in samples] == [3, 1, 2]
    assert all(isinstance(sample, tuple) for sample in samples)
    assert "SampleRows([(" in repr(samples)
    with pytest.raises(IndexError):
        samples[3]
    assert type(FastHDF5Dataset(file, "label").__getitems__([1])) is list


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "x.h5"
    with h5py.File(path, "w") as file:
        compound = np.zeros((20, 3), np.dtype([("a", "i1"), ("b", "<f8")]))
        compound["b"] = np.arange(60).reshape(20, 3)
        file["compound"], file["point"] = compound, compound[:, 0]
        file["big"], file["bigs"] = np.arange(60, dtype=">f4").reshape(20, 3), np.arange(20, dtype=">i4")
        file["strings"] = np.array([[b"a", b"b"]] * 20, "S3")
        ragged = file.create_dataset("ragged", (20,), h5py.vlen_dtype("i4"))
        for row in range(20):
            ragged[row] = np.arange(row % 4)
        arrays = file.create_dataset("arrays", (20, 4000), np.dtype(("f4", (3,))))
        arrays[...] = np.random.default_rng(0).random((20, 4000, 3))
        file["u8"] = np.arange(20, dtype="u8")
    return path


@pytest.mark.parametrize("name", ["compound", "point", "strings", "ragged"])
@pytest.mark.parametrize("form", ["value", "tuple"])
def test_rows_that_torch_cannot_collate_are_torchs_error(odd: Path, name: str, form: str) -> None:
    keys = name if form == "value" else [name, "bigs"]

    def error_of(kind: Any, dataset: Any) -> Any:
        return failure(lambda: list(kind(dataset(odd, keys), 4)), (TypeError, RuntimeError))

    theirs = error_of(DataLoader, H5pyRows)
    for kind in (DataLoader, BY_PROCESSES):
        ours = error_of(kind, FastHDF5Dataset)
        assert type(ours) is type(theirs) and str(theirs).split("found")[0] in str(ours)


def test_the_order_of_bytes_becomes_the_machines(odd: Path) -> None:
    wanted = torch.arange(60, dtype=torch.float32).reshape(20, 3), torch.arange(20, dtype=torch.int32)
    for kind in (DataLoader, FastLoader):
        for key, values in zip(("big", "bigs"), wanted, strict=True):
            (found,) = kind(FastHDF5Dataset(odd, key), 20)
            assert same(found, values)
        (found,) = kind(FastHDF5Dataset(odd, ["big", "bigs"]), 20)
        assert same(tuple(found), wanted)
        (found,) = kind(FastHDF5Dataset(odd, {"x": "big", "y": "bigs"}), 20)
        assert same(tuple(found.values()), wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_elements_that_are_arrays_in_large_batches(odd: Path, workers: int) -> None:
    wanted = list(DataLoader(H5pyRows(odd, ["arrays", "bigs"]), 10))
    assert wanted[0][0].nbytes > 1 << 18
    for kind in (DataLoader, BY_PROCESSES):
        assert same(list(kind(FastHDF5Dataset(odd, ["arrays", "bigs"]), 10, num_workers=workers)), wanted)


def test_paths_may_be_text_bytes_or_paths(file: Path) -> None:
    for path in (str(file), file, os.fsencode(file), [os.fsencode(file)]):
        assert FastHDF5Dataset(path, KEYS).sample_dims == 1  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not int"):
        FastHDF5Dataset([0], KEYS)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
def test_kept_labels_do_not_keep_the_rest(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["n"] = np.zeros((40, 1 << 17), np.uint8), np.arange(40)
    arrays: list[Any] = []
    real = FastHDF5Dataset._memory

    def memory(self: Any, *arguments: Any) -> Any:
        parts = real(self, *arguments)
        arrays.append(weakref.ref(parts[0].array))
        return parts

    monkeypatch.setattr(FastHDF5Dataset, "_memory", memory)
    kept = [batch[1] for batch in kind(FastHDF5Dataset(tmp_path / "x.h5", ["x", "n"]), 4)]
    gc.collect()
    assert torch.cat(kept).tolist() == list(range(40))
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
