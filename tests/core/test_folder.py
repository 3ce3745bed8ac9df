"""The folder scan against torchvision's, on many trees."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision.datasets import folder as reference

from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, find_classes, scan_folder
from fastpipe.core.sample_tables import SampleTable
from fastpipe.core.text import printable
from fastpipe.errors import OptionError

posix_only = pytest.mark.skipif(os.name != "posix", reason="makes fifos and links: run it on Linux or macOS")
not_root = pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() == 0, reason="root reads every folder: run it as another user"
)

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


class Tree:
    """A folder to fill.  What cannot be made there (a name in use) is not made."""

    def __init__(self, root: str) -> None:
        self.root = root

    def make(self, where: tuple[str, ...], kind: str, name: str, to: tuple[str, ...]) -> None:
        folder = os.path.join(self.root, *where)
        path = os.path.join(folder, name)
        try:
            os.makedirs(folder, exist_ok=True)
            if kind == "folder":
                os.mkdir(path)
            elif kind == "link":
                os.symlink(os.path.join(self.root, *to), path)
            else:
                open(path, "xb").close()
        except OSError:  # the name is taken, or a file stands where a folder should
            return


@pytest.fixture(scope="module")
def scratch() -> Iterator[Callable[[], Tree]]:
    base = tempfile.mkdtemp()
    yield lambda: Tree(tempfile.mkdtemp(dir=base))
    shutil.rmtree(base)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, or the type and message of what it raises, in which names are escaped."""
    try:
        result = function(*args, **kwargs)
    except (OSError, ValueError) as error:
        return type(error), printable(str(error))
    return list(result) if isinstance(result, SampleTable) else result


def assert_same(root: str, class_to_idx: dict[str, int], **options: Any) -> None:
    ours = outcome(scan_folder, root, class_to_idx, **options)
    assert ours == outcome(reference.make_dataset, root, class_to_idx, **options)


def test_extensions_are_torchvisions() -> None:
    assert TORCHVISION_EXTENSIONS == reference.IMG_EXTENSIONS


@posix_only
@given(entries, st.booleans())
@example([(("a-b",), "file", "1.jpg", ()), (("a", "b"), "file", "1.jpg", ())], False)
@example([(("a", "a", "b"), "file", "1.jpg", ()), (("a", "a-b"), "file", "1.jpg", ())], False)
@settings(max_examples=150, deadline=None)
def test_random_trees(scratch: Callable[[], Tree], made: list[Any], allow_empty: bool) -> None:
    tree = scratch()
    for entry in made:
        # Links lead to folders in the tree or to nowhere.  Those that lead to a folder
        # above themselves make a scan grow exponentially and have a test of their own.
        where, kind, _, to = entry
        if kind != "link" or where[: len(to)] != to:
            tree.make(*entry)
    # A tree in which two links point into each other still loops: leave such trees out.
    if _has_link_cycle(tree.root):
        return
    assert outcome(find_classes, tree.root) == outcome(reference.find_classes, tree.root)
    classes = [*sorted(os.listdir(tree.root)), "not there"]
    class_to_idx = {name: len(classes) - i for i, name in enumerate(classes)}
    assert_same(tree.root, class_to_idx, extensions=TORCHVISION_EXTENSIONS, allow_empty=allow_empty)
    assert_same(tree.root, class_to_idx, extensions=".jpg", allow_empty=allow_empty)
    assert_same(tree.root, class_to_idx, is_valid_file=lambda path: "a" in path, allow_empty=allow_empty)


def _has_link_cycle(root: str) -> bool:
    """Whether following links from ``root`` comes to a folder that holds the way to it."""

    def visit(folder: str, above: frozenset[str]) -> bool:
        real = os.path.realpath(folder)
        if real in above:
            return True
        below = [os.path.join(folder, name) for name in os.listdir(folder)]
        return any(visit(path, above | {real}) for path in below if os.path.isdir(path))

    return visit(root, frozenset())


@posix_only
def test_links_in_a_loop_end_where_the_system_stops_following(tmp_path: Path) -> None:
    (tmp_path / "cat" / "deep").mkdir(parents=True)
    (tmp_path / "cat" / "1.jpg").touch()
    (tmp_path / "cat" / "deep" / "up.jpg").symlink_to(tmp_path / "cat")
    assert_same(str(tmp_path), {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
    found = scan_folder(tmp_path, {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
    assert len(found) > 10
    assert found[-1][0].endswith("up.jpg")  # the last link is no folder any more: a file


@posix_only
def test_whatever_is_no_folder_is_a_file(tmp_path: Path) -> None:
    cat = tmp_path / "cat"
    (cat / "folder.jpg").mkdir(parents=True)
    (cat / "folder.jpg" / "inner.jpg").touch()
    (cat / "broken.jpg").symlink_to(tmp_path / "nowhere")
    (cat / "itself.jpg").symlink_to(cat / "itself.jpg")
    (cat / "linked.jpg").symlink_to(cat / "folder.jpg" / "inner.jpg")
    os.mkfifo(cat / "fifo.jpg")
    assert_same(str(tmp_path), {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
    names = [os.path.relpath(path, cat) for path, _ in scan_folder(tmp_path, {"cat": 0}, extensions=".jpg")]
    assert names == ["broken.jpg", "fifo.jpg", "itself.jpg", "linked.jpg", "folder.jpg/inner.jpg"]


@posix_only
def test_class_folders_may_be_links_and_a_broken_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "1.jpg").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "cat").symlink_to(tmp_path / "store")
    (root / "dog").symlink_to(tmp_path / "nowhere")
    (root / "file").touch()
    assert find_classes(root) == reference.find_classes(root) == (["cat"], {"cat": 0})
    assert_same(
        str(root), {"cat": 0, "dog": 1, "file": 2}, extensions=TORCHVISION_EXTENSIONS, allow_empty=True
    )
    assert_same(str(root), {"cat": 0, "dog": 1, "file": 2}, extensions=TORCHVISION_EXTENSIONS)


@posix_only
@not_root
def test_folders_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    closed = tmp_path / "cat" / "closed"
    closed.mkdir(parents=True)
    (closed / "2.jpg").touch()
    (tmp_path / "cat" / "1.jpg").touch()
    closed.chmod(0)
    try:
        assert_same(str(tmp_path), {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
        assert len(scan_folder(tmp_path, {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)) == 1
    finally:
        closed.chmod(0o700)


class FailingScan:
    """``os.scandir`` that fails for one folder, at once or after its first entry."""

    def __init__(self, folder: str, *, at_once: bool) -> None:
        self.folder, self.at_once, self.real = folder, at_once, os.scandir

    def __call__(self, folder: Any) -> Any:
        if os.fspath(folder) != self.folder:
            return self.real(folder)
        if self.at_once:
            raise PermissionError(13, "Permission denied", folder)
        return HalfScan(self.real(folder))


class HalfScan:
    def __init__(self, entries: Any) -> None:
        self.entries, self.given = entries, 0

    def __enter__(self) -> Iterator[Any]:
        return self

    def __exit__(self, *_: object) -> None:
        self.entries.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.given += 1
        if self.given > 1:
            raise OSError(5, "Input/output error")
        return next(self.entries)


@pytest.mark.parametrize("at_once", [True, False])
def test_folders_that_fail_are_left_out_with_all_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    bad = tmp_path / "cat" / "bad"
    for folder in (bad / "below", bad / "beside"):
        folder.mkdir(parents=True)
        (folder / "1.jpg").touch()
    (tmp_path / "cat" / "1.jpg").touch()
    monkeypatch.setattr(os, "scandir", FailingScan(str(bad), at_once=at_once))
    assert_same(str(tmp_path), {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
    assert list(scan_folder(tmp_path, {"cat": 0}, extensions=".jpg")) == [
        (str(tmp_path / "cat" / "1.jpg"), 0)
    ]


@pytest.fixture
def two_classes(tmp_path: Path) -> Path:
    for name in ("cat/1.jpg", "cat/sub/2.PNG", "dog/3.jpeg", "dog/notes.txt", "empty/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extensions": ".jpg", "is_valid_file": bool},
        {"extensions": TORCHVISION_EXTENSIONS},
        {"extensions": list(TORCHVISION_EXTENSIONS)},
        {"extensions": ".jpg"},
        {"extensions": ""},
        {"extensions": ()},
        {"extensions": ".JPG"},
        {"extensions": ("cat/1.jpg", "sub/2.png")},
        {"extensions": "/1.jpg"},
        pytest.param({"is_valid_file": lambda path: path.endswith(".txt")}, id="texts"),
        pytest.param({"is_valid_file": lambda path: 1 if "cat" in path else None}, id="no bool"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("classes", [{"cat": 0, "dog": 1, "empty": 2}, {"dog": 7}, {}, {"none": 0, "cat": 1}])
def test_options_and_errors(
    two_classes: Path, options: dict[str, Any], allow_empty: bool, classes: dict[str, int]
) -> None:
    assert_same(str(two_classes), classes, allow_empty=allow_empty, **options)


@pytest.mark.parametrize("name", ["", ".", "cat/sub", "../cat", "cat\0dog", "\ud800"])
def test_odd_class_names(two_classes: Path, name: str) -> None:
    assert_same(str(two_classes / "dog"), {name: 0}, extensions=TORCHVISION_EXTENSIONS)
    assert_same(str(two_classes), {name: 0}, extensions=TORCHVISION_EXTENSIONS)


@pytest.mark.parametrize(
    "spell", [str, Path, lambda p: f"{p}/", lambda p: f"{p}//", lambda p: f"{p}/../{p.name}"]
)
def test_spellings_of_the_directory(two_classes: Path, spell: Callable[[Path], Any]) -> None:
    assert_same(spell(two_classes), {"cat": 0, "dog": 1}, extensions=TORCHVISION_EXTENSIONS)


def test_home_and_relative_directories(two_classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(two_classes))
    monkeypatch.setenv("USERPROFILE", str(two_classes))
    assert_same("~", {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
    monkeypatch.chdir(two_classes)
    for directory in (".", "", "cat/.."):
        assert_same(directory, {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)


def test_is_valid_file_is_called_as_torchvision_calls_it(two_classes: Path) -> None:
    calls: list[list[str]] = [[], []]
    classes = {"dog": 0, "cat": 1, "empty": 2}

    def noting(noted: list[str]) -> Callable[[str], bool]:
        def is_valid_file(path: str) -> bool:
            noted.append(path)
            return True

        return is_valid_file

    scan_folder(two_classes, classes, is_valid_file=noting(calls[0]))
    reference.make_dataset(two_classes, classes, is_valid_file=noting(calls[1]))
    assert calls[0] == calls[1]
    assert len(calls[0]) == 5


def test_class_indices_are_kept_as_they_are(two_classes: Path) -> None:
    classes: dict[str, Any] = {"cat": True, "dog": 2**70}
    found = scan_folder(two_classes, classes, extensions=TORCHVISION_EXTENSIONS)
    assert list(found) == reference.make_dataset(two_classes, classes, extensions=TORCHVISION_EXTENSIONS)
    assert [type(target) for _, target in found] == [bool, bool, int]


def test_missing_directory(tmp_path: Path) -> None:
    assert_same(str(tmp_path / "none"), {"cat": 0}, extensions=TORCHVISION_EXTENSIONS)
    for directory in (tmp_path, tmp_path / "none"):
        assert outcome(find_classes, directory) == outcome(reference.find_classes, directory)


def test_selected_classes_keep_the_users_order(two_classes: Path) -> None:
    names, class_to_idx = find_classes(two_classes, ["dog", "cat"])
    assert names == ["dog", "cat"]
    assert class_to_idx == {"dog": 0, "cat": 1}
    found = scan_folder(two_classes, class_to_idx, extensions=TORCHVISION_EXTENSIONS)
    assert [target for _, target in found] == [1, 1, 0]  # sorted by class name all the same


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        (["cat", "cow", "elk"], OptionError, r"not in '.*': 'cow', 'elk'\. .*'cat', 'dog', 'empty'$"),
        (["cat", "dog", "cat"], OptionError, r"more than once: 'cat'$"),
        ([], OptionError, r"at least one folder"),
        (["cat/sub"], OptionError, r"'cat/sub'"),
        ("cat", TypeError, r"sequence of folder names, got the string 'cat'"),
        ([0], TypeError, r"must hold strings, got 0 of type int"),
    ],
)
def test_bad_selections(two_classes: Path, classes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_classes(two_classes, classes)


def test_messages_stay_short_with_many_classes(tmp_path: Path) -> None:
    for i in range(50):
        (tmp_path / f"class{i:02}").mkdir()
    with pytest.raises(OptionError, match=r"'class19' and 30 more$"):
        find_classes(tmp_path, ["other"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs names that are not UTF-8: run it on Linux")
def test_names_that_are_not_utf8_open(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/c\xe9"
    os.mkdir(folder)
    with open(folder + b"/\xff\xfe.jpg", "wb") as file:
        file.write(b"content")
    names, class_to_idx = find_classes(tmp_path)
    (path, target), *_ = scan_folder(tmp_path, class_to_idx, extensions=TORCHVISION_EXTENSIONS)
    assert names == [os.fsdecode(b"c\xe9")]
    assert target == 0
    assert Path(path).read_bytes() == b"content"
