"""``cache=``: chunks are decoded once, shared by processes, and never those of a file as it was."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastpipe import Cache, FastHDF5Dataset, FastLoader
from fastpipe.errors import HDF5Error

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="run it where files have locks: not on Windows"
)

ROWS, CHUNK = 40, 8
WHOLE = ROWS * 100 * 4  # bytes of all chunks
MIB = 1 << 20


def expected(value: float = 0) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32)[:, None] + torch.full((ROWS, 100), value)


def write(path: Path, value: float = 0, **options: Any) -> Path:
    options = {"chunks": (CHUNK, 100), "compression": "gzip", **options}
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=expected(value).numpy(), **options)
    return path


@pytest.fixture
def path(tmp_path: Path, settled: Any) -> Path:
    return settled(write(tmp_path / "x.h5"))  # type: ignore[no-any-return]


def option(where: str, folder: Path) -> Cache:
    return {"disk": Cache("disk", MIB, folder), "ram": Cache("ram", MIB), "auto": Cache("auto")}[where]


def epoch(dataset: Any, **options: Any) -> torch.Tensor:
    return torch.cat(list(FastLoader(dataset, 6, **options)))


@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
@pytest.mark.parametrize("where", ["ram", "disk", "auto"])
def test_chunks_are_decoded_once(path: Path, tmp_path: Path, decoded: Any, where: str, kind: Any) -> None:
    dataset = FastHDF5Dataset(path, "x", cache=option(where, tmp_path))
    counts = []
    for _ in range(4):
        assert torch.equal(torch.cat(list(kind(dataset, 6))), expected())
        counts.append(decoded(dataset))
    if where == "auto":  # what an epoch ends with the next may find
        assert counts[0] == WHOLE < counts[1] <= counts[3] <= 2 * WHOLE
        return
    assert counts == [WHOLE] * 4
    other = FastHDF5Dataset(path, ["x"], cache=option(where, tmp_path))
    assert torch.equal(torch.cat([batch[0] for batch in FastLoader(other, 6)]), expected())
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(epoch(copy), expected())
    assert decoded(other) == decoded(copy) == 0, "datasets share what is kept"


def test_datasets_of_one_file_have_chunks_of_their_own(path: Path, settled: Any) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("y", data=-file["x"][...], chunks=(CHUNK, 100), compression="gzip")
    dataset = FastHDF5Dataset(settled(path), ["x", "y"], cache=Cache("ram", MIB))
    for values, negative in [*FastLoader(dataset, 6), *FastLoader(dataset, 6)]:
        assert torch.equal(negative, -values)


@pytest.mark.few(2)
@pytest.mark.usefixtures("common_cache_folder")
@pytest.mark.parametrize("where", ["ram", "disk", "auto"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_share_kept_chunks(path: Path, tmp_path: Path, decoded: Any, where: str, method: str) -> None:
    dataset = FastHDF5Dataset(path, "x", cache=option(where, tmp_path))
    # Processes, not threads of this process: these would find the chunks that an epoch ended with in memory.
    workers = {"num_workers": 1, "workers": "processes", "multiprocessing_context": method}
    for _ in range(2 if where == "auto" else 1):  # the worker and its memory are gone after each
        assert torch.equal(epoch(dataset, **workers), expected())
        assert decoded(dataset) == 0
    here = FastHDF5Dataset(path, "x", cache=option(where, tmp_path))
    assert torch.equal(epoch(here), expected())
    assert decoded(here) == 0


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_chunks_that_do_not_fit_are_not_kept(path: Path, tmp_path: Path, decoded: Any, where: str) -> None:
    cache = Cache(where, WHOLE // 2, tmp_path if where == "disk" else None)  # type: ignore[arg-type]
    dataset = FastHDF5Dataset(path, "x", cache=cache)
    counts = []
    for _ in range(4):
        assert torch.equal(epoch(dataset), expected())
        counts.append(decoded(dataset))
    steps = np.diff(counts).tolist()
    assert min(steps) > 0 and max(steps) < WHOLE
    # The same ones are found each time, and perhaps what the epoch before has ended with.
    assert max(steps) - min(steps) <= CHUNK * 400
    assert "as many as fit" in repr(dataset)


def test_auto_keeps_all_or_nothing(path: Path, decoded: Any) -> None:
    dataset = FastHDF5Dataset(path, "x", cache=Cache("auto", WHOLE - 1))
    for _ in range(3):
        epoch(dataset)
    assert 2 * WHOLE < decoded(dataset) <= 3 * WHOLE  # what an epoch ends with the next may find
    assert "not kept, as all of them are 15.6 KiB, and there is room for 15.6 KiB" in repr(dataset)


@pytest.mark.parametrize("options", [{"compression": None, "chunks": None}, {"compression": None}])
def test_data_as_they_are_may_be_kept_too(tmp_path: Path, settled: Any, decoded: Any, options: Any) -> None:
    path = settled(write(tmp_path / "x.h5", **options))
    plain, kept = FastHDF5Dataset(path, "x"), FastHDF5Dataset(path, "x", cache="ram")
    for _ in range(3):
        assert torch.equal(epoch(plain), expected())
        assert torch.equal(epoch(kept), expected())
    assert "none, as samples are read from the file as they are" in repr(plain)
    assert decoded(plain) == 0
    assert 0 < decoded(kept) <= 2 * MIB  # in chunks of a megabyte, each once
    assert "kept in memory" in repr(kept)


@pytest.mark.few(5)
@pytest.mark.parametrize("how", ["rewritten", "replaced", "a row"])
@pytest.mark.parametrize("where", ["ram", "disk", "auto"])
def test_a_changed_file_is_read_anew(path: Path, tmp_path: Path, settled: Any, where: str, how: str) -> None:
    cache = option(where, tmp_path)
    dataset = FastHDF5Dataset(path, "x", cache=cache)
    for _ in range(3):
        epoch(dataset)
    before = path.stat()
    if how == "replaced":
        os.replace(write(tmp_path / "new.h5", 7), path)
    elif how == "rewritten":
        content = write(tmp_path / "new.h5", 7).read_bytes()
        with open(path, "r+b") as file:  # the same inode
            file.write(content)
            file.truncate(len(content))
    else:
        with h5py.File(path, "a") as file:
            file["x"][...] = expected(7).numpy()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    settled(path)
    fresh = FastHDF5Dataset(path, "x", cache=cache)
    for _ in range(3):
        assert torch.equal(epoch(fresh), expected(7))


@pytest.mark.parametrize("where", ["ram", "off"])
def test_a_replaced_file_is_read_on_and_a_changed_one_refused(path: Path, tmp_path: Path, where: Any) -> None:
    dataset = FastHDF5Dataset(path, "x", cache=where)
    epoch(dataset)
    os.replace(write(tmp_path / "new.h5", 7), path)
    assert torch.equal(epoch(dataset), expected())
    again = FastHDF5Dataset(path, "x", cache=where)
    epoch(again)
    with h5py.File(path, "a") as file:
        file["x"][0] = 5
    for call in (lambda: again[30], lambda: epoch(again)):
        with pytest.raises(HDF5Error, match="has changed since it was opened; make the dataset anew"):
            call()
