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
from fastpipe.hdf5 import checking, partial, planning, repacking

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


def test_two_threads_do_not_write_one_file(out: Path) -> None:
    with (
        partial.Partial(out),
        pytest.raises(HDF5Error, match=r"another thread is writing .*out\.h5; wait for it"),
    ):
        partial.Partial(out)
    with partial.Partial(out) as again:
        again.remove()
    assert names(out) == ["in.h5"]


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
    out.unlink()
    monkeypatch.undo()
    assert repack(source, out)[0] == 0  # nothing was lost
    assert names(out) == ["in.h5", "out.h5"]


def test_without_hard_links(source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(_files, "_renameat2", None)
    monkeypatch.setattr(os, "link", link)
    assert repack(source, out)[0] == 0
    assert names(out) == ["in.h5", "out.h5"]


def test_a_folder_of_the_users_own_is_no_unfinished_copy(source: Path, out: Path, repack: Repack) -> None:
    mine = out.with_name("out.h5.partial")
    mine.mkdir()
    for name in ("precious.txt", "lock", "data.h5"):
        (mine / name).write_text("mine")
        assert "out.h5.partial is not that of an unfinished copy" in refused(repack(source, out))
        assert {path.name: path.read_text() for path in mine.iterdir()} == {name: "mine"}
        (mine / name).unlink()
    assert repack(source, out)[0] == 0  # an empty one is taken
    assert names(out) == ["in.h5", "out.h5"]


def test_what_others_put_beside_the_growing_copy_stays(source: Path, out: Path, repack: Repack) -> None:
    growing = partial.Partial(out)
    (out.with_name("out.h5.partial") / "precious.txt").write_text("mine")
    growing.remove()
    (path,) = out.with_name("out.h5.partial").iterdir()
    assert path.read_text() == "mine"


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
from fastpipe.hdf5.partial import Partial
with Partial(Path({str(out)!r})):
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


@pytest.mark.skipif(os.geteuid() == 0, reason="run it as another user than root, whom no mode keeps out")
def test_a_folder_that_cannot_be_written(source: Path, out: Path, repack: Repack) -> None:
    source.parent.chmod(0o500)
    try:
        assert "Permission denied" in refused(repack(source, out))
    finally:
        source.parent.chmod(0o700)


def test_a_folder_that_cannot_be_made(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "out.h5.partial")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert "Read-only file system: 'out.h5.partial'" in refused(repack(source, out))
    assert names(out) == ["in.h5"]


@pytest.mark.parametrize("after", [0, 1, 40, 90, 150])
def test_a_full_disk(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """What was written before is used when there is room again."""
    monkeypatch.setattr(planning, "_STEP_NBYTES", 20000)
    monkeypatch.setattr(repacking, "_CHECKPOINT_NBYTES", 60000)
    calls, write = 0, os.pwrite

    def pwrite(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        line = refused(repack(source, out, "--chunk-rows", "8"))
    assert "No space left on device" in line
    assert calls > after
    assert names(out) == ["in.h5", "out.h5.partial"][: 2 if after >= 40 else 1]
    code, _, errors = repack(source, out, "--chunk-rows", "8")
    assert code == 0
    assert ("going on: " in errors) == (after >= 40)
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


def test_ctrl_c_keeps_what_is_done(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repacking, "check_structure", interrupted)
        code, output, errors = repack(source, out)
    assert (code, output, errors) == (130, "", "fastpipe repack: interrupted\n")
    assert names(out) == ["in.h5", "out.h5.partial"]
    code, _, errors = repack(source, out)
    assert code == 0
    assert "going on: 4,000 of 4,000 rows are written" in errors


def test_memory_is_bounded_by_steps() -> None:
    assert planning._step(1000, 7, (10, 250), 4, 7000) * 1000 <= planning._STEP_NBYTES
    assert planning._step(1000, 7, (10, 250), 4, 7000) % 70 == 0
    # A group of old chunks that is too large is read in several steps, in whole new chunks.
    step = planning._step(1 << 20, 3, (100, 1 << 16), 4, 3 << 20)
    assert step * (1 << 20) <= planning.MEMORY_NBYTES and step % 3 == 0
    # One old chunk that is larger than all of the memory is read at once.
    assert planning._step(1 << 20, 1, (100, 1 << 18), 4, 1 << 20) >= 100


@pytest.mark.parametrize("then", ["again", "other options", "by force"])
def test_ended_when_the_file_had_its_name_already(
    source: Path, out: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """What is left beside it is the same file by another name, and must not be written to."""

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "remove", interrupted)
        assert repack(source, out)[0] == 130
    assert names(out) == ["in.h5", "out.h5", "out.h5.partial"]
    before = out.read_bytes()
    if then == "again":
        code, output, _ = repack(source, out)
        assert code == 0 and "every value read back and equal" in output
        assert names(out) == ["in.h5", "out.h5"]
    elif then == "other options":
        assert "out.h5 exists" in refused(repack(source, out, "--codec", "lzf"))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(repacking, "check_structure", interrupted)
            assert repack(source, out, "--codec", "lzf", "--force")[0] == 130
        assert out.read_bytes() == before
        assert repack(source, out, "--codec", "lzf", "--force")[0] == 0
        with h5py.File(out) as new:
            assert new["x"].compression == "lzf"
        assert names(out) == ["in.h5", "out.h5"]
    if then != "by force":
        assert out.read_bytes() == before
