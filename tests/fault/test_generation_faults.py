"""``generate`` where something is wrong: bytes, the disk, other arguments, Ctrl-C.  Nothing is lost by it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scripts import Started, children, has_ended

import fastpipe
from fastpipe.cli import main
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation import Generated, generate, schedule

N = 30
RAGGED = {"columns": {"r": ("int64", (None,))}}
Forked = Callable[[Callable[[], object]], int]


def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.integers(99, size=2, dtype="u1"), "index": np.int16(index)}


def ragged(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"r": np.arange(index % 4), "x": rng.integers(99, dtype="u1"), "text": str(index)}


class Stopping:
    """A function that raises in a row, until the file ``mended`` is there."""

    def __init__(self, fn: Callable[..., Any], folder: Path, at: int) -> None:
        self.fn, self.mended, self.at = fn, folder / "mended", at
        self.__qualname__ = "sample"

    def __call__(self, index: int, rng: np.random.Generator) -> Any:
        if index == self.at and not self.mended.exists():
            raise KeyError("scene")
        return self.fn(index, rng)


def made(fn: Callable[..., Any], out: Path, n: int = N, **options: Any) -> Generated:
    return generate(fn, n, out, **{"seed": 5, "workers": 0, "progress": False, **options})


def folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def noted(out: Path) -> list[tuple[int, int]]:
    """First and last rows of the blocks that are noted."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder_of(out) / "journal").read_bytes().split(b"\n")[:-1]
        return [tuple(json.loads(line[9:])["rows"]) for line in lines if b'"rows":[' in line[:20]]
    return []


def noted_rows(out: Path) -> int:
    return sum(last - first for first, last in noted(out))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.Schedule, "_block_rows", lambda self: 4)
    monkeypatch.setattr(schedule, "_COMMIT_S", -1.0)


def unfinished(fn: Callable[..., Any], folder: Path, at: int = 26, **options: Any) -> Path:
    """A job that stopped in a row, and goes on from now on; the file."""
    out = folder / "x.h5"
    stopping = Stopping(fn, folder, at)
    with pytest.raises(GenerationError, match=f"row {at} failed: KeyError: 'scene'"):
        made(stopping, out, **options)
    assert noted_rows(out) == at
    (folder / "mended").touch()
    return out


class Copies:
    """Copies of an unfinished job, each damaged in its own way, that are to come out as if nothing was."""

    def __init__(self, fn: Callable[..., Any], folder: Path, **options: Any) -> None:
        self._out = unfinished(fn, folder, **options)
        self._fn, self._options = Stopping(fn, folder, 26), options
        self.files = content(folder_of(self._out))
        made(self._fn, folder / "whole.h5", **options)
        self._whole = (folder / "whole.h5").read_bytes()
        self.out = folder / "copy" / "x.h5"

    def goes_on(self, files: dict[str, bytes], **options: Any) -> Generated:
        """The next call finishes what these files leave of the job."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        folder_of(self.out).mkdir(parents=True)
        for name, data in files.items():
            (folder_of(self.out) / name).write_bytes(data)
        found = made(self._fn, self.out, **{**self._options, **options})
        assert list(content(self.out.parent).items()) == [("x.h5", self._whole)]
        assert not folder_of(self.out).exists()
        return found


# ---- what is there is damaged --------------------------------------------------------------------


@pytest.mark.slow
def test_a_journal_that_was_cut_off_anywhere_in_its_last_lines(tmp_path: Path, small_blocks: None) -> None:
    copies = Copies(sample, tmp_path)
    journal = copies.files["journal"]
    lines = journal.splitlines(keepends=True)
    assert len(lines) > 6
    for size in range(len(journal) - sum(map(len, lines[-3:])), len(journal) + 1):
        whole_lines = journal[:size].count(b"\n")
        left = sum(
            json.loads(line[9:])["rows"][1] - json.loads(line[9:])["rows"][0] for line in lines[1:whole_lines]
        )
        assert copies.goes_on({**copies.files, "journal": journal[:size]}).made == N - left


@pytest.mark.parametrize("head", [0, 1, 8, 9, 10, 50])
def test_a_journal_that_was_cut_off_in_its_first_line(tmp_path: Path, small_blocks: None, head: int) -> None:
    """The machine failed before anything was made, and data of a later time cannot be there."""
    copies = Copies(ragged, tmp_path, **RAGGED)
    assert copies.goes_on({"lock": b"", "journal": copies.files["journal"][:head]}).made == N


def test_garbage_behind_the_journal(tmp_path: Path, small_blocks: None) -> None:
    copies = Copies(sample, tmp_path)
    for garbage in (b"\0" * 4096, b"\n\n", b"00000000 {}\n", copies.files["journal"][-40:], b"\xff\n" * 9):
        files = {**copies.files, "journal": copies.files["journal"] + garbage}
        assert copies.goes_on(files).made == N - 26


@pytest.mark.few(1)
@pytest.mark.parametrize("suffix", [".data", ".spool"])
def test_a_byte_that_has_changed(
    tmp_path: Path, small_blocks: None, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.generate")
    copies = Copies(ragged, tmp_path, **RAGGED)
    name = next(name for name in copies.files if name.endswith(suffix))
    data, again = copies.files[name], 0
    # At the end of the data file are the rows; before, structure that is not there yet.
    places = range(len(data) - 40, len(data)) if suffix == ".data" else range(0, len(data), 5)
    for at in places:
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        caplog.clear()
        found = copies.goes_on({**copies.files, name: bytes(changed)})
        is_noticed = "rows are not as they were noted, and are made again" in caplog.text
        assert found.made == N - 26 + is_noticed * (2 if "2 rows are not" in caplog.text else 4)
        again += is_noticed
    assert again == (26 if suffix == ".data" else len(places))


@pytest.mark.parametrize("suffix", [".data", ".spool"])
@pytest.mark.parametrize("kept", [None, 0, 0.5])
def test_files_that_are_gone_or_cut_off(
    tmp_path: Path, small_blocks: None, suffix: str, kept: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(ragged, tmp_path, **RAGGED)
    name = next(name for name in copies.files if name.endswith(suffix))
    files = dict(copies.files)
    data = files.pop(name)
    if kept is not None:
        begin = data.rindex(bytes(64)) if suffix == ".data" else 0
        files[name] = data[: int(begin + (len(data) - begin) * kept)]
    assert copies.goes_on(files).made > N - 26
    assert "are not as they were noted, and are made again" in caplog.text


@pytest.mark.parametrize("name", ["journal", "lock"])
def test_a_folder_without(tmp_path: Path, small_blocks: None, name: str) -> None:
    """Without a lock it may be anybody's; without a journal nothing tells what is in it."""
    copies = Copies(sample, tmp_path)
    files = {key: data for key, data in copies.files.items() if key != name}
    if name == "lock":
        with pytest.raises(OptionError, match="is not that of an unfinished job; move it away"):
            copies.goes_on(files)
        assert content(folder_of(copies.out)) == files
    else:
        assert copies.goes_on(files).made == N


def test_every_byte_of_the_journal_counts(tmp_path: Path, small_blocks: None) -> None:
    copies, rng = Copies(sample, tmp_path), random.Random(0)
    journal = copies.files["journal"]
    for at in rng.sample(range(journal.index(b"\n") + 1, len(journal)), 60):
        changed = bytearray(journal)
        changed[at] ^= 1 << rng.randrange(8)
        copies.goes_on({**copies.files, "journal": bytes(changed)})


def test_a_damaged_line_of_the_journal_costs_its_own_rows(
    tmp_path: Path, small_blocks: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fastpipe.generate")
    copies = Copies(sample, tmp_path)
    lines = copies.files["journal"].splitlines(keepends=True)
    at = len(lines) // 2
    first, last = json.loads(lines[at][9:])["rows"]
    lines[at] = lines[at].replace(b"rows", b"rowz")
    left = N - sum(
        last - first for first, last in (json.loads(one[9:])["rows"] for one in lines[1:] if b"rows" in one)
    )
    assert copies.goes_on({**copies.files, "journal": b"".join(lines)}).made == left
    assert left >= last - first and "1 lines of the journal are damaged" in caplog.text


def test_a_journal_that_does_not_say_of_what_it_is(tmp_path: Path, small_blocks: None) -> None:
    """Nothing that was made is thrown away unasked."""
    copies = Copies(sample, tmp_path)
    changed = bytearray(copies.files["journal"])
    changed[20] ^= 1
    files = {**copies.files, "journal": bytes(changed)}
    with pytest.raises(GenerationError, match=r"its journal, which says of which, is damaged.*resume=False"):
        copies.goes_on(files)
    assert content(folder_of(copies.out)) == files
    assert copies.goes_on(files, resume=False).made == N


# ---- the disk is full ------------------------------------------------------------------------------

_ON_A_SMALL_DISK = """
import errno, json, os, subprocess, sys
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from fastpipe.generation import generate

def sample(index, rng):
    found = {"x": rng.normal(size=64), "index": index}
    if kind != "plain":
        found |= {"r": np.arange(index % 40), "text": str(index) * 5}
    return found

disk, who, kind, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
options = {"columns": {"r": ("int64", (None,))}, "seed": 0, "progress": False}
if kind == "plain":
    del options["columns"]
if kind == "files":
    options["max_bytes"] = 100_000
if who == "pool":
    options["executor"] = ThreadPoolExecutor(2)
elif who == "threads":
    options |= {"executor": "threads", "workers": 2}
else:
    options["workers"] = int(who)
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
    disk, unshare = tmp_path_factory.mktemp("disk"), shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=6m tmpfs {disk}"
    if (
        unshare is None
        or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("run it as root, with util-linux installed: it mounts a small disk for one process")
    script = disk.with_name("script.py")
    script.write_text(_ON_A_SMALL_DISK)

    def run(*arguments: str) -> list[Any]:
        command = [unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable]
        ran = subprocess.run(
            [*command, str(script), str(disk), *arguments],
            capture_output=True, text=True, timeout=150, env=environment(), check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)  # type: ignore[no-any-return]

    return run


@pytest.fixture(scope="module")
def whole_files() -> dict[str, Any]:
    """What the script makes where there is room, by kind."""
    return {}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(fastpipe.__file__).parents[1])}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("who", "kind"), [("0", "plain"), ("2", "files"), ("threads", "ragged"), ("pool", "ragged")]
)
def test_the_disk_is_full_again_and_again(
    on_a_small_disk: Callable[..., list[Any]], whole_files: dict[str, Any], who: str, kind: str
) -> None:
    """Each time a little room is made; the last of it is needed to finish."""
    errors, left, _ = on_a_small_disk(who, kind, "200000")
    if who == "0":
        *errors, other, own = errors
        assert other[0] == own[0] == errno.EROFS and "y.h5.partial" in other[1] and "x.h5.partial" in own[1]
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
    # As where there is room.
    if kind not in whole_files:
        whole_files[kind] = on_a_small_disk("0", kind, "5000000")[1]
    assert left == whole_files[kind] and len(left) == (8 if kind == "files" else 1)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["pwrite", "write", "fsync", "ftruncate", "open", "replace", "unlink"])
@pytest.mark.parametrize("job", ["ragged", "files"])
def test_any_call_to_the_system_may_fail(
    tmp_path: Path, small_blocks: None, name: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**RAGGED, **({"max_bytes": 60} if job == "files" else {})}
    (tmp_path / "whole").mkdir()
    (tmp_path / "x").mkdir()
    made(ragged, tmp_path / "whole" / "x.h5", **options)
    whole = content(tmp_path / "whole")
    real, calls, fail_at = getattr(os, name), 0, 0

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments, **more)

    while True:
        calls, fail_at = 0, fail_at + (3 if name == "pwrite" else 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                made(ragged, tmp_path / "x" / "x.h5", **options)
            except OSError as error:
                assert error.errno == errno.EIO
        if calls < fail_at:
            break
        made(ragged, tmp_path / "x" / "x.h5", **options)
        assert content(tmp_path / "x") == whole, fail_at
        shutil.rmtree(tmp_path / "x")
        (tmp_path / "x").mkdir()
    assert fail_at > 1


def test_more_files_than_a_process_may_have_open(tmp_path: Path, forked: Forked) -> None:
    def work() -> None:
        import resource

        limit = len(os.listdir("/proc/self/fd")) + 90
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for number, options in enumerate(
            ({"workers": 0}, {"workers": 2}, {"workers": 2, "executor": "threads"})
        ):
            found = made(ragged, tmp_path / str(number), 240, max_bytes=6, **RAGGED, **options)
            assert len(found.paths) == 120

    assert os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == 0


# ---- what is in the way --------------------------------------------------------------------------------


def test_a_folder_of_that_name_that_is_somebody_elses(tmp_path: Path) -> None:
    out = tmp_path / "x.h5"
    for name in ("notes.txt", "journal", "data.h5"):
        folder_of(out).mkdir()
        (folder_of(out) / name).write_text("mine")
        for resume in (True, False):
            with pytest.raises(
                OptionError, match="is not that of an unfinished job; move it away, or remove"
            ):
                made(sample, out, resume=resume)
            assert content(folder_of(out)) == {name: b"mine"}
        shutil.rmtree(folder_of(out))
    folder_of(out).write_text("a file")
    with pytest.raises(OptionError, match=r"x\.h5\.partial is a link, or no folder"):
        made(sample, out)
    assert folder_of(out).read_text() == "a file"


def test_a_folder_of_another_command_is_left_alone(tmp_path: Path) -> None:
    """Its folder has the same name and an empty lock, too, as that of ``repack`` had."""
    folder = tmp_path / "x.h5.partial"
    folder.mkdir()
    for name in ("lock", "data.h5", "note.json"):
        (folder / name).write_text("" if name == "lock" else "hours of work")
    before = content(folder)
    for resume in (True, False):
        with pytest.raises(OptionError, match="is not that of an unfinished job"):
            made(sample, tmp_path / "x.h5", resume=resume)
    assert content(folder) == before


def test_repack_leaves_an_unfinished_job_alone(tmp_path: Path) -> None:
    out = unfinished(sample, tmp_path)
    folder = tmp_path / f"{out.name}.partial"
    before = content(folder)
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["x"] = np.zeros((9, 3))
    assert main(["repack", str(tmp_path / "source.h5"), str(out)]) == 0
    assert content(folder) == before


def test_files_that_others_put_into_the_folder_stay(tmp_path: Path, small_blocks: None) -> None:
    out = unfinished(sample, tmp_path)
    (folder_of(out) / "notes.txt").write_text("mine")
    (folder_of(out) / "plots").mkdir()
    made(Stopping(sample, tmp_path, 26), out)
    assert sorted(path.name for path in folder_of(out).iterdir()) == ["notes.txt", "plots"]


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "x.h5"

    def intruding(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20 and not (tmp_path / "moved").exists():
            out.write_text("mine")
        return {"x": index}

    with pytest.raises(OptionError, match=r"x\.h5 has come meanwhile; move it away, and call again"):
        made(intruding, out)
    assert out.read_text() == "mine"
    out.rename(tmp_path / "moved")
    assert made(intruding, out).made == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "x.h5"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_one_at_a_time(tmp_path: Path, forked: Forked, kind: str) -> None:
    out, (begun, begins), (wait, go) = tmp_path / "x.h5", os.pipe(), os.pipe()

    def waiting(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 20:
            os.write(begins, b"1")
            assert os.read(wait, 1) == b"2"
        return {"x": index}

    def quiet(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": index}

    if kind == "process":
        pid = forked(lambda: made(waiting, out))
        end = lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # noqa: E731
    else:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(made, waiting, out)
        end = lambda: future.result().rows - N  # noqa: E731
    try:
        assert os.read(begun, 1) == b"1"
        for resume in (True, False, "changed"):
            with pytest.raises(GenerationError, match=rf"another {kind} is writing .*x\.h5; wait for it"):
                made(quiet, out, resume=resume)
    finally:
        os.write(go, b"2")
        assert end() == 0
        if kind == "thread":
            pool.shutdown()
        for descriptor in (begun, begins, wait, go):
            os.close(descriptor)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    with h5py.File(out) as file:
        assert file["x"][:].tolist() == list(range(N))


# ---- other arguments than before ------------------------------------------------------------------------


def other(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.integers(9, size=2, dtype="u1"), "index": np.int16(index)}


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"fn": other}, "the function has changed"),
    ({"seed": 6}, "seed was 5 and is 6"),
    ({"columns": {"x": ("uint8", (2,))}}, "columns was '' and is 'x: "),
    ({"bad_samples": "skip"}, "bad_samples was 'raise' and is 'skip'"),
    ({"chunk_rows": 3}, "chunk_rows was None and is 3"),
    ({"max_bytes": 100}, "max_bytes was None and is 100"),
    ({"seed_globals": True}, "seed_globals was False and is True"),
    ({"seed": 6, "bad_samples": "retry"}, "seed was 5 and is 6, bad_samples was 'raise' and is 'retry'"),
]


def changed(options: dict[str, Any], out: Path, n: int = N, **more: Any) -> Generated:
    fn = Stopping(options.get("fn", sample), out.parent, 26)
    return made(fn, out, n, **{key: value for key, value in options.items() if key != "fn"}, **more)


def in_words(value: Any) -> str:
    """Of a test's parameters, the same in each process."""
    return "-".join(value) if isinstance(value, dict) else value


@pytest.mark.parametrize(("options", "words"), CHANGES, ids=in_words)
@pytest.mark.parametrize("n", [N, N + 20])
def test_an_unfinished_job_of_other_arguments(
    tmp_path: Path, small_blocks: None, options: dict[str, Any], words: str, n: int
) -> None:
    out = unfinished(sample, tmp_path)
    before = content(folder_of(out))
    with pytest.raises(GenerationError) as caught:
        changed(options, out, n)
    assert words in str(caught.value) or (
        "fn" in options and "the function is another" in str(caught.value)
    ), str(caught.value)
    assert "x.h5.partial is of a job that was not finished" in str(caught.value)
    assert "begin anew with resume=False, which removes 26 rows" in str(caught.value)
    assert ("resume='changed'" in str(caught.value)) == ("fn" in options)
    assert content(folder_of(out)) == before
    # As it was, it goes on; and begins anew where that is asked for.
    copy = tmp_path / "copy.h5.partial"
    shutil.copytree(folder_of(out), copy)
    assert changed({}, out).made == N - 26
    found = changed(options, tmp_path / "copy.h5", n, resume=False)
    alone = changed(options, tmp_path / "alone.h5", n)
    assert found.made == n and [path.read_bytes() for path in found.paths] == [
        path.read_bytes() for path in alone.paths
    ]


@pytest.mark.parametrize(("options", "words"), CHANGES, ids=in_words)
@pytest.mark.parametrize("n", [N, N + 20])
def test_a_finished_file_of_other_arguments(
    tmp_path: Path, options: dict[str, Any], words: str, n: int
) -> None:
    out = tmp_path / "x.h5"
    (tmp_path / "mended").touch()
    changed({}, out)
    before = content(tmp_path)
    with pytest.raises(GenerationError) as caught:
        changed(options, out, n)
    assert words in str(caught.value) or (
        "fn" in options and "the function is another" in str(caught.value)
    ), str(caught.value)
    assert "x.h5 exists, and" in str(caught.value) and "Name another file" in str(caught.value)
    with pytest.raises(OptionError, match=r"x\.h5 exists; remove it to make it anew, or name another file"):
        changed(options, out, n, resume=False)
    assert content(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mended", "x.h5"]


@pytest.mark.parametrize("left", ["folder", "lock", "journal", "first line", "half a line", "old blocks"])
@pytest.mark.parametrize(("options", "words"), CHANGES[:2], ids=in_words)
def test_a_finished_file_beside_what_was_left_of_a_job(
    tmp_path: Path, small_blocks: None, left: str, options: dict[str, Any], words: str
) -> None:
    """Rows of one function or seed are never mixed with those of another."""
    out = unfinished(sample, tmp_path)
    files = content(folder_of(out))
    changed({}, out)
    before = out.read_bytes()
    folder_of(out).mkdir()
    if left != "folder":
        (folder_of(out) / "lock").touch()
    line = files["journal"].index(b"\n") + 1
    size = {"journal": 0, "first line": line, "half a line": line // 2}.get(left)
    if size is not None:
        (folder_of(out) / "journal").write_bytes(files["journal"][:size])
    if left == "old blocks":
        for name, data in files.items():
            (folder_of(out) / name).write_bytes(data)
    for n in (N, N + 20):
        with pytest.raises(GenerationError, match=r"the function|seed was 5 and is 6"):
            changed(options, out, n)
        with pytest.raises(OptionError, match="exists; remove it"):
            changed(options, out, n, resume=False)
        assert out.read_bytes() == before
    if left != "old blocks":
        grown = changed({}, out, N + 20)
        assert grown.made == 20
        assert out.read_bytes() == changed({}, tmp_path / "y.h5", N + 20).paths[0].read_bytes()


def test_fewer_rows_than_there_are(tmp_path: Path, small_blocks: None) -> None:
    out = unfinished(sample, tmp_path)
    before = content(folder_of(out))
    with pytest.raises(GenerationError, match="not finished, and it is of 30 rows, and n=29 is less"):
        changed({}, out, N - 1)
    assert content(folder_of(out)) == before
    changed({}, out)
    before = content(tmp_path)
    with pytest.raises(GenerationError, match="has 30 rows, and n=29 is less: read its first ones"):
        changed({}, out, N - 1)
    assert content(tmp_path) == before


def test_more_rows_than_an_unfinished_job_has(tmp_path: Path, small_blocks: None) -> None:
    out = unfinished(ragged, tmp_path, **RAGGED)
    fn = Stopping(ragged, tmp_path, 26)
    found = made(fn, out, N + 20, **RAGGED)
    assert found.rows == N + 20 and found.made == N + 20 - 26
    whole = made(fn, tmp_path / "y.h5", N + 20, **RAGGED)
    assert out.read_bytes() == whole.paths[0].read_bytes()


def test_a_function_that_was_changed_but_makes_the_same(tmp_path: Path, small_blocks: None) -> None:
    """The rows before are kept, those behind are of the function as it is now."""
    out = unfinished(sample, tmp_path)
    found = made(other, out, resume="changed")
    assert found.made == N - 26
    with h5py.File(out) as file:
        for index in range(N):
            fn = sample if index < 26 else other
            assert file["x"][index].tolist() == fn(index, np.random.default_rng([5, index]))["x"].tolist()
    # It is the other function's now.
    assert made(other, out).made == 0
    # And so does a finished one.
    found = made(sample, out, N + 5, resume="changed")
    assert found.made == 5 and made(sample, out, N + 5).made == 0
    with pytest.raises(GenerationError, match="seed was 5 and is 6"):
        made(other, out, N + 9, resume="changed", seed=6)


def test_nothing_is_asked_where_nothing_was_made(tmp_path: Path) -> None:
    """A job that failed in its first block is no obstacle for the function that was mended."""
    out = tmp_path / "x.h5"

    def failing(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 1:
            raise KeyError("scene")
        return {"x": index}

    with pytest.raises(GenerationError, match="row 1 failed"):
        made(failing, out, workers=2)
    is_kept = noted_rows(out) > 0
    if is_kept:
        shutil.rmtree(folder_of(out))
        folder_of(out).mkdir()
        (folder_of(out) / "lock").touch()
    assert made(sample, out, seed=9).made == N


# ---- Ctrl-C --------------------------------------------------------------------------------------------

_INTERRUPTED = """
import os, signal, sys
import numpy as np
from fastpipe.generation import files, generate, run, schedule

schedule._BLOCK_S, schedule._COMMIT_S = 0.02, 0.0
who = sys.argv[1]
options = {"threads": {"executor": "threads", "workers": 2}}.get(who) or {"workers": int(who)}

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
        (folder / "script.py").write_text(_INTERRUPTED)

    def start(self) -> Started:
        return Started(
            [sys.executable, "script.py", self._who], cwd=self.folder,
            env={**environment(), "STUCK": self._stuck},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @staticmethod
    def wait(process: subprocess.Popen[str], when: Callable[[], bool]) -> list[int]:
        """Until something is so; the workers then."""
        while not when():
            assert process.poll() is None, process.communicate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.001)
        return children(process.pid)

    def finish(self) -> bytes:
        (self.folder / "go").touch()
        with self.start() as process:
            told, errors = process.communicate()
        assert process.returncode == 0 and told == "done\n", errors
        assert not folder_of(self.out).exists()
        return self.out.read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of the script, when nobody interrupts it."""
    return Script(tmp_path_factory.mktemp("whole"), "2", "").finish()


def told_rows(errors: str) -> int:
    """How many rows are kept, as the message says."""
    text = " ".join(errors.split())
    before, found, behind = text.partition("interrupted: ")
    assert found and "x.h5.partial; the same call goes on from there" in behind, errors
    assert "KeyboardInterrupt" in behind
    return int(behind.partition(" of ")[0].replace(",", ""))


@pytest.mark.few(1)
@pytest.mark.parametrize(("who", "count"), [("0", 1), ("2", 2), ("threads", 2)])
def test_an_interrupt_lets_be_finished_what_is_begun(
    tmp_path: Path, who: str, count: int, reference: bytes
) -> None:
    script = Script(tmp_path, who, "no")
    with script.start() as process:
        workers = script.wait(process, lambda: len(list(tmp_path.glob("row *"))) == count)
        process.send_signal(signal.SIGINT)
        (tmp_path / "go").touch()  # a row that was begun ends only now
        told, errors = process.communicate()
    assert process.returncode == -signal.SIGINT and not told
    kept = told_rows(errors)
    assert kept == noted_rows(script.out) < 800
    for begun in tmp_path.glob("row *"):
        row = int(begun.name[4:])
        assert any(first <= row < last for first, last in noted(script.out))
    assert "Traceback" in errors and "FileNotFound" not in errors
    assert all(map(has_ended, workers))
    assert script.finish() == reference


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("who", "stuck"), [("2", "row"), ("0", "row"), ("2", "first row"), ("0", "first row")]
)
def test_a_second_interrupt_waits_for_nothing(tmp_path: Path, who: str, stuck: str, reference: bytes) -> None:
    script = Script(tmp_path, who, stuck)
    with script.start() as process:
        workers = script.wait(process, (tmp_path / "stuck").exists)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        told, errors = process.communicate()
    assert process.returncode == -signal.SIGINT and not told, errors
    if stuck == "row":
        assert told_rows(errors) == noted_rows(script.out) > 0
    else:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py", "stuck"]
    assert all(map(has_ended, workers))
    assert script.finish() == reference


def test_an_interrupt_while_the_file_is_finished(tmp_path: Path, reference: bytes) -> None:
    """It is not forgotten, nor is anything lost."""
    script = Script(tmp_path, "2", "finish")
    with script.start() as process:
        told, errors = process.communicate()
    assert process.returncode == -signal.SIGINT and not told, errors
    assert told_rows(errors) == 800 and not script.out.exists()
    assert script.finish() == reference


def test_a_script_that_handles_interrupts_itself(tmp_path: Path) -> None:
    script = Script(tmp_path, "2", "handled")
    with script.start() as process:
        script.wait(process, lambda: noted_rows(script.out) > 10)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate()
    assert process.returncode == 0 and told == "done\n", errors
    assert (tmp_path / "handled").exists() and script.out.exists()


def test_interrupts_are_the_callers_again_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    made(sample, tmp_path / "x.h5")
    with pytest.raises(GenerationError):
        made(Stopping(sample, tmp_path, 9), tmp_path / "y.h5")
    assert signal.getsignal(signal.SIGINT) is before
    found: list[Generated] = []
    thread = threading.Thread(target=lambda: found.append(made(sample, tmp_path / "z.h5")))
    thread.start()
    thread.join()
    assert found[0].rows == N


# ---- scripts ------------------------------------------------------------------------------------------


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    """Its function, helpers and classes go to workers by content, modules beside it by name."""
    (tmp_path / "beside.py").write_text("SCALE = 3\ndef scaled(x):\n    return SCALE * x\n")
    (tmp_path / "script.py").write_text(
        "import dataclasses, os\n"
        "import beside\n"
        "from fastpipe.generation import generate\n"
        "print('run')\n"
        "TABLE = list(range(5))\n"
        "@dataclasses.dataclass\n"
        "class Scene:\n"
        "    size: int\n"
        "    def grown(self):\n"
        "        return Scene(self.size + 1)\n"
        "def helper(index):\n"
        "    return beside.scaled(Scene(index).grown().size) + TABLE[index % 5]\n"
        "def sample(index, rng):\n"
        "    return {'x': helper(index), 'is_worker': os.getpid() != parent}\n"
        "parent = os.getpid()\n"
        "generate(sample, 100, 'x.h5', seed=0, workers=2, progress=False)\n"
    )
    ran = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "run\n" and not ran.stderr
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
        folder = tmp_path / str(rows)
        folder.mkdir()
        ran = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(rows), str(workers)], cwd=folder, env=environment(),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        found.append(int(ran.stdout))
    assert found[1] - found[0] < 20, found
