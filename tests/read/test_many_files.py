"""Files that are read together: what each would be if it were read alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("files are read one by one on Windows", allow_module_level=True)

from fastpipe.read import many_files
from fastpipe.read.files import read_file
from fastpipe.read.jpeg_header import read_jpeg_header
from fastpipe.read.many_files import read_many
from fastpipe.testing import damaged_at_random, photo_tree, write_fifo


def test_photos_whole_and_damaged(tmp_path: Path) -> None:
    photos = sorted(photo_tree(tmp_path / "photos", classes=2, per_class=4).rglob("*.jpg"))
    rng = np.random.default_rng(3)
    paths = []
    for number in range(60):
        path = tmp_path / f"{number} ü.jpg"
        data = photos[number % len(photos)].read_bytes()
        path.write_bytes(damaged_at_random(data, rng) if number % 3 else data)
        paths.append(str(path))
    for path, found in zip(paths, read_many(paths), strict=True):
        alone = read_file(path)
        assert found == ((alone, read_jpeg_header(alone)) if alone else None)
        assert found is None or (type(found[0]) is bytes and hash(found[0]) == hash(alone))
    assert sum(found is not None and found[1] is not None for found in read_many(paths)) >= 20


def test_what_is_no_file_to_be_read_is_left_and_the_others_are_there(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(b"content")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("nothing")
    odd = ["empty", "folder", "nowhere", "missing", "x" * 300, "good\0more", Path(write_fifo(tmp_path)).name]
    paths = [str(tmp_path / name) for name in odd] + ["/dev/zero", "/proc/self/stat"]
    asked = [path for name in paths for path in (str(good), name)]
    before = set(os.listdir("/proc/self/fd"))
    found = read_many(asked)
    assert set(os.listdir("/proc/self/fd")) == before
    assert found[::2] == [(b"content", None)] * len(paths)
    assert found[1::2] == [None] * len(paths)
    assert read_many([]) == []


@pytest.mark.parametrize("change", [-1, 1, 5])
def test_a_file_of_another_size_than_it_had_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"0123456789")
    real = many_files.open_files

    def told_otherwise(*arguments: object) -> None:
        real(*arguments)
        arguments[-1][:] += change  # type: ignore[index]

    monkeypatch.setattr(many_files, "open_files", told_otherwise)
    assert read_many([str(path)]) == [None]
    monkeypatch.undo()
    assert read_many([str(path)]) == [(b"0123456789", None)]


def test_descriptors_are_closed_where_there_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"0123456789")

    def no_memory(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(many_files, "_new_bytes", no_memory)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        read_many([str(path)] * 9)
    assert set(os.listdir("/proc/self/fd")) == before
