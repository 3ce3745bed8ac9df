"""``FileArrays``: kept for as long as the file is as it was, and never a reason to fail."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe import FastHDF5Dataset
from fastpipe.core import array_cache as kept_module
from fastpipe.core import file_identity as file_systems
from fastpipe.core.array_cache import FileArrays, default_file_arrays
from fastpipe.hdf5 import layout

ARRAYS = [np.arange(5), np.array([7, 1 << 60]), np.zeros(0, np.uint32)]
LATER = 10_000_000_000  # nanoseconds: long after the file was written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(b"content")
    return tmp_path / "data"


@pytest.fixture
def kept(tmp_path: Path) -> FileArrays:
    return FileArrays(tmp_path / "kept", now=lambda: time.time_ns() + LATER)


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "_warned", set())


def same(found: Any, expected: Any = ARRAYS) -> bool:
    return found is not None and all(
        one.dtype == other.dtype and np.array_equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


def test_kept_and_read_again(kept: FileArrays, file: Path) -> None:
    assert kept.load(file.stat(), "x") is None
    assert not kept.path.exists()
    kept.save(file.stat(), "x", ARRAYS)
    assert same(kept.load(file.stat(), "x"))
    assert same(FileArrays(kept.path).load(file.stat(), "x"))
    assert kept.load(file.stat(), "y") is None
    kept.save(file.stat(), "y", ARRAYS[:1])
    assert same(kept.load(file.stat(), "x"))
    assert same(kept.load(file.stat(), "y"), ARRAYS[:1])
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.path.iterdir()} <= {0o600, 0o400}


@pytest.mark.parametrize("change", ["content", "time", "inode"])
def test_not_of_a_file_that_has_changed(kept: FileArrays, file: Path, change: str) -> None:
    kept.save(file.stat(), "x", ARRAYS)
    if change == "content":
        file.write_bytes(b"other content")
    elif change == "time":
        os.utime(file, ns=(1, 1))
    else:
        file.with_name("new").write_bytes(b"content")
        os.replace(file.with_name("new"), file)
    assert kept.load(file.stat(), "x") is None
    kept.save(file.stat(), "x", ARRAYS[::-1])
    assert same(kept.load(file.stat(), "x"), ARRAYS[::-1])
    files = [path for path in kept.path.iterdir() if path.suffix == ".npz"]
    assert len(files) == (2 if change == "inode" else 1), "in the place of what was kept before"


@pytest.mark.parametrize("damage", ["empty", "cut off", "flipped", "text"])
def test_a_damaged_file_is_none(kept: FileArrays, file: Path, damage: str) -> None:
    kept.save(file.stat(), "x", ARRAYS)
    (path,) = kept.path.glob("*.npz")
    raw = path.read_bytes()
    place = raw.index(np.array([7, 1 << 60]).tobytes())
    changed = {
        "empty": b"", "cut off": raw[: len(raw) // 2], "text": b"text",
        "flipped": raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :],
    }[damage]  # fmt: skip
    path.write_bytes(changed)
    assert kept.load(file.stat(), "x") is None
    kept.save(file.stat(), "x", ARRAYS)
    assert same(kept.load(file.stat(), "x"))


@pytest.mark.parametrize("age", [0, 2_100_000_000])
def test_not_of_a_file_that_changed_just_now(tmp_path: Path, file: Path, age: int) -> None:
    status = file.stat()
    kept = FileArrays(tmp_path / "kept", now=lambda: max(status.st_mtime_ns, status.st_ctime_ns) + age)
    kept.save(status, "x", ARRAYS)
    assert not kept.path.exists()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("how", ["open to others", "a file", "a link"])
def test_a_folder_that_is_not_the_users_alone(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    folder = tmp_path / "kept"
    FileArrays(folder, now=lambda: time.time_ns() + LATER).save(file.stat(), "x", ARRAYS)
    if how == "open to others":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.touch() if how == "a file" else folder.symlink_to(tmp_path / "elsewhere")
    kept = FileArrays(folder, now=lambda: time.time_ns() + LATER)
    for _ in range(3):
        assert kept.load(file.stat(), "x") is None
        kept.save(file.stat(), "x", ARRAYS)
    assert len(refusals(caplog)) == 1
    assert "Where chunks are is not kept, so each file is asked each time" in refusals(caplog)[0]


def test_a_folder_of_another_user(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = FileArrays(tmp_path / "kept", now=lambda: time.time_ns() + LATER)
    kept.save(file.stat(), "x", ARRAYS)
    others = os.geteuid() + 1, os.getuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: others[0])
    monkeypatch.setattr(os, "getuid", lambda: others[1])
    assert kept.load(file.stat(), "x") is None
    assert len(refusals(caplog)) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in the way").touch()
    kept = FileArrays(tmp_path / "in the way" / "kept", now=lambda: time.time_ns() + LATER)
    for _ in range(3):
        kept.save(file.stat(), "x", ARRAYS)
        assert kept.load(file.stat(), "x") is None
    assert len(refusals(caplog)) == 1


# ---- where chunks of an HDF5 file are ------------------------------------------------------------------


def test_a_dataset_from_a_kept_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py", reason="needs h5py: pip install 'fastpipe[hdf5]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(layout, "_KEEP_FROM_S", 0.0)
    monkeypatch.setattr(file_systems, "_RESOLUTION_NS", 0)
    calls, real = [], layout._chunks

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(layout, "_chunks", counted)

    def write(value: int) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            for name in ("x", "y"):
                dataset = file.create_dataset(name, (40, 3), "i8", chunks=(3, 2), compression="gzip")
                dataset[:30] = value

    def opened(**options: Any) -> int:
        """Reads everything; how many tables were asked of the library."""
        calls.clear()
        dataset = FastHDF5Dataset(tmp_path / "x.h5", ["x", "y"], **options)
        with h5py.File(tmp_path / "x.h5", "r") as file:
            wanted = file["x"][...]
        for index in range(40):
            assert np.array_equal(dataset[index][0], wanted[index])
        return len(calls)

    write(5)
    assert [opened(cache="off"), opened(cache="off")] == [2, 2]
    assert not (tmp_path / "cache").exists()
    assert [opened(), opened(), opened(cache="ram")] == [2, 0, 0]
    write(6)
    assert [opened(), opened()] == [2, 0]
    folder = default_file_arrays()
    assert folder is not None
    for path in folder.path.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:-40])
    assert [opened(), opened()] == [2, 0]


def test_a_table_of_another_form_is_not_taken(tmp_path: Path, file: Path, kept: FileArrays) -> None:
    """Should a number of chunks not fit, whatever the reason, the library is asked."""
    h5py = pytest.importorskip("h5py", reason="needs h5py: pip install 'fastpipe[hdf5]'")
    with h5py.File(tmp_path / "x.h5", "w") as new:
        new.create_dataset("x", data=np.arange(10), chunks=(2,))
    status = (tmp_path / "x.h5").stat()
    kept.save(status, "hdf5 chunks 1, /x, (10,), (2,)", ARRAYS)
    with h5py.File(tmp_path / "x.h5", "r") as new:
        found = layout.read_layout(new["x"], kept, status)
        assert np.array_equal(found.offsets, layout.read_layout(new["x"]).offsets)
