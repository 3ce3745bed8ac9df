"""A copy of a volume that is killed at any call to the system: the next run goes on and makes the same bytes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dying import dying_at

from fastpipe.cli import main
from fastpipe.volumes import repacking
from fastpipe.volumes.bricks import Bricks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux, which has SIGKILL and fork")

VOXELS = np.random.default_rng(0).integers(0, 90, (30, 33, 36), np.uint16)
VOXELS[8:24, :16] = 0  # of whole chunks, which have no files
CALLS = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "sync")
OPTIONS = ["--chunks", "8,8,8"]
Forked = Callable[[Callable[[], object]], int]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A volume, and so small steps that there are many of them; of one thread, whose calls come in one order."""
    monkeypatch.setattr(repacking, "planned_bricks", lambda *some: Bricks((8, 16, 24), 1, 1.0))
    monkeypatch.setattr(repacking, "_NOTED_NBYTES", 10000)
    monkeypatch.setattr(os, "sync", lambda: None)  # what other programs have written is nothing to the test
    np.save(tmp_path / "in.npy", VOXELS)
    return tmp_path / "in.npy"


def command(source: Path, *more: str) -> int:
    return main(["repack", str(source), str(source.with_name("out.zarr")), *OPTIONS, *more])


def content(source: Path) -> dict[str, bytes]:
    """All files beside the source but its own; there is nothing else than the copy."""
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.npy", "out.zarr"]
    return files_of(source.with_name("out.zarr"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def remove(source: Path) -> None:
    folder = source.with_name("out.zarr")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def count_calls(work: Callable[[], int], die_at: int = 0, codes: tuple[int, ...] = (0,)) -> int:
    """Calls to the system that change names; at one of them this process is killed, with half of the file
    that was to get its name.  The exit code is one of ``codes``."""

    def half(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "replace":
            os.truncate(arguments[0], os.stat(arguments[0]).st_size // 2)

    with dying_at(die_at, [(os, name) for name in CALLS], half) as count:
        assert work() in codes
    return count.calls


def killed(forked: Forked, source: Path, die_at: int) -> bool:
    """Run in a process that is killed at a call; whether it came to that."""
    # Where all that was left is an empty folder, the copy is one that is there already.
    partial = source.with_name("out.zarr.partial")
    is_done = source.with_name("out.zarr").exists() and not any(partial.iterdir())
    pid = forked(lambda: count_calls(lambda: command(source), die_at, (2,) if is_done else (0,)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_killed_again_and_again(
    source: Path, forked: Forked, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    undisturbed = content(source)
    assert total > 150 and len(undisturbed) == 81
    rng = random.Random(seed)
    begins = [rng.randrange(1, 12), *(rng.randrange(1, total) for _ in range(3)), total - rng.randrange(8)]
    for die_at in begins:
        remove(source)
        kills = 0
        while killed(forked, source, die_at):
            kills += 1
            if source.with_name("out.zarr").exists():  # then all of it is there
                assert files_of(source.with_name("out.zarr")) == undisturbed
            # The further it is, the fewer calls are left; at an early one it would never get further.
            die_at += rng.randrange(20)
            assert kills < 200
        assert kills
        assert content(source) == undisturbed


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_an_unfinished_copy_is_no_zarr_array(
    source: Path, forked: Forked, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    remove(source)
    assert killed(forked, source, int(total * share))
    assert not source.with_name("out.zarr").exists()
    array = source.with_name("out.zarr.partial") / "array"
    assert array.is_dir() and not (array / "zarr.json").exists()


def test_what_was_done_is_not_done_again(
    source: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    undisturbed = content(source)
    remove(source)
    assert killed(forked, source, total // 2)
    array = source.with_name("out.zarr.partial") / "array"
    there = {path for path in (array / "c").rglob("*") if path.is_file()}
    assert 10 < len(there) < 90
    states = {path: path.stat().st_mtime_ns for path in there}
    fresh, write = [], repacking.write_chunk
    monkeypatch.setattr(repacking, "write_chunk", lambda *some: (fresh.append(some[2]), write(*some)))
    capsys.readouterr()
    assert command(source) == 0
    assert f"going on: {len(there)} of 100 chunks are written" in capsys.readouterr().err
    assert len(fresh) == 80 - len(there)
    out = source.with_name("out.zarr")
    assert {path: (out / path.relative_to(array)).stat().st_mtime_ns for path in there} == states
    assert content(source) == undisturbed


def test_what_was_compared_is_not_compared_again(
    source: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_calls(lambda: command(source))
    remove(source)
    assert killed(forked, source, total - 12)
    assert (source.with_name("out.zarr.partial") / "array" / "zarr.json").exists()
    seen, compare = [], repacking._Repacking._wrong_chunks
    monkeypatch.setattr(
        repacking._Repacking, "_wrong_chunks", lambda *some: (seen.append(some[2]), compare(*some))[1]
    )
    assert command(source) == 0
    assert 1 <= len(seen) < 24


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_other_codecs_make_the_same_bytes_too(
    source: Path, forked: Forked, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    OPTIONS_OF_CODEC = ["--codec", codec]
    assert command(source, *OPTIONS_OF_CODEC) == 0
    undisturbed = content(source)
    remove(source)
    pid = forked(lambda: count_calls(lambda: command(source, *OPTIONS_OF_CODEC), 60))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert command(source, *OPTIONS_OF_CODEC) == 0
    assert content(source) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_while_several_threads_write(
    source: Path,
    forked: Forked,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(repacking, "planned_bricks", lambda *some: Bricks((16, 16, 24), 4, 1.0))
    total = count_calls(lambda: command(source))
    undisturbed = content(source)
    rng = random.Random(seed)
    for _ in range(5):
        remove(source)
        kills = 0
        while killed(forked, source, rng.randrange(1, total // 2)) and kills < 12:
            kills += 1
        assert kills
        if not source.with_name("out.zarr").exists():
            assert command(source) == 0
        assert content(source) == undisturbed
