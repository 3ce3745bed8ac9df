"""Folders for caches, besides tests/contracts/test_caches.py: no links, whole files only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fastpipe.core.private_folder import PrivateFolder
from fastpipe.errors import CacheError


def test_a_refusal_says_why_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("open")
    for name, message in (
        ("open", r"is open to other users.*chmod 700"),
        ("file", r"file.*cannot be used"),
        ("link", r"cannot be used: it is a link"),
    ):
        with pytest.raises(CacheError, match=message):
            PrivateFolder(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        PrivateFolder(tmp_path / "a")


def test_a_failed_or_killed_write_leaves_the_old_file(tmp_path: Path, forked: Any) -> None:
    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    def end(file: Any) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with PrivateFolder(tmp_path / "a") as folder:
        folder.write("x", lambda file: file.write(b"old"))
        with pytest.raises(OSError, match="No space"):
            folder.write("x", fail)
        assert os.listdir(tmp_path / "a") == ["x"]
        assert os.waitpid(forked(lambda: folder.write("x", end)), 0)[1] == signal.SIGKILL
        assert folder.read("x") == b"old"
        assert folder.names() == ["x"]
    (left,) = (name for name in os.listdir(tmp_path / "a") if name != "x")
    PrivateFolder(tmp_path / "a").close()
    assert left in os.listdir(tmp_path / "a"), "another process may still be writing it"
    os.utime(tmp_path / "a" / left, (time.time() - 7200,) * 2)
    PrivateFolder(tmp_path / "a").close()
    assert os.listdir(tmp_path / "a") == ["x"]
