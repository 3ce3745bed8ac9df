"""A copy that is killed at any call to the system: the next run goes on and makes the same file."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dying import dying_at

from fastpipe.cli import main
from fastpipe.hdf5 import planning, repacking
from fastpipe.hdf5.checkpoints import CheckpointedFile

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux, which has SIGKILL and fork")

ROWS = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")
CALLS = ("pwrite", "fsync", "replace", "ftruncate", "unlink", "link")
OPTIONS = ["--chunk-rows", "3", "--codec", "gzip:1", "--dataset", "a", "--dataset", "b", "--dataset", "c"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some datasets, and so small steps that there are many of them."""
    monkeypatch.setattr(planning, "_STEP_NBYTES", 4000)
    monkeypatch.setattr(repacking, "_CHECKPOINT_NBYTES", 10000)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("a", data=ROWS, chunks=(16, 30), compression="lzf")
        file.create_dataset("b", data=[f"text {n}" for n in range(300)])
        file.create_dataset("c", data=ROWS[:, 0] * 0.5, maxshape=(None,), chunks=(50,))
        file["d"] = ROWS[0]
        file["a"].attrs["other"] = file["c"].ref
    return tmp_path / "in.h5"


def command(source: Path, *more: str) -> int:
    return main(["repack", str(source), str(source.with_name("out.h5")), *OPTIONS, *more])


def is_right(source: Path) -> None:
    with h5py.File(source) as old, h5py.File(source.with_name("out.h5")) as new:
        for name in "abcd":
            assert (old[name][()] == new[name][()]).all()
        assert new["a"].chunks == (3, 30) and new["c"].chunks == (3,)
        assert new[new["a"].attrs["other"]] == new["c"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.h5", "out.h5"]


def count_calls(work: Callable[[], object], die_at: int = 0) -> int:
    """Calls to the system that change files; at one of them this process is killed, with half of it done."""

    def half(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "pwrite":
            descriptor, data, offset = arguments
            real(descriptor, data[: len(data) // 2], offset)

    with dying_at(die_at, [(os, name) for name in CALLS], half) as count:
        work()
    return count.calls


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_killed_again_and_again(
    source: Path, forked: Callable[[Callable[[], object]], int], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    assert total > 200
    is_right(source)
    rng = random.Random(seed)
    for die_at in (
        rng.randrange(1, 30),
        *(rng.randrange(1, total) for _ in range(3)),
        total - rng.randrange(8),
    ):
        source.with_name("out.h5").unlink(missing_ok=True)
        kills = 0
        while True:
            pid = forked(lambda: count_calls(lambda: command(source), die_at))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != -signal.SIGKILL:
                break
            kills += 1
            # The further it is, the fewer calls are left; at an early one it would never get further.
            die_at += rng.randrange(20)
            assert kills < 200
        assert code == 0 and kills
        is_right(source)


def test_what_was_done_is_not_done_again(
    source: Path,
    forked: Callable[[Callable[[], object]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    total = count_calls(lambda: command(source))
    source.with_name("out.h5").unlink()
    for share, phase in ((0.5, "written"), (0.98, "verified")):
        pid = forked(lambda: count_calls(lambda: command(source), int(total * share)))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        file = CheckpointedFile(source.with_name("out.h5.partial"))  # as it is put in order
        assert file.note is not None
        done = file.note[phase]
        assert done
        file.close()
        seen: dict[str, list[tuple[str, int]]] = {"written": [], "verified": []}
        write, check = repacking.write_rows, repacking._through_library
        with monkeypatch.context() as patch:
            patch.setattr(
                repacking,
                "write_rows",
                lambda dataset, first, rows: (
                    seen["written"].append((dataset.name, first)),
                    write(dataset, first, rows),
                ),
            )
            patch.setattr(
                repacking,
                "_through_library",
                lambda dataset, first, target: (
                    seen["verified"].append((dataset.name, first)), check(dataset, first, target)
                )[1],
            )  # fmt: skip
            capsys.readouterr()
            assert command(source) == 0
        assert all(first >= done.get(name, 0) for name, first in seen[phase])
        begun = dict(reversed(seen[phase]))
        counts = {"/a": 400, "/b": 300, "/c": 400}
        assert {name: first for name, first in begun.items() if first < counts[name]} == {
            name: done.get(name, 0) for name in counts if done.get(name, 0) < counts[name]
        }
        if phase == "verified":
            assert not seen["written"]
        rows = f"{sum(done.values()):,}"
        assert (
            f"{rows} {'of 1,100 rows are written' if phase == 'written' else 'are verified'}"
            in capsys.readouterr().err
        )
        is_right(source)
        source.with_name("out.h5").unlink()


@pytest.mark.parametrize("change", ["options", "input", "note", "data", "format"])
def test_what_is_there_fits_no_more(
    source: Path,
    forked: Callable[[Callable[[], object]], int],
    change: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    total = count_calls(lambda: command(source))
    source.with_name("out.h5").unlink()
    pid = forked(lambda: count_calls(lambda: command(source), total * 2 // 3))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    partial = source.with_name("out.h5.partial")
    CheckpointedFile(partial).close()
    more: list[str] = []
    if change == "options":
        more = ["--codec", "gzip:2"]
    elif change == "input":
        with h5py.File(source, "r+") as file:
            file["d"][0] = 99
    elif change == "note":
        (partial / "note.json").write_text("{")
    elif change == "format":
        note = json.loads((partial / "note.json").read_text())
        note["note"]["job"]["format"] = 0
        (partial / "note.json").write_text(json.dumps(note))
    else:
        data = (partial / "data.h5").read_bytes()
        (partial / "data.h5").write_bytes(bytes(2048) + data[2048:])
    capsys.readouterr()
    assert command(source, *more) == 0
    assert "going on" not in capsys.readouterr().err
    is_right(source)
