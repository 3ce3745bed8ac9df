"""Objects that are copied whole to a stage: all of any size, once, and nothing is left of a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.core.locks import open_file_locks_are_possible
from fastpipe.core.sample_tables import FrozenSamples, offsets_of, pack_paths
from fastpipe.errors import StageError, StoreError
from fastpipe.options import Stage
from fastpipe.stores import staged_files as whole
from fastpipe.stores.listing import Listing
from fastpipe.stores.opening import open_store
from fastpipe.stores.stage import StageFolder

pytestmark = pytest.mark.skipif(
    not open_file_locks_are_possible(), reason="run it on 64-bit Linux, which has OFD locks"
)

PART = 64
SIZE = 3 * PART + 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "PART", PART)


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


class Copies:
    """A store with an object of each size, its listing, and the same in a stage."""

    def __init__(self, place: Path, sizes: Sequence[int] = (SIZE,), max_bytes: int = 1 << 20) -> None:
        self.place = place
        (place / "far").mkdir(exist_ok=True)
        for row, size in enumerate(sizes):
            if not (place / "far" / f"{row}").exists():  # else another process may be reading it
                (place / "far" / f"{row}").write_bytes(content(size))
        self.store, location = open_store(place / "far")
        keys, count = pack_paths("", [str(row) for row in range(len(sizes))]), np.zeros(len(sizes), np.int64)
        paths = FrozenSamples(bytes(keys.block), offsets_of(keys.lengths), count, location.store)
        self.listing = Listing(paths, "", np.array(sizes, np.int64), pack_paths("", [""] * len(sizes)))
        folder = StageFolder(Stage(place / "stage", max_bytes=max_bytes))
        self.table = folder.open_table(
            self.listing.digest, self.listing.sizes, lambda row: self.listing.name(row, self.store.name)
        )

    def copy(self, row: int = 0, **options: Any) -> tuple[bytes, bool]:
        """The content of the file in the stage, and whether it was downloaded now."""
        path, is_new = whole.copy_whole(self.store, self.listing, self.table, row, **options)
        return Path(path).read_bytes(), is_new

    def unfinished(self) -> list[Path]:
        return list((self.place / "stage/fastpipe-stage/writing").iterdir())


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_a_file_of_any_size_is_copied_once(tmp_path: Path, connections: int) -> None:
    edges = [0, 1, PART - 1, PART, PART + 1, 3 * PART - 1, 3 * PART + 1, 5 * PART]
    sizes = [*edges, *np.random.default_rng(connections).integers(0, 5 * PART, 5).tolist()]
    copies = Copies(tmp_path, sizes)
    for row, size in enumerate(sizes):
        assert copies.copy(row, connections=connections) == (content(size), True)
        assert copies.copy(row) == (content(size), False)
    assert not copies.unfinished()
    copies.table.close()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    copies = Copies(tmp_path, [5 * PART, 1000], max_bytes=900)
    with pytest.raises(StageError, match="no room for a file of 1,000 bytes"):
        copies.copy(1)
    (tmp_path / "far" / "0").write_bytes(b"cut")
    with pytest.raises(StoreError, match="another size"):
        copies.copy(0)
    copies.table.close()
    folder = StageFolder(Stage(tmp_path / "stage", max_bytes=900))
    assert folder.usage()[:2] == (0, 0) and not copies.unfinished()
    folder.close()


def test_processes_that_begin_together_download_once(tmp_path: Path, forked: Any) -> None:
    Copies(tmp_path).table.close()  # which makes the store; no process finds it half made
    read, write = os.pipe()
    begin, begun = os.pipe()

    def copy() -> None:
        os.close(begun)
        os.read(begin, 1)  # until all are there
        os.write(write, b"%d" % Copies(tmp_path).copy()[1])

    children = [forked(copy) for _ in range(3)]
    for descriptor in (begun, begin, write):
        os.close(descriptor)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sorted(os.read(read, 9)) == sorted(b"001")
    os.close(read)


def test_the_next_process_copies_where_one_is_killed(tmp_path: Path, forked: Any) -> None:
    def copy() -> None:
        copies = Copies(tmp_path)
        copies.store.get_range = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
        copies.copy()

    assert os.WTERMSIG(os.waitpid(forked(copy), 0)[1]) == signal.SIGKILL
    assert list((tmp_path / "stage/fastpipe-stage/writing").iterdir())
    copies = Copies(tmp_path)
    assert not copies.unfinished()
    assert copies.copy() == (content(SIZE), True)
    copies.table.close()
