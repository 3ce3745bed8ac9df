"""Files that are there whole, or as they were before."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from fastpipe.bench.results import check_target, write_file
from fastpipe.errors import OptionError


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted(file: BinaryIO) -> None:
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, interrupted)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_file(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    check_target(tmp_path / "new" / "folder" / "file", "--json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match=r"--json: .* is a folder; give a file's name"):
        check_target(tmp_path, "--json")
    (tmp_path / "file").touch()
    with pytest.raises(
        OptionError, match=r"--html: .* cannot be written: .*file' is not a folder that you may write to"
    ):
        check_target(tmp_path / "file" / "page", "--html")
