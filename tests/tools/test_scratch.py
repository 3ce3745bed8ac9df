"""Folders for what a profile writes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastpipe.tools.folders import Scratch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_old(folder: str | Path) -> None:
    before = time.time() - 3600
    os.utime(Path(folder) / ".lock", (before, before))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux or macOS, where folders can be locked")
def test_what_a_killed_process_has_left_is_removed_and_nothing_else(
    folder: Path, forked: Callable[[Callable[[], object]], int]
) -> None:
    ours, told = os.pipe()

    def work() -> None:
        scratch = Scratch()
        (Path(scratch.path) / "inner").mkdir()
        make_old(scratch.path)
        os.write(told, scratch.path.encode() + b"\n")
        signal.pause()

    pid = forked(work)
    left = Path(os.read(ours, 4096).decode().strip())
    (folder / "fastpipe-profile-is-a-file").touch()
    elsewhere = folder / "elsewhere"
    for path in (elsewhere, folder / "fastpipe-profile-young", folder / "fastpipe-profile-without"):
        path.mkdir()
    (folder / "fastpipe-profile-link").symlink_to(elsewhere)
    for path in (elsewhere, folder / "fastpipe-profile-young"):
        (path / ".lock").touch()
    make_old(elsewhere)
    first = Scratch()
    make_old(first.path)
    assert left.is_dir(), "its process is alive"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    second = Scratch()
    assert not left.exists()
    kept = ["elsewhere", *(f"fastpipe-profile-{one}" for one in ("is-a-file", "link", "without", "young"))]
    names = [Path(one.path).name for one in (first, second)]
    assert sorted(os.listdir(folder)) == sorted([*kept, *names])
    for scratch in (first, second):
        scratch.close()
        scratch.close()
    os.close(ours), os.close(told)
    assert sorted(os.listdir(folder)) == kept
