"""Copies of files in another form: made once, whole, for one state of a file, and removed when nobody uses them."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from fastpipe.errors import CacheError
from fastpipe.volumes import nifti


def copy_of(source: Path | str, nbytes: int, fill: Any) -> str:
    """The path of a copy, whose state is looked at."""
    path, status = nifti.converted_file(str(source), nbytes, fill)
    now = os.stat(path)
    assert (status.st_ino, status.st_size, status.st_mtime_ns) == (now.st_ino, now.st_size, now.st_mtime_ns)
    return path


def copies_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - {"locks"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gz"
    path.write_bytes(b"packed")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fastpipe" / "converted"


class Fill:
    """Writes a copy, and counts how often."""

    def __init__(self, data: bytes) -> None:
        self.data, self.count = data, 0

    def __call__(self, file: BinaryIO) -> None:
        self.count += 1
        file.write(self.data)


def test_a_copy_is_made_once(source: Path, folder: Path) -> None:
    fill = Fill(b"unpacked")
    paths = {copy_of(str(source), 8, fill) for _ in range(3)}
    (path,) = paths
    assert fill.count == 1
    assert Path(path).read_bytes() == b"unpacked"
    assert Path(path).parent == folder
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.stat(path).st_mode & 0o077 == 0


def test_another_name_of_the_same_path_has_the_same_copy(
    source: Path, folder: Path, monkeypatch: Any
) -> None:
    fill = Fill(b"unpacked")
    first = copy_of(str(source), 8, fill)
    monkeypatch.chdir(source.parent)
    assert copy_of("source.gz", 8, fill) == first
    assert fill.count == 1


def test_a_file_that_changed_gets_another_copy_and_the_old_one_goes(source: Path, folder: Path) -> None:
    first = copy_of(str(source), 3, Fill(b"one"))
    source.write_bytes(b"packed anew")
    second = copy_of(str(source), 3, Fill(b"two"))
    assert first != second
    assert Path(second).read_bytes() == b"two"
    assert copies_in(folder) == {os.path.basename(second)}


def test_two_files_have_a_copy_each(source: Path, folder: Path) -> None:
    other = source.with_name("other.gz")
    other.write_bytes(b"packed")
    paths = [copy_of(str(path), 3, Fill(data)) for path, data in ((source, b"one"), (other, b"two"))]
    assert [Path(path).read_bytes() for path in paths] == [b"one", b"two"]


def test_an_error_while_it_is_made_leaves_nothing(source: Path, folder: Path) -> None:
    def failing(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        copy_of(str(source), 8, failing)
    assert not copies_in(folder)
    assert Path(copy_of(str(source), 8, Fill(b"unpacked"))).read_bytes() == b"unpacked"


def test_a_copy_that_is_too_short_is_made_again(source: Path, folder: Path) -> None:
    fill = Fill(b"unpacked")
    path = copy_of(str(source), 8, fill)
    os.truncate(path, 5)
    assert Path(copy_of(str(source), 8, fill)).read_bytes() == b"unpacked"
    assert fill.count == 2


def test_copies_that_nobody_has_used_for_long_go_when_another_is_made(source: Path, folder: Path) -> None:
    others = []
    for number in range(3):
        path = source.with_name(f"{number}.gz")
        path.write_bytes(b"packed")
        others.append((path, copy_of(str(path), 3, Fill(b"one"))))
    long_ago = time.time() - 31 * 86400
    for _, copy in others[:2]:
        os.utime(copy, (long_ago, long_ago))
    copy_of(str(others[0][0]), 3, Fill(b"one"))  # used: it stays
    newest = copy_of(str(source), 3, Fill(b"new"))
    left = {os.path.basename(path) for path in (others[0][1], others[2][1], newest)}
    assert copies_in(folder) == left


def test_other_files_in_the_folder_stay(source: Path, folder: Path) -> None:
    copy_of(str(source), 3, Fill(b"one"))
    (folder / "notes.txt").write_text("mine")
    os.utime(folder / "notes.txt", (0, 0))
    source.write_bytes(b"packed anew")
    copy_of(str(source), 3, Fill(b"two"))
    assert (folder / "notes.txt").exists()


def test_no_room_is_an_error_that_says_where_and_how_much(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nifti, "free_disk", lambda descriptor: (1 << 28) + (3 << 20))
    with pytest.raises(
        CacheError, match=r"source\.gz is read from a copy of 4 MiB .* has room for 3 MiB.*XDG_CACHE_HOME"
    ):
        copy_of(str(source), 4 << 20, Fill(b""))
    assert not copies_in(folder)


def test_a_folder_of_others_is_refused(source: Path, folder: Path) -> None:
    folder.mkdir(mode=0o777, parents=True)
    folder.chmod(0o777)
    with pytest.raises(CacheError):
        copy_of(str(source), 3, Fill(b"one"))


def test_a_source_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        copy_of(str(tmp_path / "none.gz"), 3, Fill(b"one"))


def test_those_who_want_a_copy_at_once_get_the_same(source: Path, folder: Path) -> None:
    count = 0

    def fill(file: BinaryIO) -> None:
        nonlocal count
        count += 1
        file.write(b"unpacked")

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: copy_of(str(source), 8, fill), range(40)))
    assert len(set(paths)) == 1
    assert count == 1
    assert copies_in(folder) == {os.path.basename(paths[0])}


def test_who_comes_while_a_copy_is_made_waits_for_it(source: Path, folder: Path) -> None:
    found: list[str] = []
    take = nifti.LockFile.take
    comes, others = threading.Event(), Fill(b"another!")

    def fill(file: BinaryIO) -> None:
        other.start()
        assert comes.wait(30)
        file.write(b"unpacked")

    def counted(lock: nifti.LockFile, byte: int, **how: Any) -> bool:
        if threading.current_thread() is other:
            comes.set()
        return take(lock, byte, **how)

    def second() -> None:
        found.append(copy_of(str(source), 8, others))

    other = threading.Thread(target=second)
    with mock.patch.object(nifti.LockFile, "take", counted):
        path = copy_of(str(source), 8, fill)
        other.join(30)
    assert found == [path]
    assert others.count == 0
    assert Path(path).read_bytes() == b"unpacked"
