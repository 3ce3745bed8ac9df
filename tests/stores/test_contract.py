"""What every store must do, whatever is behind it."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.core.types import Store, StoredObject
from fastpipe.errors import ObjectChangedError
from fastpipe.stores.s3 import ObjectStore

_FILES = [
    "cat/1.jpg",
    "cat/more/deep/2.jpg",
    "cat/more/3.jpg",
    "catalogue/4.jpg",
    "dog/Ärger & 100%.jpg",
    "dog/a b+c%20d?e#f=g~h.jpg",
    "dog/\U0001f436.jpg",
    "dog/n\u0303.jpg",
    "dog/\xf1.jpg",
    "dog/back\\slash*[x].jpg",
    "dog/" + "k" * 200 + ".jpg",
    "top.jpg",
]
# A bucket has these too; a file system does not, or not beside the others.
_KEYS_ONLY = [
    "cat",
    "cat/1.JPG",
    "cat/../x",
    "cat/./x",
    "cat//x",
    "cat/new\nline",
    "cat/" + "k" * 1000,
    "cat/tab\t",
    "../x",
    "/lead",
    "dog/ ",
]


def listed(store: Store, prefix: str) -> list[StoredObject]:
    return [found for page in store.objects(prefix) for found in page]


def keys(store: Store, prefix: str) -> list[str]:
    return [found.key for found in listed(store, prefix)]


@pytest.fixture
def full(place: Any) -> Any:
    """A store with all kinds of keys, of which it is told where they begin."""
    place.fill([place.location.prefix + key for key in _FILES])
    return place


def test_what_is_put_is_listed_and_read(full: Any) -> None:
    prefix = full.location.prefix
    found = listed(full.store, prefix)
    assert sorted(one.key for one in found) == sorted(prefix + key for key in _FILES)
    for one in found:
        got = full.store.get(one.key, one.version)
        assert type(got.data) is bytes and got.data == one.key.encode() and got.version == one.version
        assert one.size == len(got.data) and one.version
        assert full.store.get(one.key).data == got.data
        assert full.location.key(full.location.path(one.key)) == one.key
        assert full.store.find(one.key) == one


def test_a_prefix_is_where_keys_begin(full: Any) -> None:
    prefix = full.location.prefix
    assert sorted(keys(full.store, prefix + "cat/")) == sorted(prefix + key for key in _FILES[:3])
    assert sorted(keys(full.store, prefix + "cat")) == sorted(prefix + key for key in _FILES[:4])
    assert keys(full.store, prefix + "cat/1.jpg/") == []
    assert keys(full.store, prefix + "nothing/") == []


def test_folders_are_those_directly_below(full: Any) -> None:
    prefix = full.location.prefix
    assert full.store.folders(prefix) == ["cat", "catalogue", "dog"]
    assert full.store.folders(prefix + "cat/") == ["more"]
    assert full.store.folders(prefix + "dog/") == []
    assert full.store.folders(prefix + "nothing/") == []


def test_parts_are_those_of_the_whole(full: Any) -> None:
    key = full.location.prefix + "cat/more/deep/2.jpg"
    whole = full.store.get(key)
    for start, stop in ((0, 1), (2, 5), (0, len(whole.data)), (3, 10_000), (4, 4), (5, 3), (5000, 6000)):
        assert full.store.get_range(key, start, stop, whole.version) == whole.data[start:stop]
        assert full.store.get_range(key, start, stop) == whole.data[start:stop]


def test_an_empty_object_is_an_object(place: Any) -> None:
    key = place.location.prefix + "cat/empty.jpg"
    place.put(key, b"")
    (found,) = listed(place.store, place.location.prefix)
    assert found.key == key and found.size == 0
    assert place.store.get(key, found.version).data == b""


def test_what_is_not_there_is_not_found(full: Any) -> None:
    for key in ("cat/nothing.jpg", "nothing/x.jpg", "cat/1.jpg/x", "top"):
        with pytest.raises(FileNotFoundError, match="is not there"):
            full.store.get(full.location.prefix + key)
        with pytest.raises(FileNotFoundError, match=key):
            full.store.get_range(full.location.prefix + key, 0, 1)
        with pytest.raises(FileNotFoundError, match=key):
            full.store.find(full.location.prefix + key)


def test_what_is_removed_after_it_was_listed_is_not_found(full: Any) -> None:
    found = listed(full.store, full.location.prefix + "cat/more/deep/")[0]
    full.delete(found.key)
    with pytest.raises(FileNotFoundError, match=r"cat/more/deep/2\.jpg"):
        full.store.get(found.key, found.version)
    assert keys(full.store, full.location.prefix + "cat/more/deep/") == []


def test_what_is_replaced_is_of_another_version(full: Any) -> None:
    found = listed(full.store, full.location.prefix + "cat/more/deep/")[0]
    full.put(found.key, bytes(reversed(found.key.encode())))  # of the same length
    with pytest.raises(ObjectChangedError, match="refresh=True"):
        full.store.get(found.key, found.version)
    with pytest.raises(ObjectChangedError, match=r"cat/more/deep/2\.jpg"):
        full.store.get_range(found.key, 0, 2, found.version)
    assert full.store.get(found.key).data == bytes(reversed(found.key.encode()))
    again = listed(full.store, full.location.prefix + "cat/more/deep/")[0]
    assert again.version != found.version
    full.store.get(again.key, again.version)


def test_a_closed_store_is_told_by_nobody_else(full: Any) -> None:
    key = full.location.prefix + "top.jpg"
    before = full.store.get(key)
    full.store.close()
    assert full.store.get(key) == before  # closing lets go of connections; they are made anew


def test_names_tell_stores_apart_and_stay(place: Any, tmp_path: Path) -> None:
    assert place.location.bucket in place.store.name
    assert pickle.loads(pickle.dumps(place.store)).name == place.store.name


class TestBuckets:
    """What no folder has."""

    def test_every_key_is_listed_and_read(self, bucket: Any) -> None:
        everything = [*_FILES, *_KEYS_ONLY]
        bucket.fill(everything)
        found = listed(bucket.store, "")
        assert sorted(one.key for one in found) == sorted(everything)
        for one in found:
            assert bucket.store.get(one.key, one.version).data == one.key.encode()
            assert bucket.store.get_range(one.key, 1, 3, one.version) == one.key.encode()[1:3]
            assert bucket.store.find(one.key) == one
        for prefix in ("cat", "cat/", "dog/", "/", "../", "cat/.", "cat//"):
            assert sorted(keys(bucket.store, prefix)) == sorted(
                key for key in everything if key.startswith(prefix)
            )

    def test_odd_keys_have_versions_too(self, bucket: Any) -> None:
        bucket.put("cat/../x", b"first")
        (found,) = listed(bucket.store, "cat/")
        bucket.put("cat/../x", b"other")
        with pytest.raises(ObjectChangedError, match="refresh=True"):
            bucket.store.get(found.key, found.version)

    def test_folders_beside_odd_keys(self, bucket: Any) -> None:
        bucket.fill(["/lead", "cat//x", "cat/../x", "cat/y/z", "dog/../x"])
        assert bucket.store.folders("") == ["cat", "dog"]
        assert bucket.store.folders("cat/") == ["..", "y"]

    def test_marks_of_folders_are_no_objects(self, bucket: Any) -> None:
        bucket.fill(["cat/x.jpg", "cat/deep/y.jpg", "cat/deep-er.jpg", "cat/taken"])
        for mark in ("cat/", "cat/deep/", "cat/alone/", "cat/taken/", "cat/empty/"):
            bucket.put(mark, b"")
        bucket.put("cat/empty", b"")
        expected = ["cat/deep-er.jpg", "cat/deep/y.jpg", "cat/empty", "cat/taken", "cat/x.jpg"]
        assert sorted(keys(bucket.store, "cat/")) == expected
        assert bucket.store.folders("cat/") == ["alone", "deep", "empty", "taken"]

    @pytest.fixture
    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fastpipe.stores.s3._PAGE", 3)

    def test_a_list_goes_on_over_pages_and_after_a_key(self, bucket: Any, small_pages: None) -> None:
        names = [f"cat/{number}" for number in range(10)]
        bucket.fill(names)
        pages = [[one.key for one in page] for page in bucket.store.objects("cat/")]
        assert [len(page) for page in pages] == [3, 3, 3, 1] and sum(pages, []) == names
        after = [one.key for page in bucket.store.objects_after("cat/", names[4]) for one in page]
        assert after == names[5:]

    def test_an_odd_key_on_a_later_page_repeats_nothing(
        self, bucket: Any, small_pages: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [f"cat/{number}" for number in range(8)] + ["cat/x//y", "cat/z"]
        bucket.fill(names)
        if isinstance(bucket.store, ObjectStore):  # which reads a whole page of the server's before the first
            self._fail_late(bucket.store, monkeypatch)
        assert keys(bucket.store, "cat/") == names

    def _fail_late(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with an odd key beyond the server's first page."""
        import obstore

        def late(*arguments: Any, **options: Any) -> Any:
            yield [{"path": f"cat/{number}", "size": 5, "e_tag": '"x"'} for number in range(5)]
            yield from obstore.list(*arguments, **options)

        store._client.get()
        monkeypatch.setattr(store, "_obstore", SimpleNamespace(list=late))
