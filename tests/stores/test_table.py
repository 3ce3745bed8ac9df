"""The objects of a listing in a stage: what others have left, have in use, have broken or removed."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.core.locks import open_file_locks_are_possible
from fastpipe.errors import StageError
from fastpipe.options import Stage
from fastpipe.stores import table as files
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)

SIZE, LIMIT, ROWS = 100, 1000, 60
Int64Array = npt.NDArray[np.int64]
Opened = Callable[..., StageTable]
InChild = Callable[[Callable[[], object]], None]


class Uses:
    def __init__(self, at: Int64Array, tag: bytes = b"t" * 16) -> None:
        self.at, self.tag = at, tag

    def next_uses(self, rows: Int64Array) -> Int64Array:
        return self.at[rows]


def name_of(row: int) -> bytes:
    return hashlib.md5(b"%d" % row).digest()


def name_elsewhere(row: int) -> bytes:
    return hashlib.md5(b"elsewhere %d" % row).digest()


def content(row: int) -> bytes:
    return (b"%d," % row * SIZE)[:SIZE]


def stage_in(folder: Path) -> Path:
    return folder / "fastpipe-stage"


def files_in(folder: Path) -> list[Path]:
    return [path for path in (stage_in(folder) / "objects").glob("*/*") if path.is_file()]


def keep(table: StageTable, *rows: int) -> list[int]:
    return [row for row in rows if table.keep(row, content(row))]


def there(table: StageTable) -> list[int]:
    found = []
    for row in range(ROWS):
        data = table.read(row)
        assert data in (None, content(row))
        found += [] if data is None else [row]
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    tables: list[StageTable] = []

    def opened(
        limit: int = LIMIT, digest: bytes = b"d" * 16, name_of: Callable[[int], bytes] = name_of
    ) -> StageTable:
        folder = StageFolder(Stage(tmp_path, max_bytes=limit))
        tables.append(folder.open_table(digest, np.full(ROWS, SIZE, np.int64), name_of))
        return tables[-1]

    yield opened
    for table in tables:
        table.close()


# ---- what others have left or have in use --------------------------------------------------------------


def test_what_nobody_needs_any_more_makes_room(opened: Opened, tmp_path: Path) -> None:
    old = opened(digest=b"o" * 16, name_of=name_elsewhere)
    keep(old, *range(10))
    old.close()
    table = opened()
    assert keep(table, *range(20, 24)) == [20, 21, 22, 23]
    assert there(table) == [20, 21, 22, 23]
    assert len(files_in(tmp_path)) == 10


def test_a_new_listing_keeps_what_it_has_in_common_with_an_old_one(opened: Opened) -> None:
    old = opened(digest=b"o" * 16, name_of=lambda row: name_of(row) if row < 6 else name_elsewhere(row))
    keep(old, *range(10))
    old.close()
    table = opened()
    assert keep(table, *range(20, 30)) == [20, 21, 22, 23]
    assert there(table) == [*range(6), 20, 21, 22, 23]


def test_the_same_listing_of_another_store_is_another_table(opened: Opened) -> None:
    one, other = opened(), opened(name_of=name_elsewhere)
    keep(one, 3)
    assert not other.has(3)
    assert other.read(3) is None


def test_threads_that_find_no_room_at_once(opened: Opened) -> None:
    old = opened(digest=b"o" * 16, name_of=name_elsewhere)
    keep(old, *range(10))
    old.close()
    table, errors = opened(), list[BaseException]()

    def work(first: int) -> None:
        try:
            keep(table, *range(first, ROWS, 8))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(20 + number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors
    assert len(there(table)) == 10
    assert table._folder.ledger.nbytes == LIMIT


def test_a_name_that_a_killed_writer_has_left_keeps_the_bytes(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    keep(table, *range(10))
    os.link(table._folder.object_path(name_of(3)), stage_in(tmp_path) / "writing" / "17")
    table.follow(Uses(np.r_[np.zeros(3, np.int64), 60, np.full(6, 50), np.zeros(ROWS - 10, np.int64)]))
    assert keep(table, 20) == [20]
    assert there(table) == [0, 1, 2, *range(4, 9), 20], "it took another one as well"
    table.close()
    table = opened()
    assert table._folder.ledger.nbytes == 9 * SIZE
    assert not list((stage_in(tmp_path) / "writing").iterdir())


def test_what_a_later_training_has_taken_on_stays(opened: Opened) -> None:
    table = opened()
    keep(table, *range(10))
    table.follow(Uses(np.r_[np.arange(100, 110), np.zeros(ROWS - 10, np.int64)]))
    assert keep(table, 20) == [20]  # it has looked at who else there is
    other = opened(digest=b"e" * 16)
    assert there(other) == [*range(9), 20]
    assert not keep(table, *range(30, 40))
    assert there(other) == [*range(9), 20]


def test_whoever_has_a_smaller_limit_takes_nothing_from_others(opened: Opened) -> None:
    large, small = opened(), opened(limit=300)
    keep(large, *range(10))
    at = np.full(ROWS, 50)
    at[20] = 0
    small.follow(Uses(at))
    assert not keep(small, 20)
    assert there(large) == list(range(10))


def test_a_limit_that_was_lowered_holds_from_the_opening_on(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    keep(table, *range(10))
    table.close()
    table = opened(limit=450)
    assert len(files_in(tmp_path)) == 4
    assert len(there(table)) == 4


def test_what_is_there_already_removes_nothing(opened: Opened) -> None:
    other = opened(digest=b"e" * 16)
    keep(other, 20)
    table = opened()
    keep(table, *range(9))
    at = np.full(ROWS, 50)
    at[20] = 0
    table.follow(Uses(at))
    assert table.keep(20, content(20))
    assert there(table) == [*range(9), 20]


# ---- who makes room ------------------------------------------------------------------------------------


def test_who_follows_first_goes_on_when_the_next_epoch_begins(opened: Opened) -> None:
    first, other = opened(), opened()
    keep(first, *range(10))
    at = np.r_[np.full(10, 50), np.zeros(ROWS - 10, np.int64)]
    first.follow(Uses(at))
    other.follow(Uses(at, b"o"))
    first.follow(Uses(at))
    other.follow(Uses(at, b"o"))
    assert not keep(other, 20)
    assert keep(first, 20) == [20]


@pytest.mark.parametrize("end", [lambda table: table.follow(None), StageTable.close])
def test_whoever_ends_leaves_it_to_the_next(opened: Opened, end: Callable[[StageTable], None]) -> None:
    first, other = opened(), opened()
    keep(first, *range(10))
    at = np.r_[np.full(10, 50), np.zeros(ROWS - 10, np.int64)]
    first.follow(Uses(at))
    end(first)
    other.follow(Uses(at, b"o"))
    assert keep(other, 20) == [20]
    first.follow(Uses(at))
    assert not keep(first, 21)


def test_two_orders_do_not_disturb_each_other(opened: Opened) -> None:
    """Two trainings on halves of the same data, and room for all but ten: each keeps what is its own."""
    tables = opened(), opened(digest=b"e" * 16)
    keep(tables[0], *range(5))
    keep(tables[1], *range(30, 35))
    for seed in range(3):
        orders = [np.random.default_rng(seed + 10 * which).permutation(30) for which in range(2)]
        for which, table in enumerate(tables):
            at = np.full(ROWS, 2**62)
            at[orders[which] + 30 * which] = np.arange(30)
            table.follow(Uses(at))
        for step in range(30):
            for which, table in enumerate(tables):
                keep(table, int(orders[which][step]) + 30 * which)
                staged = np.array(there(table))
                assert ((staged >= 30) == which).sum() >= 5


# ---- forked children, closing ---------------------------------------------------------------------------


def test_a_forked_child_goes_on_with_claims_of_its_own(opened: Opened, in_child: InChild) -> None:
    table = opened()
    keep(table, 1)

    def child() -> None:
        assert table.has(1)
        assert table.read(1) == content(1)
        assert keep(table, 2) == [2]
        assert not table._folder.locks.take(table._folder.claim_byte(name_of(5)))
        with table.claim(5, 0.0) as waited_in_vain, table.claim(6, 0.0) as is_ours:
            assert waited_in_vain
            assert is_ours
        table.close()

    with table.claim(5, 0.0):
        in_child(child)
        assert not opened()._folder.locks.take(table._folder.claim_byte(name_of(5)))
    assert table.has(2)
    assert table.read(2) == content(2)
    with pytest.raises(StageError, match="in use"):
        table._folder.clear()


def test_what_is_closed_is_empty_and_complains_of_nothing(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    table = opened()
    keep(table, 1)
    with table.claim(1, 0.0):
        table.close()
    assert not table.has(1)
    assert not keep(table, 2)
    with table.claim(3, 0.0) as is_ours:
        assert is_ours
    table.follow(Uses(np.zeros(ROWS, np.int64)))
    table.used(np.array([1]))
    assert table.read(1) is None
    assert not table.have(np.arange(3)).any()
    assert not caplog.records


# ---- what is broken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 7, 16 + 5 * 16 + 3, 1 << 16])
def test_a_table_of_another_length_is_made_anew(opened: Opened, tmp_path: Path, length: int) -> None:
    table = opened()
    keep(table, 1)
    table.close()
    (path,) = (stage_in(tmp_path) / "tables").iterdir()
    os.truncate(path, length)
    table = opened()
    assert path.stat().st_size == 16 + ROWS * 16
    assert not table.has(1)
    assert table.read(1) == content(1)


def test_broken_tables_and_strange_files_are_in_nobody_s_way(opened: Opened, tmp_path: Path) -> None:
    other = opened(digest=b"e" * 16)
    keep(other, *range(5))
    (path,) = (stage_in(tmp_path) / "tables").iterdir()
    with path.open("ab") as file:
        file.write(b"odd")
    (stage_in(tmp_path) / "objects" / "ab").mkdir(exist_ok=True)
    (stage_in(tmp_path) / "objects" / "ab" / "note.txt").touch()
    (stage_in(tmp_path) / "objects" / "file").touch()
    (stage_in(tmp_path) / "tables" / "mine").touch()
    table = opened()
    table.follow(Uses(np.r_[np.full(20, 50), np.zeros(ROWS - 20, np.int64)]))
    assert keep(table, *range(10, 20), *range(40, 50)) == [*range(10, 15), *range(40, 45)]
    assert there(other) == [*range(5), *range(40, 45)]
    assert (stage_in(tmp_path) / "objects" / "ab" / "note.txt").exists()


def test_what_was_removed_by_hand_is_counted_anew_once_it_was_noticed(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    keep(table, *range(10))
    table.close()
    for path in files_in(tmp_path)[:4]:
        path.unlink()
    table = opened()
    assert len(there(table)) == 6
    table.close()
    table = opened()
    assert table._folder.ledger.nbytes == 6 * SIZE
    assert keep(table, *range(20, 30)) == [20, 21, 22, 23]


def test_where_the_count_is_lost_nothing_is_kept_or_removed(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    keep(table, *range(10))
    table.follow(Uses(np.r_[np.full(10, 50), np.zeros(ROWS - 10, np.int64)]))
    os.truncate(stage_in(tmp_path) / "locks", 0)
    assert not keep(table, *range(20, 30))
    assert there(table) == list(range(10))
    table.close()
    assert opened()._folder.ledger.nbytes == LIMIT


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_without_room_for_the_table_is_said(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StageError, match=os.strerror(code)):
        opened()


def test_an_object_that_cannot_be_moved_is_not_there_and_not_counted(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    table = opened()
    keep(table, 1)
    with monkeypatch.context() as patched:
        patched.setattr(files, "_rename", refused)
        assert not keep(table, *range(2, 9))
    assert "Read-only file system" in caplog.text
    assert len(caplog.records) == 1
    assert there(table) == [1]
    assert table._folder.ledger.nbytes == SIZE
    assert not list((stage_in(tmp_path) / "writing").iterdir())


def test_a_file_that_is_cut_off_by_a_limit_of_the_system_is_not_kept(
    opened: Opened, tmp_path: Path, in_child: InChild
) -> None:
    table = opened()
    keep(table, 1)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
        assert not keep(table, 2, 3, 4)
        assert there(table) == [1]

    in_child(child)
    assert there(table) == [1]
    assert table._folder.ledger.nbytes == SIZE
    assert not list((stage_in(tmp_path) / "writing").iterdir())


def test_nothing_is_made_anew_where_the_folder_was_removed(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = opened()
    keep(table, *range(10))
    table.follow(Uses(np.r_[np.full(10, 50), np.zeros(ROWS - 10, np.int64)]))
    shutil.rmtree(stage_in(tmp_path))
    assert not keep(table, *range(20, 30))
    assert there(table) == []
    with table.claim(1, 0.0) as is_ours:
        assert is_ours
    assert len(caplog.records) <= 1
    assert not stage_in(tmp_path).exists()
