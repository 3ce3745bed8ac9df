"""``generate`` where something is wrong: bytes, the disk, other arguments, Ctrl-C.  No row is lost by it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from generated import content, contents, environment, folder_of, made, noted, noted_rows
from scripts import children, has_ended, on_small_disk, ran, started, wait_until

from fastpipe.cli import main
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation import Generated, schedule

N = 30
RAGGED = {"columns": {"r": ("int64", (None,))}}


def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.integers(99, size=2, dtype="u1"), "index": np.int16(index)}


def ragged(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"r": np.arange(index % 4), "x": rng.integers(99, dtype="u1"), "text": str(index)}


def other(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.integers(9, size=2, dtype="u1"), "index": np.int16(index)}


class Stopping:
    """A function that raises in row 26, until the file ``mended`` is there."""

    def __init__(self, fn: Callable[..., Any], folder: Path) -> None:
        self.fn, self.mended = fn, folder / "mended"
        self.__qualname__ = "sample"

    def __call__(self, index: int, rng: np.random.Generator) -> Any:
        if index == 26 and not self.mended.exists():
            raise KeyError("scene")
        return self.fn(index, rng)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.Schedule, "_block_rows", lambda self: 4)
    monkeypatch.setattr(schedule, "_COMMIT_S", -1.0)


def unfinished(fn: Callable[..., Any], folder: Path, **options: Any) -> Path:
    """A job that stopped in a row, and goes on from now on; the file."""
    with pytest.raises(GenerationError, match="row 26 failed: KeyError: 'scene'"):
        made(Stopping(fn, folder), folder / "x.h5", N, **options)
    assert noted_rows(folder / "x.h5") == 26
    (folder / "mended").touch()
    return folder / "x.h5"


class Copies:
    """Copies of an unfinished job, each damaged in its own way, that are to end as if nothing was."""

    def __init__(self, fn: Callable[..., Any], folder: Path, **options: Any) -> None:
        out = unfinished(fn, folder, **options)
        self._fn, self._options = Stopping(fn, folder), options
        self.files = content(folder_of(out))
        made(self._fn, folder / "whole.h5", N, **options)
        self._whole = (folder / "whole.h5").read_bytes()
        self.out = folder / "copy" / "x.h5"

    def goes_on(self, files: dict[str, bytes], **options: Any) -> int:
        """The next call finishes what these files leave of the job; how many rows it makes."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        folder_of(self.out).mkdir(parents=True)
        for name, data in files.items():
            (folder_of(self.out) / name).write_bytes(data)
        found = made(self._fn, self.out, N, **{**self._options, **options})
        assert content(self.out.parent) == {"x.h5": self._whole}
        assert not folder_of(self.out).exists()
        return found.made


def test_a_journal_may_be_cut_off_or_damaged(tmp_path: Path, small_blocks: None, caplog: Any) -> None:
    copies, rng = Copies(sample, tmp_path), random.Random(0)
    journal = copies.files["journal"]
    lines = journal.splitlines(keepends=True)
    blocks = [json.loads(line[9:])["rows"] for line in lines[1:]]
    rows = [last - first for first, last in blocks]

    def rows_made(content: bytes) -> int:
        return copies.goes_on({**copies.files, "journal": content})

    for size in rng.sample(range(len(lines[0]), len(journal)), 15):
        assert rows_made(journal[:size]) == N - sum(rows[: journal[:size].count(b"\n") - 1])
    for size in (0, 1, 8, 9, 10, 50):  # the machine failed before anything was made: there are no data
        assert copies.goes_on({"lock": b"", "journal": journal[:size]}) == N
    for garbage in (b"\0" * 4096, b"\n\n", b"00000000 {}\n", journal[-40:], b"\xff\n" * 9):
        assert rows_made(journal + garbage) == N - 26
    for at in rng.sample(range(len(lines[0]), len(journal)), 20):
        assert rows_made(journal[:at] + bytes([journal[at] ^ 1 << at % 8]) + journal[at + 1 :]) >= N - 26
    caplog.clear()
    damaged = b"".join([*lines[:3], lines[3].replace(b"rows", b"rowz"), *lines[4:]])
    assert rows_made(damaged) == N - 26 + rows[2]
    assert "1 lines of the journal are damaged" in caplog.text


def test_a_journal_that_does_not_say_of_which_job_it_is_is_kept(tmp_path: Path, small_blocks: None) -> None:
    copies = Copies(sample, tmp_path)
    changed = bytearray(copies.files["journal"])
    changed[20] ^= 1
    files = {**copies.files, "journal": bytes(changed)}
    with pytest.raises(GenerationError, match=r"its journal, which says of which, is damaged.*resume=False"):
        copies.goes_on(files)
    assert content(folder_of(copies.out)) == files
    assert copies.goes_on(files, resume=False) == N
    del copies.files["lock"]  # without which it may be of anybody
    with pytest.raises(OptionError, match="does not belong to an unfinished job; move it away"):
        copies.goes_on(copies.files)
    assert content(folder_of(copies.out)) == copies.files


@pytest.mark.parametrize("suffix", [".data", ".spool"])
def test_rows_that_are_damaged_or_gone_are_made_again(
    tmp_path: Path, small_blocks: None, suffix: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.generate")
    copies, words = Copies(ragged, tmp_path, **RAGGED), "rows are not as they were noted, and are made again"
    name = next(name for name in copies.files if name.endswith(suffix))
    data, again = copies.files[name], 0
    # At the end of the data file are the rows; before, structure that is not there yet.
    places = range(len(data) - 40, len(data), 2) if suffix == ".data" else range(0, len(data), 15)
    for at in places:
        caplog.clear()
        rows = copies.goes_on({**copies.files, name: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]})
        assert rows == N - 26 + (words in caplog.text) * (2 if "2 rows are not" in caplog.text else 4)
        again += words in caplog.text
    assert again == (13 if suffix == ".data" else len(places))
    begin = data.rindex(bytes(64)) if suffix == ".data" else 0
    for kept in (None, begin, begin + (len(data) - begin) // 2):
        files = {one: content for one, content in copies.files.items() if one != name}
        assert copies.goes_on(files if kept is None else {**files, name: data[:kept]}) > N - 26
        assert words.partition("rows ")[2] in caplog.text


_ON_A_SMALL_DISK = """
import json, os, subprocess, sys
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from fastpipe.generation import generate

def sample(index, rng):
    found = {"x": rng.normal(size=64), "index": index}
    if kind != "plain":
        found |= {"r": np.arange(index % 40), "text": str(index) * 5}
    return found

disk, who, kind, steps = *sys.argv[1:4], int(sys.argv[4])
options = {"seed": 0, "progress": False, "max_bytes": 100_000 if kind == "files" else None}
options["columns"] = None if kind == "plain" else {"r": ("int64", (None,))}
options |= {
    "pool": {"executor": ThreadPoolExecutor(2)}, "threads": {"executor": "threads", "workers": 2},
}.get(who) or {"workers": int(who)}
free = lambda: os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
found, out = [], f"{disk}/x.h5"
with open(f"{disk}/filler", "wb") as filler:
    filler.write(bytes(free() - 16384))
for step in range(200):
    try:
        made = generate(sample, 1500, out, **options)
    except OSError as error:
        found.append([error.errno, str(error), sorted(os.listdir(disk))])
    else:
        break
    size = os.stat(f"{disk}/filler").st_size - steps
    assert size > 0, found
    os.truncate(f"{disk}/filler", size)
os.unlink(f"{disk}/filler")
left = {name: open(f"{disk}/{name}", "rb").read().hex() for name in os.listdir(disk)}
if who == "0":
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for name in ("y.h5", "x.h5"):
        try:
            generate(sample, 1600, f"{disk}/{name}", **options)
        except OSError as error:
            found.append([error.errno, str(error), []])
print(json.dumps([found, left, made.made]))
"""


@pytest.fixture(scope="module")
def on_a_small_disk(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Runs the script, with a disk of 6 MiB that this process does not see."""
    disk = tmp_path_factory.mktemp("disk")
    command = on_small_disk(disk, "6m")

    def run(*arguments: str) -> list[Any]:
        done = ran("-c", _ON_A_SMALL_DISK, disk, *arguments, command=command)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("who", "kind"), [("0", "plain"), ("2", "files"), ("threads", "ragged"), ("pool", "ragged")]
)
def test_a_disk_that_is_full_again_and_again_loses_nothing(
    on_a_small_disk: Callable[..., list[Any]], who: str, kind: str
) -> None:
    """Each time a little room is made; the last of it is needed to finish."""
    errors, left, _ = on_a_small_disk(who, kind, "400000")
    if who == "0":
        *errors, new, own = errors
        assert new[0] == own[0] == errno.EROFS and "y.h5.partial" in new[1] and "x.h5.partial" in own[1]
    assert len(errors) > 2
    rows = []
    for number, text, there in errors:
        assert number == errno.ENOSPC and "filler" in there
        if "rows are kept" in text or rows:
            assert "No space left on device (" in text and " are free); " in text, text
            assert "of 1,500 rows are kept in " in text and "; the same call goes on from there" in text
            rows.append(int(text.partition(" free); ")[2].partition(" of ")[0].replace(",", "")))
            assert there == ["filler", "x.h5.partial"]
        else:
            assert there == ["filler"]  # nothing was begun, and nothing is left
    assert rows == sorted(rows) and rows[-1] > 500
    assert left == on_a_small_disk("0", kind, "5000000")[1], "as where there is room"
    assert len(left) == (8 if kind == "files" else 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["pwrite", "write", "fsync", "ftruncate", "open", "replace", "unlink"])
@pytest.mark.parametrize("options", [RAGGED, {**RAGGED, "max_bytes": 60}], ids=["one file", "files"])
def test_any_call_to_the_system_may_fail(
    tmp_path: Path, small_blocks: None, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "x" / "x.h5", tmp_path / "whole" / "x.h5"
    whole.parent.mkdir()
    made(ragged, whole, N, **options)
    real = getattr(os, name)
    for fail_at in itertools.count(1, 5 if name == "pwrite" else 1):
        out.parent.mkdir()
        calls = itertools.count(1)

        def failing(*arguments: Any, **more: Any) -> Any:
            if next(calls) == fail_at:
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            with contextlib.suppress(OSError):
                made(ragged, out, N, **options)
        if next(calls) <= fail_at:
            break
        made(ragged, out, N, **options)
        assert content(out.parent) == content(whole.parent), fail_at
        shutil.rmtree(out.parent)
    assert fail_at > 1


def test_more_files_than_a_process_may_open_are_made(tmp_path: Path, in_child: Any) -> None:
    def work() -> None:
        limit = len(os.listdir("/proc/self/fd")) + 90
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for number, options in enumerate(({}, {"workers": 2}, {"workers": 2, "executor": "threads"})):
            found = made(ragged, tmp_path / str(number), 240, max_bytes=6, **RAGGED, **options)
            assert len(found.paths) == 120

    in_child(work)


@pytest.mark.parametrize(
    "files", [{"notes.txt": b"mine"}, {"journal": b"mine"}, {"data.h5": b"mine"},
              {"lock": b"", "data.h5": b"hours of work", "note.json": b"hours of work"}],
)  # fmt: skip
def test_a_folder_that_is_of_no_job_stays(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = tmp_path / "x.h5.partial"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for resume in (True, False):
        with pytest.raises(OptionError, match="does not belong to an unfinished job; move it away, or"):
            made(sample, tmp_path / "x.h5", N, resume=resume)
    assert content(folder) == files


def test_other_files_stay_in_the_folder_of_a_job(tmp_path: Path, small_blocks: None) -> None:
    out = unfinished(sample, tmp_path)
    (folder_of(out) / "notes.txt").write_text("mine")
    (folder_of(out) / "plots").mkdir()
    before = content(folder_of(out))
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["x"] = np.zeros((9, 3))
    assert main(["repack", str(tmp_path / "source.h5"), str(out)]) == 0
    assert content(folder_of(out)) == before, "repack leaves an unfinished job alone"
    out.unlink()
    made(Stopping(sample, tmp_path), out, N)
    assert sorted(path.name for path in folder_of(out).iterdir()) == ["notes.txt", "plots"]


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "x.h5"

    def intruding(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20 and not (tmp_path / "moved").exists():
            out.write_text("mine")
        return {"x": index}

    with pytest.raises(OptionError, match=r"x\.h5 was created meanwhile; move it away, and call again"):
        made(intruding, out, N)
    assert out.read_text() == "mine"
    out.rename(tmp_path / "moved")
    assert made(intruding, out, N).made == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "x.h5"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_one_process_or_thread_writes_a_file_at_a_time(tmp_path: Path, forked: Any, kind: str) -> None:
    out, (begun, begins), (wait, go) = tmp_path / "x.h5", os.pipe(), os.pipe()

    def waiting(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20:
            os.write(begins, b"1")
            assert os.read(wait, 1) == b"2"
        return {"x": index}

    with ThreadPoolExecutor(1) as pool:
        if kind == "process":
            pid = forked(lambda: made(waiting, out, N))
            end = pool.submit(lambda: os.waitpid(pid, 0)[1])
        else:
            end = pool.submit(lambda: made(waiting, out, N).made - N)
        assert os.read(begun, 1) == b"1"
        try:
            for resume in (True, False, "changed"):
                with pytest.raises(GenerationError, match=rf"another {kind} is writing .*x\.h5; wait for it"):
                    made(sample, out, N, resume=resume)
        finally:
            os.write(go, b"2")
            assert end.result() == 0
    for descriptor in (begun, begins, wait, go):
        os.close(descriptor)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    with h5py.File(out) as file:
        assert file["x"][:].tolist() == list(range(N))


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"fn": other}, "the function (has changed|is another)"), ({"seed": 6}, "seed was 5 and is 6"),
    ({"columns": {"x": ("uint8", (2,))}}, "columns was '' and is 'x: "),
    ({"bad_samples": "skip"}, "bad_samples was 'raise' and is 'skip'"),
    ({"chunk_rows": 3}, "chunk_rows was None and is 3"), ({"max_bytes": 100}, "max_bytes was None and is 100"),
    ({"seed_globals": True}, "seed_globals was False and is True"),
    ({"seed": 6, "bad_samples": "retry"}, "seed was 5 and is 6, bad_samples was 'raise' and is 'retry'"),
]  # fmt: skip


def changed(options: dict[str, Any], out: Path, n: int = N, **more: Any) -> Generated:
    fn = Stopping(options.get("fn", sample), out.parent)
    return made(fn, out, n, **{key: value for key, value in options.items() if key != "fn"}, **more)


@pytest.mark.parametrize(
    ("options", "words"), CHANGES, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_other_arguments_are_refused_until_a_job_begins_anew(
    tmp_path: Path, small_blocks: None, options: dict[str, Any], words: str
) -> None:
    out = unfinished(sample, tmp_path)
    before = content(folder_of(out))
    shutil.copytree(folder_of(out), tmp_path / "copy.h5.partial")
    for n in (N, N + 20):
        with pytest.raises(GenerationError, match=words) as caught:
            changed(options, out, n)
        assert "x.h5.partial belongs to an unfinished job" in str(caught.value)
        assert "start again with resume=False (--no-resume), which removes 26 rows" in str(caught.value)
        assert ("resume='changed'" in str(caught.value)) == ("fn" in options)
    assert content(folder_of(out)) == before
    assert changed({}, out).made == N - 26, "as it was, it goes on"
    found = changed(options, tmp_path / "copy.h5", N + 20, resume=False)
    assert found.made == N + 20 and contents(found) == contents(changed(options, tmp_path / "new.h5", N + 20))
    whole = content(tmp_path)
    for n in (N, N + 20):
        with pytest.raises(GenerationError, match=words) as caught:
            changed(options, out, n)
        assert "x.h5 exists, and" in str(caught.value) and "Name another file" in str(caught.value)
        with pytest.raises(OptionError, match="exists; remove it to generate it again, or name another file"):
            changed(options, out, n, resume=False)
    assert content(tmp_path) == whole and not folder_of(out).exists()


@pytest.mark.parametrize("left", ["folder", "lock", "journal", "first line", "half a line", "old blocks"])
@pytest.mark.parametrize("options", [{"fn": other}, {"seed": 6}], ids=["function", "seed"])
def test_rows_of_two_functions_or_seeds_are_never_mixed(
    tmp_path: Path, small_blocks: None, left: str, options: dict[str, Any]
) -> None:
    """Whatever was left of a job beside its finished file."""
    out = unfinished(sample, tmp_path)
    files = content(folder_of(out))
    changed({}, out)
    before = out.read_bytes()
    folder_of(out).mkdir()
    if left != "folder":
        (folder_of(out) / "lock").touch()
    line = files["journal"].index(b"\n") + 1
    sizes = {"journal": 0, "first line": line, "half a line": line // 2, "old blocks": len(files["journal"])}
    if left in sizes:
        (folder_of(out) / "journal").write_bytes(files["journal"][: sizes[left]])
    for name, data in files.items() if left == "old blocks" else ():
        (folder_of(out) / name).write_bytes(data)
    for n in (N, N + 20):
        with pytest.raises(GenerationError, match=r"the function|seed was 5 and is 6"):
            changed(options, out, n)
        with pytest.raises(OptionError, match="exists; remove it"):
            changed(options, out, n, resume=False)
        assert out.read_bytes() == before
    if left != "old blocks":
        grown = changed({}, out, N + 20)
        assert grown.made == 20 and contents(grown) == contents(changed({}, tmp_path / "y.h5", N + 20))


def test_a_job_may_have_more_rows_than_before_and_no_less(tmp_path: Path, small_blocks: None) -> None:
    out = unfinished(ragged, tmp_path, **RAGGED)
    before = content(folder_of(out))
    fn = Stopping(ragged, tmp_path)
    with pytest.raises(GenerationError, match="unfinished job, but it is of 30 rows, and n=29 is less"):
        made(fn, out, N - 1, **RAGGED)
    assert content(folder_of(out)) == before
    found = made(fn, out, N + 20, **RAGGED)
    assert found.rows == N + 20 and found.made == N + 20 - 26
    assert contents(found) == contents(made(fn, tmp_path / "y.h5", N + 20, **RAGGED))
    with pytest.raises(GenerationError, match="has 50 rows, and n=29 is less: read its first ones"):
        made(fn, out, N - 1, **RAGGED)


def test_a_changed_function_may_keep_the_rows_that_there_are(tmp_path: Path, small_blocks: None) -> None:
    out = unfinished(sample, tmp_path)
    assert made(other, out, N, resume="changed").made == N - 26
    with h5py.File(out) as file:
        for index in range(N):
            fn = sample if index < 26 else other
            assert file["x"][index].tolist() == fn(index, np.random.default_rng([5, index]))["x"].tolist()
    assert made(other, out, N).made == 0, "it is the other function's now"
    assert made(sample, out, N + 5, resume="changed").made == 5 and made(sample, out, N + 5).made == 0
    with pytest.raises(GenerationError, match="seed was 5 and is 6"):
        made(other, out, N + 9, resume="changed", seed=6)


_INTERRUPTED = """
import os, signal, sys
import numpy as np
from fastpipe.generation import files, generate, run, schedule

schedule._BLOCK_S, schedule._COMMIT_S = 0.02, 0.0
who = sys.argv[1]
options = {"executor": "threads", "workers": 2} if who == "threads" else {"workers": int(who)}

def sample(index, rng):
    x = rng.normal(size=(24, 24)).astype("f4")
    for _ in range(100):
        x = np.tanh(x @ x.T / 5)
    stuck = os.environ["STUCK"]
    if index >= 300 and stuck == "no" and not os.path.exists("go"):
        open(f"row {index}", "w").close()
        while not os.path.exists("go"):
            pass
    if not os.path.exists("go") and (stuck == "row" and index >= 600 or stuck == "first row"):
        open("stuck", "w").close()
        while True:
            signal.pause()
    return {"x": x[0], "r": np.arange(index % 9)}

stuck = os.environ["STUCK"]
stuck = os.environ["STUCK"]
if stuck == "finish" and not os.path.exists("go"):
    really = files._write_ragged
    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return really(*arguments)
    files._write_ragged = interrupted
if stuck == "handled":
    signal.signal(signal.SIGINT, lambda number, frame: open("handled", "w").close())
generate(sample, 800, "x.h5", seed=0, columns={"r": ("int64", (None,))}, **options)
print("done")
"""


class Script:
    """Runs of the script above in a folder."""

    def __init__(self, folder: Path, who: str, stuck: str) -> None:
        self.folder, self.out, self._who, self._stuck = folder, folder / "x.h5", who, stuck

    def start(self) -> Any:
        environ = {**environment(), "STUCK": self._stuck}
        return started("-c", _INTERRUPTED, self._who, cwd=self.folder, env=environ)

    def rows_kept(self, process: Any) -> int:
        """After the end by Ctrl-C: how many rows are kept, as the message says."""
        shown, errors = process.communicate()
        assert process.returncode == -signal.SIGINT and not shown, errors
        _, found, behind = " ".join(errors.split()).partition("interrupted: ")
        assert found and "x.h5.partial; the same call goes on from there" in behind, errors
        assert "KeyboardInterrupt" in behind and "FileNotFound" not in errors
        kept = int(behind.partition(" of ")[0].replace(",", ""))
        assert kept == noted_rows(self.out) or self._stuck == "finish"
        return kept

    def finish(self) -> bytes:
        (self.folder / "go").touch()
        with self.start() as process:
            shown, errors = process.communicate()
        assert process.returncode == 0 and shown == "done\n", errors
        assert not folder_of(self.out).exists()
        return self.out.read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of the script when it is not interrupted."""
    return Script(tmp_path_factory.mktemp("whole"), "2", "").finish()


@pytest.mark.few(1)
@pytest.mark.parametrize(("who", "count"), [("0", 1), ("2", 2), ("threads", 2)])
def test_ctrl_c_keeps_the_rows_that_are_begun(tmp_path: Path, who: str, count: int, reference: bytes) -> None:
    script = Script(tmp_path, who, "no")
    with script.start() as process:
        wait_until(lambda: len(list(tmp_path.glob("row *"))) == count, process)
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        (tmp_path / "go").touch()  # a row that was begun ends only now
        assert script.rows_kept(process) < 800
    for begun in tmp_path.glob("row *"):
        assert any(first <= int(begun.name[4:]) < last for first, last in noted(script.out))
    assert all(map(has_ended, workers))
    assert script.finish() == reference


@pytest.mark.few(1)
@pytest.mark.parametrize("stuck", ["row", "first row"])
@pytest.mark.parametrize("who", ["2", "0"])
def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, who: str, stuck: str, reference: bytes) -> None:
    script = Script(tmp_path, who, stuck)
    with script.start() as process:
        wait_until((tmp_path / "stuck").exists, process)
        workers = children(process.pid)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            threading.Event().wait(0.2)
        if stuck == "row":
            assert script.rows_kept(process) > 0
        else:
            process.communicate()
            assert process.returncode == -signal.SIGINT
            assert [path.name for path in tmp_path.iterdir()] == ["stuck"]
    assert all(map(has_ended, workers))
    assert script.finish() == reference


def test_ctrl_c_while_the_file_is_finished_loses_nothing(tmp_path: Path, reference: bytes) -> None:
    script = Script(tmp_path, "2", "finish")
    with script.start() as process:
        assert script.rows_kept(process) == 800 and not script.out.exists()
    assert script.finish() == reference


def test_a_script_may_handle_ctrl_c_itself(tmp_path: Path) -> None:
    script = Script(tmp_path, "2", "handled")
    with script.start() as process:
        wait_until(lambda: noted_rows(script.out) > 10, process)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate()
    assert process.returncode == 0 and shown == "done\n", errors
    assert (tmp_path / "handled").exists() and script.out.exists()


def test_the_handler_of_ctrl_c_is_the_callers_again_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    made(sample, tmp_path / "x.h5", N)
    with pytest.raises(GenerationError):
        made(Stopping(sample, tmp_path), tmp_path / "y.h5", N)
    assert signal.getsignal(signal.SIGINT) is before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(made, sample, tmp_path / "z.h5", N).result().rows == N


_SCRIPT = """
import dataclasses, os
import beside
from fastpipe.generation import generate
print("run")
TABLE = list(range(5))
@dataclasses.dataclass
class Scene:
    size: int
    def grown(self):
        return Scene(self.size + 1)
def helper(index):
    return beside.scaled(Scene(index).grown().size) + TABLE[index % 5]
def sample(index, rng):
    return {"x": helper(index), "is_worker": os.getpid() != parent}
parent = os.getpid()
generate(sample, 100, "x.h5", seed=0, workers=2, progress=False)
"""


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Its function, helpers and classes go to workers by content, modules beside it by name."""
    (tmp_path / "beside.py").write_text("SCALE = 3\ndef scaled(x):\n    return SCALE * x\n")
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = ran("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run\n", "")
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"][:].tolist() == [3 * (index + 1) + index % 5 for index in range(100)]
        assert file["is_worker"][:].all()


_MEMORY = """
import resource, sys
import numpy as np
from fastpipe.generation import generate

def sample(index, rng):
    return {"x": np.int32(index), "y": np.float32(index)}

def batch(indices, rng):
    return {"x": indices.astype("i4"), "y": indices.astype("f4")}

sample.batch = batch
rows, workers = int(sys.argv[1]), int(sys.argv[2])
generate(sample, rows, "x.h5", seed=0, workers=workers, progress=False, probe=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_does_not_grow_with_rows(tmp_path: Path, workers: int) -> None:
    found = []
    for rows in (10**4, 10**6):
        (tmp_path / str(rows)).mkdir()
        done = ran("-c", _MEMORY, rows, workers, cwd=tmp_path / str(rows))
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    assert found[1] - found[0] < 20, found
