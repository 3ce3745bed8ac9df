"""Several files as one: which sample is where, and how many files are open."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_kit import read, read_natively

from fastpipe.core.native import native
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5 import library
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.reader import RowReader

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


@pytest.fixture
def read() -> Any:
    def run(source: SampleFiles | RowReader, samples: Any) -> list[Any]:
        found = read(RowReader(source) if isinstance(source, SampleFiles) else source, samples)
        return found if isinstance(found, list) else [found]

    return run


def test_samples_follow_each_other(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x", "text"])
    assert (files.count, files.firsts.tolist()) == (9, [0, 3, 3, 8, 9])
    for source in (files, pickle.loads(pickle.dumps(files))):
        order = [8, 0, 3, 7, 2, 2, 5]
        numbers, texts = read(source, order)
        assert numbers[:, 2].tolist() == order
        assert [int(text) for text in texts] == order
    assert [files.shown_of(sample) for sample in (0, 2, 3, 7, 8)] == [
        str(paths[number]) for number in (0, 0, 2, 2, 3)
    ]
    assert read(files, [])[0].shape == (0, 4)


def test_which_files_have_which_samples(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"])
    found = files.located(np.array([8, 0, 4, 1]))
    assert [(number, places.tolist()) for number, places in found if places is not None] == [
        (0, [1, 3]),
        (2, [2]),
        (3, [0]),
    ]
    assert SampleFiles(paths[:1], ["x"]).located(np.array([2, 0])) == [(0, None)]
    assert SampleFiles(paths[:1], ["x"]).located(np.array([], int)) == []


def test_rows_are_the_batchs(paths: list[Path]) -> None:
    reader = RowReader(SampleFiles(paths, ["x", "text"]))
    outs = [np.zeros((10, 4), "i4"), np.full(10, None, object)]
    started = reader.start(np.array([8, 0, 4]), np.array([9, 1, 5]), outs)
    assert sorted(np.concatenate([task.rows for task in started.tasks]).tolist()) == [1, 5, 9]
    for task in started.tasks:
        task.run()
    native.run_here(started.batch)
    assert outs[0][:, 0].tolist() == [0, 0, 0, 0, 0, 4, 0, 0, 0, 8]
    assert [None if text is None else int(text) for text in outs[1]] == [
        None, 0, None, None, None, 4, None, None, None, 8,
    ]  # fmt: skip


def test_groups_go_on_from_file_to_file(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"])
    assert files.groups(0).tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 5]
    assert files.samples_in_group(0) == 2


def test_files_are_opened_when_they_are_read(paths: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = RowReader(SampleFiles(paths, ["x"]))
    assert len(os.listdir("/proc/self/fd")) == before
    read(reader, [0])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    read(reader, [0, 1, 8])
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_few_are_open_at_a_time(tmp_path: Path) -> None:
    """Files that the core reads take no more than the lower half of the descriptors."""
    paths = [write(tmp_path / f"{number}.h5", 1, number, chunks=(1, 4)) for number in range(150)]
    before = len(os.listdir("/proc/self/fd"))
    reader = RowReader(SampleFiles(paths, ["x"]))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * before + 100, limits[1]))
    try:
        for order in (np.arange(150), np.arange(150)[::-1]):
            np.testing.assert_array_equal(read(reader, order)[0][:, 0], order)
            assert before < len(os.listdir("/proc/self/fd")) <= before + 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_library_has_few_open_at_a_time(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_MOST_OPEN", 2)
    reader = RowReader(SampleFiles([*paths, *paths], ["text"]))
    before = len(os.listdir("/proc/self/fd"))
    order = [17, 0, 9, 8, 3, 12, 1, 16]
    for samples in ([0], order, order[::-1]):
        assert [int(text) for text in read(reader, samples)[0]] == [sample % 9 for sample in samples]
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_batch_of_several_files_says_which_has_changed(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"])
    write(paths[2], 5, 100)
    assert read_natively(RowReader(files), [0, 4, 8]).is_made.tolist() == [True, False, True]
    with pytest.raises(HDF5Error, match=r"2\.h5 has changed"):
        read(files, [0, 4, 8])
    assert read(files, [0, 8])[0][:, 0].tolist() == [0, 8]


def test_files_that_are_not_alike(tmp_path: Path, paths: list[Path]) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros((2, 5), "i4")
    with pytest.raises(OptionError, match=r"'x' are \(4,\) int32 in .*0\.h5 and \(5,\) int32 in .*other\.h5"):
        SampleFiles([paths[0], tmp_path / "other.h5"], ["x"])
    with pytest.raises(OptionError, match="no HDF5 file was named"):
        SampleFiles([], ["x"])
    # Chunks may differ.
    mixed = SampleFiles([paths[0], write(tmp_path / "plain.h5", 2, 3)], ["x"])
    assert read(mixed, [4, 0, 3])[0][:, 0].tolist() == [4, 0, 3]
