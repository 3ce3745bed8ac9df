"""``fastpipe repack``: an error is one line and an exit code, no file is lost, and OUT is only ever whole."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from dying import dying_at, half_of_it
from pytest import MonkeyPatch

from fastpipe.core import files
from fastpipe.errors import HDF5Error
from fastpipe.hdf5 import copying
from fastpipe.hdf5 import repack as repacking
from fastpipe.hdf5.repack import UnfinishedFile

ROWS = np.random.default_rng(0).standard_normal((4000, 40))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=ROWS, chunks=(64, 40), compression="gzip")
        file["one"] = 5
        file["x"].attrs["unit"] = file["one"].attrs["unit"] = "mV"
    return tmp_path / "in.h5"


@pytest.fixture
def out(source: Path) -> Path:
    return source.with_name("out.h5")


@pytest.fixture
def run(source: Path, out: Path, repack: Any) -> Callable[..., int]:
    """Repacks the source to OUT with options; returns the exit code."""
    return lambda *options: repack(source, out, *options)[0]


@pytest.fixture
def error(source: Path, out: Path, repack: Any) -> Callable[..., str]:
    """Repacks the source to OUT with options; returns the one line of its error."""

    def fails(*options: str, source: Path = source, out: Path = out) -> str:
        code, output, errors = repack(source, out, *options)
        assert (code, output) == (2, "") and errors.startswith("fastpipe repack: ")
        (line,) = errors.splitlines()
        return line

    return fails


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def assert_whole(out: Path) -> None:
    with h5py.File(out) as new:
        np.testing.assert_array_equal(new["x"], ROWS)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_file_is_replaced_only_by_force(out: Path, run: Any, error: Any, monkeypatch: MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # it is made while it is packed
        check = repacking.check_structure
        patch.setattr(repacking, "check_structure", lambda *some: (check(*some), out.write_bytes(b"mine")))
        assert "out.h5 exists" in error()
    assert "out.h5 exists; name another file, or replace it with --force" in error()
    assert out.read_bytes() == b"mine" and names(out) == ["in.h5", "out.h5"]
    assert run("--force") == 0
    assert_whole(out)
    assert names(out) == ["in.h5", "out.h5"]


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_a_name_of_an_unfinished_copy_that_is_no_file_is_an_error(out: Path, error: Any, kind: str) -> None:
    mine, precious = repacking.unfinished_path(out), out.with_name("precious")
    precious.write_bytes(b"mine, and longer than a signature")
    {"folder": mine.mkdir, "link": lambda: mine.symlink_to(precious), "fifo": lambda: os.mkfifo(mine)}[kind]()
    assert f"{mine.name} is not an unfinished copy" in error()
    assert precious.read_bytes() == b"mine, and longer than a signature" and os.path.lexists(mine)
    assert not out.exists()


def test_files_of_the_user_stay(source: Path, out: Path, run: Any) -> None:
    files_of_user = {
        out.with_name(f"{name}{number or ''}"): content
        for name in ("out.h5.partial", "out.h5.unfinished", ".out.h5", "fastpipe-repack-mine")
        for number, content in enumerate((source.read_bytes(), b"mine", bytes(100)))
    }
    precious = out.with_name("precious")
    for path, content in {**files_of_user, precious: b"mine"}.items():
        path.write_bytes(content)
        path.chmod(0o600)
    os.link(precious, repacking.unfinished_path(out))  # another name of a file is all that is removed
    assert run() == 0
    assert all(path.read_bytes() == content for path, content in files_of_user.items())
    assert precious.read_bytes() == b"mine"
    assert names(out) == sorted(["in.h5", "out.h5", "precious", *(path.name for path in files_of_user)])


@pytest.mark.parametrize("how", ["path", "link", "hard link", "detour"])
def test_the_input_is_not_overwritten(source: Path, out: Path, error: Any, how: str) -> None:
    before = source.read_bytes()
    other = {"path": source, "detour": source.parent / ".." / source.parent.name / "in.h5"}.get(how, out)
    if how == "link":
        out.symlink_to(source)
    elif how == "hard link":
        os.link(source, out)
    assert "is the input itself" in error("--force", "--codec", "none", out=other)
    assert source.read_bytes() == before


def test_paths_that_cannot_be_used_are_refused(source: Path, out: Path, error: Any) -> None:
    (source.parent / "text").write_text("text")
    for arguments, message in (
        ((source.with_name("none.h5"), out), "No such file"),
        ((source.parent / "text", out), "is not an HDF5 file"),
        ((source, source.parent), "is a folder; name a file"),
        ((source, source.parent / "text" / "out.h5"), "Not a directory"),
    ):
        assert message in error(source=arguments[0], out=arguments[1])
    assert names(out) == ["in.h5", "text"]


def test_another_process_that_uses_the_files_is_an_error(
    source: Path, out: Path, run: Any, error: Any
) -> None:
    repacker = "from fastpipe.hdf5 import repack\nwith repack.UnfinishedFile(pathlib.Path(sys.argv[2])):"
    for code, message in (
        ("import h5py\nwith h5py.File(sys.argv[1], 'r+'):", "is open for writing elsewhere"),
        (repacker, "another process is writing"),
    ):
        code = f"import pathlib, sys\n{code}\n    print(flush=True)\n    sys.stdin.read()"
        command = [sys.executable, "-c", code, source, out]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            assert message in error()
            child.stdin.close()
        assert run() == 0
        out.unlink()


def test_another_thread_that_repacks_to_the_file_is_an_error(
    source: Path, out: Path, repack: Any, run: Any, error: Any
) -> None:
    with UnfinishedFile(out):
        assert "another thread is writing" in error()
        assert names(out) == [repacking.unfinished_path(out).name, "in.h5"]
        (source.parent / "link").symlink_to(source.parent)
        with pytest.raises(HDF5Error, match="another thread is writing"):
            UnfinishedFile(source.parent / "link" / "out.h5")
        assert repack(source, out.with_name("other.h5"))[0] == 0
    assert run() == 0


def test_a_copy_that_begins_just_now_is_not_taken_for_one_left_behind(out: Path, monkeypatch: Any) -> None:
    """Another process removes the file between its making and its locking: it is made again."""
    lock, path, removed = repacking._lock, repacking.unfinished_path(out), []

    def lock_late(descriptor: int) -> bool:
        if len(removed) < 3:
            removed.append(path.unlink())
        return lock(descriptor)

    monkeypatch.setattr(repacking, "_lock", lock_late)
    with UnfinishedFile(out) as unfinished:
        assert len(removed) == 3 and os.path.samestat(os.fstat(unfinished.fileno()), path.stat())


def test_reads_and_writes_are_whole(out: Path, monkeypatch: MonkeyPatch) -> None:
    """Linux ends a call at 2 GiB, and h5py does not look at how much was done."""
    preadv, write = os.preadv, os.write
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:7]], at))
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    content, buffer = bytes(range(1, 101)), bytearray(b"\xff" * 200)
    with UnfinishedFile(out) as file:
        assert file.write(content) == 100
        file.seek(10)
        assert file.readinto(memoryview(buffer)) == 90
        assert buffer == content[10:] + bytes(110) and file.tell() == 100


def flipped(dataset: Any, first: int, rows: Any, write: Any = repacking.write_rows) -> None:
    rows = rows.copy()
    rows.view(np.uint8)[-1, -1] ^= 1
    write(dataset, first, rows)


def other_unit(old: Any, new: Any, *arguments: Any, copy: Any = repacking.copy_structure) -> None:
    copy(old, new, *arguments)
    new["x"].attrs["unit"] = "mW"


@pytest.mark.parametrize(
    ("place", "name", "function", "message"),
    [
        (repacking, "try_to_lock", raising(OSError(errno.ENOLCK, "No locks")), "No locks"),
        (repacking, "open_regular", raising(OSError(errno.EROFS, "Read-only", "a")), "Read-only: 'a'"),
        (repacking, "write_rows", flipped, "/x: rows read back from the copy are not those of the source"),
        (repacking, "copy_structure", other_unit, "/x: its attribute b'unit' would not be the same"),
        (h5py.h5z, "get_filter_info", lambda code: h5py.h5z.FILTER_CONFIG_DECODE_ENABLED,
         "cannot write its filter gzip 4; choose another --codec"),
    ],
)  # fmt: skip
def test_a_copy_that_cannot_be_made_or_is_wrong_never_gets_its_name(
    out: Path, error: Any, monkeypatch: MonkeyPatch, place: Any, name: str, function: Any, message: str
) -> None:
    monkeypatch.setattr(place, name, function)
    assert message in error()
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize("name", ["write_rows", "check_rows"])
def test_an_input_that_changes_meanwhile_is_an_error(
    source: Path, out: Path, error: Any, monkeypatch: MonkeyPatch, name: str
) -> None:
    real, status = getattr(repacking, name), source.stat()

    def changed(*arguments: Any) -> None:
        real(*arguments)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    monkeypatch.setattr(repacking, name, changed)
    assert re.search("in.h5 has changed (meanwhile|since)", error())
    assert names(out) == ["in.h5"]


def test_a_damaged_input_is_an_error(source: Path, out: Path, error: Any) -> None:
    with h5py.File(source) as file:
        info = file["x"].id.get_chunk_info(10)
    with open(source, "r+b") as plain:
        plain.seek(info.byte_offset)
        plain.write(bytes(info.size))
    assert "the file is damaged" in error()
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize("after", [0, 40, 105])
def test_full_disks_leave_no_file(out: Path, run: Any, error: Any, monkeypatch: Any, after: int) -> None:
    monkeypatch.setattr(repacking, "_STEP_NBYTES", 20000)
    calls, write = 0, os.write

    def full(descriptor: int, data: Any) -> int:
        nonlocal calls
        if len(data) < 8 or descriptor < 3:  # not of the copy
            return write(descriptor, data)
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: max(1, len(data) // 2)])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert "No space left on device" in error("--chunk-rows", "8")
    assert calls > after and names(out) == ["in.h5"]
    assert run("--chunk-rows", "8") == 0
    assert_whole(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dataset none", "has no dataset 'none'; `fastpipe inspect` lists those it has"),
        ("--dataset one", "is a single value"),
        ("--codec zip", "must be one of keep, none, gzip[:LEVEL]"),
        ("--codec gzip:10", "gzip has levels from 0 to 9"),
        ("--codec gzip:1:2", "gzip has levels"),
        ("--codec blosc:zip", "blosc has blosclz, lz4"),
        ("--codec lzf:3", "must be one of"),
        ("--shuffle", "go with a new codec, not with --codec keep"),
        ("--no-shuffle --codec none", "not with --codec none"),
    ],
)
def test_wrong_options_are_refused(out: Path, error: Any, options: str, message: str) -> None:
    assert message in error(*options.split())
    assert names(out) == ["in.h5"]


def test_a_missing_package_is_named(out: Path, error: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    assert "pip install hdf5plugin" in error("--codec", "lz4")
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize("kind", ["zfp", "scale-offset"])
def test_rounding_filters_are_not_applied_again(
    source: Path, out: Path, run: Any, error: Any, kind: str
) -> None:
    options = {"scaleoffset": 2} if kind == "scale-offset" else dict(hdf5plugin.Zfp(rate=8))
    with h5py.File(source, "r+") as file:
        file.create_dataset("rounded", data=ROWS.astype("f4"), chunks=(64, 40), **options)
    message = error("--dataset", "rounded")
    assert "may round values that were rounded already; choose another --codec" in message
    assert run("--dataset", "rounded", "--codec", "lzf") == 0
    with h5py.File(out) as new, h5py.File(source) as old:
        assert new["rounded"].compression == "lzf"
        np.testing.assert_array_equal(new["rounded"], old["rounded"])


def test_a_source_whose_filter_the_library_lacks_is_read_by_fastpipe(
    out: Path, run: Any, monkeypatch: MonkeyPatch
) -> None:
    for module in (repacking, copying):
        monkeypatch.setattr(module, "missing", lambda steps: [step for step in steps if step.code == 1])
    monkeypatch.setattr(repacking, "_through_library", raising(AssertionError("the library is asked")))
    assert run("--codec", "lzf") == 0
    assert_whole(out)


def test_ctrl_c_leaves_no_file(source: Path, out: Path, repack: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "check_structure", raising(KeyboardInterrupt()))
    assert repack(source, out) == (130, "", "fastpipe repack: interrupted\n")
    assert names(out) == ["in.h5"]


def test_a_copy_that_was_moved_away_gets_no_name(out: Path, error: Any, monkeypatch: MonkeyPatch) -> None:
    check, unfinished = repacking.check_structure, repacking.unfinished_path(out)

    def moved(*arguments: Any) -> None:
        check(*arguments)
        os.rename(unfinished, f"{out}.was")
        unfinished.write_bytes(b"forged")

    monkeypatch.setattr(repacking, "check_structure", moved)
    assert "was moved away while it was written" in error()
    assert names(out) == [unfinished.name, "in.h5", "out.h5.was"] and unfinished.read_bytes() == b"forged"


def test_memory_is_bounded_by_steps() -> None:
    assert repacking._step(1000, 7, (10, 250), 4, 7000) * 1000 <= repacking._STEP_NBYTES
    assert repacking._step(1000, 7, (10, 250), 4, 7000) % 70 == 0
    # A group of old chunks that is too large is read in several steps, in whole new chunks.
    step = repacking._step(1 << 20, 3, (100, 1 << 16), 4, 3 << 20)
    assert step * (1 << 20) <= repacking.MEMORY_NBYTES and step % 3 == 0
    # One old chunk that is larger than all of the memory is read at once.
    assert repacking._step(1 << 20, 1, (100, 1 << 18), 4, 1 << 20) >= 100


SMALL = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")
OPTIONS = ["--chunk-rows", "3", "--codec", "gzip:1", "--dataset", "a", "--dataset", "b", "--dataset", "c"]
CALLS = [(os, name) for name in ("write", "fsync", "fchmod", "ftruncate", "unlink", "replace", "link")]
CALLS += [(repacking, name) for name in ("open_regular", "rename_anew", "sync_folder")]


@pytest.mark.few(1)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux, which has SIGKILL and fork")
@pytest.mark.parametrize(("how", "umask"), [("link", 0o022), ("copy", 0)])
def test_whatever_a_kill_at_the_end_has_left_it_can_be_repacked_again(
    tmp_path: Path, repack: Any, forked: Any, monkeypatch: MonkeyPatch, how: str, umask: int
) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "out.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("a", data=SMALL, chunks=(16, 30), compression="lzf")
        file.create_dataset("b", data=[f"text {n}" for n in range(300)])
        file.create_dataset("c", data=SMALL[:, 0] * 0.5, maxshape=(None,), chunks=(50,))
        file["d"] = SMALL[0]
        file["a"].attrs["other"] = file["c"].ref

    def repacked(die_at: int) -> int:
        with dying_at(die_at, CALLS, half_of_it) as count:
            repack(source, out, *OPTIONS)
        return count.calls

    def assert_repacked() -> None:
        with h5py.File(source) as old, h5py.File(out) as new:
            assert all((old[name][()] == new[name][()]).all() for name in "abcd")
            assert new["a"].chunks == (3, 30) and new["c"].chunks == (3,)
            assert new[new["a"].attrs["other"]] == new["c"]

    monkeypatch.setattr(repacking, "_STEP_NBYTES", 4000)  # so small that there are many of them
    monkeypatch.setattr(files, "_renameat2", None)
    if how == "copy":
        monkeypatch.setattr(os, "link", raising(OSError(errno.EPERM, "no links here")))
    before = os.umask(umask)
    try:
        total = repacked(0)
        assert total > 100
        for die_at in range(total - 7, total + 1):
            out.unlink(missing_ok=True)
            _, status = os.waitpid(forked(lambda: repacked(die_at)), 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            if out.exists():
                assert_repacked()
            assert repack(source, out, *OPTIONS, "--force")[0] == 0
            assert_repacked()
            assert names(out) == ["in.h5", "out.h5"]
            assert out.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)
