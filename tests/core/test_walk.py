"""Walking folders: threads where listing waits, stamps where times can be relied on."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastpipe.core import class_folders as walk
from fastpipe.core.class_folders import Folder, Walker, waits
from fastpipe.core.file_identity import FileSystems

PATIENCE_S = 60.0
LATER = 10**20  # nanoseconds since 1970: all times in this file are long past


class Systems(FileSystems):
    """File systems of one kind."""

    def __init__(self, *, local: bool = True, remote: bool = False) -> None:
        super().__init__("")
        self.local, self.remote = local, remote

    def is_local(self, device: int, folder: str) -> bool:
        return self.local

    def is_remote(self, device: int, folder: str) -> bool:
        return self.remote


def take(folder: str, names: list[str]) -> tuple[int, list[str]]:
    return len(names), sorted(names)


def walker(root: Path, **options: Any) -> Walker[list[str]]:
    settings: dict[str, Any] = {
        "now": lambda: LATER, "file_systems": Systems(), "is_waiting": lambda: False
    }  # fmt: skip
    return Walker(f"{root}/", take, **{**settings, **options})


def plain(found: list[list[Folder[list[str]]]]) -> list[Any]:
    return [[(folder.path, folder.content) for folder in folders] for folders in found]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for top in "abcdefgh":
        for below in ("", "1", "1-2", "1/2", "links"):
            (tmp_path / "root" / top / below).mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / top / below / f"{top}.jpg").touch()
        (tmp_path / "root" / top / "links" / "up").symlink_to("../1")
    return tmp_path / "root"


def reference(root: Path) -> list[Any]:
    return [
        [
            (os.path.relpath(folder, root), sorted(files))
            for folder, _, files in sorted(os.walk(root / top, followlinks=True))
        ]
        for top in sorted(os.listdir(root))
    ]


class Together:
    """``os.scandir`` that returns once so many calls are in progress."""

    def __init__(self, parties: int) -> None:
        self.barrier, self.real = threading.Barrier(parties), os.scandir

    def __call__(self, folder: Any) -> Any:
        self.barrier.wait(PATIENCE_S)
        return self.real(folder)


def test_folders_are_listed_in_parallel_where_one_thread_would_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tops = [f"{number:03}" for number in range(2 * walk.THREADS)]
    for top in tops:
        (tmp_path / top).mkdir()
        (tmp_path / top / "x").touch()
    monkeypatch.setattr(os, "scandir", Together(walk.THREADS))
    found = walker(tmp_path, is_waiting=lambda: True).walk(tops)
    assert plain(found) == [[(top, ["x"])] for top in tops]


def test_folders_of_a_remote_file_system_are_listed_in_parallel_after_the_first(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, real, together = reference(tree), os.scandir, Together(4)
    calls: list[int] = []
    numbers = itertools.count()  # atomic, unlike the length of a list that threads append to

    def scandir(folder: Any) -> Any:
        number = next(numbers)
        calls.append(threading.get_ident())
        # The first shows what kind it is; the last ones need not come in fours.
        return together(folder) if 1 <= number <= 8 else real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    found = walker(tree, file_systems=Systems(local=False, remote=True)).walk(list("abcdefgh"))
    assert plain(found) == expected
    assert calls[0] == threading.get_ident()
    assert threading.get_ident() not in calls[1:]


def test_one_thread_does_while_it_is_busy(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, real = reference(tree), os.scandir
    callers: set[int] = set()

    def scandir(folder: Any) -> Any:
        callers.add(threading.get_ident())
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert plain(walker(tree).walk(list("abcdefgh"))) == expected
    assert callers == {threading.get_ident()}


@pytest.mark.parametrize("after", range(0, 40, 7))
def test_going_over_to_threads_anywhere_finds_the_same(tree: Path, after: int) -> None:
    answers = iter([*[False] * after, *[True] * 100])
    found = walker(tree, is_waiting=lambda: next(answers)).walk(list("abcdefgh"))
    assert plain(found) == reference(tree)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_ends_the_threads(tree: Path, error: type[BaseException]) -> None:
    def fail(folder: str, names: list[str]) -> tuple[int, list[str]]:
        if folder == "c/1":
            raise error("here")
        return take(folder, names)

    one = Walker(f"{tree}/", fail, is_waiting=lambda: True)
    with pytest.raises(error, match="here"):
        one.walk(list("abcdefgh"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastpipe-scan")]


def test_an_interrupt_in_the_callers_thread_ends_the_others(tree: Path) -> None:
    ticks = iter(range(1000))

    def interrupt(folders: int, files: int) -> None:
        raise KeyboardInterrupt

    one = walker(tree, is_waiting=lambda: True, on_progress=interrupt, clock=lambda: float(next(ticks)))
    with pytest.raises(KeyboardInterrupt):
        one.walk(list("abcdefgh"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastpipe-scan")]


@pytest.mark.parametrize(
    ("passed", "ran", "expected"),
    [
        (0.04, 0.0, False),  # too short to tell
        (0.06, 0.05, False),
        (0.06, 0.02, True),
        (0.1, 0.05, False),
        (0.1, 0.04, True),
        (5.0, 0.0, True),
    ],
)
def test_waiting_is_more_than_half_of_the_time(
    passed: float, ran: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0 + passed)
    monkeypatch.setattr(time, "thread_time", lambda: 3.0 + ran)
    assert waits((10.0, 3.0)) is expected


@pytest.mark.parametrize("threads", [False, True])
def test_progress_is_told_a_few_times_a_second(tree: Path, threads: bool) -> None:
    told: list[tuple[float, int, int]] = []
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.1
        return now

    def on_progress(folders: int, files: int) -> None:
        told.append((now, folders, files))

    one = walker(tree, is_waiting=lambda: threads, on_progress=on_progress, clock=clock)
    one.walk(list("abcdefgh"))
    assert told == sorted(told)
    assert all(later[0] - earlier[0] > 0.25 for earlier, later in itertools.pairwise(told))
    assert told[0][0] < 0.45
    assert now - told[-1][0] < 0.35
    if not threads:  # else the thread that waits may look at the clock more often
        assert [folders for _, folders, _ in told] == list(range(3, 57, 3))
    assert all(folders == files for _, folders, files in told)


def stamp_of(root: Path, **options: Any) -> Any:
    ((folder, *_),) = walker(root, **options).walk(["cat"])
    return folder.stamp


def test_a_stamp_is_given_where_the_times_will_tell_of_a_change(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    status = os.stat(tmp_path / "cat")
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    assert stamp_of(tmp_path) == stamp
    assert stamp_of(tmp_path, now=lambda: changed + 2_100_000_001) == stamp
    assert stamp_of(tmp_path, now=lambda: changed + 2_100_000_000) is None
    assert stamp_of(tmp_path, now=lambda: changed - 10**15) is None  # a clock that was set back
    assert stamp_of(tmp_path, file_systems=Systems(local=False)) is None
    os.utime(tmp_path / "cat", (0, 0))  # the other time still tells when it was
    assert stamp_of(tmp_path, now=lambda: changed + 1) is None


def test_links_that_may_become_something_else_take_the_stamp(tmp_path: Path) -> None:
    cat = tmp_path / "cat"
    (cat / "folder").mkdir(parents=True)
    (cat / "1.jpg").touch()
    (cat / "link").symlink_to("folder")
    assert stamp_of(tmp_path) is not None
    for target in ("1.jpg", "nowhere", "itself"):
        (cat / "itself").symlink_to(target)
        assert stamp_of(tmp_path) is None
        (cat / "itself").unlink()
    assert stamp_of(tmp_path) is not None


def test_an_entry_of_unknown_kind_takes_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()

    class Entry:
        name = "odd"

        def is_dir(self) -> bool:
            raise OSError(5, "Input/output error")

    class Entries:
        def __enter__(self) -> Any:
            return iter([Entry()])

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda path: Entries())
    ((folder,),) = walker(tmp_path).walk(["cat"])
    assert (folder.content, folder.stamp) == (["odd"], None)


def test_a_folder_that_changes_while_it_is_listed_gets_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1.jpg").touch()
    real = os.scandir

    def swapped(path: Any) -> Any:
        os.rename(tmp_path / "cat", tmp_path / "before")
        os.rename(tmp_path / "other", tmp_path / "cat")
        return real(path)

    monkeypatch.setattr(os, "scandir", swapped)
    ((folder,),) = walker(tmp_path).walk(["cat"])
    assert (folder.content, folder.stamp) == (["1.jpg"], None)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    listed: list[str] = []
    real = os.scandir

    def scandir(path: Any) -> Any:
        listed.append(os.path.basename(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return listed


Change = Callable[[Path], object]


@pytest.mark.parametrize("threads", [False, True])
def test_a_known_folder_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    for name in ("a", "a/x", "b", "b/y"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"is_waiting": lambda: threads}
    first = walker(tmp_path, **options).walk(["a", "b"])
    known = {folder.path: folder for folders in first for folder in folders}
    listed = counted(monkeypatch)
    again = walker(tmp_path, known=known, **options).walk(["a", "b"])
    assert again == first
    assert listed == []
    changed = known["a/x"]
    known["a/x"] = Folder(changed.path, (1, 2, 3, 4), changed.folders, changed.count, changed.content)
    assert walker(tmp_path, known=known, **options).walk(["a", "b"]) == first
    assert listed == ["x"]
    walker(tmp_path, known=known, file_systems=Systems(local=False), **options).walk(["a", "b"])
    assert sorted(listed) == ["a", "b", "x", "x", "y"]


def test_a_known_folder_that_may_not_be_read_any_more_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    ((folder,),) = walker(tmp_path).walk(["a"])
    listed = counted(monkeypatch)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    walker(tmp_path, known={"a": folder}).walk(["a"])
    assert listed == ["a"]
