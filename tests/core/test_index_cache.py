"""Scans that are kept on disk: the same samples as torchvision finds, with less listing; and never an error."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import folder as reference

from fastpipe import FastImageFolder
from fastpipe.core import array_cache, class_folders, progress
from fastpipe.core.class_folders import (
    TORCHVISION_EXTENSIONS,
    IndexCache,
    default_index_cache,
    find_classes,
    scan_folder,
)
from fastpipe.core.file_identity import FileSystems

LATER = 10**20  # nanoseconds since 1970: all times in this file are long past
CLASSES = {"cat": 0, "dog": 1, "elk": 2}
EVERYTHING = ["cat", "deep", "dog", "elk", "er"]
USUAL: dict[str, Any] = {"extensions": TORCHVISION_EXTENSIONS, "allow_empty": True}


@pytest.fixture(autouse=True, scope="module")
def local() -> Iterator[None]:
    """Temporary folders may be on any file system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystems, "is_local", lambda *_: True)
        patch.setattr(FileSystems, "is_remote", lambda *_: False)
        yield


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(array_cache, "_warned", set())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    names = "cat/1.jpg", "cat/2.JPG", "cat/deep/er/3.png", "dog/é\udcff.jpg", "dog/notes.txt", "elk/5.webp"
    for name in names:
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "root"


@pytest.fixture
def cache(tmp_path: Path) -> IndexCache:
    return IndexCache(tmp_path / "cache", keep_from_s=-1, now=lambda: LATER)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are listed, by their names."""
    names: list[str] = []
    real = os.scandir

    def scandir(path: Any) -> Any:
        if not isinstance(path, int):  # rmtree's
            names.append(os.path.basename(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return names


def tick(folder: Path) -> None:
    """Come back once the file systems' clock has gone on, so that the next change has another time."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.chmod(0o600)
    probe.unlink()


def scan(root: Any, cache: IndexCache | None, classes: Any = CLASSES, **options: Any) -> Any:
    return scan_folder(root, classes, cache=cache, **{**USUAL, **options})


def expected(root: Any, classes: Any = CLASSES, **options: Any) -> Any:
    return reference.make_dataset(root, classes, **{**USUAL, **options})


def kept_file(cache: IndexCache) -> Path:
    (path,) = cache.path.iterdir()
    return path


def kept_folders(cache: IndexCache) -> list[str]:
    folders = json.loads(np.load(kept_file(cache))["about"].tobytes())["folders"]
    return sorted(folder[0] for folder in folders)


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing": (lambda root: None, []),
    "a new file": (lambda root: (root / "cat/0.jpg").touch(), ["cat"]),
    "a file less": (lambda root: (root / "cat/deep/er/3.png").unlink(), ["er"]),
    "another name": (lambda root: (root / "elk/5.webp").rename(root / "elk/6.webp"), ["elk"]),
    "a new folder": (lambda root: shutil.copytree(root / "dog", root / "elk/dog"), ["elk", "dog"]),
    "a folder less": (lambda root: shutil.rmtree(root / "cat/deep"), ["cat"]),
    "a moved folder": (lambda root: (root / "cat/deep").rename(root / "elk/d"), ["cat", "elk", "d", "er"]),
    "content only": (lambda root: (root / "cat/1.jpg").write_bytes(b"more"), []),
    "a class less": (lambda root: shutil.rmtree(root / "cat"), []),
    "a class replaced": (lambda root: shutil.copytree(root / "dog", root / "cat", dirs_exist_ok=True), ["cat"]),
    "another mode": (lambda root: (root / "dog").chmod(0o700), ["dog"]),
}  # fmt: skip


@pytest.mark.parametrize("sets_times_back", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_only_changed_folders_are_listed_again(
    root: Path, cache: IndexCache, listed: list[str], name: str, sets_times_back: bool
) -> None:
    change, again = CHANGES[name]
    scan(root, cache)
    tick(root.parent)
    folders = [root, *filter(Path.is_dir, root.rglob("*"))]
    times = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in folders}
    change(root)
    for path, before in times.items() if sets_times_back else ():
        if path.is_dir():
            os.utime(path, ns=before)
    listed.clear()
    found = scan(root, cache)
    assert set(again) <= set(listed)
    if not sets_times_back:
        assert sorted(listed) == sorted(again)
        listed.clear()
        assert scan(root, cache) == found
        assert listed == []
    assert found == expected(root)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("just changed", {}), ("another file system", {}), ("short", {}),
        ("is_valid_file", {"extensions": None, "is_valid_file": lambda path: True}),
        ("an ending with a separator", {"extensions": ("cat/1.jpg",)}),
    ],
)  # fmt: skip
def test_an_unreliable_or_short_scan_is_not_kept(
    root: Path, tmp_path: Path, listed: list[str], how: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = max(os.stat(root / "cat").st_ctime_ns, os.stat(root / "dog").st_ctime_ns)
    now = changed + 1_000_000_000 if how == "just changed" else LATER
    cache = IndexCache(tmp_path / "cache", keep_from_s=1e9 if how == "short" else -1, now=lambda: now)
    if how == "another file system":
        monkeypatch.setattr(FileSystems, "is_local", lambda *_: False)
    for _ in range(2):
        listed.clear()
        found = scan(root, cache, **options)
        assert sorted(listed) == EVERYTHING
        assert found == expected(root, **options)
    assert not cache.path.exists()


def test_a_kept_scan_is_not_used_where_the_file_system_became_another(
    root: Path, cache: IndexCache, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan(root, cache)
    monkeypatch.setattr(FileSystems, "is_local", lambda *_: False)
    listed.clear()
    scan(root, cache)
    assert sorted(listed) == EVERYTHING
    assert list(scan(root / "none", cache)) == []


def test_selected_classes_share_the_kept_scan(root: Path, cache: IndexCache, listed: list[str]) -> None:
    scan(root, cache)
    listed.clear()
    for names in itertools.permutations(["cat", "dog", "elk"], 2):
        classes = {name: index for index, name in enumerate(names)}
        found = scan(root, cache, classes)
        assert listed == []
        assert found == expected(root, classes)
        listed.clear()
    tick(root.parent)
    (root / "dog" / "new.jpg").touch()
    (root / "cat" / "deep" / "new.jpg").touch()
    for classes in ({"cat/deep": 0}, {"dog": 0}, {"elk": 5, "cat": 3}, CLASSES):
        assert scan(root, cache, classes) == expected(root, classes)
        assert kept_folders(cache) == ["cat", "cat/deep", "cat/deep/er", "dog", "elk"]
    shutil.rmtree(root / "elk")
    (root / "dog" / "new.jpg").unlink()
    scan(root, cache, {"dog": 0})
    assert kept_folders(cache) == ["cat", "cat/deep", "cat/deep/er", "dog"]


def test_a_moved_or_differently_spelled_root_is_known(
    root: Path, cache: IndexCache, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan(root, cache)
    moved = root.parent / "somewhere else" / "with a longer name"
    moved.parent.mkdir()
    root.rename(moved)
    (root.parent / "link").symlink_to(moved)
    monkeypatch.chdir(moved.parent)
    monkeypatch.setenv("HOME", str(moved))
    spellings: list[Any] = [
        moved, f"{moved}/", f"{moved}//", moved.name, f"./{moved.name}", "../link", root.parent / "link", "~", "~/."
    ]  # fmt: skip
    for spelling in spellings:
        listed.clear()
        found = scan(spelling, cache)
        assert listed == []
        assert found == expected(spelling)
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "other.jpg").touch()
    assert scan(root, cache) == expected(root), "another root at the same place"


def rewritten(path: Path, **members: Any) -> None:
    """Put other arrays into a kept file, with checksums that fit."""
    with np.load(path) as file:
        arrays = {**file, **members}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def with_json(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = json.loads(np.load(path)["about"].tobytes())
        change(content)
        rewritten(path, about=np.frombuffer(json.dumps(content).encode(), dtype=np.uint8))

    return write


def first_folder(field: int, value: Any) -> Callable[[Path], None]:
    return with_json(lambda content: content["folders"][0].__setitem__(field, value))


class Trap:
    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


# Besides those of every cache, see tests/contracts/test_caches.py.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "another zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "no arena": lambda path: rewritten(path, arena=None),
    "no JSON": lambda path: rewritten(path, about=np.frombuffer(b"{", np.uint8)),
    "deep JSON": lambda path: rewritten(path, about=np.frombuffer(b"[" * 100_000, np.uint8)),
    "an arena that is not UTF-8": lambda path: rewritten(path, arena=np.load(path)["arena"] | 0x80),
    "negative lengths": lambda path: rewritten(path, lengths=-np.load(path)["lengths"]),
    "a length more": lambda path: rewritten(path, lengths=np.append(np.load(path)["lengths"], [0]).astype(np.int32)),
    "a pickled call": lambda path: rewritten(path, arena=np.array([Trap()], dtype=object)),
    "another version": with_json(lambda content: content["key"].__setitem__(0, 0)),
    "a folder less": with_json(lambda content: content["folders"].pop()),
    "a count too high": first_folder(3, 100),
    "a short stamp": with_json(lambda content: content["folders"][0][1].pop()),
    "folders that are numbers": first_folder(2, [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_replaced(
    root: Path, cache: IndexCache, listed: list[str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    scan(root, cache)
    DAMAGE[name](kept_file(cache))
    listed.clear()
    assert scan(root, cache) == expected(root)
    assert sorted(listed[:5]) == EVERYTHING
    listed.clear()
    scan(root, cache)
    assert listed == []
    assert caplog.messages == []
    assert not Trap.sprung


def test_only_files_that_were_not_used_for_long_are_removed(root: Path, cache: IndexCache) -> None:
    day = 86400
    scan(root, cache)
    used = kept_file(cache)
    for name, age in (("old.npz", 91 * day), ("new.npz", 89 * day), ("other", 91 * day)):
        (cache.path / name).write_bytes(b"")
        os.utime(cache.path / name, (time.time() - age,) * 2)
    os.mkfifo(cache.path / "fifo.npz")
    os.utime(used, (time.time() - 91 * day,) * 2)
    scan(root, cache)  # only read: nothing is removed, and it is in use again
    assert len(list(cache.path.iterdir())) == 5
    scan(root, cache, extensions=".jpg")
    assert {path.name for path in cache.path.iterdir()} >= {used.name, "new.npz", "other", "fifo.npz"}
    assert not (cache.path / "old.npz").exists()


def test_the_dataset_keeps_and_logs_its_scan(
    root: Path, tmp_path: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(IndexCache.__init__, "__kwdefaults__", {"keep_from_s": -1, "now": lambda: LATER})
    monkeypatch.setattr(sys, "stderr", None)
    first = FastImageFolder(root)
    listed.clear()
    again = FastImageFolder(root)
    assert listed == [root.name]  # the classes are looked up each time
    assert again.samples == first.samples == expected(root)
    assert again.targets == first.targets
    assert (tmp_path / "home" / "fastpipe" / "index").is_dir()
    monkeypatch.setattr(array_cache, "user_cache_folder", lambda: Path("~/.cache/fastpipe"))
    assert default_index_cache() is None, "a user without a home has none"
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    monkeypatch.setattr(class_folders, "_TELL_EVERY_S", 0.0)
    FastImageFolder(root)
    line, last = shown.getvalue().splitlines()
    assert line == f"Scanning {root}: 2 files in 1 folders so far, 0 s"
    assert last.startswith(f"Scanning {root}: done in ")


# Random changes of a tree between scans.  Folders, links and files share names, so that one replaces the other.

FILES = ["1.jpg", "a", "a-b/2.PNG", "é/\udcff.jpg", "a/a.jpg", "a/x/3.jpg", "a/x/c.txt", "a-b", "é/a/4.jpg", "a.jpg"]  # fmt: skip
FOLDERS = ["a", "a-b", "é", "a/x", "é/a", "a.jpg"]
PLACES = [*(f"root/{top}/{inner}" for top in ("cat", "dog") for inner in (*FILES, *FOLDERS)), "root/cat", "root/dog"]  # fmt: skip
STORE = ["store", "store/a", "store/a/x", "store/1.jpg", "store/none"]
STORED = [*STORE[1:], "store/a/5.jpg", "store/a/x/6.jpg"]

places = st.sampled_from(PLACES + STORED)
changes = st.one_of(
    st.tuples(st.sampled_from(["file", "file", "folder", "remove", "remove"]), places, places),
    st.tuples(st.just("rename"), st.sampled_from(PLACES), st.sampled_from(PLACES)),
    st.tuples(st.just("rename"), st.sampled_from(STORED), st.sampled_from(STORED)),
    st.tuples(st.just("turn"), st.sampled_from(STORE[1:]), places),
    # Links lead from "root" to "store" only, so there are no loops.
    st.tuples(st.just("link"), st.sampled_from(PLACES), st.sampled_from(STORE)),
)
openings = st.tuples(
    st.lists(changes, max_size=4), st.booleans(), st.booleans(), st.sampled_from([LATER, LATER, LATER, 0]),
    st.sampled_from([None, None, ["dog"], ["cat"]]),
)  # fmt: skip


def make_tree(base: str) -> None:
    """Folders with everything in them that is in the lists above."""
    for top in ("root/cat", "root/dog", "store"):
        for name in sorted(FILES, key=lambda name: -name.count("/")):
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(f"{base}/{top}/{name}"), exist_ok=True)
                open(f"{base}/{top}/{name}", "xb").close()
    for name, place in (("a", "cat/é"), ("1.jpg", "cat/a/x"), ("none", "dog/é/a"), ("a/x", "dog/a")):
        os.symlink(f"{base}/store/{name}", f"{base}/root/{place}/link.jpg")


def change_tree(base: str, kind: str, place: str, other: str) -> None:
    """Do it if it can be done."""

    def is_in_store(path: str) -> bool:
        return os.path.realpath(path).startswith(os.path.realpath(f"{base}/store"))

    def remove(path: str) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    path, to = os.path.join(base, place), os.path.join(base, other)
    by_link = [is_in_store(os.path.dirname(one)) for one in (path, to)]
    if place.startswith("root") and (by_link[0] or (kind == "rename" and by_link[1])):
        return  # nothing is to be linked or moved there
    with contextlib.suppress(OSError):
        if kind == "turn":  # a link's target into something else
            kind = "file" if os.path.isdir(path) else "folder"
            remove(path)
        elif kind in ("remove", "link", "rename"):
            remove(path if kind != "rename" else to)
        if kind == "file":
            open(path, "xb").close()
        elif kind == "folder":
            os.mkdir(path)
            open(f"{path}/7.jpg", "xb").close()
        elif kind == "rename":
            os.rename(path, to)
        elif kind == "link":
            os.symlink(to, path)


@given(st.lists(openings, min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_scans_of_a_changing_tree_find_what_torchvision_finds(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        make_tree(base)
        for changed, sets_times_back, threads, now, chosen in steps:
            times = {path: os.stat(path) for path, _, _ in os.walk(base)}
            for change in changed:
                change_tree(base, *change)
            for path, before in times.items() if sets_times_back else ():
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            patch.setattr(class_folders, "waits", lambda _, threads=threads: threads)
            cache = IndexCache(f"{base}/cache", keep_from_s=-1, now=lambda now=now: now)
            try:
                _, classes = find_classes(f"{base}/root")
            except FileNotFoundError:
                continue
            some = {name: index for name, index in classes.items() if name in (chosen or classes)} or classes
            assert list(scan(f"{base}/root", cache, some)) == expected(f"{base}/root", some)
            tick(Path(base))
