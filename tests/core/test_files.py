"""Reading regular files whole or in parts, also more of them than the process may have open."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.ma  # NumPy imports it late, which takes a descriptor
import pytest
import tifffile
import torch
from PIL import Image
from torch.utils.data import DataLoader

from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset
from fastpipe.core import files
from fastpipe.core.files import parents_made, read_file
from fastpipe.sampling import Grid

COUNT = 60  # files of each kind
InChild = Callable[[Callable[[], object]], None]


def test_short_reads_and_growing_files_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "x.jpg", b"0123456789" * 3
    for size in (0, 1, 4095, 4096, 1_000_003, 30):
        whole = (content * (size // 30 + 1))[:size]
        path.write_bytes(whole)
        assert read_file(str(path)) == whole
    real = os.read, os.fstat

    def smaller(descriptor: int) -> os.stat_result:
        status = list(real[1](descriptor))
        status[6] = 4
        return os.stat_result(status)

    for most in (1, 7):
        monkeypatch.setattr(files.os, "read", lambda descriptor, count: real[0](descriptor, min(count, most)))
        assert read_file(str(path)) == content
    monkeypatch.setattr(files.os, "fstat", smaller)
    assert read_file(str(path)) == content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("many")
    (made / "images" / "a").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        values = rng.random((4, 6)).astype(np.float32)
        with h5py.File(made / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=values, chunks=(1, 6), compression="gzip")
            file.create_dataset("library", data=values, chunks=(2, 6), scaleoffset=3)
        np.save(made / f"{number}.npy", values)
        tifffile.imwrite(made / f"{number}.tif", values, photometric="minisblack", compression="zlib")
        ending = "png" if number % 2 else "jpg"
        Image.fromarray((values * 255).astype(np.uint8)).save(made / "images" / "a" / f"{number}.{ending}")
    return made


def _as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def _rows(folder: Path, key: str) -> Any:
    return FastHDF5Dataset([folder / f"{n}.h5" for n in range(COUNT)], key, bad_samples="skip")


def _patches(folder: Path, name: str) -> Any:
    paths = [folder / name.format(n) for n in range(COUNT)]
    return FastPatchDataset(paths, (2, 3), sampling=Grid(), bad_samples="skip")


MADE: dict[str, Callable[[Path], Any]] = {
    "rows": lambda folder: _rows(folder, "x"),
    "rows, by the library": lambda folder: _rows(folder, "library"),
    "patches of HDF5": lambda folder: _patches(folder, "{}.h5/x"),
    "patches of HDF5, by the library": lambda folder: _patches(folder, "{}.h5/library"),
    "patches of NumPy": lambda folder: _patches(folder, "{}.npy"),
    "patches of TIFF": lambda folder: _patches(folder, "{}.tif"),
    "images": lambda folder: FastImageFolder(folder / "images", _as_tensor, bad_samples="skip"),
}


@contextmanager
def _limit(left: int) -> Iterator[None]:
    """Let this process open so many more files than it has."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def _nothing_left() -> Iterator[None]:
    taken = []
    with _limit(20):
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
        try:
            yield
        finally:
            for descriptor in taken:
                os.close(descriptor)


def _values(loader: Any) -> torch.Tensor:
    return torch.cat([batch[0] if isinstance(batch, list) else batch for batch in loader])


@pytest.mark.parametrize("name", MADE)
def test_more_files_than_may_be_open(folder: Path, in_child: InChild, name: str) -> None:
    def with_few() -> None:
        wanted = _values(FastLoader(MADE[name](folder), 16))
        with _limit(16):
            dataset = MADE[name](folder)
            for kind in (FastLoader, DataLoader):
                assert torch.equal(_values(kind(dataset, 16)), wanted)
            os.close(os.open(os.devnull, os.O_RDONLY))  # some are left for the script

    in_child(with_few)


@pytest.mark.parametrize("name", ["rows", "patches of NumPy", "images"])
def test_workers_with_few_descriptors(folder: Path, in_child: InChild, name: str) -> None:
    def with_few() -> None:
        dataset = MADE[name](folder)
        wanted = _values(FastLoader(dataset, 16))
        with _limit(40):
            loader = FastLoader(dataset, 16, num_workers=2, workers="processes")
            assert torch.equal(_values(loader), wanted)

    in_child(with_few)


@pytest.mark.parametrize("name", MADE)
def test_without_a_descriptor_nothing_is_damaged(folder: Path, in_child: InChild, name: str) -> None:
    def with_none() -> None:
        dataset = MADE[name](folder)
        dataset.__getitems__([0, 1])  # modules are imported, and memory is made
        for close in files._closing:
            close()
        with _nothing_left():
            for call in (
                lambda: dataset[5],
                lambda: dataset.__getitems__([3, 4]),
                lambda: MADE[name](folder),
            ):
                with pytest.raises(OSError, match=r"Too many open files: .*ulimit -n") as raised:
                    call()
                assert raised.value.errno == errno.EMFILE
        assert len(dataset.__getitems__([3, 4])) == 2

    in_child(with_none)


def test_files_that_are_idle_make_room_for_others(folder: Path, in_child: InChild) -> None:
    def with_idle() -> None:
        dataset, images = MADE["rows"](folder), MADE["images"](folder)
        wanted = _values(FastLoader(dataset, 16))  # its files stay open
        images.__getitems__([3, 4])
        with _nothing_left():
            assert len(images.__getitems__([3, 4])) == 2
        assert torch.equal(_values(FastLoader(dataset, 16)), wanted)

    in_child(with_idle)


def test_folders_that_were_made_are_removed_after_an_error_unless_they_are_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), parents_made(tmp_path / "a" / "b" / "file"):
        (tmp_path / "a" / "b").rmdir()  # as if the disk were full at the second folder
        raise ValueError("broken")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="broken"), parents_made(tmp_path / "a" / "b" / "file"):
        (tmp_path / "a" / "other").touch()
        raise ValueError("broken")
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["other"]
