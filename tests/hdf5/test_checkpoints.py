"""The file under a growing copy, beside a model of it: bytes, sizes, and what is left of it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import console
from fastpipe.console import Pace
from fastpipe.hdf5 import checkpoints
from fastpipe.hdf5.checkpoints import CheckpointedFile

STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 90), st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("read"), st.integers(0, 90), st.integers(1, 60)),
    st.tuples(st.just("truncate"), st.integers(0, 120)),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("reopen")),
)


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=30))
def test_any_steps(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "_PAGE", 16)
        file, now, kept = CheckpointedFile(Path(folder)), b"", b""
        number = 0
        for kind, *arguments in steps:
            if kind == "write":
                at, data = arguments
                file.seek(at)
                assert file.write(data) == len(data)
                now = now.ljust(at, b"\0")
                now = now[:at] + data + now[at + len(data) :]
            elif kind == "truncate":
                # The library gives the file its size when it closes it, and writes there anew.
                (size,) = arguments
                now = now[:size].ljust(size, b"\0")
                file.truncate(size)
                file.checkpoint({"number": (number := number + 1)})
                kept = now
            elif kind == "read":
                at, count = arguments
                buffer = bytearray(count)
                file.seek(at)
                file.readinto(buffer)
                assert bytes(buffer) == now[at : at + count].ljust(count, b"\0")
            elif kind == "checkpoint":
                file.checkpoint({"number": (number := number + 1)})
                kept = now
            else:
                file.close()
                file, now = CheckpointedFile(Path(folder)), kept
                assert file.note == ({"number": number} if number else None)
            # Nobody who reads the file itself sees anything but the last checkpoint.
            assert file.path.read_bytes()[: len(kept)] == kept
            assert file.seek(0, os.SEEK_END) == len(now)
        file.close()


def test_a_checkpoint_that_was_begun_is_put_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CheckpointedFile(tmp_path)
    file.write(b"old bytes")
    file.checkpoint({"step": 1})
    file.seek(0)
    file.write(b"new bytes, and more")
    with monkeypatch.context() as patch:

        def interrupted(self: CheckpointedFile) -> None:
            raise KeyboardInterrupt

        patch.setattr(CheckpointedFile, "_redo", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.checkpoint({"step": 2})
        file.close()
    assert (tmp_path / "data.h5").read_bytes() == b"old bytes, and more"
    for _ in range(2):
        file = CheckpointedFile(tmp_path)
        assert file.note == {"step": 2}
        assert file.path.read_bytes() == b"new bytes, and more"
        file.close()


def test_after_an_error_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CheckpointedFile(tmp_path)
    file.write(b"good")
    file.checkpoint({"step": 1})

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    file.seek(4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert file.write(b"lost") == 4  # the library is not told
    assert file.failed is not None and file.failed.errno == errno.ENOSPC
    assert file.write(b"lost as well") == 12
    with pytest.raises(OSError, match="full"):
        file.checkpoint({"step": 2})
    assert (file.failed, file.note) == (None, {"step": 1})
    assert file.path.read_bytes() == b"good"
    file.write(b"GOOD")
    file.checkpoint({"step": 2})
    assert file.path.read_bytes() == b"GOOD"
    file.close()


def test_beginning_anew_forgets_everything(tmp_path: Path) -> None:
    file = CheckpointedFile(tmp_path)
    file.write(b"good")
    file.checkpoint({"step": 1})
    file.begin_anew()
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.h5"]
    file = CheckpointedFile(tmp_path)
    assert (file.note, file.seek(0, os.SEEK_END)) == (None, 0)
    file.close()


def test_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown:
        text = ""

        def now(self, text: str) -> None:
            self.text = text

    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    shown = Shown()
    bar = Pace(shown, "writing", 1000 << 10)  # type: ignore[arg-type]
    bar.add(250 << 10, "/x, row 1 of 4")
    assert shown.text == "writing /x, row 1 of 4: 25%, 125 KiB/s, 6 s left"
    bar.add(750 << 10, "/x, row 4 of 4")
    assert shown.text == "writing /x, row 4 of 4: 100%, 250 KiB/s, 0 s left"
