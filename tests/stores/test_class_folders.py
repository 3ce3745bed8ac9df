"""Samples of a store against those torchvision finds where the same objects are files."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder
from torchvision.datasets import folder as reference

from fastpipe.core import array_cache as kept
from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, IndexCache, find_classes
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import OptionError, StoreAccessError, StoreBusyError
from fastpipe.options import Subset
from fastpipe.stores import listing as lister
from fastpipe.stores.class_folders import find_remote_classes, scan_store

ROOT, PREFIX = "s3://bucket/of/train/", "of/train/"
WAIT_S = 30.0


class Bucket:
    """A store whose objects are in a dict; says which prefixes it was asked for."""

    name = "https://endpoint.example/bucket"
    objects_after: Any = None

    def __init__(self, keys: Sequence[str] = (), *, page: int = 2, prefix: str = PREFIX) -> None:
        self.objects_by_key = {prefix + key: self.made(prefix + key) for key in keys}
        self.page = page
        self.asked: list[str] = []

    @staticmethod
    def made(key: str) -> StoredObject:
        return StoredObject(key, len(key) * 1000, f'"{key[::-1]}"')

    def put(self, key: str) -> None:
        self.objects_by_key[PREFIX + key] = self.made(PREFIX + key)

    def delete(self, key: str) -> None:
        del self.objects_by_key[PREFIX + key]

    def below(self, prefix: str) -> list[StoredObject]:
        return [self.objects_by_key[key] for key in sorted(self.objects_by_key) if key.startswith(prefix)]

    def folders(self, prefix: str) -> list[str]:
        self.asked.append(f"folders {prefix}")
        rests = (one.key[len(prefix) :] for one in self.below(prefix))
        return list({rest.split("/")[0] for rest in rests if "/" in rest})

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        self.asked.append(prefix)
        found = self.below(prefix)
        for start in range(0, len(found), self.page):
            yield found[start : start + self.page]

    def find(self, key: str) -> StoredObject:
        raise AssertionError("an index asks for no object")

    def describe(self) -> str:
        return "a bucket"

    def get(self, key: str, version: str = "") -> FetchedObject:
        raise AssertionError("an index reads no object")

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        raise AssertionError("an index reads no object")

    def close(self) -> None: ...


class Shuffled(Bucket):
    """A store that lists in an order of its own."""

    def below(self, prefix: str) -> list[StoredObject]:
        return sorted(super().below(prefix), key=lambda one: one.key[::-1])


class Ordered(Bucket):
    """A store that can begin a list after a key, as S3 does."""

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        self.asked.append(f"{prefix} after {after}")
        found = [one for one in self.below(prefix) if one.key > after.rstrip("/")]  # as obstore takes it
        for start in range(0, len(found), self.page):
            yield found[start : start + self.page]


KINDS = [Bucket, Shuffled, Ordered]


def scan(store: Bucket, classes: Any = None, **options: Any) -> Any:
    """The samples as a list; asserts that the listing is of the same."""
    options = {"allow_empty": True, **options}
    if "is_valid_file" not in options:
        options.setdefault("extensions", TORCHVISION_EXTENSIONS)
    if classes is None:
        classes = find_remote_classes(store, ROOT, PREFIX)[1]
    table, listing = scan_store(store, ROOT, PREFIX, classes, **options)
    assert [listing.path(row) for row in range(len(listing))] == [path for path, _ in table]
    for row in range(len(listing)):
        shown = StoredObject(listing.key(row), listing.size(row), listing.version(row))
        assert shown == store.objects_by_key.get(shown.key, shown)
        assert listing.path(row) == ROOT + shown.key[len(PREFIX) :]
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
    return samples[0], samples[1].replace(f"{root}", ROOT)


# Names in which sorting by key, by path string and by components disagree ("a-b" < "a/b" < "ab"), upper
# case, other scripts, folders that look like files.
SEGMENTS = [
    "a",
    "a-b",
    "a.b",
    "ab",
    "A",
    "a.jpg",
    "é",
    "Σ",
    "日本",
    "\U0001f40d",
    "\ue000",
    "b c",
    "b%20c",
    "#?",
]
FILES = [
    stem + ending for stem in ("1", "10", "2", "a", "Σ", "\ue000") for ending in (".jpg", ".JPG", ".txt", "")
]
keys = st.lists(
    st.tuples(st.lists(st.sampled_from(SEGMENTS), max_size=3), st.sampled_from(SEGMENTS + FILES)).map(
        lambda parts: "/".join([*parts[0], parts[1]])
    ),
    max_size=25,
    unique=True,
)


@pytest.mark.parametrize("kind", KINDS)
@given(
    keys=keys,
    page=st.integers(1, 4),
    allow_empty=st.booleans(),
    extensions=st.sampled_from([TORCHVISION_EXTENSIONS, ".jpg", ""]),
)
@example(["a/b/1.jpg", "a-b/1.jpg"], 1, False, ".jpg")
@example(["a/b/1.jpg", "a/b-c/1.jpg", "a/b.jpg", "a/b0/1.jpg"], 2, False, ".jpg")
@settings(max_examples=50, deadline=None)
def test_samples_are_those_of_the_same_files(
    kind: type[Bucket], tmp_path_factory: pytest.TempPathFactory, keys: list[str], page: int, allow_empty: bool,
    extensions: Any,
) -> None:  # fmt: skip
    root = str(tmp_path_factory.mktemp("root"))
    made = [key for key in keys if _make(os.path.join(root, key))]
    store = kind(made, page=page)
    with mock.patch.object(lister, "_SPLIT_FROM", 0):
        _assert_same(root, store, allow_empty, extensions)


def _assert_same(root: str, store: Bucket, allow_empty: bool, extensions: Any) -> None:
    theirs = outcome(reference.find_classes, root)
    ours = outcome(find_remote_classes, store, ROOT, PREFIX)
    assert ours == (moved(theirs, root) if isinstance(theirs[1], str) else theirs)
    classes = {**(theirs[1] if isinstance(theirs[1], dict) else {}), "none": 77}
    for these in (classes, dict.fromkeys(list(classes)[:2], 7)):
        options = {"extensions": extensions, "allow_empty": allow_empty}
        expected = outcome(reference.make_dataset, root, these, **options)
        assert outcome(scan, store, these, **options) == moved(expected, root)
        options = {"is_valid_file": lambda path: "1" in os.path.basename(path), "allow_empty": allow_empty}
        expected = outcome(reference.make_dataset, root, these, **options)
        assert outcome(scan, store, these, **options) == moved(expected, root)


def _make(path: str) -> bool:
    """Make a file with its folders; whether there could be one beside what there is."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "xb").close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_dataset_is_image_folders(kind: type[Bucket], tmp_path: Path) -> None:
    names = [
        f"{c}/{'sub/' * (i % 3)}{i}.{e}"
        for c in ("dog", "cat", "elk")
        for i, e in enumerate(["jpg", "PNG", "webp"] * 4)
    ]
    assert all(_make(str(tmp_path / name)) for name in names)
    theirs = ImageFolder(tmp_path)
    assert scan(kind(names)) == moved(theirs.samples, str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_could_be_no_files_are_samples(kind: type[Bucket]) -> None:
    odd = ["a/x.jpg", "a/x.jpg/y.jpg", "a//z.jpg", "a/../w.jpg", "a/./v.jpg", "a/ .jpg", "a/\0.jpg", "a/.jpg"]
    found = [path for path, _ in scan(kind(odd, page=1), {"a": 0})]
    assert sorted(found) == sorted(ROOT + key for key in odd)
    folders = [path.rpartition("/")[0] for path in found]
    assert folders == sorted(folders)


def test_what_stands_for_a_folder_is_no_sample() -> None:
    store = Bucket(["cat/", "cat/sub.jpg/", "cat/1.jpg", "/1.jpg", "./2.jpg", "../3.jpg"])
    assert find_remote_classes(store, ROOT, PREFIX) == (["cat"], {"cat": 0})
    assert scan(store, extensions="") == [(f"{ROOT}cat/1.jpg", 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "train/"])
def test_any_prefix(kind: type[Bucket], prefix: str) -> None:
    store = kind(["a/1.jpg", "b/c/2.jpg", "b/3.jpg", "b/c/4.jpg"], prefix=prefix)
    classes = find_remote_classes(store, "s3://bucket/", prefix)[1]
    table, listing = scan_store(store, "s3://bucket/", prefix, classes, extensions=".jpg")
    assert list(table) == [(f"s3://bucket/{key}", target) for key, target in
                           (("a/1.jpg", 0), ("b/3.jpg", 1), ("b/c/2.jpg", 1), ("b/c/4.jpg", 1))]  # fmt: skip
    assert [listing.key(row) for row in range(4)] == [
        prefix + key for key in ("a/1.jpg", "b/3.jpg", "b/c/2.jpg", "b/c/4.jpg")
    ]


@pytest.mark.parametrize(
    "extensions", ["cat/1.jpg", ("train/cat/1.jpg", "/2.png"), "bucket/of/train/cat/1.jpg", [".JPG"], ()]
)
def test_an_ending_may_be_more_than_a_name(extensions: Any, tmp_path: Path) -> None:
    names = ["cat/1.jpg", "cat/2.PNG", "cat/deep/cat/1.jpg", "dog/1.jpg"]
    root = tmp_path / "bucket/of/train"
    assert all(_make(str(root / name)) for name in names)
    for is_kept in (False, True):
        cache = IndexCache(tmp_path / "kept") if is_kept else None
        options = {"extensions": extensions, "allow_empty": True}
        expected = reference.make_dataset(root, {"cat": 0, "dog": 1}, **options)
        for _ in range(2):
            assert scan(Bucket(names), {"cat": 0, "dog": 1}, **options, cache=cache) == moved(
                expected, str(root)
            )


def test_is_valid_file_is_called_as_torchvision_calls_it(tmp_path: Path) -> None:
    names = ["dog/2.jpg", "dog/10.jpg", "dog/b/c.txt", "dog/b-/d", "cat/1.jpg"]
    assert all(_make(str(tmp_path / name)) for name in names)
    calls: list[list[tuple[str, int]]] = [[], []]
    thread = threading.get_ident()
    scan(Bucket(names), is_valid_file=lambda path: calls[0].append((path, threading.get_ident())) or True)
    ImageFolder(tmp_path, is_valid_file=lambda path: calls[1].append((path, thread)) or True)
    assert calls[0] == moved(calls[1], str(tmp_path))


def test_options_are_refused_as_torchvision_refuses_them() -> None:
    for classes, options in (
        ({}, {}),
        ({"a": 0}, {}),
        ({"a": 0}, {"extensions": ".jpg", "is_valid_file": bool}),
    ):
        ours = outcome(scan_store, Bucket(), ROOT, PREFIX, classes, **options)
        assert ours == outcome(reference.make_dataset, "anywhere", classes, **options)
        assert ours[0] is ValueError


def test_class_indices_are_kept_as_they_are() -> None:
    found = scan(Bucket(["cat/1.jpg", "dog/2.jpg", "dog/3.jpg"]), {"cat": True, "dog": 2**70})
    assert [target for _, target in found] == [True, 2**70, 2**70]
    assert [type(target) for _, target in found] == [bool, int, int]


def test_a_class_may_be_below_another_or_be_everything() -> None:
    store = Bucket(["cat/1.jpg", "cat/deep/2.jpg", "3.jpg"])
    assert scan(store, {"cat/deep": 0, "cat": 1}) == [
        (f"{ROOT}cat/1.jpg", 1), (f"{ROOT}cat/deep/2.jpg", 1), (f"{ROOT}cat/deep/2.jpg", 0)
    ]  # fmt: skip
    assert [path for path, _ in scan(store, {"": 0})] == [
        ROOT + key for key in ("3.jpg", "cat/1.jpg", "cat/deep/2.jpg")
    ]
    assert scan(store, {"cat/": 0}) == scan(store, {"cat": 0})


def test_table_and_listing_share_their_paths() -> None:
    table, listing = scan_store(Bucket(["cat/1.jpg"]), ROOT, PREFIX, {"cat": 0}, extensions=".jpg")
    assert table._data is listing.paths


# ---- classes -----------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "store"])
def find(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Finds the classes ant, bee, cat and dog in a folder or in a store."""
    names = ("dog", "bee", "ant", "cat")
    if request.param == "folder":
        for name in names:
            (tmp_path / name).mkdir()
        return lambda classes: find_classes(tmp_path, classes)
    store = Bucket([f"{name}/1.jpg" for name in names])
    return lambda classes: find_remote_classes(store, ROOT, PREFIX, classes)


def test_classes_come_in_the_order_asked_for(find: Callable[..., Any]) -> None:
    assert find(None) == (["ant", "bee", "cat", "dog"], {"ant": 0, "bee": 1, "cat": 2, "dog": 3})
    assert find(["dog", "ant"]) == (["dog", "ant"], {"dog": 0, "ant": 1})
    assert find(Subset(2, seed=42)) == (["bee", "dog"], {"bee": 0, "dog": 1})
    assert find(lambda names: names[:0:-1]) == (["dog", "cat", "bee"], {"dog": 0, "cat": 1, "bee": 2})


def test_a_function_gets_all_names_sorted_and_may_change_them(find: Callable[..., Any]) -> None:
    got: list[list[str]] = []

    def choose(names: list[str]) -> tuple[str, ...]:
        got.append(names.copy())
        names.clear()
        return ("cat",)

    assert find(choose) == (["cat"], {"cat": 0})
    assert got == [["ant", "bee", "cat", "dog"]]


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        (["cat", "cow"], OptionError, r"not in '.*': 'cow'\. .*'ant', 'bee', 'cat', 'dog'$"),
        (["cat", "dog", "cat"], OptionError, r"more than once: 'cat'$"),
        ([], OptionError, r"at least one folder"),
        ("cat", TypeError, r"sequence of folder names, got the string 'cat'"),
        ([0], TypeError, r"must hold strings, got 0 of type int"),
        (7, TypeError, r"a sequence of folder names, got 7$"),
    ],
)
def test_bad_selections(
    find: Callable[..., Any], is_function: bool, classes: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find((lambda names: classes) if is_function else classes)


def test_a_subset_cannot_be_more_than_there_is(find: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match=r"num=5.* than the 4 there are"):
        find(Subset(5))


def test_no_class_folder_is_torchvisions_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as theirs:
        reference.find_classes(str(tmp_path))
    with pytest.raises(FileNotFoundError) as ours:
        find_remote_classes(Bucket(["1.jpg"]), ROOT, PREFIX)
    assert str(ours.value) == str(theirs.value).replace(str(tmp_path), ROOT)


# ---- asking the store --------------------------------------------------------------------------


def test_only_the_classes_asked_for_are_listed() -> None:
    store = Bucket(["ant/1.jpg", "bee/1.jpg", "bee/deep/2.jpg", "bees/1.jpg", "cat/1.jpg"])
    assert len(scan(store, {"cat": 0, "bee": 1})) == 3
    assert sorted(store.asked) == [f"{PREFIX}bee/", f"{PREFIX}cat/"]


class Meeting:
    """Mixed into a store: the first pages of some prefixes come when all of these have been asked for."""

    def __init__(self, keys: Sequence[str], together: Sequence[str]) -> None:
        super().__init__(keys)  # type: ignore[call-arg]
        self.together, self.barrier = together, threading.Barrier(len(together))

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        for number, page in enumerate(super().objects(prefix)):  # type: ignore[misc]
            if number == 0 and prefix[len(PREFIX) :] in self.together:
                self.barrier.wait(WAIT_S)
            yield page


def test_classes_are_listed_beside_each_other() -> None:
    together = [f"{number:02}/" for number in range(32)]
    store = type("Store", (Meeting, Bucket), {})([f"{name}1.jpg" for name in together], together)
    assert len(scan(store)) == 32


def test_folders_of_a_long_class_are_listed_beside_each_other() -> None:
    folders = [f"{number:03}/" for number in range(60)]
    keys = [
        "0.jpg",
        *(f"{name}{number}.jpg" for name in folders for number in range(3)),
        "010-.jpg",
        "zzz.jpg",
    ]
    store = MeetingAfter([f"cat/{key}" for key in keys], 30)
    found = scan(store, {"cat": 0})
    assert found == scan(Bucket([f"cat/{key}" for key in keys]), {"cat": 0})
    assert store.asked[:2] == [f"{PREFIX}cat/", f"folders {PREFIX}cat/"]
    assert len(store.asked) == 2 + 30


class MeetingAfter(Ordered):
    """Lists from keys on once it has been asked to so many times."""

    def __init__(self, keys: Sequence[str], times: int) -> None:
        super().__init__(keys)
        self.barrier = threading.Barrier(times)

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        self.barrier.wait(WAIT_S)
        return super().objects_after(prefix, after)


def test_a_class_is_one_list_where_it_is_short_or_has_few_folders_or_all_threads_are_busy() -> None:
    short = [f"short/{number}/1.jpg" for number in range(6)]
    flat = [f"flat/{number:02}.jpg" for number in range(20)] + ["flat/05/1.jpg", "flat/30/1.jpg"]
    store = Ordered([*short, *flat])
    assert len(scan(store, {"short": 0, "flat": 1})) == 28
    assert sorted(store.asked) == [f"{PREFIX}flat/", f"{PREFIX}short/"]
    deep = [f"{number}/{name:02}/1.jpg" for number in range(40) for name in range(20)]
    together = [f"{number}/" for number in range(32)]
    store = type("Store", (Meeting, Ordered), {})(deep, together)
    lasting = threading.Barrier(32)
    page = store.objects

    def objects(prefix: str) -> Iterator[Sequence[StoredObject]]:
        yield from page(prefix)
        if prefix[len(PREFIX) :] in together:
            lasting.wait(WAIT_S)  # none is finished before all are

    store.objects = objects
    assert len(scan(store, {str(number): number for number in range(40)})) == 800
    assert not [
        asked for asked in store.asked if "after" in asked and asked.split("/")[2] in map(str, range(32))
    ]


def test_a_store_that_lists_in_no_order_is_not_listed_from_folders_on() -> None:
    store = type("Store", (Shuffled, Ordered), {})([f"cat/{name:02}/1.jpg" for name in range(40)])
    assert len(scan(store, {"cat": 0})) == 40
    assert store.asked == [f"{PREFIX}cat/"]


def test_a_long_folder_is_sorted_whatever_the_stores_order(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"cat/{folder}{number:02}.jpg" for folder in ("", "a/", "a-/", "b/") for number in range(20)]
    expected = scan(Bucket(keys), {"cat": 0})
    assert expected == sorted(expected, key=lambda one: one[0].rpartition("/"))
    for kind in (Shuffled, Ordered):
        assert scan(kind(keys, page=4), {"cat": 0}) == expected


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

    with pytest.raises(type(error)) as raised:
        scan(Failing(), {"ant": 0, "bee": 1, "cat": 2})
    assert raised.value is error
    with pytest.raises(type(error)):
        find_remote_classes(Failing(), ROOT, PREFIX)


def test_an_interrupt_ends_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lister, "_TELL_EVERY_S", 0)

    class Endless(Bucket):
        def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
            yield from ([self.made(f"{prefix}{number}.jpg")] for number in itertools.count())

    def interrupt(folders: int, files: int) -> None:
        if files:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(Endless(), {"ant": 0, "bee": 1}, on_progress=interrupt)


def test_progress_is_told_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lister, "_TELL_EVERY_S", 0)
    told: list[tuple[int, int, int]] = []
    keys = [f"{name}/{number}.jpg" for name in "abc" for number in range(5)]
    scan(
        Bucket(keys), on_progress=lambda folders, files: told.append((folders, files, threading.get_ident()))
    )
    assert {thread for _, _, thread in told} == {threading.get_ident()}
    assert told == sorted(told)
    assert told[-1][0] == 3
    assert 10 <= told[-1][1] <= 15


# ---- kept on disk ------------------------------------------------------------------------------


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1_000_000_000

    def __call__(self) -> int:
        return self.seconds * 10**9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> IndexCache:
    monkeypatch.setattr(kept, "_warned", set())
    return IndexCache(tmp_path / "cache", now=clock)


@pytest.fixture
def store() -> Bucket:
    return Bucket(["ant/1.jpg", "bee/1.jpg", "bee/deep/2.PNG", "bee/notes.txt", "cat/1.jpg"])


def index(store: Bucket, cache: IndexCache | None, classes: Any = None, **options: Any) -> list[str]:
    """The samples' paths from the root on."""
    refresh = options.get("refresh", False)
    indices = find_remote_classes(store, ROOT, PREFIX, classes, cache=cache, refresh=refresh)[1]
    return [path[len(ROOT) :] for path, _ in scan(store, indices, cache=cache, **options)]


ALL = ["ant/1.jpg", "bee/1.jpg", "bee/deep/2.PNG", "cat/1.jpg"]


def test_what_is_kept_is_not_listed_again(store: Bucket, cache: IndexCache) -> None:
    assert index(store, cache) == ALL
    assert sorted(store.asked) == [
        f"folders {PREFIX}",
        *(f"{PREFIX}{name}/" for name in ("ant", "bee", "cat")),
    ]
    store.asked.clear()
    store.put("ant/2.jpg")  # nobody can tell
    store.put("dog/1.jpg")
    for classes, expected in (
        (None, ALL),
        (["bee"], ALL[1:3]),
        (Subset(1, seed=3), ALL[1:3]),
        (lambda names: names[:2], ALL[:3]),
    ):
        assert index(store, cache, classes) == expected
    assert store.asked == []


def test_other_classes_are_added_to_what_is_kept(store: Bucket, cache: IndexCache) -> None:
    assert index(store, cache, ["bee"]) == ALL[1:3]
    assert store.asked == [f"folders {PREFIX}", f"{PREFIX}bee/"]
    store.asked.clear()
    assert index(store, cache, ["bee", "ant"]) == ALL[:3]
    assert store.asked == [f"{PREFIX}ant/"]
    store.asked.clear()
    assert index(store, cache) == ALL
    assert store.asked == [f"{PREFIX}cat/"]


def test_refresh_lists_anew_and_is_kept(store: Bucket, cache: IndexCache) -> None:
    index(store, cache)
    store.put("ant/2.jpg")
    store.put("dog/1.jpg")
    store.delete("bee/1.jpg")
    store.delete("bee/deep/2.PNG")
    store.asked.clear()
    after = ["ant/1.jpg", "ant/2.jpg", "cat/1.jpg", "dog/1.jpg"]
    assert index(store, cache, refresh=True) == after
    assert len(store.asked) == 5
    store.asked.clear()
    assert index(store, cache) == after
    assert store.asked == [f"{PREFIX}bee/"]  # it is empty now, and that is not kept


def test_refresh_of_some_classes_leaves_the_others_as_they_were(store: Bucket, cache: IndexCache) -> None:
    index(store, cache)
    store.put("ant/2.jpg")
    store.put("cat/2.jpg")
    assert index(store, cache, ["cat"], refresh=True) == ["cat/1.jpg", "cat/2.jpg"]
    assert index(store, cache) == [*ALL, "cat/2.jpg"]


def test_nothing_found_is_not_kept(cache: IndexCache) -> None:
    store = Bucket(["cat/notes.txt"])
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"no valid file for the classes cat\. "):
            index(store, cache, allow_empty=False)
    store.put("cat/1.jpg")
    assert index(store, cache) == ["cat/1.jpg"]
    empty = Bucket()
    empty.name = "another"
    with pytest.raises(FileNotFoundError, match="any class folder"):
        index(empty, cache)
    empty.put("dog/1.jpg")
    assert index(empty, cache) == ["dog/1.jpg"]


def test_class_folders_that_are_gone_are_forgotten_by_refresh(store: Bucket, cache: IndexCache) -> None:
    index(store, cache)
    store.objects_by_key.clear()
    with pytest.raises(FileNotFoundError, match="any class folder"):
        index(store, cache, refresh=True)
    with pytest.raises(FileNotFoundError, match="any class folder"):
        index(store, cache)


def test_a_class_that_is_new_is_found_where_it_is_asked_for(store: Bucket, cache: IndexCache) -> None:
    index(store, cache)
    store.put("dog/1.jpg")
    assert index(store, cache, ["dog"]) == ["dog/1.jpg"]
    assert index(store, cache) == [*ALL, "dog/1.jpg"]
    with pytest.raises(OptionError, match=r"'elk'\. The folders there are: 'ant', 'bee', 'cat', 'dog'$"):
        index(store, cache, ["elk"])


def test_each_store_prefix_and_choice_of_extensions_is_kept_for_itself(
    store: Bucket, cache: IndexCache
) -> None:
    for _ in range(2):
        assert index(store, cache, extensions=".jpg") == ["ant/1.jpg", "bee/1.jpg", "cat/1.jpg"]
        assert index(store, cache, extensions=(".png", ".txt")) == ["bee/notes.txt", "bee/deep/2.PNG"]
    other = Bucket(["dog/1.jpg"])
    other.name = "another"
    assert index(other, cache, extensions=".jpg") == ["dog/1.jpg"]
    elsewhere = Bucket(["elk/1.jpg"], prefix="else/")
    classes = find_remote_classes(elsewhere, "s3://bucket/else/", "else/", cache=cache)[1]
    table, _ = scan_store(elsewhere, "s3://bucket/else/", "else/", classes, extensions=".jpg", cache=cache)
    assert list(table) == [("s3://bucket/else/elk/1.jpg", 0)]


def test_what_a_function_decides_is_not_kept(store: Bucket, cache: IndexCache) -> None:
    for _ in range(2):
        store.asked.clear()
        assert index(store, cache, is_valid_file=lambda path: "1" in path) == [
            "ant/1.jpg",
            "bee/1.jpg",
            "cat/1.jpg",
        ]
        assert f"{PREFIX}ant/" in store.asked


def test_damage_costs_a_listing(store: Bucket, cache: IndexCache) -> None:
    index(store, cache)
    for path in cache.path.iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    store.asked.clear()
    assert index(store, cache) == ALL
    assert len(store.asked) == 4


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        (59, "less than a minute"),
        (60, "1 minute"),
        (7200, "2 hours"),
        (40 * 86400, "40 days"),
        (-9999, "less than a minute"),
    ],
)
def test_the_log_says_which_listing_is_used(
    store: Bucket, cache: IndexCache, clock: Clock, caplog: pytest.LogCaptureFixture, passed: int, words: str
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    index(store, cache, ["ant", "bee"])
    assert caplog.messages == []
    clock.seconds += passed
    index(store, cache)
    assert caplog.messages == [
        f"The class folders of {ROOT} are those that were listed {words} ago (3); refresh=True lists them anew",
        f"The objects of {ROOT} are those that were listed {words} ago (3 in 2 of 3 classes); refresh=True lists them anew",
    ]
