"""The stage's folder: what is kept, what is counted, what processes share, and what faults do."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastpipe.core.locks import LockFile, open_file_locks_are_possible
from fastpipe.errors import StageError
from fastpipe.options import Stage
from fastpipe.stores import stage as module
from fastpipe.stores import table as files
from fastpipe.stores.stage import Ledger, StageFolder
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)


def test_a_kept_object_is_read_by_all_and_stays(users: Any) -> None:
    one, other = users.open(), users.open()
    assert one.read(3) is None and not other.has(3)
    assert one.keep(3, users.content(3)) and other.keep(3, users.content(3))
    assert users.nbytes() == users.SIZE  # it counts once
    assert other.has(3) and other.read(3) == users.content(3)
    assert Path(other._folder.object_path(users.name_of(3))).read_bytes() == users.content(3)
    np.testing.assert_array_equal(one.have(np.array([2, 3])), [False, True])
    assert users.open().read(3) == users.content(3)
    assert users.path.stat().st_mode & 0o777 == 0o700


def test_another_listing_finds_the_same_object_and_another_store_does_not(users: Any) -> None:
    users.keep(users.open(), 1)
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


def test_a_claim_is_had_by_one_at_a_time(users: Any) -> None:
    one, other = users.open(), users.open()
    byte = other._folder.claim_byte(users.name_of(1))
    with one.claim(1, 0.0) as is_ours:
        assert is_ours
        with other.claim(1, 0.01) as waited_in_vain, other.claim(2, 0.0) as is_another:
            assert waited_in_vain and is_another
            assert not other._folder.locks.take(byte)
    assert other._folder.locks.take(byte)


def test_a_claim_that_waited_finds_the_object(users: Any) -> None:
    one, other = users.open(), users.open()
    found: list[bool] = []
    begun = threading.Event()

    def wait(table: StageTable) -> None:
        begun.set()
        with table.claim(1, 60.0) as is_ours:
            found.append(is_ours)

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
    assert not table.has(1) and table.read(1) is None and not table.have(np.arange(3)).any()
    assert not users.keep(table, 2)
    with table.claim(3, 0.0) as is_ours:
        assert is_ours
    users.follow(table, [])
    table.used(np.array([1]))
    assert not caplog.records


# ---- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "name", "code"),
    [(os, "write", errno.ENOSPC), (files, "_rename", errno.EROFS)],
    ids=["full", "read-only"],
)
def test_a_disk_that_cannot_be_written_is_one_warning(
    users: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, of: Any, name: str, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    table = users.open()
    users.keep(table, 0)
    with monkeypatch.context() as patched:
        patched.setattr(of, name, refuse)
        assert not users.keep(table, *range(1, 20))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(code) in caplog.text
    assert users.kept(table) == [0] and users.nbytes() == users.SIZE and not users.unfinished()


def test_a_file_that_a_limit_of_the_system_cuts_off_is_not_kept(users: Any, in_child: Any) -> None:
    table = users.open()
    users.keep(table, 1)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (users.SIZE // 2, users.SIZE // 2))
        assert not users.keep(table, 2, 3, 4) and users.kept(table) == [1]

    in_child(child)
    assert users.kept(table) == [1] and users.nbytes() == users.SIZE and not users.unfinished()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_without_room_for_the_table_is_an_error(users: Any, monkeypatch: Any, code: int) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StageError, match=os.strerror(code)):
        users.open()


@pytest.mark.parametrize("count", [1, 10])
def test_a_folder_that_vanished_is_one_warning(
    users: Any, caplog: pytest.LogCaptureFixture, count: int
) -> None:
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


def test_a_link_or_an_open_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "fastpipe-stage").symlink_to("real")
    with pytest.raises(StageError, match="is a link"):
        StageFolder(Stage(tmp_path))
    (tmp_path / "real" / "fastpipe-stage").mkdir()
    (tmp_path / "real" / "fastpipe-stage").chmod(0o755)
    with pytest.raises(StageError, match="chmod 700"):
        StageFolder(Stage(tmp_path / "real"))


def test_a_stage_in_use_is_not_cleared(users: Any) -> None:
    table = users.open_full()
    folder = StageFolder(Stage(users.folder))
    with pytest.raises(StageError, match="in use"):
        folder.clear()
    table.close()
    folder.clear()
    assert folder.usage()[:2] == (0, 0) and not users.files()


# ---- the count of bytes --------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(LockFile(str(tmp_path / "locks")))
    assert not ledger.is_reliable
    assert ledger.reserve(1, 100) < 0, "what is there has not been counted"
    ledger.reset(0)
    yield ledger
    ledger._lock.close()


ledger_steps = st.tuples(
    st.integers(0, 1), st.sampled_from(["reserve", "keep", "free", "remove"]), st.integers(0, 60)
)


@given(st.lists(ledger_steps, max_size=60))
@example([(0, "reserve", 60), (1, "reserve", 41), (1, "reserve", 40), (0, "keep", 0), (1, "free", 0)])
def test_the_count_is_the_sum_and_never_above_the_limit(steps: list[tuple[int, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledgers = [Ledger(LockFile(f"{folder}/locks")) for _ in range(2)]
        ledgers[0].reset(0)
        writing: tuple[list[int], list[int]] = ([], [])
        kept: list[int] = []
        numbers = set()
        for which, step, nbytes in steps:
            ledger, mine = ledgers[which], writing[which]
            held = sum(kept) + sum(map(sum, writing))
            if step == "reserve":
                number = ledger.reserve(nbytes, 100)
                assert (number >= 0) == (held + nbytes <= 100) and number not in numbers
                if number >= 0:
                    numbers.add(number)
                    mine.append(nbytes)
            elif step == "keep" and mine:
                kept.append(mine.pop())
                ledger.written()
            elif step == "free" and mine:
                ledger.written(mine.pop())
            elif step == "remove" and kept:
                ledger.remove()
                ledger.removed(kept.pop())
            assert ledger.nbytes == sum(kept) + sum(map(sum, writing)) <= 100
        for ledger, mine in zip(ledgers, writing, strict=True):
            while mine:
                ledger.written(mine.pop())
        assert (ledgers[0].nbytes, ledgers[0].is_reliable) == (sum(kept), True)
        for ledger in ledgers:
            ledger._lock.close()


@pytest.mark.parametrize("step", [lambda it: it.reserve(1, 100), Ledger.remove, Ledger.mark_uncertain])
def test_a_count_that_was_not_ended_is_not_reliable(ledger: Ledger, step: Callable[[Ledger], object]) -> None:
    step(ledger)
    assert not ledger.is_reliable
    ledger.reset(5)
    assert (ledger.nbytes, ledger.is_reliable) == (5, True)


def test_a_count_before_a_crash_of_the_machine_is_not_reliable(ledger: Ledger, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_boot", lambda: 1)
    assert not ledger.is_reliable


@pytest.mark.parametrize("left", [0, 20])
def test_a_count_that_was_cut_off_ends_only_keeping(ledger: Ledger, tmp_path: Path, left: int) -> None:
    ledger.reset(50)
    os.truncate(tmp_path / "locks", left)
    assert ledger.reserve(1, 100) < 0
    ledger.removed(1)
    ledger.mark_uncertain()
    assert ledger.nbytes == 0 and not ledger.is_reliable


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
