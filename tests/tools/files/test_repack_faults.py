"""What goes wrong is one line and an exit code, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from fastpipe.cli import main
from fastpipe.core import files as _files
from fastpipe.errors import HDF5Error
from fastpipe.hdf5 import copying as checking
from fastpipe.hdf5 import repack as repacking
from fastpipe.hdf5.repack import UnfinishedFile

Repack = Callable[..., tuple[int, str, str]]
ROWS = np.random.default_rng(0).standard_normal((4000, 40))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=ROWS, chunks=(64, 40), compression="gzip")
        file["one"] = 5
    return tmp_path / "in.h5"


@pytest.fixture
def out(source: Path) -> Path:
    return source.with_name("out.h5")


def refused(result: tuple[int, str, str]) -> str:
    code, output, errors = result
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("fastpipe repack: ")
    return line


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def test_what_is_said_at_the_end(source: Path, out: Path, repack: Repack) -> None:
    code, output, errors = repack(source, out, "--chunk-rows", "2", "--codec", "lzf", "--threads", "2")
    assert (code, errors) == (0, "")
    assert re.fullmatch(
        rf"{out}: [\d.]+ MiB → [\d.]+ MiB \([\d.]+×\); 1 dataset, 4,000 rows in [\d.]+ s "
        r"\([\d,]+ rows/s\), every value read back and equal\n",
        output,
    )
    with h5py.File(out) as new:
        np.testing.assert_array_equal(new["x"], ROWS)
    assert names(out) == ["in.h5", "out.h5"]


def test_a_file_that_is_there_is_replaced_only_by_force(source: Path, out: Path, repack: Repack) -> None:
    out.write_bytes(b"mine")
    assert "out.h5 exists; name another file, or replace it with --force" in refused(repack(source, out))
    assert out.read_bytes() == b"mine"
    assert names(out) == ["in.h5", "out.h5"]
    assert repack(source, out, "--force")[0] == 0
    with h5py.File(out) as new:
        np.testing.assert_array_equal(new["x"], ROWS)
    assert names(out) == ["in.h5", "out.h5"]


def test_a_file_that_comes_meanwhile_stays(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = repacking.check_structure
    monkeypatch.setattr(
        repacking, "check_structure", lambda *arguments: (check(*arguments), out.write_bytes(b"mine"))
    )
    assert "out.h5 exists" in refused(repack(source, out))
    assert out.read_bytes() == b"mine"
    assert names(out) == ["in.h5", "out.h5"]


def test_without_hard_links(source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(_files, "_renameat2", None)
    monkeypatch.setattr(os, "link", link)
    assert repack(source, out)[0] == 0
    assert names(out) == ["in.h5", "out.h5"]


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_what_the_user_has_put_there_is_no_unfinished_copy(
    source: Path, out: Path, repack: Repack, kind: str
) -> None:
    mine, precious = repacking.unfinished_path(out), out.with_name("precious")
    precious.write_bytes(b"mine, and longer than a signature")
    if kind == "folder":
        mine.mkdir()
    elif kind == "link":
        mine.symlink_to(precious)
    else:
        os.mkfifo(mine)
    assert f"{mine.name} is not an unfinished copy" in refused(repack(source, out))
    assert precious.read_bytes() == b"mine, and longer than a signature" and os.path.lexists(mine)
    assert not out.exists()


@pytest.mark.parametrize("name", ["out.h5.partial", "out.h5.unfinished", ".out.h5", "fastpipe-repack-mine"])
@pytest.mark.parametrize("kind", ["HDF5 file", "file", "zeros"])
def test_files_of_the_user_stay(source: Path, out: Path, repack: Repack, name: str, kind: str) -> None:
    mine = out.with_name(name)
    content = {"HDF5 file": source.read_bytes(), "file": b"mine", "zeros": bytes(100)}[kind]
    mine.write_bytes(content)
    mine.chmod(0o600)
    assert repack(source, out)[0] == 0
    assert mine.read_bytes() == content
    assert names(out) == sorted(["in.h5", "out.h5", name])


def test_another_name_of_a_file_is_all_that_is_removed(source: Path, out: Path, repack: Repack) -> None:
    precious = out.with_name("precious")
    precious.write_bytes(b"mine")
    os.link(precious, repacking.unfinished_path(out))
    assert repack(source, out)[0] == 0
    assert precious.read_bytes() == b"mine"
    assert names(out) == ["in.h5", "out.h5", "precious"]


@pytest.mark.parametrize("how", ["path", "link", "hard link", "detour"])
def test_the_input_itself(source: Path, out: Path, repack: Repack, how: str) -> None:
    before = source.read_bytes()
    other = {"path": source, "detour": source.parent / ".." / source.parent.name / "in.h5"}.get(how, out)
    if how == "link":
        out.symlink_to(source)
    elif how == "hard link":
        os.link(source, out)
    assert "is the input itself" in refused(repack(source, other, "--force", "--codec", "none"))
    assert source.read_bytes() == before


def test_files_that_cannot_be_used(source: Path, out: Path, repack: Repack) -> None:
    assert "No such file" in refused(repack(source.with_name("none.h5"), out))
    (source.parent / "text").write_text("text")
    assert "is no HDF5 file" in refused(repack(source.parent / "text", out))
    assert "is a folder; name a file" in refused(repack(source, source.parent))
    assert "there is no folder" in refused(repack(source, source.parent / "no" / "out.h5"))
    assert names(out) == ["in.h5", "text"]


def test_a_file_that_another_process_writes(source: Path, out: Path, repack: Repack) -> None:
    writer = f"""
import sys
import h5py
with h5py.File({str(source)!r}, "r+"):
    print(flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", writer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert "is open for writing elsewhere" in refused(repack(source, out))
        child.stdin.close()


def test_two_at_once(source: Path, out: Path, repack: Repack) -> None:
    holder = f"""
import sys
from pathlib import Path
from fastpipe.hdf5.repack import UnfinishedFile
with UnfinishedFile(Path({str(out)!r})):
    print(flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert "another process is writing" in refused(repack(source, out))
        child.stdin.close()
    assert repack(source, out)[0] == 0


def test_two_threads_at_once(source: Path, out: Path, repack: Repack) -> None:
    with UnfinishedFile(out):
        assert "another thread is writing" in refused(repack(source, out))
        assert names(out) == [repacking.unfinished_path(out).name, "in.h5"]
        (source.parent / "link").symlink_to(source.parent)
        with pytest.raises(HDF5Error, match="another thread is writing"):
            UnfinishedFile(source.parent / "link" / "out.h5")
        assert repack(source, out.with_name("other.h5"))[0] == 0
    assert repack(source, out)[0] == 0


def test_a_copy_that_begins_just_now_is_not_taken_for_one_left_behind(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the file between its making and its locking: it is made again."""
    lock, path, removed = repacking._lock, repacking.unfinished_path(out), []

    def lock_late(descriptor: int) -> bool:
        if len(removed) < 3:
            removed.append(path.unlink())
        return lock(descriptor)

    monkeypatch.setattr(repacking, "_lock", lock_late)
    with UnfinishedFile(out) as unfinished:
        assert len(removed) == 3 and os.path.samestat(os.fstat(unfinished.fileno()), path.stat())


def test_a_file_system_without_locks(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(descriptor: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(repacking, "try_to_lock", lock)
    assert "No locks available" in refused(repack(source, out))
    assert names(out) == ["in.h5"]


def test_reads_and_writes_are_whole(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux ends a call at 2 GiB, and h5py does not look at how much was done."""
    preadv, write = os.preadv, os.write
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:7]], at))
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    content = bytes(range(1, 101))
    with UnfinishedFile(out) as file:
        assert file.write(content) == 100
        file.seek(10)
        buffer = bytearray(b"\xff" * 200)
        assert file.readinto(memoryview(buffer)) == 90
        assert buffer == content[10:] + bytes(110)
        assert file.tell() == 100


@pytest.mark.skipif(os.geteuid() == 0, reason="run it as another user than root, whom no mode keeps out")
def test_a_folder_that_cannot_be_written(source: Path, out: Path, repack: Repack) -> None:
    source.parent.chmod(0o500)
    try:
        assert "Permission denied" in refused(repack(source, out))
    finally:
        source.parent.chmod(0o700)


def test_a_file_that_cannot_be_made(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_regular(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system", "unfinished")

    monkeypatch.setattr(repacking, "open_regular", open_regular)
    assert "Read-only file system: 'unfinished'" in refused(repack(source, out))
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize("after", [0, 1, 40, 90, 105])
def test_a_full_disk(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
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
        line = refused(repack(source, out, "--chunk-rows", "8"))
    assert "No space left on device" in line
    assert calls > after
    assert names(out) == ["in.h5"]
    assert repack(source, out, "--chunk-rows", "8")[0] == 0
    with h5py.File(out) as new:
        np.testing.assert_array_equal(new["x"], ROWS)
    assert names(out) == ["in.h5", "out.h5"]


@pytest.mark.parametrize("when", ["write", "check"])
def test_an_input_that_changes(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    name = {"write": "write_rows", "check": "check_rows"}[when]
    real, status = getattr(repacking, name), source.stat()

    def changed(*arguments: Any) -> None:
        real(*arguments)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    monkeypatch.setattr(repacking, name, changed)
    assert re.search("in.h5 has changed (meanwhile|since)", refused(repack(source, out)))
    assert names(out) == ["in.h5"]


def test_a_copy_that_is_wrong_never_gets_its_name(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = repacking.write_rows

    def write(dataset: Any, first: int, rows: Any) -> None:
        rows = rows.copy()
        rows.view(np.uint8)[-1, -1] ^= 1
        real(dataset, first, rows)

    monkeypatch.setattr(repacking, "write_rows", write)
    assert "/x: rows read back from the copy are not those of the source" in refused(repack(source, out))
    assert names(out) == ["in.h5"]


def test_a_lost_attribute_is_noticed(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(source, "r+") as file:
        file["x"].attrs["unit"] = "mV"
        file["one"].attrs["unit"] = "mV"
    real = repacking.copy_structure

    def copy(old: Any, new: Any, *arguments: Any) -> None:
        real(old, new, *arguments)
        new["x"].attrs["unit"] = "mW"

    monkeypatch.setattr(repacking, "copy_structure", copy)
    assert "/x: its attribute b'unit' would not be the same" in refused(repack(source, out))
    assert names(out) == ["in.h5"]


def test_a_damaged_input(source: Path, out: Path, repack: Repack) -> None:
    with h5py.File(source) as file:
        info = file["x"].id.get_chunk_info(10)
    with open(source, "r+b") as plain:
        plain.seek(info.byte_offset)
        plain.write(bytes(info.size))
    assert "the file is damaged" in refused(repack(source, out))
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dataset", "none"], "has no dataset 'none'; `fastpipe inspect` lists those it has"),
        (["--dataset", "one"], "is a single value"),
        (["--codec", "zip"], "must be one of keep, none, gzip[:LEVEL]"),
        (["--codec", "gzip:10"], "gzip has levels from 0 to 9"),
        (["--codec", "gzip:1:2"], "gzip has levels"),
        (["--codec", "blosc:zip"], "blosc has blosclz, lz4"),
        (["--codec", "lzf:3"], "must be one of"),
        (["--shuffle"], "go with a new codec, not with --codec keep"),
        (["--no-shuffle", "--codec", "none"], "not with --codec none"),
    ],
)
def test_options_that_cannot_work(
    source: Path, out: Path, repack: Repack, options: list[str], said: str
) -> None:
    assert said in refused(repack(source, out, *options))
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize("options", [["--chunk-rows", "0"], ["--chunk-rows", "x"], ["--threads", "-1"]])
def test_options_that_are_wrong(
    source: Path, out: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["repack", str(source), str(out), *options])
    assert stopped.value.code == 2
    assert "usage: fastpipe repack" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [hdf5plugin.Zfp(rate=8), "scale-offset"])
def test_filters_that_round_are_not_applied_again(source: Path, out: Path, repack: Repack, kind: Any) -> None:
    options = {"scaleoffset": 2} if kind == "scale-offset" else dict(kind)
    with h5py.File(source, "r+") as file:
        file.create_dataset("rounded", data=ROWS.astype("f4"), chunks=(64, 40), **options)
    assert "may round values that were rounded already; choose another --codec" in refused(
        repack(source, out, "--dataset", "rounded")
    )
    assert repack(source, out, "--dataset", "rounded", "--codec", "lzf")[0] == 0
    with h5py.File(out) as new, h5py.File(source) as old:
        assert new["rounded"].compression == "lzf"
        np.testing.assert_array_equal(new["rounded"], old["rounded"])


def test_a_codec_whose_package_is_missing(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    line = refused(repack(source, out, "--codec", "lz4"))
    assert "pip install hdf5plugin" in line
    assert names(out) == ["in.h5"]


def test_a_filter_that_cannot_be_written(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5z = h5py.h5z
    monkeypatch.setattr(h5z, "get_filter_info", lambda code: h5z.FILTER_CONFIG_DECODE_ENABLED)
    assert "cannot write its filter gzip 4; choose another --codec" in refused(repack(source, out))


def test_the_library_is_not_asked_where_it_lacks_a_filter(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fastpipe's own readers read the source then."""
    for module in (repacking, checking):
        monkeypatch.setattr(module, "missing", lambda steps: [step for step in steps if step.code == 1])
    seen = []
    monkeypatch.setattr(repacking, "_through_library", lambda *arguments: seen.append(arguments))
    assert repack(source, out, "--codec", "lzf")[0] == 0
    assert not seen
    with h5py.File(out) as new:
        np.testing.assert_array_equal(new["x"], ROWS)


def test_ctrl_c_leaves_nothing(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repacking, "check_structure", interrupted)
        code, output, errors = repack(source, out)
    assert (code, output, errors) == (130, "", "fastpipe repack: interrupted\n")
    assert names(out) == ["in.h5"]


def test_a_copy_that_was_moved_away_does_not_get_its_name(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, unfinished = repacking.check_structure, repacking.unfinished_path(out)

    def moved(*arguments: Any) -> None:
        check(*arguments)
        os.rename(unfinished, f"{out}.was")
        unfinished.write_bytes(b"forged")

    monkeypatch.setattr(repacking, "check_structure", moved)
    assert "was moved away while it was written" in refused(repack(source, out))
    assert names(out) == [unfinished.name, "in.h5", "out.h5.was"]
    assert unfinished.read_bytes() == b"forged"


def test_memory_is_bounded_by_steps() -> None:
    assert repacking._step(1000, 7, (10, 250), 4, 7000) * 1000 <= repacking._STEP_NBYTES
    assert repacking._step(1000, 7, (10, 250), 4, 7000) % 70 == 0
    # A group of old chunks that is too large is read in several steps, in whole new chunks.
    step = repacking._step(1 << 20, 3, (100, 1 << 16), 4, 3 << 20)
    assert step * (1 << 20) <= repacking.MEMORY_NBYTES and step % 3 == 0
    # One old chunk that is larger than all of the memory is read at once.
    assert repacking._step(1 << 20, 1, (100, 1 << 18), 4, 1 << 20) >= 100
