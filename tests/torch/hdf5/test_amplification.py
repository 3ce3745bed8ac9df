"""The warning of an order that decodes each chunk many times: when, once, and with the right figure."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch.utils.data import DataLoader, Subset

from fastpipe import Cache, FastHDF5Dataset, FastLoader, Shuffle
from fastpipe.core.text import in_bytes
from fastpipe.hdf5 import cache as memory

pytestmark = pytest.mark.usefixtures("same_generators")

ROWS, CHUNK, WIDTH = 2000, 40, 50


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("amplification") / "x.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(ROWS)[:, None] * np.ones((1, WIDTH), "i8")
        file.create_dataset("x", data=data, chunks=(CHUNK, WIDTH), compression="gzip")
        file["plain"] = data
    return path


@pytest.fixture(autouse=True)
def little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files were large: only two chunks of fifty are remembered."""
    monkeypatch.setattr(memory, "_LEAST_NBYTES", 2 * CHUNK * WIDTH * 8)


def warned(loader: Any, epochs: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for batch in loader:
                del batch
    return [str(one.message) for one in found]


@pytest.mark.parametrize(("kind", "keys", "size"), [(DataLoader, "x", 64), (FastLoader, ["x", "plain"], 4)])
def test_an_order_that_decodes_much_is_warned_of_once_with_the_figure(
    path: Path, decoded: Any, kind: Any, keys: Any, size: int
) -> None:
    dataset = FastHDF5Dataset(path, keys, cache="off", threads=2)
    texts = warned(kind(dataset, size, shuffle=True), 1)
    texts += warned(kind(dataset, size, shuffle=True), 1)
    assert len(texts) == 1, "once"
    found = re.search(r"(\d+) times as much is decoded as is used", texts[0])
    assert found is not None
    true = decoded(dataset) / (2 * ROWS * WIDTH * 8)
    assert true / 1.5 < int(found[1]) < true * 1.5
    whole = ROWS * WIDTH * 8 * (1 if keys == "x" else 2)  # in memory, what is not compressed is kept too
    for words in (
        str(path),
        "Shuffle(unit='group')",
        f"Cache('ram', max_bytes={whole})",
        in_bytes(whole),
        "not kept (cache='off')",
    ):
        assert words in texts[0]


QUIET: dict[str, Any] = {
    "in order": lambda path: FastLoader(FastHDF5Dataset(path, "x", cache="off"), 16),
    "in order, stock": lambda path: DataLoader(FastHDF5Dataset(path, "x", cache="off"), 16),
    "a part, in order": lambda path: FastLoader(
        Subset(FastHDF5Dataset(path, "x", cache="off"), range(7, ROWS, 3)), 16
    ),
    "windows": lambda path: FastLoader(
        FastHDF5Dataset(path, "x", cache="off"), 16, shuffle=Shuffle(10, "group"), seed=1
    ),
    "kept": lambda path: FastLoader(FastHDF5Dataset(path, "x", cache=Cache("ram", 1 << 22)), 16, shuffle=True),
    "kept from the second use on": lambda path: FastLoader(FastHDF5Dataset(path, "x"), 16, shuffle=True),
    "not compressed": lambda path: FastLoader(FastHDF5Dataset(path, "plain", cache="off"), 16, shuffle=True),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_orders_that_decode_little_are_not_warned_of(path: Path, name: str) -> None:
    assert warned(QUIET[name](path)) == []


def test_a_cache_that_is_too_small_does_not_help(path: Path) -> None:
    texts = warned(FastLoader(FastHDF5Dataset(path, "x", cache=Cache("ram", 1 << 18)), 16, shuffle=True))
    assert len(texts) == 1
    assert "kept in memory, as many as fit" in texts[0]


def test_the_advised_remedies_help(path: Path, decoded: Any) -> None:
    shuffled = FastHDF5Dataset(path, "x", cache="off")
    assert warned(FastLoader(shuffled, 16, shuffle=Shuffle(unit="group")), 1) == []
    assert decoded(shuffled) == ROWS * WIDTH * 8
    kept = FastHDF5Dataset(path, "x", cache=Cache("ram", max_bytes=ROWS * WIDTH * 8))
    assert warned(FastLoader(kept, 16, shuffle=True)) == []
    assert "as many as fit" not in repr(kept)
