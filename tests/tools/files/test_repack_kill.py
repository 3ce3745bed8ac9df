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
from fastpipe.hdf5 import repack as repacking

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux, which has SIGKILL and fork")

ROWS = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")
CALLS = ("write", "fsync", "fchmod", "ftruncate", "unlink", "replace", "link")
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


def command(source: Path) -> int:
    return main(["repack", str(source), str(source.with_name("out.h5")), *OPTIONS])


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

    with dying_at(die_at, [(os, name) for name in CALLS], half) as count:
        work()
    return count.calls


def test_killed_at_any_call(
    source: Path, forked: Callable[[Callable[[], object]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    assert total > 100
    is_right(source)
    out = source.with_name("out.h5")
    for die_at in [1, 2, 3, 4, *range(5, total, total // 12), *range(total - 3, total + 1)]:
        out.unlink(missing_ok=True)
        pid = forked(lambda die_at=die_at: count_calls(lambda: command(source), die_at))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        left = sorted(path.name for path in source.parent.iterdir())
        assert left in (["in.h5", "out.h5"], ["in.h5", "out.h5.partial"])
        if not out.exists():
            assert command(source) == 0
        is_right(source)
        assert sorted(path.name for path in source.parent.iterdir()) == ["in.h5", "out.h5"]
