"""What a store's listing says of each sample, and how it is kept on disk."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core import array_cache as kept
from fastpipe.core.sample_tables import FrozenSamples, offsets_of
from fastpipe.stores import listing
from fastpipe.stores.listing import KeptFolders, KeptRows, Listing, ListingCache, ListingKey, Rows

ROOT, PREFIX = "s3://bucket/train/", "train/"
Found = list[tuple[str, int, str]]  # keys without the prefix, sizes and versions

texts = st.text(st.sampled_from("ab/\0é日\U0001f40d\udcff."), max_size=6)
objects = st.lists(
    st.tuples(texts.filter(bool), st.integers(0, 2**50), texts), max_size=30, unique_by=lambda one: one[0]
)


def listing_of(found: Found, root: str = ROOT, prefix: str = PREFIX) -> Listing:
    keys, sizes, versions = ([one[at] for one in found] for at in range(3))
    rows = Rows.of("", keys, sizes, versions)  # type: ignore[arg-type]
    offsets = offsets_of(rows.paths.lengths)
    paths = FrozenSamples(bytes(rows.paths.block), offsets, np.zeros(len(rows), np.int64), root)
    return Listing(paths, prefix, rows.sizes, rows.versions)


@given(objects, texts)
def test_a_listing_and_its_copies_have_what_was_listed(found: Found, other: str) -> None:
    made = listing_of(found)
    for same in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert same.sizes.tolist() == [size for _, size, _ in found] and len(same) == len(found)
        assert same.digest == made.digest
        for row, (rest, size, version) in enumerate(found):
            assert (same.key(row), same.size(row), same.version(row)) == (PREFIX + rest, size, version)
            assert same.path(row) == ROOT + rest
            assert same.find(ROOT + rest) == row
            assert same.find(rest) == same.find(PREFIX + rest) == same.find(ROOT + rest + "x") == -1
        if other not in [rest for rest, _, _ in found]:
            assert same.find(ROOT + other) == -1
        with pytest.raises(ValueError, match="read-only"):
            same.sizes[:] = 0


def test_paths_with_the_same_hash_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "hash", sum, raising=False)  # of all bytes
    made = listing_of([("ab", 1, ""), ("ba", 2, ""), ("ab", 3, "")])
    assert made.find(ROOT + "ab") == 0  # the first of the same
    assert made.find(ROOT + "ba") == 1
    assert made.find(ROOT + "bb") == made.find(ROOT + "aa") == -1


def test_names_stand_for_store_key_version_and_size() -> None:
    named: list[tuple[str, str, tuple[str, int, str]]] = [
        ("store", PREFIX, ("a/b", 1, "v")), ("stor", PREFIX, ("a/b", 1, "v")), ("store", "trai/", ("a/b", 1, "v")),
        ("store", PREFIX, ("a/c", 1, "v")), ("store", PREFIX, ("a/b", 11, "v")), ("store", PREFIX, ("a/b", 1, "w")),
        ("store", PREFIX, ("a/b", 1, "")), ("store", PREFIX, ("a/bv", 1, "")), ("storet", "rain/", ("a/b", 1, "v")),
    ]  # fmt: skip
    names = {listing_of([one], prefix=prefix).name(0, store) for store, prefix, one in named}
    assert set(map(len, names)) == {16} and len(names) == len(named)
    # They do not depend on how a key is split or where its row is; stages that exist are found by them.
    whole = listing_of([("train/a/b", 1, "v")], "s3://bucket/", "")
    part = listing_of([("x", 5, "y"), ("a/b", 1, "v")])
    assert whole.name(0, "store") == part.name(1, "store")
    assert part.name(1, "store").hex() == "026653f7d1da1a42b6bcce175054157b"


def test_the_digest_stands_for_everything() -> None:
    several: list[Any] = [
        ([("a", 1, "v"), ("b", 2, "w")], ROOT, PREFIX), ([("b", 2, "w"), ("a", 1, "v")], ROOT, PREFIX),
        ([("a", 1, "v")], ROOT, PREFIX), ([("a", 2, "v"), ("b", 2, "w")], ROOT, PREFIX),
        ([("a", 1, "vw"), ("b", 2, "")], ROOT, PREFIX), ([("ab", 1, "v"), ("", 2, "w")], ROOT, PREFIX),
        ([("a", 1, "v"), ("b", 2, "w")], "s3://other/train/", PREFIX),
        ([("a", 1, "v"), ("b", 2, "w")], ROOT, "other/"), ([], ROOT, PREFIX),
    ]  # fmt: skip
    digests = [listing_of(*one).digest for one in several]
    assert set(map(len, digests)) == {16} and len(set(digests)) == len(several)
    assert listing_of(*several[0]).digest == digests[0]


KEY = ListingKey("store", PREFIX, (".jpg",))
FOUND = {
    "cat/": KeptRows(10, Rows.of("cat/", ["1.jpg", "é.jpg"], [1, 2], ["v", ""])),
    "dog/": KeptRows(20, Rows.of("dog/", ["1.jpg"], [3], ["w"])),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListingCache:
    monkeypatch.setattr(kept, "_warned", set())
    return ListingCache(tmp_path / "cache")


def content(found: dict[str, KeptRows]) -> Any:
    return [
        (name, one.listed, list(one.rows.each_path()), one.rows.sizes.tolist(), bytes(one.rows.versions.block),
         one.rows.versions.lengths.tolist())
        for name, one in found.items()
    ]  # fmt: skip


def damage(cache: ListingCache, name: str, change: Callable[[Any], Any]) -> None:
    """Change an array of the kept file, or what it says ``about`` itself; its checksums fit."""
    (path,) = cache.path.iterdir()
    with np.load(path) as file:
        arrays = dict(file)
    if name == "about":
        about = json.loads(arrays[name].tobytes())
        change(about)
        arrays[name] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    else:
        arrays[name] = change(arrays[name])
    np.savez(path, **arrays)


# Besides those of every cache, see tests/contracts/test_caches.py.
DAMAGE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "paths that are not UTF-8": ("paths", lambda array: array | 0x80),
    "short paths": ("paths", lambda array: array[1:]),
    "versions that are not UTF-8": ("versions", lambda array: array | 0x80),
    "negative lengths": ("path_lengths", lambda array: -array),
    "a version less": ("version_lengths", lambda array: array[:2]),
    "sizes of floats": ("sizes", lambda array: array.astype(float)),
    "a size less": ("sizes", lambda array: array[1:]),
    "another version": ("about", lambda about: about["key"].__setitem__(1, 0)),
    "another store": ("about", lambda about: about["key"].__setitem__(2, "other")),
    "a folder less": ("about", lambda about: about["folders"].pop()),
    "a count too high": ("about", lambda about: about["folders"][1].__setitem__(2, 2)),
    "a negative count": ("about", lambda about: about["folders"][1].__setitem__(2, -1)),
    "a count that is none": ("about", lambda about: about["folders"][1].__setitem__(2, "1")),
    "a name that is none": ("about", lambda about: about["folders"][1].__setitem__(0, 7)),
    "a time that is none": ("about", lambda about: about["folders"][1].__setitem__(1, "now")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_listing_is_not_used(cache: ListingCache, name: str) -> None:
    cache.save(KEY, FOUND)
    damage(cache, *DAMAGE[name])
    assert cache.load(KEY) == {}
    cache.save(KEY, FOUND)
    assert content(cache.load(KEY)) == content(FOUND)


@pytest.mark.parametrize("folders", [[7, [1]], [7, "cat"], [7], ["now", ["cat"]], None], ids=repr)
def test_damaged_names_of_folders_are_not_used(cache: ListingCache, folders: Any) -> None:
    cache.save_folders("store", PREFIX, KeptFolders(7, ["cat"]))
    assert cache.load_folders("store", PREFIX) == KeptFolders(7, ["cat"])
    damage(cache, "about", lambda about: about.__setitem__("folders", folders))
    assert cache.load_folders("store", PREFIX) is None


def test_a_folder_that_cannot_be_used_is_one_warning(cache: ListingCache, caplog: Any) -> None:
    cache.path.touch()
    for _ in range(2):
        cache.save(KEY, FOUND)
        assert cache.load(KEY) == {}
    (record,) = caplog.records
    assert "listing of the store is not kept" in record.getMessage()
