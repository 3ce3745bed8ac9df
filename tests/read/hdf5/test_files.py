"""Several files as one: which sample is where, and how many files are open."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from fastpipe.read.hdf5.files import OpenFiles, SampleFiles

from fastpipe.errors import HDF5Error, OptionError

COUNTS = [3, 0, 5, 1]


def write(path: Path, rows: int, first: int, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "x", data=first + np.arange(rows)[:, None] * np.ones(4, "i4"), dtype="i4", **options
        )
        file.create_dataset("text", data=[str(first + row) for row in range(rows)], dtype=h5py.string_dtype())
    return path


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    firsts = np.cumsum([0, *COUNTS])
    return [
        write(
            tmp_path / f"{number}.h5",
            rows,
            int(firsts[number]),
            chunks=(2, 4),
            maxshape=(None, 4),
            compression="gzip",
        )
        for number, rows in enumerate(COUNTS)
    ]


def read(files: OpenFiles, samples: Any, names: int = 1) -> list[Any]:
    samples = np.asarray(samples, np.int64)
    outs = [np.zeros((len(samples), 4), "i4"), np.empty(len(samples), object)][:names]
    for task in files.tasks(samples, np.arange(len(samples)), outs):
        task.run()
    return outs


def test_samples_follow_each_other(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x", "text"])
    assert (files.count, files.firsts.tolist()) == (9, [0, 3, 3, 8, 9])
    for source in (files, pickle.loads(pickle.dumps(files))):
        order = [8, 0, 3, 7, 2, 2, 5]
        numbers, texts = read(source.open(), order, 2)
        assert numbers[:, 2].tolist() == order
        assert [int(text) for text in texts] == order
    assert [files.shown_of(sample) for sample in (0, 2, 3, 7, 8)] == [
        str(paths[number]) for number in (0, 0, 2, 2, 3)
    ]
    assert read(files.open(), [])[0].shape == (0, 4)


def test_rows_of_tasks_are_the_batchs(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"]).open()
    out = np.zeros((10, 4), "i4")
    tasks = files.tasks(np.array([8, 0, 4]), np.array([9, 1, 5]), [out])
    assert sorted(np.concatenate([task.rows for task in tasks]).tolist()) == [1, 5, 9]
    for task in tasks:
        task.run()
    assert out[:, 0].tolist() == [0, 0, 0, 0, 0, 4, 0, 0, 0, 8]


def test_groups_go_on_from_file_to_file(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"])
    assert files.groups(0).tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 5]
    assert files.samples_in_group(0) == 2


def test_files_are_opened_when_they_are_read(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"]).open()
    before = len(os.listdir("/proc/self/fd"))
    read(files, [0])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    read(files, [0, 1, 8])
    assert len(os.listdir("/proc/self/fd")) == before + 2


@pytest.mark.parametrize("names", [["x"], ["x", "text"]])
def test_few_are_open_at_a_time(paths: list[Path], monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    from fastpipe.read.hdf5 import files as module

    monkeypatch.setattr(module, "_MOST_OPEN", 2)
    monkeypatch.setattr(module, "_MANY", 1)
    files = SampleFiles([*paths, *paths], names).open()
    before = len(os.listdir("/proc/self/fd"))
    order = [17, 0, 9, 8, 3, 12, 1, 16]
    for samples in ([0], order, order[::-1]):
        assert read(files, samples, len(names))[0][:, 0].tolist() == [sample % 9 for sample in samples]
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_batch_of_many_files_says_which_has_changed(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpipe.read.hdf5 import files as module

    files = SampleFiles(paths, ["x"])
    write(paths[2], 5, 100)
    for many in (1, 16):
        monkeypatch.setattr(module, "_MANY", many)
        with pytest.raises(HDF5Error, match=r"2\.h5 has changed"):
            read(files.open(), [0, 4, 8])
        assert read(files.open(), [0, 8])[0][:, 0].tolist() == [0, 8]


def test_files_that_are_not_alike(tmp_path: Path, paths: list[Path]) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros((2, 5), "i4")
    with pytest.raises(OptionError, match=r"'x' are \(4,\) int32 in .*0\.h5 and \(5,\) int32 in .*other\.h5"):
        SampleFiles([paths[0], tmp_path / "other.h5"], ["x"])
    with pytest.raises(OptionError, match="no HDF5 file was named"):
        SampleFiles([], ["x"])
    # Chunks may differ.
    mixed = SampleFiles([paths[0], write(tmp_path / "plain.h5", 2, 3)], ["x"])
    assert read(mixed.open(), [4, 0, 3])[0][:, 0].tolist() == [4, 0, 3]
