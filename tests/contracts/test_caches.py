"""Behaviours of every cache: all users find the stored entries and nothing else."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.core import array_cache, locks
from fastpipe.core.array_cache import FileArrays
from fastpipe.core.caches import open_cache_store
from fastpipe.core.class_folders import Folder, IndexCache
from fastpipe.core.file_identity import FileIdentity
from fastpipe.core.locks import open_file_locks_are_possible
from fastpipe.core.sample_tables import pack_paths
from fastpipe.core.shared_chunks import joined_memory
from fastpipe.errors import FastpipeError
from fastpipe.hdf5.cache import CachedChunks
from fastpipe.images.cache import ImageCache
from fastpipe.options import Cache, Stage
from fastpipe.stores.stage import StageFolder

pytestmark = pytest.mark.skipif(not open_file_locks_are_possible(), reason="run it on 64-bit Linux")

NBYTES, KEYS = 1024, 200
BOUND = 64 * NBYTES


def content(key: int, version: int) -> bytes:
    return np.random.default_rng([key, version]).bytes(NBYTES)


def as_array(key: int, version: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(content(key, version), np.uint8)


def digest(*about: object) -> bytes:
    return hashlib.blake2b(repr(about).encode(), digest_size=16).digest()


class User:
    """One who uses a cache, whose entries are of a key's version."""

    inside = "."  # the private folder, in the one that a user gives
    is_bounded, is_on_disk, has_sums = True, True, True
    put: Callable[..., None]
    get: Callable[..., bytes | None]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        pass


class Images(User):
    inside = "fastpipe-decoded"

    def __init__(self, folder: Path) -> None:
        self._option = Cache("disk", BOUND, dir=folder) if self.is_on_disk else Cache("ram", BOUND)
        self._store: Any = open_cache_store(self._option)

    def put(self, key: int, version: int = 0) -> None:
        self._cache().keep(self._file(key, version), as_array(key, version).reshape(4, -1, 1))

    def get(self, key: int, version: int = 0) -> bytes | None:
        cache = self._cache()
        entry = cache.find(self._file(key, version))
        return None if entry is None else cache.rows(entry, 0, 4).tobytes()

    def _cache(self) -> ImageCache:
        return ImageCache(self._store, "", 0, "pixels", False, tuple, lambda size: size)

    def _file(self, key: int, version: int) -> FileIdentity:
        return FileIdentity(digest(key, version), bytes(40), "x.jpg", True)

    def close(self) -> None:
        del self._store, self._option
        gc.collect()


class ImagesInMemory(Images):
    is_on_disk = False


class Chunks(Images):
    """Of an HDF5 file, whose state is the version."""

    def put(self, key: int, version: int = 0) -> None:
        self._of(version).keep([key], [as_array(key, version)])

    def get(self, key: int, version: int = 0) -> bytes | None:
        chunks = self._of(version)
        chunks.look()
        place = chunks.native.find(key)
        if place >= 0 and self._store.mapped is not None:
            return bytes(self._store.mapped[place : place + NBYTES])
        return os.pread(self._store.descriptors[0], NBYTES, place) if place >= 0 else None

    def _of(self, version: int) -> CachedChunks:
        file = FileIdentity(digest(version), bytes(40), "x.h5", True)
        return CachedChunks(self._store, file, KEYS, NBYTES, is_second_use=False)


class ChunksInMemory(Chunks):
    is_on_disk = False


class Units(User):
    """Decoded chunks of HDF5 files and volumes while they are needed; the oldest make room."""

    is_on_disk = False

    def __init__(self, folder: Path) -> None:
        self._memory = joined_memory(str(folder), 2 * KEYS, BOUND // NBYTES, NBYTES)
        self._units = self._memory.opened()

    def put(self, key: int, version: int = 0) -> None:
        slot = self._units.claim(2 * key + version)
        if slot is not None:
            slot.memory[:] = as_array(key, version)
            slot.publish()

    def get(self, key: int, version: int = 0) -> bytes | None:
        found = self._units.find(2 * key + version)
        made = None if found is None else found.memory.tobytes()
        return made if found is not None and found.release() else None

    def close(self) -> None:
        del self._units
        self._memory.close()


class Staged(User):
    inside, has_sums = "fastpipe-stage", False

    def __init__(self, folder: Path) -> None:
        stage, sizes = StageFolder(Stage(folder, max_bytes=BOUND)), np.full(2 * KEYS, NBYTES, np.int64)
        self._table = stage.open_table(bytes(16), sizes, digest)

    def put(self, key: int, version: int = 0) -> None:
        self._table.keep(2 * key + version, content(key, version))

    def get(self, key: int, version: int = 0) -> bytes | None:
        return self._table.read(2 * key + version)

    def close(self) -> None:
        self._table.close()
        del self._table


class Arrays(User):
    """About a file, whose state is the version."""

    is_bounded = False

    def put(self, key: int, version: int = 0) -> None:
        FileArrays(self.folder).save(self._status(key, version), "x", [as_array(key, version)])

    def get(self, key: int, version: int = 0) -> bytes | None:
        found = FileArrays(self.folder).load(self._status(key, version), "x")
        return None if found is None else found[0].tobytes()

    def _status(self, key: int, version: int) -> Any:
        return SimpleNamespace(st_dev=1, st_ino=key, st_size=5, st_mtime_ns=version, st_ctime_ns=version)


class Index(User):
    """Of the files in folders."""

    is_bounded = False

    def put(self, key: int, version: int = 0) -> None:
        paths = pack_paths("", [content(key, version).hex()])
        IndexCache(self.folder).save([key, version], [Folder("a", (1, 2, 3, 4), [], 1, paths)])

    def get(self, key: int, version: int = 0) -> bytes | None:
        found = IndexCache(self.folder).load([key, version])
        return bytes.fromhex(bytes(found["a"].content.block).decode()) if found else None


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


CACHES: list[type[User]] = [Images, ImagesInMemory, Chunks, ChunksInMemory, Units, Staged, Arrays, Index]
ON_DISK = [kind for kind in CACHES if kind.is_on_disk]
every_cache = pytest.mark.parametrize("kind", CACHES)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # users in other tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(array_cache, "_warned", set())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@every_cache
def test_all_users_find_an_entry_and_no_other_is_given(kind: type[User], folder: Path, in_child: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    one, other = kind(folder), kind(folder)
    assert one.get(1) is None
    one.put(1)
    one.put(1)

    def child() -> None:
        third = kind(folder)
        assert third.get(1) == content(1, 0)
        third.put(3)
        assert third.get(3) == content(3, 0)

    in_child(child)
    for user in (one, other):
        assert [user.get(key) for key in (0, 1, 2, 3)] == [None, content(1, 0), None, content(3, 0)]
        assert user.get(1, version=1) is None
    other.put(1, version=1)
    assert one.get(1, version=1) == content(1, 1)
    assert one.get(1) in (None, content(1, 0))  # a file has one version at a time
    one.close()
    other.close()
    del one, other, user
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before  # others may have closed theirs


@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind.is_bounded])
def test_no_more_than_the_bound_is_kept(kind: type[User], folder: Path) -> None:
    user = kind(folder)
    for key in range(KEYS):
        user.put(key)
    found = [(key, data) for key in range(KEYS) if (data := user.get(key)) is not None]
    assert BOUND // 2 <= NBYTES * len(found) <= BOUND
    assert all(data == content(key, 0) for key, data in found)
    user.close()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"", "cut off": lambda data: data[: len(data) // 2], "text": lambda data: b"text",
    "other bits": lambda data: bytes(byte ^ 0x10 for byte in data),
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ON_DISK)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_missing_and_can_be_put_again(
    kind: type[User], folder: Path, damage: str, caplog: Any
) -> None:
    if damage == "other bits" and not kind.has_sums:
        pytest.skip("a stage looks at lengths: its folder is the user's alone")
    user = kind(folder)
    for key in range(3):
        user.put(key)
    user.close()
    files = sorted(files_in(folder))
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (folder / kind.inside).stat().st_mode & 0o777 == 0o700
    again = kind(folder)
    assert all(again.get(key) == content(key, 0) for key in range(3)), "they outlive their users"
    again.close()
    for path in files:
        whole = {file: file.read_bytes() for file in files}
        path.write_bytes(DAMAGE[damage](whole[path]))
        user = kind(folder)
        assert all(user.get(key) in (None, content(key, 0)) for key in range(3))
        for key in range(3):
            user.put(key)
        assert all(user.get(key) == content(key, 0) for key in range(3)), path
        user.close()
        for file, data in whole.items():
            file.write_bytes(data)
            file.chmod(0o600)
    assert not caplog.records or not kind.has_sums


@pytest.mark.few(4)
@every_cache
def test_threads_and_processes_share_it(
    kind: type[User], folder: Path, forked: Any, monkeypatch: Any
) -> None:
    user = kind(folder)

    def work(seed: int) -> None:
        own = user if seed % 2 else kind(folder)
        for key in np.random.default_rng(seed).integers(0, 12, 25).tolist():
            own.put(key)
            assert own.get(key) in (None, content(key, 0))
        if own is not user:
            own.close()

    def in_two_threads(seed: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (seed, seed + 1)))

    monkeypatch.setattr(locks, "_TRIES", 60_000)  # another process may wait for a core with the lock
    child = forked(lambda: in_two_threads(2))
    try:
        in_two_threads(4)
    finally:
        assert os.waitpid(child, 0)[1] == 0
    found = [user.get(key) for key in range(12)]
    assert all(data in (None, content(key, 0)) for key, data in enumerate(found))
    assert sum(data is not None for data in found) > 9
    user.close()


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", ON_DISK)
@pytest.mark.parametrize("how", ["another user's", "open to others", "a link", "a file", "below a file"])
def test_a_folder_that_is_not_the_users_alone_is_refused(
    kind: type[User], folder: Path, how: str, monkeypatch: Any, caplog: Any
) -> None:
    user = kind(folder)
    user.put(1)
    user.close()
    private = folder / kind.inside
    if how == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif how == "open to others":
        private.chmod(0o755)
    else:
        elsewhere = private.rename(folder.with_name("elsewhere"))
        if how == "a link":
            private.symlink_to(elsewhere)
        else:
            private.touch()
            folder = private / "below" if how == "below a file" else folder
    for _ in range(3):
        try:
            user = kind(folder)
        except FastpipeError as error:
            assert str(folder) in str(error)
        else:  # it is only slower, which is said once
            user.put(1)
            assert user.get(1) is None
            assert len(caplog.records) == 1 and str(folder) in caplog.text


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind is not Units])
def test_a_full_disk_or_memory_is_survived(kind: type[User], folder: Path, in_child: Any) -> None:
    def child() -> None:
        user = kind(folder)
        user.put(0)
        files = files_in(folder)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))  # the system's own error
        for key in range(5):
            user.put(key)
        assert [user.get(key) for key in range(5)] == [content(0, 0)] + [None] * 4
        assert files_in(folder) == files, "nothing half written is left"
        user.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        user = kind(folder)
        user.put(1)
        assert user.get(1) == content(1, 0)
        user.close()

    in_child(child)
