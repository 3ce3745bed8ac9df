from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from odd_images import write_fifo

from fastpipe.core import files
from fastpipe.core.files import open_file, read_file, regular_status


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 1_000_003])
def test_reads_everything(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "x.jpg"
    path.write_bytes(content)
    assert read_file(str(path)) == content


@pytest.mark.parametrize("most", [1, 7])
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"0123456789" * 3)
    real = os.read
    monkeypatch.setattr(files.os, "read", lambda descriptor, count: real(descriptor, min(count, most)))
    assert read_file(str(path)) == b"0123456789" * 3


def test_a_file_that_grows_after_its_size_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"0123456789")
    real = os.fstat

    def smaller(descriptor: int) -> os.stat_result:
        status = list(real(descriptor))
        status[6] = 4
        return os.stat_result(status)

    monkeypatch.setattr(files.os, "fstat", smaller)
    assert read_file(str(path)) == b"0123456789"


def test_a_folder_with_an_image_s_name(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        read_file(str(tmp_path / "x.jpg"))
    assert raised.value.filename == str(tmp_path / "x.jpg")


@pytest.mark.hang_after(20)
def test_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    path = write_fifo(tmp_path)
    with pytest.raises(OSError, match="Not a regular file") as raised:
        read_file(str(path))
    assert raised.value.filename == str(path)


def test_a_device_is_an_error() -> None:
    with pytest.raises(OSError, match="Not a regular file"):
        read_file(os.devnull)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        read_file(str(tmp_path / "no.jpg"))
    assert raised.value.filename == str(tmp_path / "no.jpg")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(PermissionError) as raised:
        read_file(str(tmp_path / "x.jpg"))
    assert raised.value.filename == str(tmp_path / "x.jpg")


def test_descriptors_are_closed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"x")

    def fail(descriptor: int, count: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "read", fail)
        with pytest.raises(OSError, match="Input/output error"):
            read_file(str(path))
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.hang_after(20)
def test_what_a_library_opens_by_its_path_is_a_regular_file(tmp_path: Path) -> None:
    path = write_fifo(tmp_path)
    with pytest.raises(OSError, match="Not a regular file"):
        regular_status(str(path))
    with pytest.raises(OSError, match="Not a regular file"), open(path, "rb", opener=open_file):
        pass
    with pytest.raises(IsADirectoryError):
        regular_status(str(tmp_path))
    (tmp_path / "x").write_bytes(b"123")
    assert regular_status(str(tmp_path / "x")).st_size == 3
