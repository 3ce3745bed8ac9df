"""Whether a file is what it was, and which file systems are relied on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.core import file_identity
from fastpipe.core.file_identity import FileSystems, identify, is_stale

TAG = b"t" * 32


def _status(file: Path, **other: int) -> Any:
    """A file's status, but for some fields."""
    real = os.stat(file)
    return SimpleNamespace(
        **{name: getattr(real, name) for name in dir(real) if name.startswith("st_")} | other
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that changed before the file system's clock went on."""
    path, probe = tmp_path / "file", tmp_path / "probe"
    path.write_bytes(b"first")
    os.utime(path, ns=(10**18, 10**18))
    changed = path.stat().st_ctime_ns
    while not probe.exists() or probe.stat().st_ctime_ns <= changed:
        probe.write_bytes(b"")
        os.utime(probe)
    return path


def _rewrite_with_old_times(file: Path) -> None:
    before = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def _replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"other")
    os.utime(other, ns=(10**18, 10**18))
    other.replace(file)


def _link_elsewhere(file: Path) -> None:
    file.with_name("other").write_bytes(b"other")
    file.with_name("link").unlink()
    file.with_name("link").symlink_to("other")


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "read": (Path.read_bytes, False),
    "another size": (lambda file: file.write_bytes(b"longer than the first"), True),
    "the same size": (lambda file: file.write_bytes(b"other"), True),
    "the same size and time of modification": (_rewrite_with_old_times, True),
    "another file with the same times": (_replace, True),
    "a link that points elsewhere": (_link_elsewhere, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_shows_in_the_digest_and_in_the_note(file: Path, name: str) -> None:
    change, is_seen = CHANGES[name]
    file.with_name("link").symlink_to(file)
    before = identify(str(file.with_name("link")), TAG)
    assert identify(str(file), TAG).digest == before.digest
    assert not is_stale(before.note())
    change(file)
    assert (identify(str(file.with_name("link")), TAG).digest != before.digest) is is_seen
    assert is_stale(before.note()) is is_seen


@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_each_part_of_the_state_counts(file: Path, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, changed = identify(str(file), TAG), _status(file, **{field: getattr(os.stat(file), field) + 1})
    monkeypatch.setattr(file_identity.os, "stat", lambda path: changed)
    assert identify(str(file), TAG).digest != before.digest
    assert is_stale(before.note())


def test_the_tag_counts(file: Path) -> None:
    digests = {identify(str(file), tag).digest for tag in (b"", b"a", b"b", TAG, b"x" * 64)}
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {16}


def test_a_missing_file_is_the_usual_error_and_stale(file: Path) -> None:
    note = identify(str(file), TAG).note()
    file.unlink()
    for one in (note, b"", b"short", bytes(40), bytes(40) + b"a\0b", bytes(40) + b"\xff\xfe"):
        assert is_stale(one)
    with pytest.raises(FileNotFoundError) as raised:
        identify(str(file), TAG)
    assert raised.value.filename == str(file)


def test_any_name_and_time_has_a_note_read_from_anywhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = file.with_name(os.fsdecode(b"\xff\xfe \xc3\xa4"))
    file.rename(odd)
    os.utime(odd, ns=(-5_000_000_000, -5_000_000_000))  # before 1970, where a file system keeps such times
    monkeypatch.chdir(odd.parent)
    here = identify(odd.name, TAG)
    assert here.digest == identify(str(odd), TAG).digest
    note = here.note()
    monkeypatch.chdir("/")
    assert not is_stale(note)
    odd.write_bytes(b"something else")
    assert is_stale(note)


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
    status = _status(file, st_ctime_ns=changed)
    monkeypatch.setattr(file_identity.os, "stat", lambda path: status)
    monkeypatch.setattr(file_identity.time, "time_ns", lambda: changed + later)
    assert identify(str(file), TAG).is_settled is is_settled


MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /data rw,relatime shared:2 master:1 - nfs4 server:/data rw
31 22 0:41 / /data/fast rw - btrfs /dev/vdb rw
32 22 0:42 / /with\040blank rw - fuse.sshfs host: rw
33 22 0:43 / /over rw - tmpfs tmpfs rw
34 22 0:44 / /over rw - 9p host rw
a line of another kind
35 22 strange:1 / /odd rw - xfs /dev/vdc rw
"""
OTHER = os.makedev(0, 99)


@pytest.mark.parametrize(
    ("device", "folder", "kind"),
    [
        (os.makedev(254, 0), "/data/x", "ext4"),  # the device decides, whatever the path looks like
        (os.makedev(0, 40), "/", "nfs4"),
        (OTHER, "/data/fast/subvolume", "btrfs"),
        (OTHER, "/data/fastest", "nfs4"),
        (OTHER, "/data", "nfs4"),
        (OTHER, "/with blank/x", "fuse.sshfs"),
        (OTHER, "/over/x", "9p"),  # hides the tmpfs
        (OTHER, "/elsewhere", "ext4"),
        (OTHER, "/odd/x", "xfs"),
    ],
)
def test_the_kind_of_a_folder_s_file_system(device: int, folder: str, kind: str) -> None:
    systems = FileSystems(MOUNTS)
    assert systems.kind(device, folder) == kind
    assert systems.is_local(device, folder) == (kind in ("ext4", "btrfs", "xfs"))
    assert systems.is_remote(device, folder) == (kind in ("nfs4", "fuse.sshfs", "9p"))


def test_a_link_is_followed_to_its_file_system(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    real = os.path.realpath(tmp_path / "real")
    systems = FileSystems(f"1 1 0:1 / / rw - ext4 x rw\n2 1 0:2 / {real} rw - nfs x rw\n")
    assert systems.kind(OTHER, str(tmp_path / "link")) == "nfs"


def test_an_unknown_system_is_not_local_nor_remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.path.exists("/proc/self/mountinfo"):
        assert FileSystems().kind(os.stat("/proc").st_dev, "/proc") == "proc"
        assert FileSystems().is_remote(os.stat("/proc").st_dev, "/proc")
    monkeypatch.setattr(file_identity, "_MOUNTS", str(tmp_path / "none"))
    for systems in (FileSystems(""), FileSystems()):
        assert systems.kind(1, "/") is None
        assert not systems.is_local(1, "/") and not systems.is_remote(1, "/")
