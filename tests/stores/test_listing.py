"""What a store's listing says of each sample, and how it is kept on disk."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core import array_cache as kept
from fastpipe.core.sample_tables import FrozenSamples, offsets_of
from fastpipe.stores import listing
from fastpipe.stores.listing import KeptFolders, KeptRows, Listing, ListingCache, ListingKey, Rows

ROOT, PREFIX = "s3://bucket/train/", "train/"

texts = st.text(st.sampled_from("ab/\0é日\U0001f40d\udcff."), max_size=6)
objects = st.lists(
    st.tuples(texts.filter(bool), st.integers(0, 2**50), texts), max_size=30, unique_by=lambda one: one[0]
)


def listing_of(found: list[tuple[str, int, str]], root: str = ROOT, prefix: str = PREFIX) -> Listing:
    rows = Rows.of("", *columns(found))
    offsets = offsets_of(rows.paths.lengths)
    paths = FrozenSamples(bytes(rows.paths.block), offsets, np.zeros(len(rows), np.int64), root)
    return Listing(paths, prefix, rows.sizes, rows.versions)


def columns(found: list[tuple[str, int, str]]) -> tuple[list[str], list[int], list[str]]:
    return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]


@given(objects, texts)
@settings(deadline=None)
def test_it_holds_what_was_listed(found: list[tuple[str, int, str]], other: str) -> None:
    made = listing_of(found)
    for same in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert len(same) == len(found)
        assert same.sizes.tolist() == [size for _, size, _ in found]
        for row, (rest, size, version) in enumerate(found):
            assert (same.key(row), same.size(row), same.version(row)) == (PREFIX + rest, size, version)
            assert same.path(row) == ROOT + rest
            assert same.find(ROOT + rest) == row
            assert same.find(rest) == same.find(PREFIX + rest) == same.find(ROOT + rest + "x") == -1
        if other not in [rest for rest, _, _ in found]:
            assert same.find(ROOT + other) == -1
        with pytest.raises(ValueError, match="read-only"):
            same.sizes[:] = 0


def test_paths_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "hash", sum, raising=False)  # of all bytes
    made = listing_of([("ab", 1, ""), ("ba", 2, ""), ("ab", 3, "")])
    assert made.find(ROOT + "ab") == 0  # the first of the same
    assert made.find(ROOT + "ba") == 1
    assert made.find(ROOT + "bb") == made.find(ROOT + "aa") == -1


NAMED: list[tuple[str, str, tuple[str, int, str]]] = [
    ("store", PREFIX, ("a/b", 1, "v")),
    ("stor", PREFIX, ("a/b", 1, "v")),
    ("store", "trai/", ("a/b", 1, "v")),
    ("store", PREFIX, ("a/c", 1, "v")),
    ("store", PREFIX, ("a/b", 11, "v")),
    ("store", PREFIX, ("a/b", 1, "w")),
    ("store", PREFIX, ("a/b", 1, "")),
    ("store", PREFIX, ("a/bv", 1, "")),
    ("storet", "rain/", ("a/b", 1, "v")),
]


def test_names_stand_for_store_key_version_and_size() -> None:
    names = [listing_of([one], prefix=prefix).name(0, store) for store, prefix, one in NAMED]
    assert {len(name) for name in names} == {16}
    assert len(set(names)) == len(NAMED)


def test_names_do_not_depend_on_how_a_key_is_split_or_where_its_row_is() -> None:
    whole = listing_of([("train/a/b", 1, "v")], "s3://bucket/", "")
    part = listing_of([("x", 5, "y"), ("a/b", 1, "v")])
    assert whole.name(0, "store") == part.name(1, "store")
    # Stages that exist already are found by these names.
    assert part.name(1, "store").hex() == "026653f7d1da1a42b6bcce175054157b"


def test_the_digest_stands_for_everything() -> None:
    several: list[Any] = [
        ([("a", 1, "v"), ("b", 2, "w")], ROOT, PREFIX),
        ([("b", 2, "w"), ("a", 1, "v")], ROOT, PREFIX),
        ([("a", 1, "v")], ROOT, PREFIX),
        ([("a", 2, "v"), ("b", 2, "w")], ROOT, PREFIX),
        ([("a", 1, "vw"), ("b", 2, "")], ROOT, PREFIX),
        ([("ab", 1, "v"), ("", 2, "w")], ROOT, PREFIX),
        ([("a", 1, "v"), ("b", 2, "w")], "s3://other/train/", PREFIX),
        ([("a", 1, "v"), ("b", 2, "w")], ROOT, "other/"),
        ([], ROOT, PREFIX),
    ]
    digests = [listing_of(*one).digest for one in several]
    assert {len(digest) for digest in digests} == {16}
    assert len(set(digests)) == len(several)
    assert listing_of(*several[0]).digest == digests[0]
    assert pickle.loads(pickle.dumps(listing_of(*several[0]))).digest == digests[0]


def test_it_is_small_and_shares_the_paths() -> None:
    made = listing_of([(f"class/{number:058d}.jpg", number, f'"{number:032x}"') for number in range(10_000)])
    both = len(pickle.dumps((made.paths, made)))
    assert both - len(pickle.dumps(made.paths)) < 10_000 * 51  # 8 of size, 34 + 8 of version


def test_rows_can_be_joined_and_taken() -> None:
    first, second = Rows.of("x/", ["b", "é"], [1, 2], ["v", ""]), Rows.of("", ["a"], [3], ["w"])
    both = Rows.joined([first, second])
    assert list(both.each_path()) == ["x/b", "x/é", "a"]
    taken = both.taken([2, 1])
    made = Listing(
        FrozenSamples(bytes(taken.paths.block), offsets_of(taken.paths.lengths), np.zeros(2, np.int64)),
        "", taken.sizes, taken.versions,
    )  # fmt: skip
    assert [(made.key(row), made.size(row), made.version(row)) for row in (0, 1)] == [
        ("a", 3, "w"),
        ("x/é", 2, ""),
    ]
    assert len(both.taken([])) == len(Rows.joined([])) == 0


# ---- kept on disk ------------------------------------------------------------------------------

KEY = ListingKey("store", PREFIX, (".jpg",))
FOUND = {
    "cat/": KeptRows(10, Rows.of("cat/", ["1.jpg", "é.jpg"], [1, 2], ["v", ""])),
    "dog/": KeptRows(20, Rows.of("dog/", ["1.jpg"], [3], ["w"])),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListingCache:
    monkeypatch.setattr(kept, "_warned", set())
    return ListingCache(tmp_path / "cache")


def shown(found: dict[str, KeptRows]) -> Any:
    return [
        (name, kept.listed, list(kept.rows.each_path()), kept.rows.sizes.tolist(), bytes(kept.rows.versions.block),
         kept.rows.versions.lengths.tolist())
        for name, kept in found.items()
    ]  # fmt: skip


def test_what_is_kept_is_found(cache: ListingCache) -> None:
    assert cache.load(KEY) == {}
    assert cache.load_folders("store", PREFIX) is None
    cache.save(KEY, FOUND)
    cache.save_folders("store", PREFIX, KeptFolders(7, ["dog", "cat"]))
    assert shown(cache.load(KEY)) == shown(FOUND)
    assert cache.load_folders("store", PREFIX) == KeptFolders(7, ["dog", "cat"])
    for key in (KEY._replace(store="other"), KEY._replace(prefix=""), KEY._replace(endings=(".png",))):
        assert cache.load(key) == {}
    assert cache.load_folders("other", PREFIX) is None
    assert cache.load_folders("store", "") is None


def test_nothing_is_kept_as_nothing(cache: ListingCache) -> None:
    cache.save(KEY, {})
    cache.save_folders("store", PREFIX, KeptFolders(7, []))
    assert cache.load(KEY) == {}
    assert cache.load_folders("store", PREFIX) is None


def rewritten(path: Path, **members: Any) -> None:
    """Put other arrays into a kept file, with checksums that fit."""
    with np.load(path) as file:
        arrays = {**file, **members}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def with_json(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = json.loads(np.load(path)["about"].tobytes())
        change(content)
        rewritten(path, about=np.frombuffer(json.dumps(content).encode(), dtype=np.uint8))

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "a byte": lambda path: path.write_bytes(path.read_bytes().replace("é.jpg".encode(), b"ee.jpg")),
    "another zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "no paths": lambda path: rewritten(path, paths=None),
    "no JSON": lambda path: rewritten(path, about=np.frombuffer(b"{", dtype=np.uint8)),
    "other JSON": lambda path: rewritten(path, about=np.frombuffer(b"[1]", dtype=np.uint8)),
    "paths that are not UTF-8": lambda path: rewritten(path, paths=np.load(path)["paths"] | 0x80),
    "short paths": lambda path: rewritten(path, paths=np.load(path)["paths"][1:]),
    "versions that are not UTF-8": lambda path: rewritten(path, versions=np.load(path)["versions"] | 0x80),
    "negative lengths": lambda path: rewritten(path, path_lengths=-np.load(path)["path_lengths"]),
    "a version less": lambda path: rewritten(path, version_lengths=np.load(path)["version_lengths"][:2]),
    "sizes of floats": lambda path: rewritten(path, sizes=np.load(path)["sizes"].astype(float)),
    "a size less": lambda path: rewritten(path, sizes=np.load(path)["sizes"][1:]),
    "another version": with_json(lambda content: content["key"].__setitem__(1, 0)),
    "another store": with_json(lambda content: content["key"].__setitem__(2, "other")),
    "a folder less": with_json(lambda content: content["folders"].pop()),
    "a count too high": with_json(lambda content: content["folders"][1].__setitem__(2, 2)),
    "a negative count": with_json(lambda content: content["folders"][1].__setitem__(2, -1)),
    "a count that is none": with_json(lambda content: content["folders"][1].__setitem__(2, "1")),
    "a name that is none": with_json(lambda content: content["folders"][1].__setitem__(0, 7)),
    "a time that is none": with_json(lambda content: content["folders"][1].__setitem__(1, "now")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_none(cache: ListingCache, name: str) -> None:
    cache.save(KEY, FOUND)
    (path,) = cache.path.iterdir()
    DAMAGE[name](path)
    assert cache.load(KEY) == {}
    cache.save(KEY, FOUND)
    assert shown(cache.load(KEY)) == shown(FOUND)


@pytest.mark.parametrize("folders", [[7, [1]], [7, "cat"], [7], ["now", ["cat"]], None], ids=repr)
def test_damaged_names_are_none(cache: ListingCache, folders: Any) -> None:
    cache.save_folders("store", PREFIX, KeptFolders(7, ["cat"]))
    (path,) = cache.path.iterdir()
    with_json(lambda content: content.__setitem__("folders", folders))(path)
    assert cache.load_folders("store", PREFIX) is None


def test_a_folder_that_cannot_be_used_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(io.BytesIO().getvalue())
    cache = ListingCache(path)
    for _ in range(2):
        cache.save(KEY, FOUND)
        assert cache.load(KEY) == {}
    (record,) = caplog.records
    assert "listing of the store is not kept" in record.getMessage()
