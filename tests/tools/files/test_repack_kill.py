"""A copy that is killed at any write: the next run makes it anew, and OUT is only ever whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dying import dying_at

from fastpipe.cli import main
from fastpipe.core import files
from fastpipe.hdf5 import repack as repacking

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux, which has SIGKILL and fork")

ROWS = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")
CALLS = [(os, name) for name in ("write", "fsync", "fchmod", "ftruncate", "unlink", "replace", "link")]
CALLS += [(repacking, name) for name in ("open_regular", "rename_anew", "sync_folder")]
UNFINISHED = repacking.unfinished_path(Path("out.h5")).name
OPTIONS = ["--chunk-rows", "3", "--codec", "gzip:1", "--dataset", "a", "--dataset", "b", "--dataset", "c"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some datasets, and so small steps that there are many of them."""
    monkeypatch.setattr(repacking, "_STEP_NBYTES", 4000)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("a", data=ROWS, chunks=(16, 30), compression="lzf")
        file.create_dataset("b", data=[f"text {n}" for n in range(300)])
        file.create_dataset("c", data=ROWS[:, 0] * 0.5, maxshape=(None,), chunks=(50,))
        file["d"] = ROWS[0]
        file["a"].attrs["other"] = file["c"].ref
    return tmp_path / "in.h5"


def command(source: Path, *options: str) -> int:
    return main(["repack", str(source), str(source.with_name("out.h5")), *OPTIONS, *options])


def is_right(source: Path) -> None:
    with h5py.File(source) as old, h5py.File(source.with_name("out.h5")) as new:
        for name in "abcd":
            assert (old[name][()] == new[name][()]).all()
        assert new["a"].chunks == (3, 30) and new["c"].chunks == (3,)
        assert new[new["a"].attrs["other"]] == new["c"]


def count_calls(work: Callable[[], object], die_at: int = 0) -> int:
    """Calls to the system that change files; at one of them this process is killed, with half of it done."""

    def half(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "write":
            descriptor, data = arguments
            real(descriptor, data[: len(data) // 2])

    with dying_at(die_at, CALLS, half) as count:
        work()
    return count.calls


def test_killed_at_any_call(
    source: Path, forked: Callable[[Callable[[], object]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    assert total > 100
    is_right(source)
    out = source.with_name("out.h5")
    ends = set()
    for die_at in [1, 2, 3, 4, *range(5, total, total // 12), *range(total - 5, total + 1)]:
        out.unlink(missing_ok=True)
        kill(forked, source, die_at)
        left = names(source)
        assert left in (["in.h5"], ["in.h5", "out.h5"], [UNFINISHED, "in.h5"])
        ends.add(tuple(left))
        if not out.exists():
            assert command(source) == 0
        is_right(source)
        assert names(source) == ["in.h5", "out.h5"]
    assert len(ends) == 3


@pytest.mark.parametrize("umask", [0o022, 0])
@pytest.mark.parametrize("how", ["rename", "link"])
def test_killed_at_the_end(
    source: Path,
    forked: Callable[[Callable[[], object]], int],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    umask: int,
) -> None:
    """Whatever the last calls have left, the command can be given again."""
    if how == "link":
        monkeypatch.setattr(files, "_renameat2", None)
    out = source.with_name("out.h5")
    before = os.umask(umask)
    try:
        total = count_calls(lambda: command(source))
        for die_at in range(total - 7, total + 1):
            out.unlink(missing_ok=True)
            kill(forked, source, die_at)
            if out.exists():
                is_right(source)
            assert command(source, "--force") == 0
            is_right(source)
            assert names(source) == ["in.h5", "out.h5"]
            assert out.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)


def kill(forked: Callable[[Callable[[], object]], int], source: Path, die_at: int) -> None:
    pid = forked(lambda: count_calls(lambda: command(source), die_at))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def names(source: Path) -> list[str]:
    return sorted(path.name for path in source.parent.iterdir())
