"""Random changes of a tree between openings: what is kept never shows in the result."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import folder as reference

from fastpipe.core import class_folders as walk
from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, IndexCache, find_classes, scan_folder
from fastpipe.core.file_identity import FileSystems

LATER = 10**20  # nanoseconds since 1970: all times in this file are long past
# Folders, links and files share names, so that one comes in the place of the other.
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
openings = st.fixed_dictionaries(
    {
        "changes": st.lists(changes, max_size=4),
        "sets_times_back": st.booleans(),
        "threads": st.booleans(),
        "now": st.sampled_from([LATER, LATER, LATER, 0]),
        "classes": st.sampled_from([None, None, ["dog"], ["cat"]]),
    }
)


@pytest.fixture(autouse=True, scope="module")
def local() -> Iterator[None]:
    """Temporary folders may be on any file system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystems, "is_local", lambda *_: True)
        patch.setattr(FileSystems, "is_remote", lambda *_: False)
        yield


class Tree:
    """Folders with everything in them that is in the lists above."""

    def __init__(self, base: str) -> None:
        self.base, self.root, self.store = base, os.path.join(base, "root"), os.path.join(base, "store")
        for top in (f"{self.root}/cat", f"{self.root}/dog", f"{self.store}"):
            for name in sorted(FILES, key=lambda name: -name.count("/")):
                with contextlib.suppress(OSError):
                    os.makedirs(os.path.dirname(f"{top}/{name}"), exist_ok=True)
                    open(f"{top}/{name}", "xb").close()
        for name, place in (("a", "cat/é"), ("1.jpg", "cat/a/x"), ("none", "dog/é/a"), ("a/x", "dog/a")):
            os.symlink(f"{self.store}/{name}", f"{self.root}/{place}/link.jpg")

    def change(self, kind: str, place: str, other: str) -> None:
        """Do it if it can be done."""
        path, to = os.path.join(self.base, place), os.path.join(self.base, other)
        if place.startswith("root") and self.is_in_store(os.path.dirname(path)):
            return  # by a link, and nothing is to be linked or moved there
        if kind == "rename" and place.startswith("root") and self.is_in_store(os.path.dirname(to)):
            return
        with contextlib.suppress(OSError):
            if kind in ("remove", "link", "rename"):
                self.remove(path if kind != "rename" else to)
            if kind == "turn":  # what links lead to into something else
                kind = "file" if os.path.isdir(path) else "folder"
                self.remove(path)
            if kind == "file":
                open(path, "xb").close()
            elif kind == "folder":
                os.mkdir(path)
                open(f"{path}/7.jpg", "xb").close()
            elif kind == "rename":
                os.rename(path, to)
            elif kind == "link":
                os.symlink(to, path)

    def remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    def is_in_store(self, path: str) -> bool:
        return os.path.realpath(path).startswith(os.path.realpath(self.store))

    def times(self) -> dict[str, tuple[int, int]]:
        found = {path: os.stat(path) for path, _, _ in os.walk(self.base)}
        return {path: (status.st_atime_ns, status.st_mtime_ns) for path, status in found.items()}

    def set_back(self, times: dict[str, tuple[int, int]]) -> None:
        for path, before in times.items():
            with contextlib.suppress(OSError):
                os.utime(path, ns=before)

    def tick(self) -> None:
        """Come back once the file systems' clock has gone on: what is injected is only ``now``."""
        probe = Path(self.base, "probe")
        probe.touch()
        before = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == before:
            probe.chmod(0o600)


@given(st.lists(openings, min_size=2, max_size=6))
@settings(max_examples=150, deadline=None)
def test_openings_find_what_torchvision_finds(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        tree = Tree(base)
        for step in steps:
            times = tree.times()
            for change in step["changes"]:
                tree.change(*change)
            if step["sets_times_back"]:
                tree.set_back(times)
            patch.setattr(walk, "waits", lambda _, threads=step["threads"]: threads)
            cache = IndexCache(f"{base}/cache", keep_from_s=-1, now=lambda now=step["now"]: now)
            try:
                _, classes = find_classes(tree.root)
            except FileNotFoundError:
                continue
            if step["classes"] is not None:
                classes = {
                    name: index for name, index in classes.items() if name in step["classes"]
                } or classes
            options: Any = {"extensions": TORCHVISION_EXTENSIONS, "allow_empty": True}
            ours = scan_folder(tree.root, classes, cache=cache, **options)
            assert list(ours) == reference.make_dataset(tree.root, classes, **options)
            tree.tick()
