"""Finding classes and samples, against torchvision; the walk through folders, and what it logs."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision.datasets import folder as reference

from fastpipe.core import class_folders
from fastpipe.core.class_folders import (
    TORCHVISION_EXTENSIONS,
    find_classes,
    scan_folder,
)
from fastpipe.core.file_identity import FileSystems
from fastpipe.core.sample_tables import SampleTable
from fastpipe.core.text import printable

IMAGES: dict[str, Any] = {"extensions": TORCHVISION_EXTENSIONS}

# Names in which sorting by path string and sorting by components disagree ("a-b" < "a/b"
# < "aXb"), folders that look like files, upper case, other scripts, bytes that are not UTF-8.
FOLDERS = ["a", "a-b", "a b", "a.b", "a.jpg", "ab", "A", "_", "é", "日本", "Σ", "ﬃ", "a\udcffb", "\U0001f40d"]
STEMS = ["1", "10", "2", "a", "A", "-", "a.b", "é", "é", "Σ", "new\nline", "\udc80", "\ue000", ".hidden"]
ENDINGS = [".jpg", ".JPG", ".jPeG", ".png", ".txt", "", ".", ".jpg.txt", ".jpgx", ".webp", "jpg", ".tıff"]

folders = st.lists(st.sampled_from(FOLDERS), max_size=4).map(tuple)
names = st.builds(str.__add__, st.sampled_from(STEMS), st.sampled_from(ENDINGS))
entries = st.lists(
    st.tuples(folders, st.sampled_from(["file", "file", "file", "folder", "link"]), names, folders),
    max_size=25,
)


def _make(root: str, where: tuple[str, ...], kind: str, name: str, to: tuple[str, ...]) -> None:
    """Make a file, a folder or a link, unless the name is in use."""
    path = os.path.join(root, *where, name)
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if kind == "folder":
            os.mkdir(path)
        elif kind == "link":
            os.symlink(os.path.join(root, *to), path)
        else:
            open(path, "xb").close()


def _outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, or the type and message of what it raises, in which names are escaped."""
    try:
        result = function(*args, **kwargs)
    except (OSError, ValueError) as error:
        return type(error), printable(str(error))
    return list(result) if isinstance(result, SampleTable) else result


def assert_same(root: Any, class_to_idx: dict[str, Any], **options: Any) -> None:
    options = options or IMAGES
    expected = _outcome(reference.make_dataset, root, class_to_idx, **options)
    assert _outcome(scan_folder, root, class_to_idx, **options) == expected


def test_extensions_are_torchvisions() -> None:
    assert TORCHVISION_EXTENSIONS == reference.IMG_EXTENSIONS


LINKED = [((), "link", "cat", ("a",)), (("a",), "file", "1.jpg", ()), ((), "link", "no", ("b",)), ((), "file", "x", ())]  # fmt: skip


@given(entries, st.booleans())
@example([(("a-b",), "file", "1.jpg", ()), (("a", "b"), "file", "1.jpg", ())], False)
@example([(("a", "a", "b"), "file", "1.jpg", ()), (("a", "a-b"), "file", "1.jpg", ())], False)
@example(LINKED, True)
@settings(max_examples=100, deadline=None)
def test_random_trees(made: list[Any], allow_empty: bool) -> None:
    root = tempfile.mkdtemp()
    for entry in made:
        # Links lead to folders in the tree or to nowhere.  Those that lead to a folder
        # above themselves make a scan grow exponentially and have a test of their own.
        where, kind, _, to = entry
        if kind != "link" or where[: len(to)] != to:
            _make(root, *entry)
    # A tree in which two links point into each other still loops: leave such trees out.
    if not _has_link_cycle(root):
        assert _outcome(find_classes, root) == _outcome(reference.find_classes, root)
        classes = [*sorted(os.listdir(root)), "not there"]
        class_to_idx = {name: len(classes) - i for i, name in enumerate(classes)}
        for options in (IMAGES, {"extensions": ".jpg"}, {"is_valid_file": lambda path: "a" in path}):
            assert_same(root, class_to_idx, **options, allow_empty=allow_empty)
    shutil.rmtree(root)


def _has_link_cycle(root: str) -> bool:
    """Whether following links from ``root`` comes to a folder that holds the way to it."""

    def visit(folder: str, above: frozenset[str]) -> bool:
        real = os.path.realpath(folder)
        if real in above:
            return True
        below = [os.path.join(folder, name) for name in os.listdir(folder)]
        return any(visit(path, above | {real}) for path in below if os.path.isdir(path))

    return visit(root, frozenset())


def test_links_in_a_loop_end_where_the_system_stops_following(tmp_path: Path) -> None:
    (tmp_path / "cat" / "deep").mkdir(parents=True)
    (tmp_path / "cat" / "1.jpg").touch()
    (tmp_path / "cat" / "deep" / "up.jpg").symlink_to(tmp_path / "cat")
    assert_same(tmp_path, {"cat": 0})
    found = scan_folder(tmp_path, {"cat": 0}, **IMAGES)
    assert len(found) > 10
    assert found[-1][0].endswith("up.jpg")  # the last link is no folder any more: a file


def test_everything_that_is_no_folder_is_a_file(tmp_path: Path) -> None:
    cat = tmp_path / "cat"
    (cat / "folder.jpg").mkdir(parents=True)
    (cat / "folder.jpg" / "inner.jpg").touch()
    (cat / "broken.jpg").symlink_to(tmp_path / "nowhere")
    (cat / "itself.jpg").symlink_to(cat / "itself.jpg")
    (cat / "linked.jpg").symlink_to(cat / "folder.jpg" / "inner.jpg")
    os.mkfifo(cat / "fifo.jpg")
    assert_same(tmp_path, {"cat": 0})
    names = [os.path.relpath(path, cat) for path, _ in scan_folder(tmp_path, {"cat": 0}, extensions=".jpg")]
    assert names == ["broken.jpg", "fifo.jpg", "itself.jpg", "linked.jpg", "folder.jpg/inner.jpg"]


def test_unreadable_folders_are_left_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, real = tmp_path / "cat" / "bad", os.scandir
    for folder in (bad.parent, bad, bad / "below"):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "1.jpg").touch()

    def scandir(folder: Any) -> Any:
        if os.fspath(folder) == str(bad):
            raise PermissionError(13, "Permission denied", folder)
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert list(scan_folder(tmp_path, {"cat": 0}, **IMAGES)) == [(str(tmp_path / "cat/1.jpg"), 0)]
    assert_same(str(tmp_path), {"cat": 0})


@pytest.fixture
def two_classes(tmp_path: Path) -> Path:
    for name in ("cat/1.jpg", "cat/sub/2.PNG", "dog/3.jpeg", "dog/notes.txt", "empty/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"extensions": ".jpg", "is_valid_file": bool}, IMAGES, {"extensions": list(TORCHVISION_EXTENSIONS)},
        {"extensions": ".jpg"}, {"extensions": ""}, {"extensions": ()}, {"extensions": ".JPG"},
        {"extensions": ("cat/1.jpg", "sub/2.png")}, {"extensions": "/1.jpg"},
        pytest.param({"is_valid_file": lambda path: path.endswith(".txt")}, id="texts"),
        pytest.param({"is_valid_file": lambda path: 1 if "cat" in path else None}, id="no bool"),
    ],
    ids=repr,
)  # fmt: skip
def test_options_are_torchvisions(two_classes: Path, options: dict[str, Any], allow_empty: bool) -> None:
    for classes in ({"cat": 0, "dog": 1, "empty": 2}, {"dog": 7}, {}, {"none": 0, "cat": 1}):
        assert_same(str(two_classes), classes, allow_empty=allow_empty, **options)


def test_odd_names_and_roots_are_torchvisions(two_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", ".", "cat/sub", "../cat", "cat\0dog", "\ud800"):
        assert_same(str(two_classes / "dog"), {name: 0})
        assert_same(str(two_classes), {name: 0})
    monkeypatch.setenv("HOME", str(two_classes))
    monkeypatch.chdir(two_classes)
    root = two_classes
    spellings = [f"{root}/", f"{root}//", f"{root}/../{root.name}", "~", ".", "", "cat/..", root / "none"]
    for directory in (*spellings, root, two_classes / "cat" / "1.jpg"):
        assert_same(directory, {"cat": 0, "dog": 1})
        if directory not in ("~", ""):
            assert _outcome(find_classes, directory) == _outcome(reference.find_classes, directory)


def test_is_valid_file_is_called_as_torchvision_calls_it(two_classes: Path) -> None:
    calls: list[list[str]] = [[], []]
    classes = {"dog": 0, "cat": 1, "empty": 2}
    for noted, scan in zip(calls, (scan_folder, reference.make_dataset), strict=True):
        scan(two_classes, classes, is_valid_file=lambda path, noted=noted: noted.append(path) or True)
    assert calls[0] == calls[1]
    assert len(calls[0]) == 5


def test_selected_classes_keep_the_users_order(two_classes: Path) -> None:
    names, class_to_idx = find_classes(two_classes, ["dog", "cat"])
    assert (names, class_to_idx) == (["dog", "cat"], {"dog": 0, "cat": 1})
    found = scan_folder(two_classes, class_to_idx, **IMAGES)
    assert [target for _, target in found] == [1, 1, 0]  # sorted by class name all the same
    classes: dict[str, Any] = {"cat": True, "dog": 2**70}
    assert_same(two_classes, classes)
    assert [type(target) for _, target in scan_folder(two_classes, classes, **IMAGES)] == [bool, bool, int]


CLASSES = {name: number for number, name in enumerate("abcdefgh")}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for top in CLASSES:
        for below in ("", "1", "1-2", "1/2", "links"):
            (tmp_path / top / below).mkdir(parents=True, exist_ok=True)
            (tmp_path / top / below / f"{top}.jpg").touch()
        (tmp_path / top / "links" / "up").symlink_to("../1")
    return tmp_path


@pytest.mark.parametrize("systems", ["local and busy", "local and waiting", "remote"])
def test_folders_are_listed_in_parallel_where_one_thread_would_wait(
    tree: Path, monkeypatch: pytest.MonkeyPatch, systems: str
) -> None:
    real, calls, barrier = os.scandir, list[int](), threading.Barrier(4)
    numbers = itertools.count()  # atomic, unlike the length of a list that threads append to

    def scandir(folder: Any) -> Any:
        number = next(numbers)
        calls.append(threading.get_ident())
        # The first shows what kind it is; the last ones need not come in fours.
        if systems != "local and busy" and 1 <= number <= 8:
            barrier.wait(60)
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        patch.setattr(FileSystems, "is_local", lambda *_: systems != "remote")
        patch.setattr(FileSystems, "is_remote", lambda *_: systems == "remote")
        patch.setattr(class_folders, "waits", lambda _: systems == "local and waiting")
        found = scan_folder(tree, CLASSES, **IMAGES)
    assert found == reference.make_dataset(tree, CLASSES, TORCHVISION_EXTENSIONS)
    here = [thread == threading.get_ident() for thread in calls]
    if systems == "local and busy":
        assert all(here)
    else:
        assert not any(here[1:]) and here[0] == (systems == "remote")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["a thread", "the caller"])
def test_errors_end_the_threads(tree: Path, monkeypatch: pytest.MonkeyPatch, error: Any, where: str) -> None:
    real = os.scandir

    def scandir(folder: Any) -> Any:
        if where == "a thread" and folder.endswith("c/1"):
            raise error("here")
        return real(folder)

    def interrupt(folders: int, files: int) -> None:
        if where == "the caller":
            raise error("here")

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(class_folders, "waits", lambda _: True)
    monkeypatch.setattr(class_folders, "_TELL_EVERY_S", 0.0)
    with pytest.raises(error, match="here"):
        scan_folder(tree, CLASSES, on_progress=interrupt, **IMAGES)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastpipe-scan")]
