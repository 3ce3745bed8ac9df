"""``generate`` where the machine fails, a script is killed from outside, or workers die: the file is the same."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generated import content, contents, failing, folder_of, made, noted_rows, plain, ragged
from scripts import parent, ran, started, wait_until, wait_until_ended

from fastpipe.errors import GenerationError
from fastpipe.generation import schedule, workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="run it on Linux, which has /proc")

N = 60
RAGGED = {"columns": {"r": ("int64", (None,))}}
SKIP = {**RAGGED, "max_bytes": 300, "bad_samples": "skip"}


def before(call: Callable[[int], object], fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a call before each row."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        call(index)
        return fn(index, rng)  # type: ignore[no-any-return]

    return sample


def with_batch(call: Callable[[int], object]) -> Callable[..., Any]:
    """The function ``plain`` and its batch, with a call before each row."""

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        for index in indices.tolist():
            call(index)
        return {"x": rng.normal(size=3), "index": indices}

    sample = before(call, plain)
    sample.batch = batch  # type: ignore[attr-defined]
    return sample


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven rows, each noted at once."""
    monkeypatch.setattr(schedule.Schedule, "_block_rows", lambda self: 7)
    monkeypatch.setattr(schedule, "_COMMIT_S", -1.0)
    monkeypatch.setattr("fastpipe.generation.run._MOST_BATCH_ROWS", 4)


@pytest.mark.parametrize("is_batch", [False, True])
def test_rows_behind_a_gap_are_kept_when_a_file_is_extended(tmp_path: Path, is_batch: bool) -> None:
    """Several workers note blocks in any order: those that are missing before others are not old ones."""
    rows, mended, begun_behind = 25, tmp_path / "mended", tmp_path / "begun_behind"

    def fail(index: int) -> None:
        """At one row, when another thread has begun with rows behind it, whose block is finished then."""
        if index > rows + 4:
            begun_behind.touch()
        elif index == rows + 1 and not mended.exists():
            while not begun_behind.exists():
                threading.Event().wait(0.001)
            raise KeyError("scene")

    out, options = tmp_path / "x" / "x.h5", {} if is_batch else {**RAGGED, "max_bytes": 300}
    fn = with_batch(fail) if is_batch else before(fail, ragged)
    (tmp_path / "whole").mkdir()
    (tmp_path / "x").mkdir()
    made(fn, out, rows, **options)
    with pytest.raises(GenerationError, match=f"row {rows + 1} failed"):
        made(fn, out, N, workers=2, executor="threads", **options)
    assert noted_rows(out) > rows + 1  # behind the gap, too
    mended.touch()
    made(fn, out, N, workers=2, **options)
    made(fn, tmp_path / "whole" / "x.h5", N, **options)
    assert content(out.parent) == content(tmp_path / "whole")


class Disk:
    """What is on the disk of the files in a folder: as each was at its last ``fsync``."""

    def __init__(self, folder: Path, rng: random.Random, at_call: Callable[[], object]) -> None:
        self._folder, self._rng, self._at_call = folder, rng, at_call
        self._kept = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}
        self._lock, self._is_looking = threading.RLock(), False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Call ``at_call`` in the middle of each write, and before each call that changes something."""
        names = ("open", "write", "pwrite", "fsync", "replace", "unlink", "ftruncate", "mkdir", "rmdir")
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(os, name, self._instead(name, getattr(os, name)))
            yield

    def _instead(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:  # so that what is looked at is of one moment
                if self._is_looking or (name == "open" and not arguments[1] & os.O_CREAT):
                    return real(*arguments, **options)
                self._is_looking = True
                try:
                    if name in ("write", "pwrite"):
                        descriptor, data, *offset = arguments
                        done = real(descriptor, data[: len(data) // 2], *offset)
                        self._at_call()
                        return done + real(descriptor, data[done:], *(at + done for at in offset))
                    self._at_call()
                    found = real(*arguments, **options)
                    if name == "fsync" and os.path.isfile(path := f"/proc/self/fd/{arguments[0]}"):
                        self._kept[os.stat(path).st_ino] = Path(path).read_bytes()
                    return found
                finally:
                    self._is_looking = False

        return call

    def after_failure(self, to: Path) -> None:
        """Files such as they may be found after the machine has failed now."""
        for path in list(self._folder.rglob("*")):
            target = to / path.relative_to(self._folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                target.mkdir(exist_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):  # of a worker
                now, kept = path.read_bytes(), self._kept.get(path.stat().st_ino, b"")
                target.write_bytes(self._mixed(kept, now, path.name == "journal"))

    def _mixed(self, kept: bytes, now: bytes, only_grows: bool) -> bytes:
        if only_grows and now.startswith(kept):
            return now[: self._rng.randint(len(kept), len(now))]
        size = self._rng.choice([len(now), max(len(kept), len(now) // 2)])
        pages = range(0, size, 64)
        return b"".join(
            self._rng.choice([now, kept])[at : at + 64].ljust(min(64, size - at), b"\0") for at in pages
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fn", "rows_before", "options"),
    [
        (plain, 0, {}), (ragged, 0, RAGGED), (failing, 0, SKIP), (failing, 25, SKIP), (plain, 0, {"workers": 2}),
        (ragged, 0, {**RAGGED, "max_bytes": 300, "workers": 2}), (ragged, 0, {**RAGGED, "workers": 2, "executor": "threads"}),
        (with_batch(lambda index: None), 25, {}),
    ],
)  # fmt: skip
def test_a_machine_that_fails_loses_nothing(
    tmp_path: Path, fn: Callable[..., Any], rows_before: int, options: dict[str, Any], caplog: Any
) -> None:
    """Bytes that were not brought to the disk may be there, or not, or in parts."""
    caplog.set_level(logging.INFO, "fastpipe.generate")
    alone = {name: value for name, value in options.items() if name not in ("workers", "executor")}
    for name in ("whole", "x"):
        (tmp_path / name).mkdir()
        if rows_before:
            made(fn, tmp_path / name / "x.h5", rows_before, **alone)
    made(fn, tmp_path / "whole" / "x.h5", N, **alone)
    undisturbed, out = content(tmp_path / "whole"), tmp_path / "x" / "x.h5"
    rng, failures = random.Random(1), list[Path]()

    def fail() -> None:
        if folder_of(out).exists() and rng.random() < (0.5 if "workers" in options else 0.1):
            failures.append(tmp_path / f"failure {len(failures)}")
            disk.after_failure(failures[-1])

    disk = Disk(out.parent, rng, fail)
    with disk.watched():
        made(fn, out, N, **options)
    assert content(out.parent) == undisturbed
    assert len(failures) > 5 and sum(noted_rows(folder / "x.h5") > 0 for folder in failures) > 3
    for folder in failures:
        noted = noted_rows(folder / "x.h5")
        caplog.clear()
        assert made(fn, folder / "x.h5", N, **alone).made <= N - noted
        assert "not as they were noted" not in caplog.text
        assert content(folder) == undisturbed, folder


# No guard: workers do not run it again.
_SCRIPT = """
import os, sys
import numpy as np
from fastpipe.generation import generate, schedule

schedule._COMMIT_S, schedule._BLOCK_S = 0.0, 0.02
kind = sys.argv[1]

def sample(index, rng):
    if index >= 100 and not os.path.exists("go"):
        os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, unlike print() without a buffer
        while True:
            pass
    x = rng.normal(size=(24, 24)).astype("f4")
    for _ in range(400):
        x = np.tanh(x @ x.T / 5)
    if kind != "plain" and index % 50 == 7:
        raise ValueError("no scene")
    found = {"x": x[0], "index": index}
    return found if kind == "plain" else {**found, "r": np.arange(index % 9), "text": str(index)}

options = {} if kind == "plain" else {"columns": {"r": ("int64", (None,))}, "bad_samples": "skip"}
if kind == "files":
    options["max_bytes"] = 12000
print("running", flush=True)
generate(sample, 300, "x.h5", seed=1, workers=2, progress=False, **options)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["plain", "ragged", "files"])
def test_a_script_that_is_killed_goes_on_and_its_workers_end_even_in_a_row_without_end(
    tmp_path: Path, kind: str, how: signal.Signals
) -> None:
    folder, whole = tmp_path / "x", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    with started("-c", _SCRIPT, kind, cwd=folder, stderr=None) as process:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        pids = {int(process.stdout.readline()) for _ in range(2)}
        assert [parent(worker) for worker in pids] == [process.pid] * 2
        wait_until(lambda: noted_rows(folder / "x.h5") > 0, process)
        process.send_signal(how)
        assert process.wait() == -how
        wait_until_ended(pids)
    for place in (folder, whole):
        (place / "go").touch()
        done = ran("-c", _SCRIPT, kind, cwd=place)
        assert (done.returncode, done.stdout) == (0, "running\n"), done.stderr
    assert content(folder) == content(whole) and (len(content(whole)) > 3) == (kind == "files")


@pytest.mark.parametrize("is_batch", [False, True])
def test_workers_that_die_once_in_some_rows_change_nothing(tmp_path: Path, is_batch: bool) -> None:
    dies, this = {11, 12, 30, 59}, os.getpid()

    def die_once(index: int) -> None:
        mark = tmp_path / f"{index} is over"
        if index in dies and os.getpid() != this and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    fn, options = (with_batch(die_once), {}) if is_batch else (before(die_once, failing), SKIP)
    alone = made(fn, tmp_path / "alone.h5", N, **options)
    assert not list(tmp_path.glob("*over"))
    found = made(fn, tmp_path / "x.h5", N, workers=2, **options)
    assert len(list(tmp_path.glob("*over"))) == len(dies)
    assert contents(found) == contents(alone)


_ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "exits": (lambda: os._exit(3), "exited with 3"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
    "crashes": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was ended by SIGSEGV"),
    "exits in a batch": (lambda: os._exit(3), "exited with 3"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("how", _ENDS)
def test_the_row_that_ends_its_worker_is_found(tmp_path: Path, how: str) -> None:
    """A batch is made in one call, so that no one can tell which of its rows it is."""
    (end, words), first = _ENDS[how], 40 if how.endswith("batch") else 43

    def end_once(index: int) -> None:
        if index == 43 and not (tmp_path / "mended").exists():
            end()

    sample = with_batch(end_once) if first == 40 else before(end_once, plain)
    with pytest.raises(GenerationError, match=f"{words} while it made rows {first} to 43") as caught:
        made(sample, tmp_path / "x.h5", N, workers=2)
    kept = noted_rows(tmp_path / "x.h5")
    assert kept >= first and f" {kept} of {N} rows are kept" in str(caught.value)
    assert first == 40 or caught.value.index == 43
    (tmp_path / "mended").touch()
    found = made(sample, tmp_path / "x.h5", N, workers=2)
    assert found.made == N - kept
    assert contents(found) == contents(made(sample, tmp_path / "y.h5", N))


def test_a_child_of_a_dead_worker_does_not_hide_its_death(tmp_path: Path) -> None:
    """It has the worker's end of the pipe, too."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20 and not (tmp_path / "child").exists():
            child = os.fork()
            if not child:
                while True:
                    signal.pause()
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": rng.normal(size=3)}

    try:
        found = made(sample, tmp_path / "x.h5", N, workers=1)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert found.rows == N


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_worker_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """Those that were started before end, and the function is not blamed."""
    real, number = workers.subprocess.Popen, itertools.count()

    def popen(*arguments: Any, **options: Any) -> Any:
        if next(number) >= 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **options)

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20 and is_begun:
            os._exit(1)
        return {"x": index}

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    words = r"Resource temporarily unavailable.* rows are kept" if is_begun else "; 0 of 60 rows are kept"
    with pytest.raises((GenerationError, OSError), match=words):
        made(sample, tmp_path / "x.h5", N, workers=2 if is_begun else 4)
    monkeypatch.undo()
    assert is_begun or made(sample, tmp_path / "x.h5", N, workers=2).made == N
