"""The stage's folder: what is kept, who may make room, what is shared by processes, and what faults do."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastpipe.core.locks import open_file_locks_are_possible
from fastpipe.errors import StageError
from fastpipe.options import Stage
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)

SIZE, NEVER = 100, 2**62
Int64Array = npt.NDArray[np.int64]
Opened = Callable[..., StageTable]


class Uses:
    """When rows are needed, as a test says."""

    def __init__(self, at: Int64Array, tag: bytes = b"t" * 16) -> None:
        self.at, self.tag = at, tag

    def next_uses(self, rows: Int64Array) -> Int64Array:
        return self.at[rows]


def name_of(row: int) -> bytes:
    return hashlib.md5(b"%d" % row).digest()


def content(row: int) -> bytes:
    return (b"%d," % row * SIZE)[:SIZE]


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "fastpipe-stage" / "objects").glob("*/*") if path.is_file()]


def nbytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    tables: list[StageTable] = []

    def opened(limit: int = 10 * SIZE, rows: int = 40, digest: bytes = b"d" * 16) -> StageTable:
        folder = StageFolder(Stage(tmp_path, max_bytes=limit))
        tables.append(folder.open_table(digest, np.full(rows, SIZE, np.int64), name_of))
        return tables[-1]

    yield opened
    while tables:  # their memory, and its descriptors, go with the last reference
        tables.pop().close()


def test_what_is_kept_is_read_by_all_and_stays(opened: Opened, tmp_path: Path) -> None:
    one, other = opened(), opened()
    assert one.read(3) is None
    assert not other.has(3)
    assert one.keep(3, content(3))
    assert other.has(3)
    assert other.read(3) == content(3)
    assert Path(other._folder.object_path(name_of(3))).read_bytes() == content(3)
    assert not os.path.exists(other._folder.object_path(name_of(4)))
    np.testing.assert_array_equal(one.have(np.array([2, 3])), [False, True])
    assert opened().read(3) == content(3)
    assert (tmp_path / "fastpipe-stage").stat().st_mode & 0o777 == 0o700


def test_keeping_twice_counts_once(opened: Opened, tmp_path: Path) -> None:
    one, other = opened(), opened()
    assert one.keep(1, content(1))
    assert other.keep(1, content(1))
    assert StageFolder(Stage(tmp_path)).usage()[:2] == (SIZE, 1)


def test_another_listing_finds_the_same_object(opened: Opened) -> None:
    assert opened().keep(1, content(1))
    other = opened(digest=b"e" * 16)
    assert not other.has(1)
    assert other.read(1) == content(1)
    assert other.has(1)


def test_the_table_heals_when_an_object_is_gone(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    table.keep(1, content(1))
    files_in(tmp_path)[0].unlink()
    assert table.has(1)
    assert table.read(1) is None
    assert not table.has(1)


@pytest.mark.parametrize("found", [b"", content(1)[:-1], content(1) + b"more"])
def test_an_object_of_another_length_is_removed(opened: Opened, tmp_path: Path, found: bytes) -> None:
    table = opened()
    table.keep(1, content(1))
    (path,) = files_in(tmp_path)
    path.write_bytes(found)
    assert table.read(1) is None
    assert not path.exists()
    assert table.keep(1, content(1))
    assert table.read(1) == content(1)


def test_data_of_another_length_is_not_kept(opened: Opened, tmp_path: Path) -> None:
    assert not opened().keep(1, b"short")
    assert not files_in(tmp_path)


def test_no_more_than_the_limit_is_kept(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    assert [table.keep(row, content(row)) for row in range(12)] == [True] * 10 + [False] * 2
    assert nbytes_in(tmp_path) == 10 * SIZE


def test_users_with_different_limits_keep_their_own(opened: Opened, tmp_path: Path) -> None:
    small, large = opened(limit=3 * SIZE), opened(limit=6 * SIZE)
    assert sum(small.keep(row, content(row)) for row in range(10)) == 3
    assert sum(large.keep(row, content(row)) for row in range(10, 20)) == 3
    assert not small.keep(9, content(9))
    assert nbytes_in(tmp_path) == 6 * SIZE


# ---- making room -----------------------------------------------------------------------------------


def test_what_is_needed_last_makes_room(opened: Opened) -> None:
    table = opened()
    for row in range(10):
        table.keep(row, content(row))
    at = np.arange(40)
    at[[4, 7]] = 1000, 2000
    table.follow(Uses(at))
    assert table.keep(20, content(20))
    assert table.keep(21, content(21))
    assert [row for row in range(10) if table.read(row) is None] == [4, 7]


def test_what_is_needed_later_than_all_others_is_not_kept(opened: Opened) -> None:
    table = opened()
    for row in range(10):
        table.keep(row, content(row))
    table.follow(Uses(np.arange(40)))
    assert not table.keep(30, content(30))
    assert all(table.read(row) for row in range(10))


def test_where_nobody_knows_what_is_there_stays(opened: Opened) -> None:
    table = opened()
    for row in range(10):
        table.keep(row, content(row))
    table.follow(Uses(np.full(40, NEVER)))
    assert not table.keep(30, content(30))
    assert all(table.read(row) for row in range(10))


def test_processes_of_one_order_all_make_room_and_those_of_another_do_not(opened: Opened) -> None:
    first, same, other = opened(), opened(), opened()
    for row in range(10):
        first.keep(row, content(row))
    at = np.arange(100, 140)
    at[30:] = 0  # these are needed at once
    first.follow(Uses(at))
    same.follow(Uses(at))
    other.follow(Uses(at, b"o" * 16))
    assert first.keep(30, content(30))
    assert same.keep(31, content(31))
    assert not other.keep(32, content(32))


def test_what_another_listing_has_in_use_is_not_removed(opened: Opened) -> None:
    other = opened(digest=b"e" * 16)
    for row in range(5):
        other.keep(row, content(row))
    table = opened()
    for row in range(10):
        if table.read(row) is None:
            table.keep(row, content(row))
    at = np.arange(100, 140)
    at[:5], at[30:] = 1000, 0  # the shared ones would be the first to go
    table.follow(Uses(at))
    assert sum(table.keep(row, content(row)) for row in range(30, 40)) == 5
    assert all(other.read(row) == content(row) for row in range(5))


@pytest.mark.parametrize("is_known", [True, False])
def test_half_a_dataset_spares_more_than_half_the_downloads(opened: Opened, is_known: bool) -> None:
    rows = 400
    table = opened(limit=rows // 2 * SIZE, rows=rows)
    fetched = []
    for epoch in range(4):
        order, later = (np.random.default_rng(e).permutation(rows) for e in (epoch, epoch + 1))
        at = rows + np.argsort(later) if is_known else np.full(rows, NEVER)
        at[order] = np.arange(rows)
        table.follow(Uses(at))
        fetched.append(0)
        for row in order.tolist():
            at[row] = rows + int(np.flatnonzero(later == row)[0]) if is_known else NEVER
            table.used(np.array([row]))
            if table.read(row) is None:
                fetched[-1] += 1
                table.keep(row, content(row))
    assert fetched[0] == rows
    assert max(fetched[1:]) <= 0.55 * rows


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39), st.integers(0, 50)), max_size=60))
def test_the_count_is_that_of_the_files_and_never_above_the_limit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int]]
) -> None:
    place = tmp_path_factory.mktemp("stage")
    sizes = np.arange(1, 41) * 10
    tables = [
        StageFolder(Stage(place, max_bytes=1000)).open_table(digest * 16, sizes, name_of)
        for digest in (b"d", b"d", b"e")
    ]
    at = np.arange(40)
    for table in tables:
        table.follow(Uses(at))
    for which, row, use in steps:
        at[row] = use
        tables[which].keep(row, bytes(int(sizes[row])))
        found = tables[which].read(row)
        assert found is None or len(found) == sizes[row]
        assert nbytes_in(place) <= 1000
        assert StageFolder(Stage(place)).usage().nbytes == nbytes_in(place)
    for table in tables:
        table.close()


# ---- claims ------------------------------------------------------------------------------------------


def test_one_at_a_time_has_a_claim(opened: Opened) -> None:
    one, other = opened(), opened()
    with one.claim(1, 0.0) as is_ours:
        assert is_ours
        with other.claim(1, 0.01) as waited_in_vain, other.claim(2, 0.0) as is_another:
            assert waited_in_vain
            assert is_another
            assert not other._folder.locks.take(other._folder.claim_byte(name_of(1)))
    assert other._folder.locks.take(other._folder.claim_byte(name_of(1)))


def test_who_waited_finds_the_object(opened: Opened) -> None:
    one, other = opened(), opened()
    found: list[bool] = []
    at_it = threading.Event()

    def wait(table: StageTable) -> None:
        at_it.set()
        with table.claim(1, 60.0) as is_ours:
            found.append(is_ours)

    for table in (one, other):  # a thread of the same process, and what stands for another process
        at_it.clear()
        with one.claim(1, 0.0):
            waiting = threading.Thread(target=wait, args=(table,))
            waiting.start()
            at_it.wait()
            threading.Event().wait(0.05)  # so that it comes to wait; nothing fails where it does not
            one.keep(1, content(1))
        waiting.join()
    assert len(found) == 2
    assert one.read(1) == content(1)


# ---- faults ------------------------------------------------------------------------------------------


def test_a_full_disk_is_said_once(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = opened()
    table.keep(0, content(0))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert not any(table.keep(row, content(row)) for row in range(1, 20))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert table.read(0) == content(0)
    assert StageFolder(Stage(tmp_path)).usage().nbytes == SIZE
    assert not list((tmp_path / "fastpipe-stage" / "writing").iterdir())


def test_a_folder_that_vanished_is_said_once(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = opened()
    table.keep(0, content(0))
    shutil.rmtree(tmp_path / "fastpipe-stage")
    assert table.read(0) is None
    assert not table.has(0)
    assert not any(table.keep(row, content(row)) for row in range(20))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_is_moved_is_used_on(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    table.keep(0, content(0))
    (tmp_path / "fastpipe-stage").rename(tmp_path / "elsewhere")
    other = opened()
    assert other.keep(0, content(1))
    assert table.read(0) == content(0)
    assert table.keep(1, content(1))
    assert len(files_in(tmp_path)) == 1


def test_a_link_or_an_open_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "fastpipe-stage").symlink_to("real")
    with pytest.raises(StageError, match="is a link"):
        StageFolder(Stage(tmp_path))
    (tmp_path / "real" / "fastpipe-stage").mkdir()
    (tmp_path / "real" / "fastpipe-stage").chmod(0o755)
    with pytest.raises(StageError, match="chmod 700"):
        StageFolder(Stage(tmp_path / "real"))


def test_clearing_needs_to_be_alone(opened: Opened, tmp_path: Path) -> None:
    table = opened()
    table.keep(0, content(0))
    folder = StageFolder(Stage(tmp_path))
    with pytest.raises(StageError, match="in use"):
        folder.clear()
    table.close()
    folder.clear()
    assert folder.usage()[:2] == (0, 0)
    assert not files_in(tmp_path)
