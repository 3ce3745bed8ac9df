"""One data file and its log, besides tests/contracts/test_caches.py; the native core's tests have the table."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.core import cache_store as store
from fastpipe.core import locks
from fastpipe.core.cache_store import EntryStore

MIB = 1 << 20
Forked = Callable[[Callable[[], object]], int]
InChild = Callable[[Callable[[], object]], None]


def _digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def _open(folder: Path, max_bytes: int = 8 * MIB, **options: Any) -> EntryStore:
    """A store over the two files of a folder."""
    data, log = (os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name in ("data", "log"))
    return EntryStore(data, log, max_bytes, **{"verify": True, **options})


def _pixels(number: int) -> npt.NDArray[np.uint8]:
    """An image that only this number has, of a size of its own."""
    random = np.random.default_rng(number)
    return random.integers(0, 256, (number % 7 + 1, number % 5 + 2, 3), np.uint8)


def _put(one: EntryStore, number: int, note: bytes = b"") -> bool:
    return one.put(_digest(number), _pixels(number), number, note)


def _found(one: EntryStore, numbers: range | list[int]) -> list[int]:
    """The numbers of the entries that are found; and then they must be right."""
    found = []
    for number in numbers:
        entry = one.find(_digest(number))
        if entry is not None:
            assert entry.flags == number
            assert np.array_equal(one.read(entry, 0, entry.shape[0]), _pixels(number))
            found.append(number)
    return found


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "fastpipe.cache")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("verify", "marks"), [(False, 0), (True, 1000)])
def test_an_entry_is_found_with_its_note_and_its_place(tmp_path: Path, verify: bool, marks: int) -> None:
    one = _open(tmp_path, verify=verify, marks=marks)
    for number in range(300):
        assert _put(one, number, b"note %d" % number)
    allocated = one.allocated
    assert _put(one, 1)
    assert (one.allocated, len(one)) == (allocated, 300)
    assert _found(one, range(400)) == list(range(300))
    for number, entry in enumerate(one.entries()):
        assert one.note(entry) == b"note %d" % number
        assert entry.shape == _pixels(number).shape
        assert entry.offset >= marks and entry.offset % 64 == 0
        for first, count in itertools.combinations(range(entry.shape[0] + 1), 2):
            rows = one.read(entry, first, count - first)
            assert np.array_equal(rows, _pixels(number)[first:count])
            assert rows.flags.c_contiguous and rows.flags.writeable


def test_all_processes_share_the_room(tmp_path: Path, in_child: InChild) -> None:
    one = _open(tmp_path, max_bytes=1000)
    in_child(lambda: _open(tmp_path, max_bytes=1000).put(_digest(0), np.zeros((300, 1, 3), np.uint8)))
    assert one.has_room(900), "it has not looked"
    assert not one.put(_digest(1), np.ones((300, 1, 3), np.uint8))
    assert not one.has_room(900)
    assert os.stat(tmp_path / "data").st_size == 900


def test_little_entries_leave_most_of_the_room(tmp_path: Path) -> None:
    used = 0
    for number in range(40):
        one = _open(tmp_path, max_bytes=1 << 26)
        assert _put(one, number)
        used += _pixels(number).nbytes
        assert one.allocated <= used + 64 * (number + 1)
        del one


CALLS: dict[str, Callable[[EntryStore], object]] = {
    "pwritev": lambda one: _put(one, 2, b"a note"), "pwrite": lambda one: one.mark(_digest(2)),
    "fstat": lambda one: one.find(_digest(2)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_store_stops_taking_at_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any, call: str
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    one = _open(tmp_path, marks=100)
    assert _put(one, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store.os, call, fail)
        assert not CALLS[call](one)
        assert _found(one, range(4)) == [1]
        assert not _put(one, 3)
    assert not _put(one, 4), "it does not try again and again"
    assert not one.has_room(1)
    assert _found(one, range(4)) == [1]
    assert len(warnings()) == 1 and "No space left" in warnings()[0]
    (tmp_path / "new").mkdir()
    monkeypatch.setattr(locks.fcntl, "lockf", fail)
    with pytest.raises(OSError, match="No space left"):
        _open(tmp_path / "new")


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """In the pixels, in the note, and between the two."""
    one, real, note = _open(tmp_path), os.pwritev, bytes(range(200))

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        return real(descriptor, [b"".join(parts)[:most]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    for number in range(5):
        assert _put(one, number, note[: 40 * number])
    assert _found(one, range(5)) == list(range(5))
    assert [one.note(entry) for entry in one.entries()] == [note[: 40 * number] for number in range(5)]


def test_a_machine_short_of_room_ends_it(tmp_path: Path, warnings: Any) -> None:
    is_short, asked = False, 0

    def look() -> bool:
        nonlocal asked
        asked += 1
        return is_short

    def fail() -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    one = _open(tmp_path, 100 * MIB, is_short=look)
    pixels = np.zeros((1024, 1024, 3), np.uint8)
    assert all(one.put(_digest(number), pixels) for number in range(10))
    assert asked == 2, "once in 16 MiB"
    is_short = True
    assert sum(one.put(_digest(number), pixels) for number in range(10, 30)) < 8
    assert (asked, len(warnings())) == (3, 1)
    assert one.find(_digest(3)) is not None
    (tmp_path / "other").mkdir()
    assert not _put(_open(tmp_path / "other", is_short=fail), 100)
    assert len(warnings()) == 2


def test_a_log_that_is_cut_off_while_it_is_used_is_left_alone(tmp_path: Path, warnings: Any) -> None:
    one = _open(tmp_path)
    for number in range(5):
        assert _put(one, number)
    os.truncate(tmp_path / "log", 0)
    assert _found(one, range(6)) == list(range(5))
    assert not _put(one, 5)
    assert len(warnings()) == 1
    assert os.stat(tmp_path / "log").st_size == 0, "nothing is written where it does not belong"


def test_a_crash_leaves_a_usable_store(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    (tmp_path / "log").write_bytes(b"half a header")  # killed while it began
    one = _open(tmp_path)
    header = (tmp_path / "log").read_bytes()
    for number in range(10):
        assert _put(one, number)
    with open(tmp_path / "log", "r+b") as file:
        file.write(header)  # older than the records, as a crash of the machine may leave it
    assert _put(_open(tmp_path), 10)
    assert _found(_open(tmp_path), range(11)) == list(range(11))


def test_processes_and_their_children_write_at_once(tmp_path: Path, forked: Forked) -> None:
    one = _open(tmp_path)
    assert all(_put(one, number) for number in range(20))  # in a part of the file where still is room

    def fill(own: EntryStore, numbers: range) -> None:
        for number in numbers:
            while not _put(own, number):  # another process has the lock
                own._not_before = 0
            assert _found(own, [number])

    ranges = [range(300), range(200, 500)]
    pids = [forked(lambda numbers=numbers: fill(_open(tmp_path), numbers)) for numbers in ranges]  # type: ignore[misc]
    pids.append(forked(lambda: fill(one, range(0, 500, 3))))
    fill(one, range(400, 500))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    for reader in (one, _open(tmp_path)):
        assert _found(reader, range(500)) == list(range(500))
    spans = sorted((entry.offset, entry.offset + entry.nbytes + entry.note) for entry in one.entries())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.usefixtures("no_gc")
def test_a_store_that_is_closed_leaves_the_lock_to_the_others(tmp_path: Path, in_child: InChild) -> None:
    one, other = _open(tmp_path), _open(tmp_path)
    descriptors = other.descriptors

    def is_free() -> None:
        assert locks.try_to_lock(os.open(tmp_path / "log", os.O_RDWR))

    with one._lock.alone(one._log):
        del other
        with pytest.raises(AssertionError):
            in_child(is_free)
    in_child(is_free)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_child_forked_while_threads_hold_the_locks_does_not_hang(tmp_path: Path, in_child: InChild) -> None:
    one = _open(tmp_path)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with one._lock.alone(one._log):
            inside.set()
            leave.wait()

    def look() -> None:
        # The parent has the file's lock; everything else goes on.
        assert not _put(one, 1) and not _found(one, [1])
        assert not one.has_room(1), "for a while it does not even try"
        descriptor = os.open(tmp_path / "new", os.O_RDWR | os.O_CREAT)
        with locks.lock_of(descriptor).alone(descriptor):
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        with locks._making:
            in_child(look)
    finally:
        leave.set()
        thread.join()
    assert _put(one, 1)
    in_child(lambda: _put(one, 2) or os._exit(1))
    assert _found(one, [1, 2]) == [1, 2]
