"""The stage's folder: what is kept, what is counted, what processes share, and what faults do."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.core.locks import LockFile, open_file_locks_are_possible
from fastpipe.errors import StageError
from fastpipe.stores import stage as module
from fastpipe.stores import table as files
from fastpipe.stores.stage import Ledger
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)


# Besides tests/contracts/test_caches.py.
def test_an_object_counts_once_and_another_listing_finds_it_and_another_store_does_not(users: Any) -> None:
    one, same = users.open(), users.open()
    assert one.keep(1, users.content(1)) and same.keep(1, users.content(1))
    assert users.nbytes() == users.SIZE
    assert Path(same._folder.object_path(users.name_of(1))).read_bytes() == users.content(1)
    np.testing.assert_array_equal(one.have(np.array([1, 2])), [True, False])
    other = users.open_other()
    assert not other.has(1) and other.read(1) == users.content(1) and other.has(1)
    elsewhere = users.open(name_of=users.name_elsewhere)
    assert not elsewhere.has(1) and elsewhere.read(1) is None


def test_a_removed_object_is_noticed(users: Any) -> None:
    table = users.open_full()
    for path in users.files()[:4]:
        path.unlink()
    assert all(table.has(row) for row in range(10))
    kept = users.kept(table)
    assert len(kept) == 6 and [row for row in range(10) if table.has(row)] == kept
    table.close()
    table = users.open()  # which counts anew
    assert users.nbytes() == 6 * users.SIZE
    assert users.keep(table, *range(20, 30)) == [20, 21, 22, 23]


@pytest.mark.parametrize("change", [b"", b"short", bytes(99), bytes(104)], ids=len)
def test_objects_of_another_length_are_removed_and_not_kept(users: Any, change: bytes) -> None:
    table = users.open()
    assert not table.keep(1, change) and not users.files()
    users.keep(table, 1)
    (path,) = users.files()
    path.write_bytes(change)
    assert table.read(1) is None and not path.exists()
    assert users.keep(table, 1) == [1] == users.kept(table)


def test_a_limit_is_each_users_own(users: Any) -> None:
    small, large = users.open(limit=300), users.open(limit=600)
    assert users.keep(small, *range(10)) == [0, 1, 2]
    assert users.keep(large, *range(10, 20)) == [10, 11, 12]
    assert not users.keep(small, 9) and users.nbytes() == 600
    users.follow(small, [50] * 20)
    assert not users.keep(small, 20), "it would have to take from others"
    assert users.kept(large) == [0, 1, 2, 10, 11, 12]
    small.close()
    large.close()
    assert len(users.kept(users.open(limit=450))) == 4 == len(users.files())  # holds from the opening on


def test_a_claim_is_had_by_one_at_a_time_and_one_that_waited_finds_the_object(users: Any) -> None:
    one, other = users.open(), users.open()
    byte = other._folder.claim_byte(users.name_of(1))
    found: list[bool] = []
    begun = threading.Event()

    def wait(table: StageTable) -> None:
        begun.set()
        with table.claim(1, 60.0) as is_ours:
            found.append(is_ours)

    with one.claim(1, 0.0) as is_ours:
        assert is_ours
        with other.claim(1, 0.01) as waited_in_vain, other.claim(2, 0.0) as is_another:
            assert waited_in_vain and is_another
            assert not other._folder.locks.take(byte)
    assert other._folder.locks.take(byte)
    other._folder.locks.release(byte)

    for table in (one, other):  # a thread of the same process, and what stands for another process
        begun.clear()
        with one.claim(1, 0.0):
            waiting = threading.Thread(target=wait, args=(table,))
            waiting.start()
            begun.wait()
            threading.Event().wait(0.05)  # so that it comes to wait; nothing fails where it does not
            users.keep(one, 1)
        waiting.join()
    assert len(found) == 2 and users.kept(one) == [1]


def test_a_forked_child_goes_on_with_claims_of_its_own(users: Any, in_child: Any) -> None:
    table = users.open()
    users.keep(table, 1)
    byte = table._folder.claim_byte(users.name_of(5))

    def child() -> None:
        assert table.has(1) and users.kept(table) == [1]
        assert users.keep(table, 2) == [2]
        assert not table._folder.locks.take(byte)
        with table.claim(5, 0.0) as waited_in_vain, table.claim(6, 0.0) as is_ours:
            assert waited_in_vain and is_ours
        table.close()

    with table.claim(5, 0.0):
        in_child(child)
        assert not users.open()._folder.locks.take(byte)
    assert table.has(2) and users.kept(table) == [1, 2]


def test_a_closed_table_is_empty_and_warns_of_nothing(users: Any, caplog: pytest.LogCaptureFixture) -> None:
    table = users.open()
    users.keep(table, 1)
    with table.claim(1, 0.0):
        table.close()
    assert not table.have(np.arange(3)).any() and not users.kept(table) and not users.keep(table, 2)
    with table.claim(3, 0.0) as is_ours:
        assert is_ours
    users.follow(table, [])
    table.used(np.array([1]))
    assert not caplog.records


# ---- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_is_one_warning_and_without_a_table_an_error(
    users: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    table = users.open()
    users.keep(table, 0)
    with monkeypatch.context() as patched:
        patched.setattr(*((files, "_rename") if code == errno.EROFS else (os, "write")), refuse)
        assert not users.keep(table, *range(1, 20))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(code) in caplog.text
    assert users.kept(table) == [0] and users.nbytes() == users.SIZE and not users.unfinished()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StageError, match=os.strerror(code)):
        users.open_other()


@pytest.mark.parametrize("count", [1, 10])
def test_a_folder_that_vanished_is_one_warning(users: Any, caplog: Any, count: int) -> None:
    table = users.open()
    users.keep(table, *range(count))
    users.follow(table, [50] * count)
    shutil.rmtree(users.path)
    assert users.kept(table) == [] and not table.has(0)
    assert not users.keep(table, *range(20, 30))
    with table.claim(1, 0.0) as is_ours:
        assert is_ours
    assert len(caplog.records) == (count == 1)  # nothing is tried where the count says that it is full
    assert not users.path.exists()


def test_a_folder_that_is_moved_is_used_on(users: Any, tmp_path: Path) -> None:
    table = users.open()
    users.keep(table, 0)
    users.path.rename(tmp_path / "elsewhere")
    assert users.open().keep(0, users.content(1))
    assert table.read(0) == users.content(0)
    assert users.keep(table, 1) == [1] and len(users.files()) == 1


# ---- the count of bytes --------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(LockFile(str(tmp_path / "locks")))
    assert not ledger.is_reliable
    assert ledger.reserve(1, 100) < 0, "what is there has not been counted"
    ledger.reset(0)
    yield ledger
    ledger._lock.close()


def test_a_count_that_was_not_ended_or_of_another_boot_is_unreliable(ledger: Any, monkeypatch: Any) -> None:
    for step in (lambda: ledger.reserve(1, 100), ledger.remove, ledger.mark_uncertain):
        step()
        assert not ledger.is_reliable
        ledger.reset(5)
        assert (ledger.nbytes, ledger.is_reliable) == (5, True)
    monkeypatch.setattr(module, "_boot", lambda: 1)  # the machine has crashed meanwhile
    assert not ledger.is_reliable


def test_processes_count_together(ledger: Ledger, forked: Callable[[Callable[[], object]], int]) -> None:
    def count() -> None:
        for _ in range(300):
            assert ledger.reserve(3, 1 << 30) >= 0
            ledger.written(1)
            ledger.remove()
            ledger.removed(1)

    for process in [forked(count) for _ in range(4)]:
        assert os.waitpid(process, 0)[1] == 0
    assert ledger.nbytes == 4 * 300 and ledger.is_reliable
    assert ledger.reserve(0, 1 << 30) >= 4 * 300, "no number was given twice"
