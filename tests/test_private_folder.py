"""Folders for caches: private, link-free, and with whole files only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastpipe.core.private_folder import PrivateFolder, user_cache_folder
from fastpipe.errors import CacheError


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path / "a" / "b") as folder:
        folder.write("x", lambda file: file.write(b"content"))
        assert folder.read("x") == b"content"
        assert folder.names() == ["x"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / "x").stat().st_mode & 0o777 == 0o600


def test_a_missing_file_is_none(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path / "a") as folder:
        assert folder.read("nothing") is None
        folder.remove("nothing")


def test_what_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(CacheError, match=r"lets other users in.*chmod 700"):
        PrivateFolder(tmp_path / "open")


def test_what_belongs_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        PrivateFolder(tmp_path / "a")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CacheError, match="cannot be used"):
        PrivateFolder(tmp_path / "link")
    with PrivateFolder(tmp_path / "real") as folder:
        (tmp_path / "secret").write_bytes(b"")
        (tmp_path / "real" / "x").symlink_to("../secret")
        with pytest.raises(OSError, match="symbolic links"):
            folder.read("x")
        folder.write("x", lambda file: file.write(b"mine"))  # takes the link's place
    assert (tmp_path / "secret").read_bytes() == b""


def test_no_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="file"):
        PrivateFolder(tmp_path / "file")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with PrivateFolder(tmp_path / "a") as folder:
        folder.write("x", lambda file: file.write(b"old"))
        with pytest.raises(OSError, match="No space"):
            folder.write("x", fail)
        assert folder.read("x") == b"old"
    assert os.listdir(tmp_path / "a") == ["x"]


def test_a_killed_writer_leaves_the_old_file_and_is_cleaned_up_after(tmp_path: Path) -> None:
    script = """if True:
        import sys, os, signal
        from fastpipe.core.private_folder import PrivateFolder
        def fill(file):
            file.write(b"half"); file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        PrivateFolder(sys.argv[1]).write("x", fill)
    """
    with PrivateFolder(tmp_path / "a") as folder:
        folder.write("x", lambda file: file.write(b"old"))
        child = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
        assert child.returncode == -signal.SIGKILL
        assert folder.read("x") == b"old"
        assert folder.names() == ["x"]
    (left,) = (name for name in os.listdir(tmp_path / "a") if name != "x")
    PrivateFolder(tmp_path / "a").close()
    assert left in os.listdir(tmp_path / "a"), "somebody may still be writing it"
    long_ago = time.time() - 7200
    os.utime(tmp_path / "a" / left, (long_ago, long_ago))
    PrivateFolder(tmp_path / "a").close()
    assert os.listdir(tmp_path / "a") == ["x"]


def test_the_users_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "fastpipe"
