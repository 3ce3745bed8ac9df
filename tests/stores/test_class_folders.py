"""Samples of a store against those that torchvision finds where the same objects are files."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder
from torchvision.datasets import folder as reference

from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, IndexCache, find_classes
from fastpipe.core.types import StoredObject
from fastpipe.errors import OptionError, StoreAccessError, StoreBusyError
from fastpipe.options import Subset
from fastpipe.stores import listing as lister
from fastpipe.stores.class_folders import find_remote_classes, scan_store

ROOT, PREFIX = "s3://bucket/of/train/", "of/train/"


class Bucket:
    """A store whose objects are in a dict, and the prefixes that it was ``asked`` for; it reads none."""

    name = "https://endpoint.example/bucket"
    objects_after: Any = None

    def __init__(self, keys: Sequence[str] = (), *, page: int = 2, prefix: str = PREFIX) -> None:
        self.objects_by_key = {prefix + key: self.made(prefix + key) for key in keys}
        self.page = page
        self.asked: list[str] = []

    @staticmethod
    def made(key: str) -> StoredObject:
        return StoredObject(key, len(key) * 1000, f'"{key[::-1]}"')

    def put(self, *keys: str) -> None:
        self.objects_by_key |= {PREFIX + key: self.made(PREFIX + key) for key in keys}

    def asked_since(self) -> list[str]:
        """The prefixes asked for since the last call, sorted, without the common prefix."""
        found, self.asked = sorted(one.replace(PREFIX, "") for one in self.asked), []
        return found

    def below(self, prefix: str) -> list[StoredObject]:
        return [self.objects_by_key[key] for key in sorted(self.objects_by_key) if key.startswith(prefix)]

    def pages(self, found: list[StoredObject]) -> Iterator[Sequence[StoredObject]]:
        return (found[start : start + self.page] for start in range(0, len(found), self.page))

    def folders(self, prefix: str) -> list[str]:
        self.asked.append(f"folders {prefix}")
        rests = (one.key[len(prefix) :] for one in self.below(prefix))
        return list({rest.split("/")[0] for rest in rests if "/" in rest})

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        self.asked.append(prefix)
        return self.pages(self.below(prefix))


class Shuffled(Bucket):
    """A store that lists in an order of its own."""

    def below(self, prefix: str) -> list[StoredObject]:
        return sorted(super().below(prefix), key=lambda one: one.key[::-1])


class Ordered(Bucket):
    """A store that can begin a list after a key, as S3 does."""

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        self.asked.append(f"{prefix} after {after}")
        return self.pages([one for one in self.below(prefix) if one.key > after.rstrip("/")])  # as obstore


KINDS = [Bucket, Shuffled, Ordered]


def scan(store: Any, classes: Any = None, **options: Any) -> Any:
    """The samples as a list; the listing is asserted to be of the same."""
    if "is_valid_file" not in options:
        options.setdefault("extensions", TORCHVISION_EXTENSIONS)
    if classes is None:
        classes = find_remote_classes(store, ROOT, PREFIX)[1]
    table, listing = scan_store(store, ROOT, PREFIX, classes, **{"allow_empty": True, **options})
    assert [listing.path(row) for row in range(len(listing))] == [path for path, _ in table]
    for row in range(len(listing)):
        found = StoredObject(listing.key(row), listing.size(row), listing.version(row))
        assert found == store.objects_by_key.get(found.key, found)
        assert listing.path(row) == ROOT + found.key[len(PREFIX) :]
    return list(table)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, or the type and message of what it raises."""
    try:
        return function(*args, **kwargs)
    except (OSError, ValueError) as error:
        return type(error), str(error)


def moved(samples: Any, root: str) -> Any:
    """Samples of a folder as they are below the URL."""
    if isinstance(samples, list):
        return [(ROOT + os.path.relpath(path, root), target) for path, target in samples]
    return samples[0], samples[1].replace(root, ROOT)


def make_file(path: str) -> bool:
    """Make a file with its folders; False if there can be none beside the others."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "xb").close()
    except OSError:
        return False
    return True


def torchvisions(names: Sequence[str], root: Path, make: Callable[[Path], Any]) -> Any:
    """Return the samples that torchvision finds in a folder with these files."""
    assert all(make_file(str(root / name)) for name in names)
    return moved(make(root), str(root))


# Names in which sorting by key, by path string and by components disagree ("a-b" < "a/b" < "ab"), upper
# case, other scripts, folders that look like files.
SEGMENTS = [
    "a", "a-b", "a.b", "ab", "A", "a.jpg", "é", "Σ", "日本", "\U0001f40d", "\ue000", "b c", "b%20c", "#?",
]  # fmt: skip
STEMS, ENDINGS = ("1", "10", "2", "a", "Σ", "\ue000"), (".jpg", ".JPG", ".txt", "")
LEAVES = SEGMENTS + [stem + ending for stem in STEMS for ending in ENDINGS]
key = st.builds(
    lambda folders, leaf: "/".join([*folders, leaf]),
    st.lists(st.sampled_from(SEGMENTS), max_size=3), st.sampled_from(LEAVES),
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@given(
    keys=st.lists(key, max_size=25, unique=True), page=st.integers(1, 4), allow_empty=st.booleans(),
    extensions=st.sampled_from([TORCHVISION_EXTENSIONS, ".jpg", ""]),
)  # fmt: skip
@example(["a/b/1.jpg", "a-b/1.jpg"], 1, False, ".jpg")
@example(["a/b/1.jpg", "a/b-c/1.jpg", "a/b.jpg", "a/b0/1.jpg"], 2, False, ".jpg")
@settings(max_examples=25)
def test_samples_are_those_of_the_same_files(
    kind: Any, tmp_path_factory: Any, keys: list[str], page: int, allow_empty: bool, extensions: Any
) -> None:
    root = str(tmp_path_factory.mktemp("root"))
    store = kind([key for key in keys if make_file(os.path.join(root, key))], page=page)
    theirs = outcome(reference.find_classes, root)
    ours = outcome(find_remote_classes, store, ROOT, PREFIX)
    assert ours == (moved(theirs, root) if isinstance(theirs[1], str) else theirs)
    classes = {**(theirs[1] if isinstance(theirs[1], dict) else {}), "none": 77}
    ones = {"is_valid_file": lambda path: "1" in os.path.basename(path)}
    for these in (classes, dict.fromkeys(list(classes)[:2], 7)):
        for which in ({"extensions": extensions}, ones):
            options = {**which, "allow_empty": allow_empty}
            expected = outcome(reference.make_dataset, root, these, **options)
            with mock.patch.object(lister, "_SPLIT_FROM", 0):
                assert outcome(scan, store, these, **options) == moved(expected, root)


@pytest.mark.parametrize("kind", KINDS)
def test_long_folders_are_sorted_whatever_the_stores_order(kind: Any, tmp_path: Path) -> None:
    folders = ("cat/", "cat/a/", "cat/a-/", "cat/b/", "dog/b/", "elk/b/c/")
    names = [f"{folder}{n:02}.{end}" for folder in folders for n, end in enumerate(["jpg", "PNG"] * 8)]
    assert scan(kind(names, page=4)) == torchvisions(names, tmp_path, lambda root: ImageFolder(root).samples)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_can_be_no_files_are_samples(kind: Any) -> None:
    odd = ["a/x.jpg", "a/x.jpg/y.jpg", "a//z.jpg", "a/../w.jpg", "a/./v.jpg", "a/ .jpg", "a/\0.jpg", "a/.jpg"]
    found = [path for path, _ in scan(kind(odd, page=1), {"a": 0})]
    assert sorted(found) == sorted(ROOT + key for key in odd)
    folders = [path.rpartition("/")[0] for path in found]
    assert folders == sorted(folders)


def test_a_key_that_stands_for_a_folder_is_no_sample() -> None:
    store: Any = Bucket(["cat/", "cat/sub.jpg/", "cat/1.jpg", "/1.jpg", "./2.jpg", "../3.jpg"])
    assert find_remote_classes(store, ROOT, PREFIX) == (["cat"], {"cat": 0})
    assert scan(store, extensions="") == [(f"{ROOT}cat/1.jpg", 0)]


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_a_dataset_may_begin_anywhere_in_a_bucket(prefix: str) -> None:
    store: Any = Ordered(["a/1.jpg", "b/c/2.jpg", "b/3.jpg"], prefix=prefix)
    classes = find_remote_classes(store, "s3://bucket/", prefix)[1]
    table, listing = scan_store(store, "s3://bucket/", prefix, classes, extensions=".jpg")
    names = ["a/1.jpg", "b/3.jpg", "b/c/2.jpg"]
    assert list(table) == [(f"s3://bucket/{name}", int(name > "b")) for name in names]
    assert [listing.key(row) for row in range(3)] == [prefix + name for name in names]


@pytest.mark.parametrize(
    "extensions", ["cat/1.jpg", ("train/cat/1.jpg", "/2.png"), "bucket/of/train/cat/1.jpg", [".JPG"], ()]
)
def test_an_ending_may_be_more_than_a_name(extensions: Any, tmp_path: Path) -> None:
    names = ["cat/1.jpg", "cat/2.PNG", "cat/deep/cat/1.jpg", "dog/1.jpg"]
    options: Any = {"class_to_idx": {"cat": 0, "dog": 1}, "extensions": extensions, "allow_empty": True}
    folder, cache = tmp_path / "bucket/of/train", IndexCache(tmp_path / "kept")
    expected = torchvisions(names, folder, lambda root: reference.make_dataset(root, **options))
    for kept in (None, cache, cache):
        assert scan(Bucket(names), {"cat": 0, "dog": 1}, extensions=extensions, cache=kept) == expected


def test_is_valid_file_is_called_as_torchvision_calls_it(tmp_path: Path) -> None:
    names = ["dog/2.jpg", "dog/10.jpg", "dog/b/c.txt", "dog/b-/d", "cat/1.jpg"]

    def calls(make: Callable[..., object]) -> list[tuple[str, int]]:
        noted: list[tuple[str, int]] = []
        make(is_valid_file=lambda path: noted.append((path, threading.get_ident())) or True)  # type: ignore[func-returns-value]
        return noted

    expected = torchvisions(names, tmp_path, lambda root: calls(partial(ImageFolder, root)))
    assert calls(partial(scan, Bucket(names))) == expected


def test_options_and_classes_are_those_of_torchvision() -> None:
    both: Any = {"extensions": ".jpg", "is_valid_file": bool}
    for classes, options in (({}, {}), ({"a": 0}, {}), ({"a": 0}, both)):
        ours = outcome(scan_store, Bucket(), ROOT, PREFIX, classes, **options)
        assert ours == outcome(reference.make_dataset, "anywhere", classes, **options)
        assert ours[0] is ValueError
    store = Bucket(["cat/1.jpg", "cat/deep/2.jpg", "3.jpg", "dog/4.jpg"])
    targets = [target for _, target in scan(store, {"cat": True, "dog": 2**70})]
    assert targets == [True, True, 2**70] and [type(target) for target in targets] == [bool, bool, int]
    one, deep = f"{ROOT}cat/1.jpg", f"{ROOT}cat/deep/2.jpg"
    assert scan(store, {"cat/deep": 0, "cat": 1}) == [(one, 1), (deep, 1), (deep, 0)]
    assert [path for path, _ in scan(store, {"": 0})] == [f"{ROOT}3.jpg", one, deep, f"{ROOT}dog/4.jpg"]
    assert scan(store, {"cat/": 0}) == scan(store, {"cat": 0})


@pytest.fixture(params=["folder", "store"])
def find(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Finds the classes ant, bee, cat and dog in a folder or in a store."""
    names = ("dog/1.jpg", "bee/1.jpg", "ant/1.jpg", "cat/1.jpg")
    if request.param == "store":
        return partial(find_remote_classes, Bucket(names), ROOT, PREFIX)
    assert all(make_file(str(tmp_path / name)) for name in names)
    return partial(find_classes, tmp_path)


def test_classes_have_the_order_asked_for(find: Callable[..., Any]) -> None:
    def choose(names: list[str]) -> tuple[str, ...]:
        assert names == ["ant", "bee", "cat", "dog"]
        names.clear()  # it may change them
        return ("cat",)

    assert find(None) == (["ant", "bee", "cat", "dog"], {"ant": 0, "bee": 1, "cat": 2, "dog": 3})
    assert find(["dog", "ant"]) == (["dog", "ant"], {"dog": 0, "ant": 1})
    assert find(Subset(2, seed=42)) == (["bee", "dog"], {"bee": 0, "dog": 1})
    assert find(lambda names: names[:0:-1]) == (["dog", "cat", "bee"], {"dog": 0, "cat": 1, "bee": 2})
    assert find(choose) == (["cat"], {"cat": 0})


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        (["cat", "cow"], OptionError, r"not in '.*': 'cow'\. .*'ant', 'bee', 'cat', 'dog'$"),
        (["cat", "dog", "cat"], OptionError, r"more than once: 'cat'$"), ([], OptionError, r"at least one folder"),
        ("cat", TypeError, r"sequence of folder names, got the string 'cat'"),
        ([0], TypeError, r"must hold strings, got 0 of type int"),
        (7, TypeError, r"a sequence of folder names, got 7$"),
        (Subset(5), OptionError, r"num=5.* than the 4 there are"),
    ],
)  # fmt: skip
def test_classes_that_cannot_be_are_refused(find: Any, classes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        find(classes)
    if not isinstance(classes, Subset):
        with pytest.raises(error, match=message):
            find(lambda names: classes)


def after_all(barrier: threading.Barrier, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls wait for each other."""
    return lambda *arguments: (barrier.wait(60), function(*arguments))[1]


def test_classes_are_listed_beside_each_other_and_no_others() -> None:
    together = [f"{number:02}/" for number in range(32)]
    store: Any = Bucket([f"{name}1.jpg" for name in [*together, "020/", "more/"]])
    store.objects = after_all(threading.Barrier(len(together)), store.objects)
    assert len(scan(store, {name[:-1]: 0 for name in together})) == 32
    assert store.asked_since() == together


def test_folders_of_a_long_class_are_listed_beside_each_other() -> None:
    folders = [f"{number:03}/" for number in range(60)]
    names = ["0.jpg", *(f"{name}{at}.jpg" for name in folders for at in range(3)), "010-.jpg", "zzz.jpg"]
    store: Any = Ordered([f"cat/{name}" for name in names])
    store.objects_after = after_all(threading.Barrier(30), store.objects_after)
    assert scan(store, {"cat": 0}) == scan(Bucket([f"cat/{name}" for name in names]), {"cat": 0})
    assert store.asked[:2] == [f"{PREFIX}cat/", f"folders {PREFIX}cat/"] and len(store.asked) == 2 + 30


def test_a_class_is_one_list_where_parts_would_not_help() -> None:
    """It is short, has few folders, or has no order."""
    short = [f"short/{number}/1.jpg" for number in range(6)]
    flat = [f"flat/{number:02}.jpg" for number in range(20)] + ["flat/05/1.jpg", "flat/30/1.jpg"]
    store = Ordered([*short, *flat])
    assert len(scan(store, {"short": 0, "flat": 1})) == 28
    assert store.asked_since() == ["flat/", "short/"]
    store = type("Store", (Shuffled, Ordered), {})([f"cat/{name:02}/1.jpg" for name in range(40)])
    assert len(scan(store, {"cat": 0})) == 40
    assert store.asked_since() == ["cat/"]


@pytest.mark.parametrize(
    "error", [StoreAccessError("no"), StoreBusyError("later"), FileNotFoundError("gone"), KeyError("a")]
)
def test_an_error_of_the_store_ends_the_scan(error: Exception) -> None:
    class Failing(Bucket):
        """Has pages without an end in one class, and an error after a page in another."""

        def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
            for number in itertools.count():
                yield [self.made(f"{prefix}{number}.jpg")]
                if prefix.endswith("cat/"):
                    raise error

        def folders(self, prefix: str) -> list[str]:
            raise error

    for ask in (partial(scan, Failing(), {"ant": 0, "bee": 1, "cat": 2}), partial(scan, Failing())):
        with pytest.raises(type(error)) as raised:
            ask()
        assert raised.value is error


def test_progress_is_reported_in_the_callers_thread_which_may_interrupt(monkeypatch: Any) -> None:
    monkeypatch.setattr(lister, "_TELL_EVERY_S", 0)
    reports: list[tuple[int, int, int]] = []
    store = Bucket([f"{name}/{number}.jpg" for name in "abc" for number in range(5)])
    scan(store, on_progress=lambda folders, files: reports.append((folders, files, threading.get_ident())))
    assert {thread for _, _, thread in reports} == {threading.get_ident()} and reports == sorted(reports)
    assert reports[-1][0] == 3 and 10 <= reports[-1][1] <= 15

    class Endless(Bucket):
        def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
            yield from ([self.made(f"{prefix}{number}.jpg")] for number in itertools.count())

    def interrupt(folders: int, files: int) -> None:
        if files:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(Endless(), {"ant": 0, "bee": 1}, on_progress=interrupt)


ALL = ["ant/1.jpg", "bee/1.jpg", "bee/deep/2.PNG", "cat/1.jpg"]


@pytest.fixture
def cache(tmp_path: Path) -> IndexCache:
    return IndexCache(tmp_path / "cache")


@pytest.fixture
def store() -> Bucket:
    return Bucket([*ALL, "bee/notes.txt"])


def index(store: Any, cache: IndexCache, classes: Any = None, **options: Any) -> list[str]:
    """The samples' paths from the root on."""
    refresh = options.get("refresh", False)
    indices = find_remote_classes(store, ROOT, PREFIX, classes, cache=cache, refresh=refresh)[1]
    return [path[len(ROOT) :] for path, _ in scan(store, indices, cache=cache, **options)]


def test_kept_classes_are_not_listed_again(store: Bucket, cache: IndexCache) -> None:
    assert index(store, cache, ["bee"]) == ALL[1:3]
    assert store.asked_since() == ["bee/", "folders "]
    assert index(store, cache, ["bee", "ant"]) == ALL[:3]
    assert store.asked_since() == ["ant/"]
    assert index(store, cache) == ALL
    assert store.asked_since() == ["cat/"]
    store.put("ant/2.jpg", "dog/1.jpg")
    for classes in (None, ["ant", "bee", "cat"], lambda names: names):
        assert index(store, cache, classes) == ALL
    assert index(store, cache, Subset(1, seed=3)) == ALL[1:3]
    assert store.asked_since() == []
    assert index(store, cache, ["dog"]) == ["dog/1.jpg"]  # a new class is found where it is asked for
    assert index(store, cache) == [*ALL, "dog/1.jpg"]
    with pytest.raises(OptionError, match=r"'elk'\. The folders there are: 'ant', 'bee', 'cat', 'dog'$"):
        index(store, cache, ["elk"])


def test_refresh_lists_anew_and_is_kept(store: Bucket, cache: IndexCache) -> None:
    index(store, cache)
    store.put("ant/2.jpg", "cat/2.jpg")
    assert index(store, cache, ["cat"], refresh=True) == ["cat/1.jpg", "cat/2.jpg"]
    assert index(store, cache) == [*ALL, "cat/2.jpg"]  # others stay as they were
    store.put("dog/1.jpg")
    for gone in ("bee/1.jpg", "bee/deep/2.PNG", "cat/2.jpg"):
        del store.objects_by_key[PREFIX + gone]
    store.asked.clear()
    after = ["ant/1.jpg", "ant/2.jpg", "cat/1.jpg", "dog/1.jpg"]
    assert index(store, cache, refresh=True) == after and len(store.asked_since()) == 5
    assert index(store, cache) == after
    assert store.asked_since() == ["bee/"]  # it is empty now, and that is not kept


def test_emptiness_is_not_kept(cache: IndexCache) -> None:
    store = Bucket(["cat/notes.txt"])
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"no valid file for the classes cat\. "):
            index(store, cache, allow_empty=False)
    store.put("cat/1.jpg")
    assert index(store, cache) == ["cat/1.jpg"]
    store.objects_by_key.clear()
    for refresh in (True, False):
        with pytest.raises(FileNotFoundError, match="any class folder"):
            index(store, cache, refresh=refresh)
    store.put("dog/1.jpg")
    assert index(store, cache) == ["dog/1.jpg"]


def test_each_store_prefix_and_choice_of_files_is_kept_for_itself(store: Bucket, cache: IndexCache) -> None:
    ones = ["ant/1.jpg", "bee/1.jpg", "cat/1.jpg"]
    for _ in range(2):
        assert index(store, cache, extensions=".jpg") == ones
        assert index(store, cache, extensions=(".png", ".txt")) == ["bee/notes.txt", "bee/deep/2.PNG"]
        store.asked.clear()
        assert index(store, cache, is_valid_file=lambda path: "1" in path) == ones
        assert "ant/" in store.asked_since()  # a function's choice is not kept
    other: Any = Bucket(["dog/1.jpg"])
    other.name = "another"
    assert index(other, cache, extensions=".jpg") == ["dog/1.jpg"]
    other, url = Bucket(["elk/1.jpg"], prefix="else/"), "s3://bucket/else/"
    classes = find_remote_classes(other, url, "else/", cache=cache)[1]
    table, _ = scan_store(other, url, "else/", classes, extensions=".jpg", cache=cache)
    assert list(table) == [(f"{url}elk/1.jpg", 0)]


@pytest.mark.parametrize(
    ("passed", "words"),
    [(59, "less than a minute"), (60, "1 minute"), (7200, "2 hours"), (40 * 86400, "40 days"), (-9999, "less than a minute")],
)  # fmt: skip
def test_the_age_is_logged(store: Bucket, tmp_path: Path, caplog: Any, passed: int, words: str) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    before, after = (IndexCache(tmp_path, now=lambda at=at: at * 10**9) for at in (10**9, 10**9 + passed))  # type: ignore[misc]
    index(store, before, ["ant", "bee"])
    assert caplog.messages == []
    index(store, after)
    assert [f"listed {words} ago" in message for message in caplog.messages] == [True, True]
    assert "(3 in 2 of 3 classes); refresh=True" in caplog.messages[1]
