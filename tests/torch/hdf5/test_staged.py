"""``FastHDF5Dataset`` over URLs: the samples of the local files, each downloaded once."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from failure import failure
from same import same
from torch.utils.data import DataLoader

from fastpipe import FastHDF5Dataset, FastLoader, Stage
from fastpipe.errors import OptionError, StageError
from fastpipe.stores.filesystems import FilesystemStore

URL = "memory://bucket/h5/x.h5"
KEYS = ["mels", "label"]


@pytest.fixture
def remote(file: Path, other: Path) -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/h5/x.h5", file.read_bytes())
    system.pipe("/bucket/h5/y.h5", other.read_bytes())
    system.pipe("/bucket/h5/x.h5.old", b"another one")
    yield system
    system.rm("/bucket", recursive=True)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of which a part was downloaded."""
    found: list[str] = []
    get = FilesystemStore.get_range

    def counted(self: Any, key: str, *arguments: Any) -> bytes:
        found.append(key)
        return get(self, key, *arguments)

    monkeypatch.setattr(FilesystemStore, "get_range", counted)
    return found


def staged(folder: Path) -> list[Path]:
    return list((folder / "stage/fastpipe-stage/objects").glob("*/*"))


@pytest.mark.parametrize(("kind", "workers", "sample_dims"), [(DataLoader, 2, 1), (FastLoader, 0, 2)])
def test_rows_are_those_of_the_local_files(
    kind: Any, workers: int, sample_dims: int, remote: Any, parts: Any, file: Path, other: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    keys: Any = KEYS if sample_dims == 1 else "grid"

    def batches(paths: Any, **options: Any) -> list[Any]:
        dataset = FastHDF5Dataset(paths, keys, sample_dims=sample_dims, **options)
        return list(kind(dataset, batch_size=7, num_workers=workers))

    theirs = batches([file, other])
    for _ in range(2):
        assert same(batches([URL, "memory://bucket/h5/y.h5"], stage=tmp_path / "stage"), theirs)
    assert sorted(parts) == ["h5/x.h5", "h5/y.h5"] and len(staged(tmp_path)) == 2


def test_a_pickle_stages_again_what_is_gone(remote: Any, parts: Any, tmp_path: Path) -> None:
    dataset = FastHDF5Dataset(URL, KEYS, stage=tmp_path / "stage")
    sample, text = dataset[3], pickle.dumps(dataset)
    dataset.close()
    (path,) = staged(tmp_path)
    path.unlink()
    assert same(pickle.loads(text)[3], sample) and len(parts) == 2
    assert same(dataset[3], sample) and len(parts) == 2  # there again


def test_a_file_in_use_stays(remote: Any, other: Path, file: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "stage", max_bytes=max(other.stat().st_size, file.stat().st_size) + 1)
    dataset = FastHDF5Dataset(URL, KEYS, stage=stage)
    with pytest.raises(StageError, match="no room for a file of"):
        FastHDF5Dataset("memory://bucket/h5/y.h5", KEYS, stage=stage)
    dataset.close()
    FastHDF5Dataset("memory://bucket/h5/y.h5", KEYS, stage=stage).close()  # in the other's place
    assert len(staged(tmp_path)) == 1


def test_rows_come_from_a_bucket(s3: Any, file: Path, tmp_path: Path) -> None:
    bucket = s3.bucket()
    s3.put(bucket, "of/x.h5", file.read_bytes())
    s3.put(bucket, "of/x.h5.old", b"-")
    url, options = f"s3://{bucket}/of/x", {"stage": tmp_path / "stage", "storage_options": s3.options}
    assert same(FastHDF5Dataset(f"{url}.h5", KEYS, **options)[5], FastHDF5Dataset(file, KEYS)[5])
    with pytest.raises(FileNotFoundError, match=url):
        FastHDF5Dataset(url, KEYS, **options)


def test_an_object_that_changes_while_it_is_staged_is_staged_anew(
    remote: Any, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = FilesystemStore.find
    changes = [other.read_bytes()]

    def found(self: Any, key: str) -> Any:
        result = find(self, key)
        if changes:
            remote.pipe("/bucket/h5/x.h5", changes.pop())
        return result

    monkeypatch.setattr(FilesystemStore, "find", found)
    dataset = FastHDF5Dataset(URL, KEYS, stage=tmp_path / "stage")
    assert same(dataset[2], FastHDF5Dataset(other, KEYS)[2]) and len(staged(tmp_path)) == 1


def test_errors_name_the_url(remote: Any, file: Path, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/h5/none\.h5"):
        FastHDF5Dataset("memory://bucket/h5/none.h5", KEYS, stage=stage)
    with pytest.raises(KeyError, match=URL):
        FastHDF5Dataset(URL, "none", stage=stage)
    dataset = FastHDF5Dataset(URL, KEYS, stage=stage)
    assert URL in repr(dataset)
    (path,) = staged(tmp_path)
    status = path.stat()
    path.write_bytes(bytes(status.st_size))  # what is damaged shows when it is read
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    error = str(failure(lambda: dataset[0]))
    assert URL in error and str(tmp_path) not in error
    dataset.close()
    with pytest.raises(OptionError, match="stage= with a folder"):
        FastHDF5Dataset(URL, KEYS)
    with pytest.raises(OptionError, match="storage_options= is for a path that is a URL"):
        FastHDF5Dataset(file, KEYS, storage_options={"anon": True})
