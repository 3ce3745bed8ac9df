"""Where the files of caches are, which processes share them, and what is left of them."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import Answering

from fastpipe.core import caches, locks
from fastpipe.core.cache_store import EntryStore
from fastpipe.core.caches import open_cache_store
from fastpipe.core.file_identity import identify
from fastpipe.core.private_folder import user_cache_folder
from fastpipe.errors import CacheError
from fastpipe.options import Cache

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/fd") or not hasattr(os, "memfd_create"),
    reason="run it on Linux, where processes can share memory through /proc",
)

MIB = 1 << 20
RAM = 16 * MIB


def _digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def _opened(option: Cache) -> EntryStore:
    store = open_cache_store(option)
    assert store is not None
    return store


def _put(store: EntryStore, number: int) -> bool:
    return store.put(_digest(number), np.full((2, 2, 3), number, np.uint8))


def _found(store: EntryStore) -> list[int]:
    return [number for number in range(20) if store.find(_digest(number))]


def _answers(option: Cache) -> dict[str, Callable[..., Any]]:
    store = _opened(option)
    return {
        "put": lambda number: _put(_opened(option), number),
        "found": lambda: _found(store),
        "lock": lambda path: locks.try_to_lock(os.open(path, os.O_RDWR) if path else store._log),
        "unlock": lambda: locks.unlock(store._log),
    }


@pytest.fixture
def other() -> Iterator[Callable[..., Answering]]:
    """Begins other processes, which open a cache; before this one does, so that they have none of its stores."""
    begun: list[Answering] = []

    def begin(*option: Any) -> Answering:
        begun.append(Answering(lambda: _answers(Cache(*option or ("ram", RAM)))))
        assert begun[-1]("found") is not None
        return begun[-1]

    yield begin
    for one in begun:
        one.end(kill=True)


def _notes() -> list[str]:
    folder = user_cache_folder() / "shared-memory"
    return sorted(path.name for path in folder.iterdir() if path.name != "lock") if folder.is_dir() else []


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # stores of other tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(caches, "_failed", set())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "fastpipe.cache")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = Cache("disk", MIB)
    first = _opened(option)
    assert first is open_cache_store(option)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert _opened(option) is not first
    assert (tmp_path / "elsewhere" / "fastpipe" / "fastpipe-decoded").is_dir()


def test_equal_options_have_one_store() -> None:
    options = Cache("ram", RAM), Cache("ram", RAM), Cache("auto", RAM), Cache("ram", RAM + 1)
    one, same, automatic, other = map(_opened, options)
    assert one is same is automatic
    assert one is not other
    assert one.max_bytes == RAM
    assert _put(one, 1)
    assert (_found(same), _found(other)) == ([1], [])


def test_a_cache_takes_a_share_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "free_memory", lambda: 400 * MIB)
    monkeypatch.setattr(caches, "free_disk", lambda descriptor: 400 * MIB)
    ram, disk = Cache("ram"), Cache("disk", dir=tmp_path)
    assert _opened(ram).max_bytes == 100 * MIB
    assert 100 * MIB <= _opened(disk).max_bytes < 101 * MIB


@pytest.mark.usefixtures("no_gc")
def test_a_store_lives_as_long_as_an_option_and_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    option, second = Cache("ram", RAM), Cache("ram", RAM)
    assert _put(_opened(option), 1)
    _opened(second)
    for descriptor in _opened(option).descriptors:
        assert os.fstat(descriptor).st_nlink == 0
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert not os.get_inheritable(descriptor)
    del option
    assert _found(_opened(second)) == [1]
    assert len(_notes()) == 1
    assert (user_cache_folder() / "shared-memory").stat().st_mode & 0o777 == 0o700
    del second
    assert set(os.listdir("/proc/self/fd")) <= before  # others may have closed theirs
    assert _notes() == []
    third = Cache("ram", RAM)
    assert _found(_opened(third)) == []


def test_processes_share_a_store_until_the_last_one_ends(other: Any) -> None:
    first, option = other(), Cache("ram", RAM)
    assert first("put", 1)
    second = other()
    store = _opened(option)
    assert _found(store) == second("found") == [1]
    assert _put(store, 2)
    assert first("found") == [1, 2]
    first.end()  # the one that made it
    assert second("put", 3)
    assert _found(store) == [1, 2, 3]
    assert len(_notes()) == 2
    second.end(kill=True)
    assert _found(store) == [1, 2, 3]
    assert _put(store, 4)
    del store, option
    gc.collect()
    assert other()("found") == []


def test_notes_of_killed_processes_and_old_ones_of_other_machines_are_removed(other: Any) -> None:
    for one in [other(*option) for option in (("ram", RAM), ("ram", 2 * RAM), ("auto",))]:
        one.end(kill=True)
    assert len(_notes()) >= 1
    for name, days in (("new", 1), ("old", 40)):
        path = user_cache_folder() / "shared-memory" / f"{name}machine.auto.1.3.json"
        path.write_text("{}")
        at = path.stat().st_mtime - days * 86400
        os.utime(path, (at, at))
    option = Cache("ram", 3 * RAM)
    assert _found(_opened(option)) == []
    notes = _notes()
    assert len(notes) == 2 and "newmachine.auto.1.3.json" in notes
    assert any(f".{os.getpid()}." in note for note in notes)


WRONG_NOTES: list[Callable[[dict[str, Any]], object]] = [
    lambda note: [],
    lambda note: {**note, "inodes": [1, 2]},
    lambda note: {**note, "inodes": note["inodes"][:1]},
    lambda note: {**note, "inodes": [], "descriptors": []},
    lambda note: {**note, "descriptors": [0, 1]},
    lambda note: {**note, "max_bytes": None},
    lambda note: {key: note[key] for key in note if key != "pid"},
]


def test_a_wrong_note_is_removed(other: Any) -> None:
    one = other()
    assert one("put", 1)
    (name,) = _notes()
    path = user_cache_folder() / "shared-memory" / name
    right = path.read_bytes()
    for content in (b"", b"no JSON", *(json.dumps(make(json.loads(right))).encode() for make in WRONG_NOTES)):
        path.write_bytes(content)
        before = len(os.listdir("/proc/self/fd"))
        option = Cache("ram", RAM)
        assert _found(_opened(option)) == []
        assert len(os.listdir("/proc/self/fd")) == before + 3  # and one of the map
        assert name not in _notes()
        assert len(_notes()) == 1
        del option
        gc.collect()


@pytest.mark.hang_after(60)
def test_a_stopped_process_with_a_lock_is_not_waited_for(tmp_path: Path, other: Any) -> None:
    """Of the memory, or of a folder in which it opens a cache."""
    memory, disk = other(), other("disk", RAM, tmp_path)
    assert memory("lock", None) and disk("lock", str(tmp_path / "fastpipe-decoded" / "lock"))
    options = Cache("ram", RAM), Cache("disk", RAM, dir=tmp_path)
    assert all(_put(_opened(option), 2) for option in options)
    assert len(_notes()) == 2
    memory("unlock")
    assert memory("found") == []


def test_a_process_that_cannot_leave_a_note_has_a_cache_of_its_own(warnings: Any) -> None:
    folder = user_cache_folder() / "shared-memory"
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # open to others
    option = Cache("ram", RAM)
    assert _put(_opened(option), 1)
    assert _found(_opened(option)) == [1]
    assert warnings() == []


def test_missing_memory_is_warned_about_once(monkeypatch: pytest.MonkeyPatch, warnings: Any) -> None:
    made: list[int] = []
    real = caches.anonymous_file

    def one_only() -> int:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(real())
        return made[0]

    monkeypatch.setattr(caches, "anonymous_file", one_only)
    option, automatic = Cache("ram", RAM), Cache("auto", RAM)
    assert open_cache_store(option) is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made[0])
    made.clear()
    assert open_cache_store(automatic) is None
    assert open_cache_store(option) is None
    assert len(warnings()) == 1
    assert "Too many open files" in warnings()[0]


def test_only_a_cache_that_was_asked_for_is_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, warnings: Any, tmp_path: Path
) -> None:
    options = automatic, ram, disk = Cache(), Cache("ram"), Cache("disk")
    with monkeypatch.context() as patch:
        patch.setattr(caches, "free_memory", lambda: None)
        assert open_cache_store(automatic) is open_cache_store(ram) is None
        assert len(warnings()) == 1 and "max_bytes" in warnings()[0]
    monkeypatch.setattr(caches, "_failed", set())
    monkeypatch.setattr(locks, "fcntl", None)
    assert [open_cache_store(option) for option in options] == [None] * 3
    assert ["operating system" in text for text in warnings()[1:]] == [True, True]
    with pytest.raises(CacheError, match="operating system"):
        open_cache_store(Cache("disk", dir=tmp_path))
    del disk


def test_a_child_forked_while_another_thread_opens_a_cache_opens_one(in_child: Any) -> None:
    option = Cache("ram", RAM)
    with caches._opening:
        in_child(lambda: _opened(option))


def _files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "fastpipe-decoded"))


FILES = ["000000.data", "000000.log", "lock"]


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "fastpipe-decoded"
    folder.mkdir(mode=0o700)
    (tmp_path / "precious").write_bytes(b"precious")
    (folder / name).symlink_to("../precious")
    with pytest.raises(CacheError):
        open_cache_store(Cache("disk", dir=tmp_path))
    gc.collect()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_default_folder_that_cannot_be_used_is_a_warning(warnings: Any) -> None:
    user_cache_folder().parent.mkdir()
    user_cache_folder().touch()
    option = Cache("disk", RAM)
    for one in (option, option, Cache("disk", RAM)):
        assert open_cache_store(one) is None
    assert len(warnings()) == 1
    user_cache_folder().unlink()
    assert _put(_opened(option), 1), "it is tried anew"
    assert _files(user_cache_folder()) == FILES


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"file {number}" for number in range(4)]
    for path in made:
        path.write_bytes(b"content")
    return made


def _full(tmp_path: Path, files: list[Path]) -> Cache:
    """An option whose store is full of entries about the files."""
    option = Cache("disk", 4096, dir=tmp_path)
    store = _opened(option)
    for number, path in enumerate(files * 200):
        if not store.put(_digest(number), np.zeros((6, 5, 3), np.uint8), 0, identify(str(path), b"").note()):
            break
    assert store.allocated > 3700
    return option


@pytest.mark.parametrize(
    ("size", "changed", "is_kept"),
    [(4097, 3, False), (4097, 1, True), (RAM, 4, True), (4097, 0, False)],
    ids=["stale", "hardly stale", "larger now", "damaged"],
)
def test_a_cache_is_kept_unless_it_is_full_and_mostly_stale(
    tmp_path: Path, files: list[Path], size: int, changed: int, is_kept: bool
) -> None:
    full = _full(tmp_path, files)
    old = _opened(full)
    known = _found(old)
    for number, path in enumerate(files[:changed]):
        path.unlink() if number % 2 else path.write_bytes(b"something else")
    if not changed:
        os.truncate(tmp_path / "fastpipe-decoded" / "000000.data", 10)
    again = Cache("disk", size, dir=tmp_path)  # as a process does that starts later
    new = _opened(again)
    if is_kept:
        assert _found(new) == known
        assert _files(tmp_path) == FILES
        return
    assert (len(new), new.allocated, _found(new)) == (0, 0, [])
    assert _files(tmp_path) == ["000001.data", "000001.log", "lock"]
    assert _put(new, 5)
    if changed:  # the user of the old files continues with them
        assert _found(old) == known
        assert not old.read(old.find(_digest(known[-1])), 0, 6).any()  # type: ignore[arg-type]


def test_files_with_a_damaged_log_are_left_to_their_users(tmp_path: Path) -> None:
    option = Cache("disk", RAM, dir=tmp_path)
    old = _opened(option)
    assert _put(old, 1)
    log = tmp_path / "fastpipe-decoded" / "000000.log"
    content = log.read_bytes()
    log.unlink()
    log.write_bytes(content.replace(b"cache 1", b"cache 2"))  # of another version
    again = Cache("disk", RAM + 1, dir=tmp_path)
    new = _opened(again)
    assert _found(new) == []
    for number in range(2, 10):
        assert _put(new, number)
    assert _files(tmp_path) == ["000001.data", "000001.log", "lock"]
    assert _found(old) == [1]
    entry: Any = old.find(_digest(1))
    assert (old.read(entry, 0, 2) == 1).all(), "nothing is written over what is in use"
