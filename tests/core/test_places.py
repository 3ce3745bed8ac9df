"""Where stores are, who shares them, and what is left of them: nothing."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe.core import caches as places
from fastpipe.core import locks
from fastpipe.core.cache_store import EntryStore
from fastpipe.core.caches import open_cache_store
from fastpipe.core.file_identity import identify
from fastpipe.core.private_folder import user_cache_folder
from fastpipe.errors import CacheError
from fastpipe.options import Cache

MIB = 1 << 20
needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/fd") or not hasattr(os, "memfd_create"),
    reason="run it on Linux, where processes can share memory through /proc",
)

_SCRIPT = """
import hashlib, os, sys
import numpy as np
from fastpipe.core.caches import open_cache_store
from fastpipe.options import Cache
def digest(number):
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()
def put(number):
    return store.put(digest(number), np.full((2, 2, 3), number, np.uint8))
def found():
    return [number for number in range(20) if store.find(digest(number))]
for line in sys.stdin:
    exec(line)
"""


class Other:
    """Another process, which runs lines of Python that print an answer."""

    def __init__(self, option: str) -> None:
        root = Path(fastpipe.__file__).parents[1]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        self.ask(f"option = {option}; store = open_cache_store(option); print(0)")

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        assert self.process.returncode == (-signal.SIGKILL if kill else 0)


@contextmanager
def other_process(option: str = 'Cache("ram", 1 << 24)') -> Iterator[Other]:
    other = Other(option)
    try:
        yield other
    finally:
        if other.process.returncode is None:
            other.process.kill()
            other.process.communicate()


def _digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def _put(store: EntryStore | None, number: int, note: bytes = b"") -> bool:
    assert store is not None
    return store.put(_digest(number), np.full((2, 2, 3), number, np.uint8), 0, note)


def _found(store: EntryStore | None) -> list[int]:
    assert store is not None
    return [number for number in range(20) if store.find(_digest(number))]


def _announced() -> list[str]:
    folder = user_cache_folder() / "shared-memory"
    return sorted(path.name for path in folder.iterdir() if path.name != "lock") if folder.is_dir() else []


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # stores of other tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_failed", set())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "fastpipe.cache")
    return lambda: [record.getMessage() for record in caplog.records]


# ---- in memory -------------------------------------------------------------------------------------


def test_the_user_s_cache_folder_is_where_the_environment_says_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = Cache("disk", 1 << 20)
    first = open_cache_store(option)
    assert first is not None
    assert first is open_cache_store(option)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    other = open_cache_store(option)
    assert other is not None
    assert other is not first
    assert (tmp_path / "elsewhere" / "fastpipe" / "fastpipe-decoded").is_dir()


def test_equal_options_have_one_store() -> None:
    options = Cache("ram", 16 * MIB), Cache("ram", 16 * MIB), Cache("ram", 17 * MIB)
    one, same, other = map(open_cache_store, options)
    assert one is same
    assert one is not other
    assert one is not None
    assert one.max_bytes == 16 * MIB
    assert _put(one, 1)
    assert (_found(same), _found(other)) == ([1], [])


def test_auto_is_in_memory() -> None:
    automatic, ram = Cache("auto", 16 * MIB), Cache("ram", 16 * MIB)
    assert open_cache_store(automatic) is open_cache_store(ram)


def test_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "free_memory", lambda: 400 * MIB)
    option = Cache("ram")
    store = open_cache_store(option)
    assert store is not None
    assert store.max_bytes == 100 * MIB


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    option = Cache("ram", 16 * MIB)
    store = open_cache_store(option)
    monkeypatch.setattr(places, "free_memory", lambda: 100 * MIB)
    assert not _put(store, 1)
    assert len(said()) == 1


@pytest.mark.usefixtures("no_gc")
def test_it_lives_while_an_option_does_and_then_its_memory_is_free() -> None:
    before = set(os.listdir("/proc/self/fd"))
    option, second = Cache("ram", 16 * MIB), Cache("ram", 16 * MIB)
    assert _put(open_cache_store(option), 1)
    open_cache_store(second)
    assert _found(open_cache_store(option)) == [1]
    del option
    assert _found(open_cache_store(second)) == [1]
    assert len(_announced()) == 1
    del second
    assert set(os.listdir("/proc/self/fd")) == before
    assert _announced() == []
    third = Cache("ram", 16 * MIB)
    assert _found(open_cache_store(third)) == []


@needs_proc
def test_nothing_has_a_name_but_the_announcement() -> None:
    option = Cache("ram", 16 * MIB)
    store = open_cache_store(option)
    assert store is not None
    assert _put(store, 1)
    for descriptor in store.descriptors:
        assert os.fstat(descriptor).st_nlink == 0
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert not os.get_inheritable(descriptor)
    assert len(_announced()) == 1
    assert (user_cache_folder() / "shared-memory").stat().st_mode & 0o777 == 0o700


@needs_proc
def test_processes_share_it_and_the_last_one_takes_it_along() -> None:
    option = Cache("ram", 1 << 24)
    with other_process() as first:
        assert first.ask("print(put(1) + 0)") == 1
        store = open_cache_store(option)
        assert _found(store) == [1]
        assert _put(store, 2)
        assert first.ask("print(found())") == [1, 2]
        with other_process() as second:
            first.end()  # whoever made it may go
            assert second.ask("print(found())") == [1, 2]
            assert second.ask("print(put(3) + 0)") == 1
            assert _found(store) == [1, 2, 3]
            assert len(_announced()) == 2
            second.end()
        assert len(_announced()) == 1
        del store, option
        gc.collect()
        assert _announced() == []
    with other_process() as late:
        assert late.ask("print(found())") == []


@needs_proc
def test_processes_that_open_it_before_anything_is_in_it_share_it_too() -> None:
    option = Cache("ram", 1 << 24)
    store = open_cache_store(option)
    with other_process() as other:
        assert other.ask("print(put(1) + 0)") == 1
        assert _found(store) == [1]


@needs_proc
def test_processes_that_ask_for_something_else_do_not_share() -> None:
    option = Cache("ram", 1 << 24)
    assert _put(open_cache_store(option), 1)
    with other_process('Cache("ram", 1 << 25)') as other:
        assert other.ask("print(found())") == []
        # One number being the beginning of the other must not matter.
        with other_process('Cache("ram", int(str(1 << 24) + "0"))') as third:
            assert third.ask("print(found())") == []


@needs_proc
def test_who_is_killed_while_it_shares_harms_nobody() -> None:
    option = Cache("ram", 1 << 24)
    with other_process() as other:
        assert other.ask("print(put(1) + 0)") == 1
        store = open_cache_store(option)
        other.end(kill=True)
    assert _found(store) == [1]
    assert _put(store, 2)
    with other_process() as third:
        assert third.ask("print(found())") == [1, 2]


@needs_proc
def test_what_killed_processes_announced_is_cleared_away() -> None:
    for option in ('Cache("ram", 1 << 24)', 'Cache("ram", 1 << 25)', "Cache()"):
        with other_process(option) as other:
            other.end(kill=True)
    assert len(_announced()) >= 1
    option_here = Cache("ram", 3 << 24)
    assert _found(open_cache_store(option_here)) == []
    assert len(_announced()) == 1
    assert f".{os.getpid()}." in _announced()[0]


@needs_proc
def test_what_was_announced_elsewhere_is_cleared_away_after_a_month() -> None:
    folder = user_cache_folder() / "shared-memory"
    folder.mkdir(mode=0o700, parents=True)
    for name, days in (("new", 1), ("old", 40)):
        path = folder / f"{name}machine.auto.1.3.json"
        path.write_text("{}")
        at = path.stat().st_mtime - days * 86400
        os.utime(path, (at, at))
    option = Cache("ram", 1 << 24)
    open_cache_store(option)
    assert len(_announced()) == 2
    assert "newmachine.auto.1.3.json" in _announced()


@pytest.mark.few(6)
@needs_proc
@pytest.mark.parametrize(
    "change",
    [
        lambda told: b"",
        lambda told: b"no JSON",
        lambda told: b"[]",
        lambda told: json.dumps({**told, "inodes": [1, 2]}).encode(),
        lambda told: json.dumps({**told, "inodes": told["inodes"][:1]}).encode(),
        lambda told: json.dumps({**told, "inodes": [], "descriptors": []}).encode(),
        lambda told: json.dumps({**told, "descriptors": [0, 1]}).encode(),
        lambda told: json.dumps({**told, "max_bytes": None}).encode(),
        lambda told: json.dumps({key: told[key] for key in told if key != "pid"}).encode(),
    ],
)
def test_an_announcement_that_is_wrong_is_cleared_away(change: Callable[[Any], bytes]) -> None:
    with other_process() as other:
        assert other.ask("print(put(1) + 0)") == 1
        (name,) = _announced()
        path = user_cache_folder() / "shared-memory" / name
        path.write_bytes(change(json.loads(path.read_bytes())))
        before = len(os.listdir("/proc/self/fd"))
        option = Cache("ram", 1 << 24)
        assert _found(open_cache_store(option)) == []
        assert len(os.listdir("/proc/self/fd")) == before + 3  # and one of the map
        assert name not in _announced()
        assert len(_announced()) == 1


@needs_proc
@pytest.mark.hang_after(60)
def test_a_stopped_process_with_the_lock_is_left_alone() -> None:
    with other_process() as other:
        line = "import fcntl, signal; fcntl.lockf(store.descriptors[1], fcntl.LOCK_EX); print(put(1) * 0)"
        assert other.ask(line.replace("put(1) * 0", "0")) == 0
        option = Cache("ram", 1 << 24)
        store = open_cache_store(option)
        assert _put(store, 2)
        assert len(_announced()) == 2
        assert other.ask("fcntl.lockf(store.descriptors[1], fcntl.LOCK_UN); print(found())") == []


@pytest.mark.parametrize("kind", ["file", "open folder", "full disk"])
def test_where_nothing_can_be_announced_there_still_is_a_cache(
    kind: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = user_cache_folder() / "shared-memory"
    folder.parent.mkdir(parents=True)
    if kind == "file":
        folder.touch()
    elif kind == "open folder":
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    else:

        def no_space(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(places.PrivateFolder, "open", no_space)
    option = Cache("ram", 16 * MIB)
    assert _put(open_cache_store(option), 1)
    assert _found(open_cache_store(option)) == [1]
    assert said() == []


def test_where_memory_cannot_be_had_a_warning_says_so_once(
    monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    made: list[int] = []
    real = places.anonymous_file

    def one_only() -> int:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(real())
        return made[0]

    monkeypatch.setattr(places, "anonymous_file", one_only)
    option, automatic = Cache("ram", 16 * MIB), Cache("auto", 16 * MIB)
    assert open_cache_store(option) is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made[0])
    made.clear()
    assert open_cache_store(automatic) is None
    assert open_cache_store(option) is None
    assert len(said()) == 1
    assert "Too many open files" in said()[0]


def test_what_was_not_asked_for_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(places, "free_memory", lambda: None)
    automatic, asked = Cache(), Cache("ram")
    assert open_cache_store(automatic) is None
    assert said() == []
    assert open_cache_store(asked) is None
    assert len(said()) == 1
    assert "max_bytes" in said()[0]


def test_without_locks_of_files_there_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, said: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    options = [Cache(), Cache("ram"), Cache("disk")]
    assert [open_cache_store(option) for option in options] == [None] * 3
    assert [("operating system" in text) for text in said()] == [True, True]
    with pytest.raises(CacheError, match="operating system"):
        open_cache_store(Cache("disk", dir=tmp_path))


# ---- on disk ---------------------------------------------------------------------------------------


def _files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "fastpipe-decoded"))


def test_a_private_folder(tmp_path: Path) -> None:
    option = Cache("disk", 16 * MIB, dir=tmp_path / "a" / "b")
    assert _put(open_cache_store(option), 1)
    folder = tmp_path / "a" / "b" / "fastpipe-decoded"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert _files(folder.parent) == ["000000.data", "000000.log", "lock"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_default_folder() -> None:
    option = Cache("disk", 16 * MIB)
    assert _put(open_cache_store(option), 1)
    assert _files(user_cache_folder()) == ["000000.data", "000000.log", "lock"]


def test_a_share_of_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "free_disk", lambda descriptor: 400 * MIB)
    option = Cache("disk", dir=tmp_path)
    store = open_cache_store(option)
    assert store is not None
    assert 100 * MIB <= store.max_bytes < 101 * MIB


def test_it_is_there_for_later_runs_and_for_others(tmp_path: Path) -> None:
    text = f'Cache("disk", 1 << 24, dir={str(tmp_path)!r})'
    with other_process(text) as other:
        assert other.ask("print(put(1) + 0)") == 1
        option = Cache("disk", 16 * MIB, dir=tmp_path)
        assert _found(open_cache_store(option)) == [1]
        assert _put(open_cache_store(option), 2)
        assert other.ask("print(found())") == [1, 2]
        other.end()
    del option
    gc.collect()
    with other_process(text) as late:
        assert late.ask("print(found())") == [1, 2]
        # Who asks for another size has the same files.
    again = Cache("disk", 17 * MIB, dir=tmp_path)
    assert _found(open_cache_store(again)) == [1, 2]


def test_sizes_and_names_of_one_folder_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    options = [
        Cache("disk", 16 * MIB, dir=tmp_path / "real"),
        Cache("disk", 17 * MIB, dir=tmp_path / "real"),
        Cache("disk", 16 * MIB, dir=tmp_path / "link"),
    ]
    stores = [open_cache_store(option) for option in options]
    for number in range(18):
        assert _put(stores[number % 3], number)
    assert all(_found(store) == list(range(18)) for store in stores)


def test_a_link_in_the_folder_s_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "fastpipe-decoded").symlink_to("elsewhere")
    with pytest.raises(CacheError, match="fastpipe-decoded"):
        open_cache_store(Cache("disk", dir=tmp_path))


@pytest.mark.parametrize("name", ["000000.data", "000000.log", "lock"])
def test_a_link_in_a_file_s_place_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "fastpipe-decoded"
    folder.mkdir(mode=0o700)
    (tmp_path / "precious").write_bytes(b"precious")
    (folder / name).symlink_to("../precious")
    with pytest.raises(CacheError):
        open_cache_store(Cache("disk", dir=tmp_path))
    gc.collect()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        open_cache_store(Cache("disk", dir=tmp_path))


def test_a_named_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="file"):
        open_cache_store(Cache("disk", dir=tmp_path / "file"))


def test_a_default_folder_that_cannot_be_used_is_a_warning(said: Any) -> None:
    user_cache_folder().parent.mkdir()
    user_cache_folder().touch()
    option = Cache("disk", 16 * MIB)
    assert open_cache_store(option) is None
    assert open_cache_store(option) is None
    assert open_cache_store(Cache("disk", 16 * MIB)) is None
    assert len(said()) == 1
    user_cache_folder().unlink()
    assert _put(open_cache_store(option), 1), "it is tried anew"


def test_a_full_disk_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(places, "free_disk", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CacheError, match="Input/output"):
        open_cache_store(Cache("disk", dir=tmp_path))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def _full(folder: Path, files: list[Path], tag: bytes = b"") -> Cache:
    """An option whose store is full of entries about some files."""
    option = Cache("disk", 4096, dir=folder)
    store = open_cache_store(option)
    assert store is not None
    for number, path in enumerate(files * 200):
        note = identify(str(path), tag).note()
        if not store.put(_digest(number), np.zeros((6, 5, 3), np.uint8), 0, note):
            break
    assert store.allocated > 3700
    return option


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"file {number}" for number in range(4)]
    for path in made:
        path.write_bytes(b"content")
    return made


def test_a_full_cache_of_files_that_have_changed_is_begun_anew(tmp_path: Path, files: list[Path]) -> None:
    option = _full(tmp_path, files)
    old = open_cache_store(option)
    assert old is not None
    known = _found(old)
    for path in files[:3]:
        path.write_bytes(b"something else")
    again = Cache("disk", 4097, dir=tmp_path)  # as a process does that starts later
    new = open_cache_store(again)
    assert new is not None
    assert (len(new), new.allocated) == (0, 0)
    assert _files(tmp_path) == ["000001.data", "000001.log", "lock"]
    assert _put(new, 5)
    # Who has the old files open goes on with them.
    assert _found(old) == known
    entry = old.find(_digest(known[-1]))
    assert entry is not None
    assert not old.read(entry, 0, 6).any()


def test_a_full_cache_of_files_that_are_there_stays(tmp_path: Path, files: list[Path]) -> None:
    option = _full(tmp_path, files)
    known = _found(open_cache_store(option))
    files[0].write_bytes(b"something else")
    again = Cache("disk", 4097, dir=tmp_path)
    assert _found(open_cache_store(again)) == known
    assert _files(tmp_path) == ["000000.data", "000000.log", "lock"]


def test_a_cache_with_room_stays_whatever_has_changed(tmp_path: Path, files: list[Path]) -> None:
    option = _full(tmp_path, files)
    known = _found(open_cache_store(option))
    for path in files:
        path.unlink()
    again = Cache("disk", 16 * MIB, dir=tmp_path)
    assert _found(open_cache_store(again)) == known


def test_a_full_cache_whose_data_file_is_cut_off_is_begun_anew(tmp_path: Path, files: list[Path]) -> None:
    option = _full(tmp_path, files)
    assert option is not None
    os.truncate(tmp_path / "fastpipe-decoded" / "000000.data", 10)
    again = Cache("disk", 4097, dir=tmp_path)
    assert _found(open_cache_store(again)) == []
    assert "000001.log" in _files(tmp_path)


@pytest.mark.parametrize(
    "damage", ["log lost", "log overwritten", "log of another version", "data and log swapped"]
)
def test_files_that_are_damaged_are_left_to_those_who_use_them(tmp_path: Path, damage: str) -> None:
    option = Cache("disk", 16 * MIB, dir=tmp_path)
    old = open_cache_store(option)
    assert _put(old, 1)
    folder = tmp_path / "fastpipe-decoded"
    log, data = folder / "000000.log", folder / "000000.data"
    if damage == "log lost":
        log.unlink()
    elif damage == "log overwritten":
        log.unlink()
        log.write_bytes(bytes(1000))
    elif damage == "log of another version":
        content = log.read_bytes()
        log.unlink()
        log.write_bytes(content.replace(b"cache 1", b"cache 2"))
    else:
        content = data.read_bytes()
        log.rename(data)
        log.write_bytes(content.ljust(100))
    again = Cache("disk", 17 * MIB, dir=tmp_path)
    new = open_cache_store(again)
    assert _found(new) == []
    for number in range(2, 10):
        assert _put(new, number)
    assert _files(tmp_path) == ["000001.data", "000001.log", "lock"]
    assert _found(old) == [1]
    assert old is not None
    entry = old.find(_digest(1))
    assert entry is not None
    assert (old.read(entry, 0, 2) == 1).all(), "nobody has written over what is in use"


def test_what_else_lies_in_the_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "fastpipe-decoded"
    folder.mkdir(mode=0o700)
    for name in ("000003.data", "000003.log", "000007.data", "000007.log", "x.log", "1.log"):
        (folder / name).touch()
    option = Cache("disk", 16 * MIB, dir=tmp_path)
    assert _put(open_cache_store(option), 1)
    assert _files(tmp_path) == ["000007.data", "000007.log", "lock"]


@pytest.mark.hang_after(60)
def test_a_stopped_process_that_opens_a_cache_is_not_waited_for_long(tmp_path: Path) -> None:
    text = f'Cache("disk", 1 << 24, dir={str(tmp_path)!r})'
    with other_process(text) as other:
        path = str(tmp_path / "fastpipe-decoded" / "lock")
        assert (
            other.ask(f"import fcntl; f = open({path!r}, 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); print(0)")
            == 0
        )
        option = Cache("disk", 16 * MIB, dir=tmp_path)
        assert _put(open_cache_store(option), 1)


def test_a_fork_while_another_thread_opens_a_cache(tmp_path: Path) -> None:
    option = Cache("ram", 16 * MIB)
    with places._opening:
        child = os.fork()
        if child == 0:
            os._exit(0 if open_cache_store(option) is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
