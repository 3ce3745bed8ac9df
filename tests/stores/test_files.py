"""Files get their names once they are whole, and never that of another."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fastpipe.core import files as _files
from fastpipe.stores.table import move_file, read_file, write_file


@pytest.fixture(params=["renames", "links", "cannot rename so"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the system can rename a file and replace none, or the file system cannot."""

    def refuse(*arguments: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    kind: str = request.param
    if kind != "renames":
        monkeypatch.setattr(_files, "_renameat2", None if kind == "links" else refuse)
    return kind


def test_a_file_gets_another_name_and_a_folder_for_it(system: str, tmp_path: Path) -> None:
    write_file(str(tmp_path / "1"), b"abc")
    assert move_file(str(tmp_path / "1"), str(tmp_path / "folder" / "name"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert read_file(str(tmp_path / "folder" / "name"), 3) == b"abc"


def test_no_file_is_replaced(system: str, tmp_path: Path) -> None:
    write_file(str(tmp_path / "1"), b"abc")
    write_file(str(tmp_path / "name"), b"there")
    assert not move_file(str(tmp_path / "1"), str(tmp_path / "name"))
    assert (tmp_path / "name").read_bytes() == b"there"
    assert (tmp_path / "1").read_bytes() == b"abc"


def test_an_error_names_both(system: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        move_file(str(tmp_path / "1"), str(tmp_path / "name"))
    assert raised.value.filename == str(tmp_path / "1") and raised.value.filename2 == str(tmp_path / "name")
    write_file(str(tmp_path / "1"), b"abc")
    with pytest.raises(NotADirectoryError):
        move_file(str(tmp_path / "1"), str(tmp_path / "1" / "name"))


def test_a_file_is_made_for_nobody_else_and_only_once(tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    write_file(path, b"abc")
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_file(path, b"abc")
    assert read_file(path, 2) == b"abc" and read_file(path, 5) == b"abc"
