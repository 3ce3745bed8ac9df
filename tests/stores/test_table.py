"""Which staged objects make room, what is damaged, and how files get their names."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core import files as _files
from fastpipe.options import Stage
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import EvictionOrder, StageTable, move_file, read_file, write_file

NEVER = 2**62


def uses_of(at: Any) -> Any:
    """When rows are needed next; ``at`` may be changed."""
    at = np.array(at)
    return SimpleNamespace(at=at, next_uses=at.__getitem__, tag=b"t" * 16)


@given(
    at=st.lists(st.integers(0, 30), min_size=12, max_size=12), staged=st.sets(st.integers(0, 11)),
    steps=st.lists(st.tuples(st.sampled_from(["use", "stage", "take"]), st.integers(0, 11), st.integers(-2, 60)),
                   max_size=40),
    by_another=st.booleans(),
)  # fmt: skip
def test_the_row_that_is_needed_last_goes_first_after_any_steps(
    at: list[int], staged: set[int], steps: Any, by_another: bool
) -> None:
    """Another process notes nothing here, and only brings uses forward: it has used the row."""
    uses = uses_of(at)
    order = EvictionOrder(uses, lambda: np.array(sorted(staged), np.int64), staged.__contains__)
    for step, row, number in steps:
        if step == "take":
            last = max((uses.at[other] for other in staged), default=-2)
            taken = order.take(number)
            assert (taken is None) == (last <= number)  # what is needed at the same time stays
            if taken is not None:
                assert uses.at[taken] == last
                staged.discard(taken)
        elif by_another and row in staged:
            uses.at[row] = min(uses.at[row], max(0, number))
        elif not by_another and (step == "stage" or row in staged):
            uses.at[row] = max(0, number) if step == "use" else uses.at[row]
            staged.add(row)
            order.note(np.array([row]))


# ---- making room -----------------------------------------------------------------------------------


def test_objects_that_are_needed_last_make_room(users: Any) -> None:
    table = users.open_full()
    at = list(range(60))
    at[4], at[7] = 1000, 2000
    users.follow(table, at)
    assert users.keep(table, 20, 21) == [20, 21]
    assert users.kept(table) == [0, 1, 2, 3, 5, 6, 8, 9, 20, 21]
    for times in (range(60), [NEVER] * 60):  # later than all others, or unknown
        users.follow(table, times)
        assert not users.keep(table, 30)
    assert len(users.kept(table)) == 10


def test_objects_of_an_ended_listing_make_room_and_common_ones_stay(users: Any) -> None:
    users.leave_old(lambda row: users.name_of(row) if row < 6 else users.name_elsewhere(row))
    table = users.open()
    assert users.keep(table, *range(20, 30)) == [20, 21, 22, 23]
    assert users.kept(table) == [*range(6), 20, 21, 22, 23]
    assert len(users.files()) == 10


def test_objects_that_another_listing_uses_stay(users: Any) -> None:
    other = users.open_other()
    users.keep(other, *range(5))
    table = users.open()
    users.kept(table)
    users.keep(table, *range(5, 10))
    users.follow(table, [1000] * 5 + [100] * 25)  # the shared ones would be the first to go
    assert len(users.keep(table, *range(30, 40))) == 5
    assert users.kept(other)[:5] == list(range(5))


def test_an_object_that_a_later_training_uses_stays(users: Any) -> None:
    table = users.open_full()
    users.follow(table, range(100, 110))
    assert users.keep(table, 20) == [20]  # it has looked at who else there is
    other = users.open_other()
    assert users.kept(other) == [*range(9), 20]
    assert not users.keep(table, *range(30, 40))
    assert users.kept(other) == [*range(9), 20]


def test_an_object_that_is_there_already_removes_nothing(users: Any) -> None:
    users.keep(users.open_other(), 20)
    table = users.open()
    users.keep(table, *range(9))
    users.follow(table, [50] * 20)
    assert users.keep(table, 20) == [20]
    assert users.kept(table) == [*range(9), 20]


def test_processes_of_one_order_make_room_and_those_of_another_do_not(users: Any) -> None:
    first, same, other = users.open_full(), users.open(), users.open()
    for _ in range(2):  # also when the next epoch begins
        users.follow(first, range(100, 130))
        users.follow(same, range(100, 130))
        users.follow(other, range(100, 130), b"o" * 16)
    assert users.keep(first, 30) and users.keep(same, 31)
    assert not users.keep(other, 32)


@pytest.mark.parametrize("end", [lambda table: table.follow(None), StageTable.close])
def test_the_next_process_makes_room_once_the_first_ends(users: Any, end: Any) -> None:
    first, other = users.open_full(), users.open()
    users.follow(first, [50] * 10)
    end(first)
    users.follow(other, [50] * 10, b"o")
    assert users.keep(other, 20) == [20]
    users.follow(first, [50] * 10)
    assert not users.keep(first, 21)


def test_two_orders_do_not_disturb_each_other(users: Any) -> None:
    """Two trainings on halves of the same data, and room for all but ten: each keeps what is its own."""
    tables = users.open(), users.open_other()
    users.keep(tables[0], *range(5))
    users.keep(tables[1], *range(30, 35))
    for seed in range(2):
        orders = [np.random.default_rng(seed + 10 * which).permutation(30) for which in range(2)]
        for which, table in enumerate(tables):
            at = np.full(users.ROWS, NEVER)
            at[orders[which] + 30 * which] = np.arange(30)
            users.follow(table, at)
        for step in range(30):
            for which, table in enumerate(tables):
                users.keep(table, int(orders[which][step]) + 30 * which)
                assert ((np.array(users.kept(table)) >= 30) == which).sum() >= 5


@pytest.mark.parametrize("is_known", [True, False])
def test_half_a_dataset_spares_more_than_half_the_downloads(users: Any, is_known: bool) -> None:
    rows = 200
    table = users.open(limit=rows // 2 * users.SIZE, rows=rows)
    fetched = []
    for epoch in range(4):
        order, later = (np.random.default_rng(e).permutation(rows) for e in (epoch, epoch + 1))
        next_epoch = rows + np.argsort(later)
        uses = uses_of(next_epoch if is_known else np.full(rows, NEVER))
        uses.at[order] = np.arange(rows)
        table.follow(uses)
        fetched.append(0)
        for row in order.tolist():
            uses.at[row] = next_epoch[row] if is_known else NEVER
            table.used(np.array([row]))
            if table.read(row) is None:
                fetched[-1] += 1
                users.keep(table, row)
    assert fetched[0] == rows and max(fetched[1:]) <= 0.57 * rows


@settings(max_examples=25)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39), st.integers(0, 50)), max_size=60))
def test_the_count_is_that_of_the_files_and_never_above_the_limit(
    users: Any, tmp_path_factory: Any, steps: Any
) -> None:
    place, sizes = tmp_path_factory.mktemp("stage"), np.arange(1, 41) * 10
    tables = [
        StageFolder(Stage(place, max_bytes=1000)).open_table(digest * 16, sizes, users.name_of)
        for digest in (b"d", b"d", b"e")
    ]
    uses = uses_of(range(40))
    for table in tables:
        table.follow(uses)
    for which, row, use in steps:
        uses.at[row] = use
        tables[which].keep(row, bytes(int(sizes[row])))
        found = tables[which].read(row)
        assert found is None or len(found) == sizes[row]
        nbytes = sum(path.stat().st_size for path in (place / "fastpipe-stage" / "objects").glob("*/*"))
        assert StageFolder(Stage(place)).usage().nbytes == nbytes <= 1000
    for table in tables:
        table.close()


def test_threads_make_room_at_once(users: Any) -> None:
    users.leave_old()
    table, interval = users.open(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    barrier = threading.Barrier(8)

    def work(first: int) -> None:
        barrier.wait(60)
        users.keep(table, *range(first, users.ROWS, 8))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(20, 28)))
    sys.setswitchinterval(interval)
    assert len(users.kept(table)) == 10 and users.nbytes() == 1000


def test_a_name_that_a_killed_writer_has_left_keeps_the_bytes(users: Any) -> None:
    table = users.open_full()
    os.link(table._folder.object_path(users.name_of(3)), users.path / "writing" / "17")
    users.follow(table, [0] * 3 + [60] + [50] * 6)
    assert users.keep(table, 20) == [20]
    assert users.kept(table) == [0, 1, 2, *range(4, 9), 20], "it took another one as well"
    table.close()
    users.open()
    assert users.nbytes() == 9 * users.SIZE and not users.unfinished()


def test_a_file_that_another_process_has_made_meanwhile_is_counted_once(users: Any, monkeypatch: Any) -> None:
    table = users.open()
    users.keep(table, 0)
    monkeypatch.setattr("fastpipe.stores.table.move_file", lambda path, name: False)
    users.keep(table, 1)
    ledger = table._folder.ledger
    assert (ledger.nbytes, ledger.is_reliable) == (users.SIZE, True) and not users.unfinished()


# ---- damage ----------------------------------------------------------------------------------------


def test_broken_tables_and_strange_files_disturb_nothing(users: Any) -> None:
    other = users.open_other()
    users.keep(other, *range(5))
    (path,) = (users.path / "tables").iterdir()
    path.write_bytes(path.read_bytes() + b"odd")
    note = users.path / "objects" / "ab" / "note.txt"
    note.parent.mkdir(exist_ok=True)
    for strange in (note, users.path / "objects" / "file", users.path / "tables" / "mine"):
        strange.touch()
    table = users.open()
    users.follow(table, [50] * 20)
    assert users.keep(table, *range(10, 20), *range(40, 50)) == [*range(10, 15), *range(40, 45)]
    assert users.kept(other) == [*range(5), *range(40, 45)] and note.exists()


def test_nothing_is_made_anew_where_the_folder_was_removed(users: Any, caplog: Any) -> None:
    table = users.open_full()
    users.follow(table, [50] * 3 + [60] + [50] * 6)
    os.unlink(table._folder.object_path(users.name_of(3)))
    assert users.keep(table, 20) == [20], "another object has made room"
    shutil.rmtree(users.path)
    assert not users.keep(table, *range(21, 30)) and not users.kept(table)
    assert not users.path.exists() and len(caplog.records) <= 1
    assert not table._folder.ledger.is_reliable, "another process would count the bytes again"


@pytest.mark.parametrize("left", [0, 20])
def test_nothing_is_kept_or_removed_where_the_count_is_lost(users: Any, left: int) -> None:
    table = users.open_full()
    users.follow(table, [50] * 10)
    os.truncate(users.path / "locks", left)
    assert not users.keep(table, *range(20, 30))
    assert users.kept(table) == list(range(10))
    table.close()
    users.open()
    assert users.nbytes() == 1000


# ---- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["renames", "links", "cannot rename so"])
def test_a_file_gets_a_name_that_no_other_has(system: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Whether the system can rename a file and replace none, or the file system cannot."""

    def refuse(*arguments: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    if system != "renames":
        monkeypatch.setattr(_files, "_renameat2", None if system == "links" else refuse)
    new, name = str(tmp_path / "1"), str(tmp_path / "folder" / "name")
    with pytest.raises(FileNotFoundError) as raised:
        move_file(new, str(tmp_path / "name"))
    assert raised.value.filename == new and raised.value.filename2 == str(tmp_path / "name")
    write_file(new, b"abc")
    with pytest.raises(FileExistsError):
        write_file(new, b"abc")
    with pytest.raises(NotADirectoryError):
        move_file(new, str(tmp_path / "1" / "name"))
    assert move_file(new, name) and [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_file(new, b"other")
    assert not move_file(new, name)
    assert read_file(name, 3) == read_file(name, 2) == b"abc" and read_file(new, 9) == b"other"
