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
    negative = [list(kind(both(dataset), 2, sampler=[-1, -74, -22])) for kind, dataset in
                ((DataLoader, H5pyRows), (FastLoader, FastHDF5Dataset))]  # fmt: skip
    assert [batch.tolist() for batch in negative[0]] == [batch.tolist() for batch in negative[1]]


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
    ends = samples[0][1], samples[-1][1], samples[1][0].sum(), len(samples), [one[1] for one in samples[1:3]]
    return [np.asarray(end).tolist() for end in ends[:3]], ends[3], [int(end) for end in ends[4]]


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


COLLATES = [_sorting, _indexing, _shuffling, _twice]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", COLLATES, ids=lambda function: function.__name__)
def test_collate_functions_of_the_script_may_change_the_list_of_samples(
    file: Path, collate: Any, workers: int
) -> None:
    options = {"batch_size": 6, "collate_fn": collate, "sampler": [7, 9, 8, 3, 52, 41, 2, 2, 0, 11]}
    wanted = list(DataLoader(H5pyRows(file, KEYS), **options))
    for kind in (DataLoader, BY_PROCESSES):
        made = list(kind(FastHDF5Dataset(file, KEYS), num_workers=workers, **options))
        assert same(made, wanted)


def test_two_collations_of_a_batch_do_not_share_memory(file: Path) -> None:
    for first, second in FastLoader(FastHDF5Dataset(file, KEYS), 6, collate_fn=_twice):
        assert first[0].data_ptr() != second[0].data_ptr()
        before = second[0].clone()
        first[0].fill_(-1)
        assert torch.equal(second[0], before)


def test_the_samples_of_a_batch_are_a_mutable_sequence(file: Path) -> None:
    samples = FastHDF5Dataset(file, KEYS).__getitems__([3, 1, 2])
    assert [int(label) for _, label in samples] == [3, 1, 2]
    assert all(isinstance(sample, tuple) for sample in samples)
    assert "SampleRows([(" in repr(samples)
    with pytest.raises(IndexError):
        samples[3]
    assert len(FastHDF5Dataset(file, "mels").__getitems__([])) == 0
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


def error_of(make: Any) -> tuple[type[BaseException], str]:
    """How a loader fails, without the traceback, which refers to iterators and workers."""
    try:
        list(make())
    except (TypeError, RuntimeError) as error:
        # Else it is in a cycle with torch's iterator, whose workers may take 5 s to end when garbage is collected.
        error.__traceback__ = None
        return type(error), str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("name", ["compound", "point", "strings", "ragged"])
@pytest.mark.parametrize("form", ["value", "tuple"])
def test_rows_that_torch_cannot_collate_are_torchs_error(odd: Path, name: str, form: str) -> None:
    keys = name if form == "value" else [name, "bigs"]
    theirs = error_of(lambda: DataLoader(H5pyRows(odd, keys), 4))
    for kind in (DataLoader, BY_PROCESSES):
        ours = error_of(lambda kind=kind: kind(FastHDF5Dataset(odd, keys), 4))
        assert ours[0] is theirs[0]
        assert theirs[1].split("found")[0] in ours[1]


def test_the_order_of_bytes_becomes_the_machines(odd: Path) -> None:
    for keys in ("big", ["big", "bigs"], {"x": "big", "y": "bigs"}, "bigs"):
        for kind in (DataLoader, FastLoader):
            batches = list(kind(FastHDF5Dataset(odd, keys), 6))
            parts = [list(batch.values()) if isinstance(batch, dict) else batch for batch in batches]
            columns = list(zip(*parts, strict=True)) if isinstance(keys, (list, dict)) else [parts]
            for column in columns:
                joined = torch.cat(list(column))
                assert joined.dtype in (torch.float32, torch.int32)
                assert joined.flatten().tolist() == list(range(joined.numel()))


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
