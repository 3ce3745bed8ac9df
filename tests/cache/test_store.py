"""One data file and its log, used by threads, stores and processes at once."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.core import cache_store as store
from fastpipe.core import locks
from fastpipe.core.cache_store import DamagedStoreError, EntryStore
from fastpipe.core.native import native

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="run it where processes can fork")

MIB = 1 << 20
HEADER = 64
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing.get_context()


def _open(folder: Path, max_bytes: int = 8 * MIB, **options: Any) -> EntryStore:
    """A store over the two files of a folder."""
    data, log = (os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name in ("data", "log"))
    return EntryStore(data, log, max_bytes, **{"verify": True, **options})


def _digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def _pixels(number: int) -> npt.NDArray[np.uint8]:
    """An image that only this number has, of a size of its own."""
    random = np.random.default_rng(number)
    return random.integers(0, 256, (number % 7 + 1, number % 5 + 2, 3), np.uint8)


def _put(one: EntryStore, number: int, note: bytes = b"") -> bool:
    return one.put(_digest(number), _pixels(number), number, note)


def _put_at_last(one: EntryStore, number: int) -> None:
    while not _put(one, number):  # somebody else has the lock
        one._not_before = 0


def _is_there(one: EntryStore, number: int) -> bool:
    """Whether an entry is found; and then it must be right."""
    entry = one.find(_digest(number))
    if entry is None:
        return False
    assert entry.flags == number
    assert np.array_equal(one.read(entry, 0, entry.shape[0]), _pixels(number))
    return True


def _in_child(task: Callable[[], object]) -> int:
    """Run something in a forked child; its exit code."""
    child = FORK.Process(target=task)
    child.start()
    child.join(60)
    return int(child.exitcode if child.exitcode is not None else -1000)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    caplog.set_level(logging.WARNING, "fastpipe.cache")
    yield lambda: [record.getMessage() for record in caplog.records]


# ---- putting and finding ---------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("marks", [0, 1000])
def test_what_was_put_is_found(tmp_path: Path, verify: bool, marks: int) -> None:
    one = _open(tmp_path, verify=verify, marks=marks)
    assert one.find(_digest(0)) is None
    for number in range(300):
        assert _put(one, number, b"note %d" % number)
    for number in range(300):
        assert _is_there(one, number)
        entry = one.find(_digest(number))
        assert entry is not None
        assert one.note(entry) == b"note %d" % number
        assert entry.shape == _pixels(number).shape
        assert entry.offset >= marks
        assert entry.offset % 64 == 0
    assert not _is_there(one, 300)
    assert len(one) == 300
    assert sorted(entry.flags for entry in one.entries()) == list(range(300))


def test_any_rows_can_be_read(tmp_path: Path) -> None:
    one, pixels = _open(tmp_path), np.random.default_rng(0).integers(0, 256, (9, 5, 3), np.uint8)
    assert one.put(_digest(0), pixels)
    entry = one.find(_digest(0))
    assert entry is not None
    for first in range(10):
        for count in range(10 - first):
            rows = one.read(entry, first, count)
            assert np.array_equal(rows, pixels[first : first + count])
            assert rows.flags.c_contiguous
            assert rows.flags.writeable


def test_what_is_there_is_not_put_again(tmp_path: Path) -> None:
    one = _open(tmp_path)
    assert _put(one, 1)
    allocated = one.allocated
    assert _put(one, 1)
    assert (one.allocated, len(one)) == (allocated, 1)


def test_it_outlives_the_process_that_made_it(tmp_path: Path) -> None:
    def fill() -> None:
        one = _open(tmp_path)
        assert all(_put(one, number) for number in range(50))

    assert _in_child(fill) == 0
    one = _open(tmp_path)
    assert all(_is_there(one, number) for number in range(50))


def test_an_open_store_sees_what_others_put(tmp_path: Path) -> None:
    one = _open(tmp_path)
    for start in (0, 10, 2000):
        assert not _is_there(one, start)
        assert (
            _in_child(lambda start=start: [_put(_open(tmp_path), start + n) for n in range(10)] and None) == 0
        )
        assert all(_is_there(one, start + n) for n in range(10))
    assert _put(one, 5000)
    assert len(one) == 31


# ---- room ------------------------------------------------------------------------------------------


def test_a_full_store_takes_no_more_and_keeps_what_it_has(tmp_path: Path) -> None:
    one = _open(tmp_path, max_bytes=4096)
    kept = [number for number in range(200) if _put(one, number)]
    assert 10 < len(kept) < 100
    assert not one.has_room(4096)
    assert [number for number in range(200) if _is_there(one, number)] == kept
    assert not any(_put(one, number) for number in range(200) if number not in kept)
    assert [number for number in range(200) if _is_there(one, number)] == kept
    assert os.stat(tmp_path / "data").st_size <= 4096


def test_room_is_what_is_left_for_all_processes(tmp_path: Path) -> None:
    one = _open(tmp_path, max_bytes=1000)
    _in_child(
        lambda: _open(tmp_path, max_bytes=1000).put(_digest(0), np.zeros((300, 1, 3), np.uint8)) and None
    )
    assert one.has_room(900), "it has not looked"
    assert not one.put(_digest(1), np.ones((300, 1, 3), np.uint8))
    assert not one.has_room(900)
    assert os.stat(tmp_path / "data").st_size == 900


def test_the_end_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any) -> None:
    one = _open(tmp_path)
    assert _put(one, 1)

    def pwritev(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        assert not _put(one, 2, b"a note")
        assert not _put(one, 3)
    assert not _put(one, 4), "it does not try again and again"
    assert not one.has_room(1)
    assert _is_there(one, 1)
    assert not _is_there(one, 2)
    assert len(warnings()) == 1
    assert "No space left" in warnings()[0]


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_write_that_is_cut_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """In the pixels, in the note, and between the two."""
    one, real = _open(tmp_path), os.pwritev
    note = bytes(range(200))

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        return real(descriptor, [b"".join(parts)[:most]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    for number in range(5):
        assert _put(one, number, note[: 40 * number])
    for number in range(5):
        assert _is_there(one, number)
        entry = one.find(_digest(number))
        assert entry is not None
        assert one.note(entry) == note[: 40 * number]


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The system's own error, in a process that may write only so much into a file."""

    def run() -> None:
        one = _open(tmp_path, marks=64)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        kept = [number for number in range(100) if _put(one, number)]
        assert 3 < len(kept) < 100
        assert [number for number in range(100) if _is_there(one, number)] == kept

    assert _in_child(run) == 0
    one = _open(tmp_path, marks=64)
    assert len(one) > 3
    assert _put(one, 5000)
    assert _is_there(one, 5000)


def test_a_machine_short_of_room(tmp_path: Path, warnings: Any) -> None:
    is_short, asked = False, 0

    def look() -> bool:
        nonlocal asked
        asked += 1
        return is_short

    one = _open(tmp_path, 100 * MIB, is_short=look)
    pixels = np.zeros((1024, 1024, 3), np.uint8)
    assert all(one.put(_digest(number), pixels) for number in range(10))
    assert asked == 2, "once in 16 MiB"
    is_short = True
    kept = [number for number in range(10, 30) if one.put(_digest(number), pixels)]
    assert len(kept) < 8
    assert asked == 3
    assert len(warnings()) == 1
    assert one.find(_digest(3)) is not None


def test_who_cannot_say_whether_there_is_room(tmp_path: Path, warnings: Any) -> None:
    def look() -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    one = _open(tmp_path, is_short=look)
    assert not _put(one, 1)
    assert len(warnings()) == 1


# ---- marks -----------------------------------------------------------------------------------------


def test_marks_are_seen_by_all(tmp_path: Path) -> None:
    one, other = _open(tmp_path, marks=1 << 16), _open(tmp_path, marks=1 << 16)
    assert not one.mark(_digest(1))
    assert one.mark(_digest(1))
    assert other.mark(_digest(1))
    assert _in_child(lambda: other.mark(_digest(2)) and os._exit(1)) == 0
    assert one.mark(_digest(2))
    assert _put(one, 3)
    assert not one.mark(_digest(3))
    assert _is_there(one, 3)


def test_marks_that_cannot_be_written_are_no_error_of_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    one = _open(tmp_path, marks=100)

    def pwrite(*_: Any) -> int:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not one.mark(_digest(1))
    assert not one.has_room(1)
    assert len(warnings()) == 1


# ---- damage ----------------------------------------------------------------------------------------


def test_a_record_that_was_cut_off_is_written_over(tmp_path: Path) -> None:
    one = _open(tmp_path)
    assert _put(one, 1)
    assert _put(one, 2)
    size = os.stat(tmp_path / "log").st_size
    os.truncate(tmp_path / "log", size - 1)
    other = _open(tmp_path)
    assert _is_there(other, 1)
    assert not _is_there(other, 2)
    assert _put(other, 3)
    assert os.stat(tmp_path / "log").st_size == size
    last = _open(tmp_path)
    assert [number for number in range(5) if _is_there(last, number)] == [1, 3]


def test_bytes_that_are_not_what_they_were_are_not_found(tmp_path: Path) -> None:
    one = _open(tmp_path)
    for number in range(20):
        assert _put(one, number)
    entry = one.find(_digest(7))
    assert entry is not None
    with open(tmp_path / "data", "r+b") as file:
        file.seek(entry.offset + entry.nbytes - 1)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    other = _open(tmp_path)
    assert [number for number in range(20) if not _is_there(other, number)] == [7]
    assert _put(other, 7)
    assert _is_there(other, 7)
    last = _open(tmp_path)
    assert all(_is_there(last, number) for number in range(20))


def test_every_single_byte_counts() -> None:
    for size in (1, 7, 8, 9, 64, 75):
        pixels = np.random.default_rng(size).integers(0, 256, (1, size, 1), np.uint8)
        total, found = native.sum_of(pixels.reshape(-1)), set()
        for at in range(size):
            changed = pixels.copy()
            changed[0, at, 0] ^= 0x10
            found.add(native.sum_of(changed.reshape(-1)))
        assert total not in found
    assert native.sum_of(np.zeros(8, np.uint8)) != native.sum_of(np.zeros(9, np.uint8))


def test_a_shorter_data_file(tmp_path: Path) -> None:
    one = _open(tmp_path)
    for number in range(20):
        assert _put(one, number)
    entry = one.find(_digest(10))
    assert entry is not None
    opened = _open(tmp_path)
    assert _is_there(opened, 10)
    os.truncate(tmp_path / "data", entry.offset + entry.nbytes - 1)
    with pytest.raises(OSError, match="shorter"):
        opened.read(entry, 0, entry.shape[0])
    other = _open(tmp_path)
    assert [number for number in range(20) if _is_there(other, number)] == list(range(10))
    assert _put(other, 11)
    assert _is_there(other, 11)


def test_a_log_that_is_cut_off_while_it_is_used(tmp_path: Path, warnings: Any) -> None:
    one = _open(tmp_path)
    for number in range(5):
        assert _put(one, number)
    os.truncate(tmp_path / "log", 0)
    assert all(_is_there(one, number) for number in range(5))
    assert not _is_there(one, 5)
    assert not _put(one, 5)
    assert len(warnings()) == 1
    assert os.stat(tmp_path / "log").st_size == 0, "nothing is written where it does not belong"


def test_a_log_that_cannot_be_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    one = _open(tmp_path)
    assert _put(one, 1)

    def fstat(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fstat", fstat)
        assert not _is_there(one, 2)
        assert _is_there(one, 1)
        assert not _put(one, 2)
    assert len(warnings()) == 1


@pytest.mark.parametrize("content", [b"something else entirely".ljust(200, b"."), bytes(128)])
def test_another_file_is_no_log(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(DamagedStoreError):
        _open(tmp_path)
    assert (tmp_path / "log").read_bytes() == content


@pytest.mark.parametrize("left", [b"", b"half a header"])
def test_a_log_that_was_lost_does_not_make_old_bytes_free(tmp_path: Path, left: bytes) -> None:
    old = _open(tmp_path)
    assert _put(old, 1)
    (tmp_path / "log").unlink()
    (tmp_path / "log").write_bytes(left)
    with pytest.raises(DamagedStoreError):
        _open(tmp_path)
    assert _is_there(old, 1)


def test_whoever_was_killed_while_it_began_leaves_a_usable_store(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    (tmp_path / "log").write_bytes(b"half a header")
    assert _put(_open(tmp_path), 1)
    assert _is_there(_open(tmp_path), 1)


def test_a_header_that_is_older_than_the_records(tmp_path: Path) -> None:
    one = _open(tmp_path)
    header = (tmp_path / "log").read_bytes()
    for number in range(10):
        assert _put(one, number)
    with open(tmp_path / "log", "r+b") as file:
        file.write(header)  # as a crash of the machine may leave it
    other = _open(tmp_path)
    assert _put(other, 10)
    assert all(_is_there(_open(tmp_path), number) for number in range(11))


# ---- at once ---------------------------------------------------------------------------------------


def _fill(folder: Path, numbers: range) -> None:
    one = _open(folder)
    for number in numbers:
        _put_at_last(one, number)
        assert _is_there(one, number)


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    ranges = [range(300), range(200, 500), range(0, 500, 3)]
    children = [FORK.Process(target=_fill, args=(tmp_path, numbers)) for numbers in ranges]
    for child in children:
        child.start()
    one, seen = _open(tmp_path), set[int]()
    while any(child.is_alive() for child in children):
        seen |= {number for number in range(500) if _is_there(one, number)}
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    for reader in (one, _open(tmp_path)):
        assert all(_is_there(reader, number) for number in range(500))


def test_stores_and_threads_of_one_process_at_once(tmp_path: Path) -> None:
    """A lock of a file does not keep them apart, and would end with the first store that is closed."""
    failed: list[BaseException] = []

    def work(one: EntryStore, numbers: range) -> None:
        try:
            for number in numbers:
                assert _put(one, number)
                assert _is_there(one, number)
                _open(tmp_path)  # and closed at once
        except BaseException as error:
            failed.append(error)

    shared = _open(tmp_path)
    stores = [shared, shared, _open(tmp_path, 7 * MIB), _open(tmp_path, 6 * MIB)]
    threads = [
        threading.Thread(target=work, args=(one, range(n * 50, n * 50 + 100))) for n, one in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    spans = sorted((entry.offset, entry.nbytes) for entry in shared.entries())
    assert all(offset + nbytes <= after for (offset, nbytes), (after, _) in itertools.pairwise(spans))
    for one in (*stores, _open(tmp_path)):
        assert all(_is_there(one, number) for number in range(250))


def _is_locked(path: Path) -> bool:
    """Whether another process would find a file locked."""

    def look() -> None:
        descriptor = os.open(path, os.O_RDWR)
        os._exit(0 if locks.try_to_lock(descriptor) else 1)

    return _in_child(look) == 1


@pytest.mark.usefixtures("no_gc")
def test_a_store_that_is_closed_leaves_the_lock_to_the_others(tmp_path: Path) -> None:
    one, other = _open(tmp_path), _open(tmp_path)
    descriptors = other.descriptors
    with one._lock.alone(one._log):
        del other
        assert _is_locked(tmp_path / "log")
    assert not _is_locked(tmp_path / "log")
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.hang_after(60)
def test_a_stopped_process_that_has_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    one = _open(tmp_path)
    assert _put(one, 1)
    child = os.fork()
    if child == 0:
        fcntl.lockf(os.open(tmp_path / "log", os.O_RDWR), fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        assert not _put(one, 2)
        assert not one.has_room(1), "for a while it does not even try"
        assert _is_there(one, 1)
        assert not _is_there(one, 2)
        with pytest.raises(locks.FileLockedError):
            _open(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    one._not_before = 0.0
    assert _put(one, 2)
    assert _is_there(_open(tmp_path), 2)


def test_a_fork_while_threads_hold_the_locks(tmp_path: Path) -> None:
    one = _open(tmp_path)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with one._lock.alone(one._log):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()

    def look() -> None:
        # The parent has the file's lock; everything else goes on, and nothing hangs.
        assert [_put(one, 1), _is_there(one, 1), _is_free(tmp_path / "new")] == [False, False, True]

    try:
        with locks._making:
            assert _in_child(look) == 0
    finally:
        leave.set()
        thread.join()
    assert _put(one, 1)
    assert _in_child(lambda: None if _put(one, 2) else os._exit(1)) == 0
    assert all(_is_there(one, number) for number in (1, 2))


def _is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    with locks.lock_of(descriptor).alone(descriptor):
        return True


# ---- descriptors -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gc")
def test_a_store_closes_its_files_when_the_last_user_is_gone(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    one = _open(tmp_path)
    assert _put(one, 1)
    del one
    assert set(os.listdir("/proc/self/fd")) == before
    (tmp_path / "log").write_bytes(bytes(100))
    with pytest.raises(DamagedStoreError):
        _open(tmp_path)
    gc.collect()  # the error's traceback
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(OSError, match="No locks"):
        _open(tmp_path)


# ---- parts of the data file, maps -----------------------------------------------------------------


def test_a_child_of_a_fork_takes_a_part_of_its_own(tmp_path: Path) -> None:
    one = _open(tmp_path)
    for number in range(20):  # the last of them lies in a part in which there still is room
        assert _put(one, number)

    def fill(numbers: range) -> None:
        for number in numbers:
            _put_at_last(one, number)

    child = FORK.Process(target=fill, args=(range(100, 160),))
    child.start()
    fill(range(200, 260))
    child.join(60)
    assert child.exitcode == 0
    for number in (*range(20), *range(100, 160), *range(200, 260)):
        assert _is_there(one, number)
    entries = sorted((entry.offset, entry.offset + entry.nbytes + entry.note) for entry in one.entries())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(entries))


def test_many_that_put_little_leave_most_of_the_room(tmp_path: Path) -> None:
    used = 0
    for number in range(40):
        one = _open(tmp_path, max_bytes=1 << 26)
        assert _put(one, number)
        used += _pixels(number).nbytes
        assert one.allocated <= used + 64 * (number + 1)
        del one


def test_what_is_in_memory_is_read_without_a_copy(tmp_path: Path) -> None:
    data, log = (os.memfd_create(name) for name in ("data", "log"))
    os.truncate(data, 100 + (1 << 20))
    one = EntryStore(data, log, 1 << 20, marks=100, is_in_memory=True)
    assert all(_put(one, number) for number in range(50))
    for number in range(50):
        assert _is_there(one, number)
        entry = one.find(_digest(number))
        assert entry is not None
        rows = one.read(entry, 0, entry.shape[0])
        assert not rows.flags.writeable
        assert not rows.flags.owndata
    del rows, one
    gc.collect()


def test_a_full_store_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe.cache")
    one = _open(tmp_path, max_bytes=4096)
    assert not all(_put(one, number) for number in range(200))
    assert not one.has_room(4096)
    assert [record.getMessage() for record in caplog.records if "full" in record.getMessage()] == [
        f"a cache is full ({len(one)} entries, 0.0 GB): what is in it stays, all else is decoded each time"
    ]
