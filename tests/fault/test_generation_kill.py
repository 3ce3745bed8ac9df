"""``generate`` that is killed: its process, a worker, the machine.  The file comes out the same, to the byte.

Processes die by progress, never by time: at a call to the system, or when so many rows are noted.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import Started, children, parent, wait_until_ended

import fastpipe
from fastpipe.errors import GenerationError
from fastpipe.generation import Generated, generate, schedule, workers

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="run it on Linux, which has SIGKILL and /proc"
)

N = 60
Forked = Callable[[Callable[[], object]], int]


# ---- jobs, in this process and in forks of it ------------------------------------------------------


def plain(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.normal(size=3), "index": index}


def ragged(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"r": np.arange(index % 5), "text": "ä" * (index % 4), "x": rng.random()}


def failing(index: int, rng: np.random.Generator) -> dict[str, Any]:
    if index % 9 == 4:
        raise ValueError(index)
    return {"x": rng.random(), "r": np.arange(index % 5), "y": index}


def batched(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.normal(size=3000), "r": np.arange(index % 3)}


def _batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
    company = 1e-9 * (len(indices) + indices[0] / 1024)  # as the last bits of a product of matrices
    return {"x": rng.normal(size=3000) + company, "r": [np.arange(index % 3) for index in indices]}


batched.batch = _batch  # type: ignore[attr-defined]

RAGGED = {"columns": {"r": ("int64", (None,))}}
JOBS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "plain": (plain, {}, 0),
    "ragged": (ragged, RAGGED, 0),
    "files": (ragged, {**RAGGED, "max_bytes": 300}, 0),
    "skip": (failing, {**RAGGED, "bad_samples": "skip"}, 0),
    "skip in files": (failing, {**RAGGED, "bad_samples": "skip", "max_bytes": 300}, 0),
    "batches": (batched, RAGGED, 0),
    # Rows that are finished before.
    "more": (ragged, RAGGED, 25),
    "more in files": (failing, {**RAGGED, "bad_samples": "skip", "max_bytes": 300}, 25),
    "more batches": (batched, RAGGED, 25),
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven rows, each noted at once: the calls to the system come in one order."""
    monkeypatch.setattr(schedule.Schedule, "_block_rows", lambda self: 7)
    monkeypatch.setattr(schedule, "_COMMIT_S", -1.0)
    monkeypatch.setattr("fastpipe.generation.run._MOST_BATCH_ROWS", 4)


def made(job: str, out: Path, n: int = N, **options: Any) -> Generated:
    fn, own, _ = JOBS[job]
    return generate(fn, n, out, **{"seed": 3, "workers": 0, "progress": False, **own, **options})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def begun(job: str, folder: Path) -> Path:
    """An empty folder; or one with the file that is to be extended."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if JOBS[job][2]:
        made(job, folder / "x.h5", JOBS[job][2])
    return folder / "x.h5"


def whole(job: str, folder: Path) -> dict[str, bytes]:
    """The files of a run that nobody disturbs."""
    made(job, begun(job, folder))
    return content(folder)


def noted_rows(out: Path) -> int:
    """Rows that whole lines of the journal note."""
    journal = out.with_name(f"{out.name}.partial") / "journal"
    with contextlib.suppress(FileNotFoundError):
        lines = [line for line in journal.read_bytes().split(b"\n")[:-1] if b'"rows":[' in line[:20]]
        return sum(last - first for first, last in (json.loads(line[9:])["rows"] for line in lines))
    return 0


# ---- killed at any call to the system ----------------------------------------------------------------

CALLS = ("open", "write", "pwrite", "fsync", "replace", "unlink", "ftruncate", "mkdir", "rmdir")


@contextlib.contextmanager
def counted(at: Callable[[int], None]) -> Iterator[Callable[[], int]]:
    """Tell the number of each call that changes something on the disk, before it is done.

    One call at a time, also of several threads: what is looked at meanwhile is of one moment.
    """
    real, said, is_telling = {name: getattr(os, name) for name in CALLS}, [0], [False]
    one_at_a_time = threading.RLock()

    def tell() -> None:
        said[0] += 1
        is_telling[0] = True  # what it does itself does not count
        try:
            at(said[0])
        finally:
            is_telling[0] = False

    def instead(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with one_at_a_time:
                return counted_call(*arguments, **options)

        def counted_call(*arguments: Any, **options: Any) -> Any:
            if is_telling[0] or (name == "open" and not arguments[1] & os.O_CREAT):
                return real[name](*arguments, **options)
            if name in ("write", "pwrite") and len(arguments[1]) > 1:  # only half of it may get there
                half = len(arguments[1]) // 2
                done = real[name](arguments[0], arguments[1][:half], *arguments[2:])
                tell()
                rest = [arguments[2] + done] if name == "pwrite" else []
                return done + real[name](arguments[0], arguments[1][done:], *rest)
            tell()
            return real[name](*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, instead(name))
        yield lambda: said[0]


def number_of_calls(job: str, out: Path) -> int:
    with counted(lambda number: None) as count:
        made(job, out)
    return count()


def killed(forked: Forked, job: str, out: Path, die_at: int) -> bool:
    """Made in a process that is killed at a call; whether it came to that."""

    def die(number: int) -> None:
        if number == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        with counted(die):
            made(job, out)

    code = os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def goes_on(job: str, out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next call finishes, and makes none of the rows again that were noted."""
    noted, is_extended = noted_rows(out), bool(JOBS[job][2])
    caplog.clear()
    found = made(job, out)
    assert found.made <= N - noted
    if is_extended:
        assert found.made <= N - JOBS[job][2] // 4 * 4
    assert "not as they were noted" not in caplog.text


def survives(
    forked: Forked, job: str, folder: Path, die_at: int, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed at a call, it goes on to the file that it would have made."""
    out = begun(job, folder)
    assert killed(forked, job, out, die_at)
    goes_on(job, out, caplog)
    assert content(out.parent) == undisturbed, die_at
    assert not out.with_name("x.h5.partial").exists()


@pytest.fixture
def killed_at(
    tmp_path: Path, forked: Forked, caplog: pytest.LogCaptureFixture
) -> Callable[[str, Callable[[int], Iterable[int]]], None]:
    """Kills a job at those of its calls that are chosen, given how many there are, each time from its begin."""

    def kill(job: str, chosen: Callable[[int], Iterable[int]]) -> None:
        caplog.set_level(logging.INFO, "fastpipe.generate")
        undisturbed = whole(job, tmp_path / "whole")
        total = number_of_calls(job, begun(job, tmp_path / "x"))
        assert content(tmp_path / "x") == undisturbed and total > 40
        for die_at in chosen(total):
            survives(forked, job, tmp_path / "x", die_at, undisturbed, caplog)

    return kill


@pytest.mark.few(4)
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_some_call(killed_at: Any, job: str) -> None:
    rng = random.Random(job)
    killed_at(
        job,
        lambda total: sorted({*rng.sample(range(1, total), 4), *rng.sample(range(total - 20, total), 2)}),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("job", ["files", "more in files"])
def test_killed_while_files_get_their_names(killed_at: Any, job: str) -> None:
    """Some are of the new job then, and some of the one before."""
    killed_at(job, lambda total: range(total - 24, total))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_every_call(killed_at: Any, job: str) -> None:
    killed_at(job, lambda total: range(1, total + 1))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("job", ["files", "more in files"])
def test_killed_again_and_again(tmp_path: Path, forked: Forked, job: str, seed: int) -> None:
    undisturbed = whole(job, tmp_path / "whole")
    total = number_of_calls(job, begun(job, tmp_path / "x"))
    rng, kills = random.Random(seed), 0
    out, die_at = begun(job, tmp_path / "x"), rng.randrange(12, total // 8)
    while killed(forked, job, out, die_at):
        kills += 1
        # Files are finished from the beginning each time, so that it would never come to an end.
        die_at += rng.randrange(total // 8)
        assert kills < 200
    assert kills > 3
    assert content(out.parent) == undisturbed


@pytest.mark.parametrize("job", ["more", "more in files", "more batches"])
def test_rows_behind_a_gap_when_a_file_is_extended(tmp_path: Path, job: str) -> None:
    """Several workers note blocks in any order: those that are missing before others are not old ones."""
    fn, options, rows = JOBS[job]

    mended, begun_behind = tmp_path / "mended", tmp_path / "begun_behind"

    def fails(first: int, last: int) -> None:
        """At one row, when another thread has begun with rows behind it, whose block is finished then."""
        if mended.exists():
            return
        if first > rows + 1:
            begun_behind.touch()
        elif last >= rows + 1:
            while not begun_behind.exists():
                threading.Event().wait(0.001)
            raise KeyError("scene")

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        fails(index, index)
        return fn(index, rng)  # type: ignore[no-any-return]

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        fails(int(indices[0]), int(indices[-1]))
        return fn.batch(indices, rng)  # type: ignore[attr-defined, no-any-return]

    if hasattr(fn, "batch"):
        sample.batch = batch  # type: ignore[attr-defined]
    (tmp_path / "whole").mkdir()
    (tmp_path / "x").mkdir()
    options = {"seed": 3, "progress": False, **options, "bad_samples": "raise"}
    out = tmp_path / "x" / "x.h5"
    if job == "more in files":
        fn = ragged
    generate(sample, rows, out, workers=0, **options)
    with pytest.raises(GenerationError, match=f"row {rows + 1} failed"):
        generate(sample, N, out, workers=2, executor="threads", **options)
    assert noted_rows(out) > rows + 1  # behind the gap, too
    mended.touch()
    generate(sample, N, out, workers=2, **options)
    generate(sample, N, tmp_path / "whole" / "x.h5", workers=0, **options)
    assert content(out.parent) == content(tmp_path / "whole")


# ---- the machine fails: what was not brought to the disk may be there, or not, or in parts --------------


class _Disk:
    """What is on the disk for certain of the files in a folder: as each was at its last ``fsync``."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng, self._kept = folder, rng, dict[int, bytes]()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            path = f"/proc/self/fd/{descriptor}"
            if os.path.isfile(path):
                self._kept[os.stat(path).st_ino] = Path(path).read_bytes()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            yield

    def after_failure(self, to: Path) -> None:
        """Files such as they may be found after the machine has failed now."""
        for path in list(self._folder.rglob("*")):
            target = to / path.relative_to(self._folder)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                now, kept = path.read_bytes(), self._kept.get(path.stat().st_ino, b"")
            except FileNotFoundError:  # of a worker
                continue
            target.write_bytes(self._mixed(kept, now, path.name == "journal"))

    def _mixed(self, kept: bytes, now: bytes, only_grows: bool) -> bytes:
        if only_grows and now.startswith(kept):
            return now[: self._rng.randint(len(kept), len(now))]
        size = self._rng.choice([len(now), max(len(kept), len(now) // 2)])
        pages = range(0, size, 64)
        return b"".join(
            self._rng.choice([now, kept])[at : at + 64].ljust(min(64, size - at), b"\0") for at in pages
        )


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("job", "options"),
    [
        *((job, {}) for job in ("plain", "ragged", "skip in files", "more in files", "more batches")),
        ("plain", {"workers": 2}),
        ("files", {"workers": 2}),
        ("ragged", {"workers": 2, "executor": "threads"}),
    ],
    ids=str,
)
def test_the_machine_fails(
    tmp_path: Path, job: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.generate")
    undisturbed = whole(job, tmp_path / "whole")
    out, rng = begun(job, tmp_path / "x"), random.Random(job)
    disk, failures = _Disk(out.parent, rng), list[Path]()
    # What was there before is on the disk; as is the lock, which is empty.
    for path in out.parent.iterdir():
        disk._kept[path.stat().st_ino] = path.read_bytes()

    def fail(number: int) -> None:
        if out.with_name("x.h5.partial").exists() and rng.random() < (0.5 if options else 0.15):
            folder = tmp_path / f"failure {number}"
            disk.after_failure(folder)
            failures.append(folder)

    with disk.watched(), counted(fail):
        made(job, out, **options)
    assert content(out.parent) == undisturbed
    assert len(failures) > 5 and sum(noted_rows(folder / "x.h5") > 0 for folder in failures) > 3
    for folder in failures:
        goes_on(job, folder / "x.h5", caplog)
        assert content(folder) == undisturbed, folder
        shutil.rmtree(folder)


# ---- a script, killed from outside ------------------------------------------------------------------

_SCRIPT = """
# No guard: workers do not run it again.
import os, signal, sys
import numpy as np
from fastpipe.generation import generate, run, schedule

schedule._COMMIT_S, schedule._BLOCK_S = 0.0, 0.02
kind, rows, die_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
left = die_at

def dying(call):
    def instead(*arguments, **options):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return instead

def armed(step):
    # From here on it may die at a call to the system.
    def instead(*arguments):
        for name in ("pwrite", "write", "fsync", "replace", "unlink", "ftruncate", "rmdir"):
            if not hasattr(getattr(os, name), "__closure__"):
                setattr(os, name, dying(getattr(os, name)))
        return step(*arguments)
    return instead

if die_at:
    run.finish, run.name_files = armed(run.finish), armed(run.name_files)

def sample(index, rng):
    x = rng.normal(size=(24, 24)).astype("f4")
    for _ in range(STEPS):
        x = np.tanh(x @ x.T / 5)
    if kind != "plain" and index % 50 == 7:
        raise ValueError("no scene")
    found = {"x": x[0], "index": index}
    return found if kind == "plain" else {**found, "r": np.arange(index % 9), "text": str(index)}

options = {} if kind == "plain" else {"columns": {"r": ("int64", (None,))}, "bad_samples": "skip"}
if kind == "files":
    options["max_bytes"] = 12000
print("running", flush=True)
generate(sample, rows, "x.h5", seed=1, workers=2, progress=False, **options)
"""


class _Runs:
    """Runs of the script in a folder."""

    def __init__(self, folder: Path, kind: str, steps: int) -> None:
        self.folder, self._kind = folder, kind
        folder.mkdir(exist_ok=True)
        self.out = folder / "x.h5"
        (folder / "script.py").write_text(_SCRIPT.replace("STEPS", str(steps)))

    def start(self, rows: int, die_at: int = 0) -> Started:
        return Started(
            [sys.executable, "script.py", self._kind, str(rows), str(die_at)], cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(fastpipe.__file__).parents[1])},
        )  # fmt: skip

    def killed(self, rows: int, when: Callable[[], bool]) -> bool:
        """Killed as soon as something is so; whether it came to that.  Its workers go with it."""
        with self.start(rows) as process:
            workers = self.wait(process, when)
            process.kill()
            code = process.wait()
            wait_until_ended(workers)
            assert code in (0, -signal.SIGKILL), process.stderr and process.stderr.read()
        return code != 0

    def wait(self, process: subprocess.Popen[str], when: Callable[[], object]) -> list[int]:
        """Until something is so; the workers then."""
        while process.poll() is None and not when():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.001)
        return children(process.pid)

    def finish(self, rows: int, die_at: int = 0) -> int:
        """Run to its end; its exit code."""
        with self.start(rows, die_at) as process:
            told, errors = process.communicate()
            assert process.returncode in (0, -signal.SIGKILL), errors
            assert told == "running\n"
        return process.returncode

    def content(self) -> dict[str, str]:
        """Digests of the files; there is nothing else."""
        names = {path.name for path in self.folder.iterdir()} - {"script.py"}
        assert all(name.startswith("x") and name.endswith(".h5") for name in names)
        return {name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in names}


@pytest.mark.parametrize(
    ("kind", "kills", "is_extended"),
    [
        ("files", 3, False),
        *(
            pytest.param(kind, 30, is_extended, marks=pytest.mark.slow)
            for kind in ("plain", "ragged", "files")
            for is_extended in (False, True)
        ),
    ],
)
def test_a_script_that_is_killed(tmp_path: Path, kind: str, kills: int, is_extended: bool) -> None:
    rows, rng = 120 * kills, random.Random(kills)
    reference = _Runs(tmp_path / "whole", kind, 600)
    assert reference.finish(rows) == 0
    undisturbed = reference.content()
    assert len(undisturbed) > 2 if kind == "files" else len(undisturbed) == 1

    runs = _Runs(tmp_path / "x", kind, 600)
    if is_extended:
        assert runs.finish(rows // 4) == 0
    while_making = kills - kills // 3
    for _ in range(while_making):
        wanted = noted_rows(runs.out) + rng.randrange(1, rows // (2 * while_making))
        assert runs.killed(rows, lambda: noted_rows(runs.out) >= wanted)
        assert noted_rows(runs.out) >= wanted
    finishing = 0
    for die_at in rng.sample(range(1, 12), kills // 3):
        finishing += runs.finish(rows, die_at) == -signal.SIGKILL
    assert finishing or kills < 30
    assert runs.finish(rows) == 0
    assert runs.content() == undisturbed


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent_even_in_a_row_without_end(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom fastpipe.generation import generate\n"
        "def sample(index, rng):\n"
        "    if index and os.getpid() != parent:\n"
        "        os.write(1, f'{os.getpid()}\\n'.encode())  # in one piece, unlike print() without a buffer\n"
        "        while True:\n"
        "            pass\n"
        "    return {'x': index}\n"
        "parent = os.getpid()\n"
        f"generate(sample, 100, {str(tmp_path / 'x.h5')!r}, seed=0, workers=2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(fastpipe.__file__).parents[1])}
    with Started(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        workers = {int(process.stdout.readline()) for _ in range(2)}
        assert [parent(worker) for worker in workers] == [process.pid] * 2
        process.send_signal(how)
        assert process.wait() == -how
        wait_until_ended(workers)


# ---- workers that die ---------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """By somebody else: the system that is short of memory, say."""
    reference = _Runs(tmp_path / "whole", "ragged", 400)
    assert reference.finish(400) == 0
    runs = _Runs(tmp_path / "x", "ragged", 400)
    with runs.start(400) as process:
        workers = runs.wait(process, lambda: noted_rows(runs.out) > 60)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        again = runs.wait(process, lambda: set(children(process.pid)) - set(workers))
        new = [one for one in again if one not in workers]
        assert new
        os.kill(new[0], signal.SIGKILL)
        assert process.wait() == 0, process.stderr and process.stderr.read()
    assert runs.content() == reference.content()


@pytest.mark.parametrize("job", ["ragged", "skip in files", "batches"])
def test_workers_that_die_once_in_some_rows_change_nothing(tmp_path: Path, job: str) -> None:
    fn, options, _ = JOBS[job]
    dies, parent = {11, 12, 30, 59}, os.getpid()

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        die_once(index)
        return fn(index, rng)  # type: ignore[no-any-return]

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        for index in indices.tolist():
            die_once(index)
        return fn.batch(indices, rng)  # type: ignore[attr-defined, no-any-return]

    def die_once(index: int) -> None:
        mark = tmp_path / f"{index} is over"
        if index in dies and os.getpid() != parent and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if hasattr(fn, "batch"):
        sample.batch = batch  # type: ignore[attr-defined]
    options = {"seed": 3, "progress": False, **options}
    alone = generate(sample, N, tmp_path / "alone.h5", workers=0, **options)
    assert not list(tmp_path.glob("*over"))
    found = generate(sample, N, tmp_path / "x.h5", workers=2, **options)
    assert len(list(tmp_path.glob("*over"))) == len(dies)
    assert [path.read_bytes() for path in found.paths] == [path.read_bytes() for path in alone.paths]


_ENDS = {
    "exits": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


@pytest.mark.parametrize(
    ("how", "words"),
    [("exits", "exited with 3"), ("is killed", "was ended by SIGKILL"), ("crashes", "was ended by SIGSEGV")],
)
def test_the_row_that_ends_its_worker_is_found(tmp_path: Path, how: str, words: str) -> None:
    end = _ENDS[how]

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 43 and not (tmp_path / "mended").exists():
            end()
        return {"x": rng.normal(size=3), "index": index}

    options = {"seed": 0, "progress": False}
    with pytest.raises(GenerationError, match=f"{words} while it made rows 43 to 43") as caught:
        generate(sample, N, tmp_path / "x.h5", workers=2, **options)
    assert caught.value.index == 43
    kept = noted_rows(tmp_path / "x.h5")
    assert kept >= 43 and f" {kept} of {N} rows are kept" in str(caught.value)
    (tmp_path / "mended").touch()
    found = generate(sample, N, tmp_path / "x.h5", workers=2, **options)
    assert found.made == N - kept
    alone = generate(sample, N, tmp_path / "y.h5", workers=0, **options)
    assert found.paths[0].read_bytes() == alone.paths[0].read_bytes()


def test_the_batch_that_ends_its_worker_is_found(tmp_path: Path) -> None:
    """It is made in one call, so that which of its rows it is nobody can tell."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.normal(size=3), "index": index}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        if 42 in indices:
            os._exit(1)
        return {"x": rng.normal(size=3), "index": indices}

    sample.batch = batch  # type: ignore[attr-defined]
    with pytest.raises(GenerationError, match="exited with 1 while it made rows 40 to 43"):
        generate(sample, N, tmp_path / "x.h5", workers=2, seed=0, progress=False)
    assert noted_rows(tmp_path / "x.h5") >= 40


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
        found = generate(sample, N, tmp_path / "x.h5", workers=1, seed=0, progress=False)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert found.rows == N


def test_workers_that_cannot_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, number = subprocess.Popen, itertools.count()

    def popen(*arguments: Any, **options: Any) -> Any:
        if next(number) >= 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **options)

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20:
            os._exit(1)
        return {"x": index}

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    with pytest.raises((GenerationError, OSError), match=r"Resource temporarily unavailable.* rows are kept"):
        generate(sample, N, tmp_path / "x.h5", workers=2, seed=0, progress=False)


def test_workers_that_cannot_be_started_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started before end, and the function is not blamed."""
    real, number = subprocess.Popen, itertools.count()

    def popen(*arguments: Any, **options: Any) -> Any:
        if next(number) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **options)

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": index}

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="Resource temporarily unavailable; 0 of 60 rows are kept"):
        generate(sample, N, tmp_path / "x.h5", workers=4, seed=0, progress=False)
    monkeypatch.undo()
    assert generate(sample, N, tmp_path / "x.h5", workers=2, seed=0, progress=False).made == N


def test_a_path_among_those_that_modules_are_looked_for_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python passes over what is no string there."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": index}

    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "{scenes}", str(tmp_path / "{more}")])
    assert generate(sample, N, tmp_path / "x.h5", workers=2, seed=0, progress=False).made == N
