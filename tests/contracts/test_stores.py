"""Behaviours of every store, whatever is behind it."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from fastpipe.core.types import StoredObject
from fastpipe.errors import ObjectChangedError
from fastpipe.stores.clients import StorageOptions
from fastpipe.stores.filesystems import FilesystemStore
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.retrying import RetryingStore
from fastpipe.stores.s3 import ObjectStore, S3fsStore

FILES = [
    "cat/1.jpg", "cat/more/3.jpg", "cat/more/deep/2.jpg", "catalogue/4.jpg", "dog/Ärger & 100%.jpg",
    "dog/a b+c%20d?e#f=g~h.jpg", "dog/back\\slash*[x].jpg", "dog/" + "k" * 200 + ".jpg", "dog/n\u0303.jpg",
    "dog/\xf1.jpg", "dog/\U0001f436.jpg", "top.jpg",
]  # fmt: skip
# A bucket has these too; a file system does not, or not beside the others.
KEYS_ONLY = [
    "cat", "cat/1.JPG", "cat/../x", "cat/./x", "cat//x", "cat/new\nline", "cat/" + "k" * 1000, "cat/tab\t",
    "../x", "/lead", "dog/ ",
]  # fmt: skip


@dataclass
class Place:
    """A new, empty store, and how objects get into it; ``rest`` is a key without the location's prefix."""

    store: Any
    location: Location
    put_key: Callable[[str, bytes], object]
    delete_key: Callable[[str], object]

    def key(self, rest: str) -> str:
        return self.location.prefix + rest

    def fill(self, rests: list[str]) -> None:
        """Put objects whose content is their key."""
        for key in map(self.key, rests):
            self.put_key(key, key.encode())

    def listed(self, rest: str = "") -> list[StoredObject]:
        return [found for page in self.store.objects(self.key(rest)) for found in page]

    def rests(self, rest: str = "") -> list[str]:
        return sorted(found.key[len(self.location.prefix) :] for found in self.listed(rest))


def s3_place(kind: str, s3: Any) -> Place:
    name = s3.bucket()
    store, location = open_store(f"s3://{name}", s3.options)
    assert isinstance(store, ObjectStore)
    if kind == "s3-s3fs":
        store = S3fsStore(location, StorageOptions(s3.options))
    return Place(store, location, lambda key, data: s3.put(name, key, data), lambda key: s3.delete(name, key))


def memory_place() -> Place:
    fs, name = fsspec.filesystem("memory"), f"test-{uuid.uuid4().hex}"
    fs.mkdir(f"/{name}")
    return Place(
        *open_store(f"memory://{name}"),
        lambda key, data: fs.pipe_file(f"/{name}/{key}", data), lambda key: fs.rm(f"/{name}/{key}"),
    )  # fmt: skip


def folder_place(kind: str, top: Path) -> Place:
    """A folder; keys of a URL's store begin at the root of the file system."""
    top.mkdir()
    store, location = open_store(top if kind == "folder" else f"file://{top}")
    if kind == "file-fsspec":
        store = FilesystemStore(location, StorageOptions())

    def at(key: str) -> Path:
        return Path(location.path(key).removeprefix("file://"))

    def put(key: str, data: bytes) -> None:
        at(key).parent.mkdir(parents=True, exist_ok=True)
        at(key).unlink(missing_ok=True)
        at(key).write_bytes(data)

    return Place(store, location, put, lambda key: at(key).unlink())


BUCKETS = ["s3-obstore", "s3-s3fs"]


@pytest.fixture(params=[*BUCKETS, "memory", "file", "file-fsspec", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind in BUCKETS:
        made = s3_place(kind, request.getfixturevalue("s3"))
    else:
        made = memory_place() if kind == "memory" else folder_place(kind, tmp_path / "top")
    yield made
    made.store.close()
    if kind == "memory":
        fsspec.filesystem("memory").rm(f"/{made.location.bucket}", recursive=True)


@pytest.fixture
def full(place: Place) -> Place:
    place.fill(FILES)
    return place


def test_objects_are_listed_found_and_read(full: Place) -> None:
    full.put_key(full.key("cat/empty.jpg"), b"")
    assert full.rests() == sorted([*FILES, "cat/empty.jpg"])
    for one in full.listed():
        got = full.store.get(one.key, one.version)
        wanted = b"" if one.key.endswith("/empty.jpg") else one.key.encode()
        assert type(got.data) is bytes and got.data == wanted and got.version == one.version
        assert one.size == len(got.data) and one.version
        assert full.store.get(one.key).data == got.data
        assert full.location.key(full.location.path(one.key)) == one.key
        assert full.store.find(one.key) == one
    full.store.close()
    assert full.store.get(one.key) == got, "it opens its connections again"


def test_lists_have_the_keys_that_begin_with_a_prefix(full: Place) -> None:
    assert full.rests("cat/") == FILES[:3] and full.rests("cat") == FILES[:4]
    assert full.rests("cat/1.jpg/") == full.rests("none/") == []
    folders = {"": ["cat", "catalogue", "dog"], "cat/": ["more"], "dog/": [], "none/": []}
    assert {rest: full.store.folders(full.key(rest)) for rest in folders} == folders


def test_ranges_are_parts_of_the_object(full: Place) -> None:
    key = full.key("cat/more/deep/2.jpg")
    whole = full.store.get(key)
    for start, stop in ((0, 1), (2, 5), (0, len(whole.data)), (3, 10_000), (4, 4), (5, 3), (5000, 6000)):
        for version in (whole.version, ""):
            assert full.store.get_range(key, start, stop, version) == whole.data[start:stop]


def test_missing_and_removed_objects_are_not_found(full: Place) -> None:
    (removed,) = full.listed("cat/more/deep/")
    full.delete_key(removed.key)
    assert full.listed("cat/more/deep/") == []
    with pytest.raises(FileNotFoundError, match=r"cat/more/deep/2\.jpg"):
        full.store.get(removed.key, removed.version)
    for rest in ("cat/none.jpg", "none/x.jpg", "cat/1.jpg/x", "top"):
        with pytest.raises(FileNotFoundError, match=f"{rest} is not there"):
            full.store.get(full.key(rest))
        for call in (lambda key: full.store.get_range(key, 0, 1), full.store.find):
            with pytest.raises(FileNotFoundError, match=rest):
                call(full.key(rest))


def test_a_replaced_object_has_another_version(full: Place) -> None:
    (found,) = full.listed("cat/more/deep/")
    other = found.key.encode()[::-1]  # of the same length
    full.put_key(found.key, other)
    with pytest.raises(ObjectChangedError, match="refresh=True"):
        full.store.get(found.key, found.version)
    with pytest.raises(ObjectChangedError, match=r"cat/more/deep/2\.jpg"):
        full.store.get_range(found.key, 0, 2, found.version)
    (again,) = full.listed("cat/more/deep/")
    assert again.version != found.version
    assert full.store.get(found.key).data == full.store.get(again.key, again.version).data == other


@pytest.mark.few(3)
def test_forked_children_read_while_their_parent_does(full: Place, in_child: Any) -> None:
    listed, key = full.listed("cat/"), full.key("cat/1.jpg")

    def child() -> None:
        assert full.store.get(key).data == key.encode() and full.listed("cat/") == listed
        assert full.store.folders(full.key("cat/")) == ["more"]
        assert full.store.get_range(key, 1, 5) == key.encode()[1:5]
        in_child(lambda: full.store.get(key))

    in_child(child)
    assert full.store.get(key).data == key.encode()


def test_a_pickle_and_a_retrying_store_have_the_same_name(full: Place) -> None:
    assert full.location.bucket in full.store.name
    retrying = RetryingStore(full.store)
    assert repr(full.store) in repr(retrying) and repr(full.store.name) in repr(retrying)
    for one in (full.store, retrying):
        # A repr has options, a pickle no secrets.
        assert pickle.loads(pickle.dumps(one)).name == full.store.name
    assert list(retrying.objects(full.key("cat/"))) == list(full.store.objects(full.key("cat/")))


@pytest.mark.parametrize("place", BUCKETS, indirect=True)
class TestBuckets:
    """Keys that no folder has, and pages of lists."""

    def test_every_key_is_listed_and_read(self, place: Place) -> None:
        everything = [*FILES, *KEYS_ONLY]
        place.fill(everything)
        assert place.rests() == sorted(everything)
        for one in place.listed():
            assert place.store.get(one.key, one.version).data == one.key.encode()
            assert place.store.get_range(one.key, 1, 3, one.version) == one.key.encode()[1:3]
            assert place.store.find(one.key) == one
        for prefix in ("cat", "cat/", "dog/", "/", "../", "cat/.", "cat//"):
            assert place.rests(prefix) == sorted(key for key in everything if key.startswith(prefix))

    def test_odd_keys_have_versions_and_folders(self, place: Place) -> None:
        place.fill(["/lead", "cat//x", "cat/../x", "cat/y/z", "dog/../x"])
        assert place.store.folders("") == ["cat", "dog"]
        assert place.store.folders("cat/") == ["..", "y"]
        (found,) = place.listed("cat/../")
        place.put_key("cat/../x", b"other")
        with pytest.raises(ObjectChangedError, match="refresh=True"):
            place.store.get(found.key, found.version)

    def test_marks_of_folders_are_no_objects(self, place: Place) -> None:
        place.fill(["cat/x.jpg", "cat/deep/y.jpg", "cat/deep-er.jpg", "cat/taken"])
        for mark in ("cat/", "cat/deep/", "cat/alone/", "cat/taken/", "cat/empty/", "cat/empty"):
            place.put_key(mark, b"")
        found = ["cat/deep-er.jpg", "cat/deep/y.jpg", "cat/empty", "cat/taken", "cat/x.jpg"]
        assert place.rests("cat/") == found
        assert place.store.folders("cat/") == ["alone", "deep", "empty", "taken"]

    def test_a_list_has_pages_and_may_begin_after_a_key(self, place: Place, monkeypatch: Any) -> None:
        monkeypatch.setattr("fastpipe.stores.s3._PAGE", 3)
        place.fill(names := [f"cat/{number}" for number in range(10)])
        pages = [[one.key for one in page] for page in place.store.objects("cat/")]
        assert [len(page) for page in pages] == [3, 3, 3, 1] and sum(pages, []) == names
        after = [one.key for page in place.store.objects_after("cat/", names[4]) for one in page]
        assert after == names[5:]

    def test_an_odd_key_on_a_later_page_repeats_no_object(self, place: Place, monkeypatch: Any) -> None:
        monkeypatch.setattr("fastpipe.stores.s3._PAGE", 3)
        place.fill(names := [*(f"cat/{number}" for number in range(8)), "cat/x//y", "cat/z"])
        if isinstance(place.store, ObjectStore):  # which reads a whole page of the server's before the first
            obstore = pytest.importorskip("obstore")

            def fail_late(*arguments: Any, **options: Any) -> Any:
                yield [{"path": f"cat/{number}", "size": 5, "e_tag": '"x"'} for number in range(5)]
                yield from obstore.list(*arguments, **options)

            place.store._client.get()
            monkeypatch.setattr(place.store, "_obstore", SimpleNamespace(list=fail_late))
        assert [one.key for one in place.listed("cat/")] == names
