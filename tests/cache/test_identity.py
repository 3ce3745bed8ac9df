"""Whether a file is what it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastpipe.core import file_identity as identity
from fastpipe.core.file_identity import identify, is_stale

TAG = b"t" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    os.utime(path, ns=(10**18, 10**18))
    _wait_for_another_time(path)
    return path


def _wait_for_another_time(path: Path) -> None:
    """Until the clock of the file system has moved on since a file changed."""
    probe, changed = path.with_name("probe"), path.stat().st_ctime_ns
    while True:
        probe.write_bytes(b"")
        os.utime(probe)
        if probe.stat().st_ctime_ns > changed:
            return


def _is_seen(path: Path, change: object) -> bool:
    """Whether a change shows both in the digest and in the note."""
    before = identify(str(path), TAG)
    assert identify(str(path), TAG).digest == before.digest
    assert not is_stale(before.note())
    change()  # type: ignore[operator]
    is_other = identify(str(path), TAG).digest != before.digest
    assert is_stale(before.note()) == is_other
    return is_other


def test_reading_is_no_change(file: Path) -> None:
    assert not _is_seen(file, file.read_bytes)


def test_another_size(file: Path) -> None:
    assert _is_seen(file, lambda: file.write_bytes(b"longer than the first"))


def test_the_same_size(file: Path) -> None:
    assert _is_seen(file, lambda: file.write_bytes(b"other"))


def test_the_same_size_and_the_old_time_of_modification(file: Path) -> None:
    def change() -> None:
        before = file.stat()
        file.write_bytes(b"other")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)

    assert _is_seen(file, change)


def test_another_file_with_the_same_times_in_its_place(file: Path) -> None:
    def change() -> None:
        other = file.with_name("other")
        other.write_bytes(b"other")
        os.utime(other, ns=(10**18, 10**18))
        other.replace(file)

    assert _is_seen(file, change)


def test_a_link_that_points_elsewhere(file: Path) -> None:
    link, other = file.with_name("link"), file.with_name("other")
    other.write_bytes(b"other")
    link.symlink_to(file)
    assert identify(str(link), TAG).digest == identify(str(file), TAG).digest

    def change() -> None:
        link.unlink()
        link.symlink_to(other)

    assert _is_seen(link, change)


@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_each_part_of_the_state_counts(file: Path, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    class Changed:
        def __init__(self, status: os.stat_result) -> None:
            self._status = status

        def __getattr__(self, name: str) -> int:
            return getattr(self._status, name) + (name == field)  # type: ignore[no-any-return]

    assert _is_seen(file, lambda: monkeypatch.setattr(identity.os, "stat", lambda path: Changed(real(path))))


def test_what_is_made_of_it_counts(file: Path) -> None:
    digests = {identify(str(file), tag).digest for tag in (b"", b"a", b"b", TAG, b"x" * 64)}
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {16}


def test_times_before_1970(file: Path) -> None:
    os.utime(file, ns=(-5_000_000_000, -5_000_000_000))
    if file.stat().st_mtime_ns > 0:
        pytest.skip("run it on a file system that keeps such times")
    assert not is_stale(identify(str(file), TAG).note())


def test_a_missing_file_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        identify(str(tmp_path / "none"), TAG)
    assert raised.value.filename == str(tmp_path / "none")


def test_a_file_that_is_gone_is_stale(file: Path) -> None:
    note = identify(str(file), TAG).note()
    file.unlink()
    assert is_stale(note)


@pytest.mark.parametrize("note", [b"", b"short", bytes(40), bytes(40) + b"a\0b", bytes(40) + b"\xff\xfe"])
def test_a_note_that_names_no_file_is_stale(note: bytes) -> None:
    assert is_stale(note)


def test_a_note_of_a_relative_path_is_read_from_anywhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    here = identify("file", TAG)
    assert here.digest == identify(str(file), TAG).digest
    note = here.note()
    monkeypatch.chdir("/")
    assert not is_stale(note)
    file.write_bytes(b"something else")
    assert is_stale(note)


def test_any_name_has_a_note(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe \xc3\xa4")
    Path(path).write_bytes(b"x")
    assert not is_stale(identify(path, TAG).note())


# ---- whether a change would show -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "later", "is_settled"),
    [
        (10**18 + 1, 15_000_000, False),
        (10**18 + 1, 25_000_000, True),
        (10**18, 25_000_000, False),  # whole seconds: the file system may know no parts of them
        (10**18, 1_500_000_000, False),
        (10**18, 2_500_000_000, True),
        (10**18 + 1, -3_600_000_000_000, False),  # the clock of a server is ahead
    ],
)
def test_a_file_that_changed_just_now_may_change_again_unseen(
    file: Path, changed: int, later: int, is_settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat(file)

    class Changed:
        def __getattr__(self, name: str) -> int:
            return changed if name == "st_ctime_ns" else getattr(real, name)  # type: ignore[no-any-return]

    monkeypatch.setattr(identity.os, "stat", lambda path: Changed())
    monkeypatch.setattr(identity.time, "time_ns", lambda: changed + later)
    assert identify(str(file), TAG).is_settled is is_settled
