"""Objects that are copied whole to a stage: all of any size, once, and nothing is left of a failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastpipe.core.locks import open_file_locks_are_possible
from fastpipe.core.sample_tables import FrozenSamples, offsets_of, pack_paths
from fastpipe.core.types import Store
from fastpipe.errors import StageError, StoreError
from fastpipe.options import Stage
from fastpipe.stores import staged_files as whole
from fastpipe.stores.listing import Listing
from fastpipe.stores.opening import open_store
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)

PART = 64


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "PART", PART)


def opened(place: Path, sizes: Sequence[int], max_bytes: int = 1 << 20) -> tuple[Store, Listing, StageTable]:
    """A store with an object of each size, its listing, and the same in a stage."""
    (place / "far").mkdir(exist_ok=True)
    for row, size in enumerate(sizes):
        (place / "far" / f"{row}").write_bytes(content(size))
    store, location = open_store(place / "far")
    keys = pack_paths("", [str(row) for row in range(len(sizes))])
    paths = FrozenSamples(
        bytes(keys.block), offsets_of(keys.lengths), np.zeros(len(sizes), np.int64), location.store
    )
    listing = Listing(paths, "", np.array(sizes, np.int64), pack_paths("", [""] * len(sizes)))
    folder = StageFolder(Stage(place / "stage", max_bytes=max_bytes))
    table = folder.open_table(listing.digest, listing.sizes, lambda row: listing.name(row, store.name))
    return store, listing, table


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def left(place: Path) -> list[Path]:
    return list((place / "stage/fastpipe-stage/writing").iterdir())


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 5 * PART), st.integers(1, 5))
@example(0, 1)
@example(1, 2)
@example(PART - 1, 2)
@example(PART, 2)
@example(PART + 1, 2)
@example(3 * PART - 1, 2)
@example(3 * PART + 1, 2)
def test_any_size_comes_out_equal(size: int, connections: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        store, listing, table = opened(place, [size])
        path, is_new = whole.copy_whole(store, listing, table, 0, connections)
        assert Path(path).read_bytes() == content(size) and is_new
        assert whole.copy_whole(store, listing, table, 0) == (path, False)
        assert not left(place)
        table.close()


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    store, listing, table = opened(tmp_path, [5 * PART, 1000], max_bytes=900)
    with pytest.raises(StageError, match="no room for a file of 1,000 bytes"):
        whole.copy_whole(store, listing, table, 1)
    (tmp_path / "far" / "0").write_bytes(b"cut")
    with pytest.raises(StoreError, match="another size"):
        whole.copy_whole(store, listing, table, 0)
    table.close()
    folder = StageFolder(Stage(tmp_path / "stage", max_bytes=900))
    assert folder.usage()[:2] == (0, 0) and not left(tmp_path)
    folder.close()


def _copy(place: Path, results: multiprocessing.SimpleQueue[bool] | None) -> None:
    store, listing, table = opened_again(place)
    if results is None:
        store.get_range = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    is_new = whole.copy_whole(store, listing, table, 0)[1]
    assert results is not None
    results.put(is_new)
    table.close()


def opened_again(place: Path) -> tuple[Store, Listing, StageTable]:
    return opened(place, [3 * PART + 5])


def test_processes_that_begin_together_download_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=_copy, args=(tmp_path, results)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert sorted(results.get() for _ in children) == [False, False, True]
    results.close()


def test_who_is_killed_leaves_it_to_the_next(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_copy, args=(tmp_path, None))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and left(tmp_path)
    store, listing, table = opened_again(tmp_path)
    assert not left(tmp_path)
    path, is_new = whole.copy_whole(store, listing, table, 0)
    assert Path(path).read_bytes() == content(3 * PART + 5) and is_new
    table.close()
