"""Orders of rows: ``Shuffle``, and the warning of an order that decodes each chunk many times."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from fastpipe import Cache, FastHDF5Dataset, FastLoader, Shuffle
from fastpipe.core.order import grouped_order
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError
from fastpipe.hdf5 import cache as memory

pytestmark = pytest.mark.usefixtures("same_generators")

ROWS, CHUNK, WIDTH = 2000, 40, 50
NBYTES = ROWS * WIDTH * 8  # of all of a dataset
GROUPS = Shuffle(window=3, unit="group")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orders") / "x.h5"
    with h5py.File(path, "w") as file:
        file["plain"] = rows = np.arange(ROWS)[:, None] * np.ones(WIDTH, "i8")
        file.create_dataset("x", data=rows, chunks=(CHUNK, WIDTH), compression="gzip")
        file["n"] = np.arange(ROWS)
    return path


@pytest.fixture(autouse=True)
def little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files were large: only two chunks of fifty are remembered, or what a window needs."""
    monkeypatch.setattr(memory, "_LEAST_NBYTES", 2 * CHUNK * WIDTH * 8)


def rows_of(path: Any, cache: Any = "off", keys: Any = "x") -> FastHDF5Dataset:
    return FastHDF5Dataset(path, keys, cache=cache, threads=2)


def dataset_of(path: Any) -> FastHDF5Dataset:
    return rows_of(path, keys=["x", "n"])


def order_of(loader: Any) -> list[int]:
    return torch.cat([numbers for _, numbers in loader]).tolist()  # type: ignore[no-any-return]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=20), window=st.integers(1, 25),
    seed=st.integers(-5, 2**64), epoch=st.integers(0, 2**64 - 1), mixed=st.booleans(),
)  # fmt: skip
def test_groups_stay_in_windows(sizes: list[int], window: int, seed: int, epoch: int, mixed: bool) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    if mixed:
        groups = np.random.default_rng(0).permutation(groups)
    order = grouped_order(groups, window, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(groups)))
    assert np.array_equal(order, grouped_order(groups, window, seed=seed, epoch=epoch))
    first, last = {}, {}
    for place, group in enumerate(groups[order].tolist()):
        first.setdefault(group, place)
        last[group] = place
    # Windows in the order in which they come: groups whose spans meet are of one window.
    windows: list[set[int]] = []
    end = -1
    for group in sorted(first, key=first.__getitem__):
        if first[group] > end:
            windows.append(set())
        windows[-1].add(group)
        end = max(end, last[group])
    assert all(len(one) <= window for one in windows)
    assert len(windows) >= -(-len(first) // window)


def test_the_order_is_pinned() -> None:
    """It must not change between releases: states and results depend on it."""
    groups = np.repeat(np.arange(4), 3)
    for seed, epoch, order in (
        (7, 0, [1, 10, 9, 0, 2, 11, 3, 4, 6, 7, 8, 5]), (7, 1, [4, 5, 3, 11, 10, 9, 6, 2, 1, 0, 8, 7]),
        (8, 0, [10, 0, 11, 1, 9, 2, 7, 3, 4, 8, 5, 6]),
    ):  # fmt: skip
        assert grouped_order(groups, 2, seed=seed, epoch=epoch).tolist() == order
    assert grouped_order(np.zeros(0, np.int64), 2, seed=7, epoch=0).tolist() == []


@pytest.mark.parametrize("window", [2, 5])
def test_neighbours_share_a_group_with_the_documented_probability(window: int) -> None:
    """Two samples that are neighbours share their group as often as ``Shuffle`` says: one in a window."""
    groups = np.repeat(np.arange(20), 200)
    orders = (groups[grouped_order(groups, window, seed=2, epoch=epoch)] for epoch in range(20))
    shared = [(found[1:] == found[:-1]).mean() for found in orders]
    assert np.mean(shared) == pytest.approx(1 / window, rel=0.05)


def test_windows_that_cannot_be_are_named() -> None:
    for options, message in (
        ({"window": 0, "unit": "group"}, "at least 1"), ({"window": -1, "unit": "group"}, "at least 1"),
        ({"window": 1.5, "unit": "group"}, "integer or None, got 1.5"),
        ({"window": 4}, "counts groups: give unit='group'"), ({"unit": "chunk"}, "'sample', 'group'; got 'chunk'"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            Shuffle(**options)  # type: ignore[arg-type]
    assert Shuffle(window=np.int64(3), unit="group") == GROUPS
    assert repr(Shuffle()) == "Shuffle()"


def test_an_epoch_decodes_each_chunk_once(path: Path, decoded: Any) -> None:
    dataset = dataset_of(path)
    loader = FastLoader(dataset, 10, shuffle=GROUPS, seed=4)
    for epoch in range(3):
        expected = grouped_order(np.arange(ROWS) // CHUNK, 3, seed=4, epoch=epoch)
        assert order_of(loader) == expected.tolist()
        # What an epoch ends with may still be there when the next begins.
        assert NBYTES <= decoded(dataset) <= (epoch + 1) * NBYTES


def test_chunks_that_reach_beyond_the_data_are_decoded_once(tmp_path: Path, decoded: Any) -> None:
    """Samples a little larger than a chunk: what is decoded of a window is much more than its samples."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = np.ones((160, 17, 17), "f4")
        file.create_dataset("x", data=data, chunks=(4, 16, 16), compression="lzf")
        file["n"] = np.arange(160)
    dataset = dataset_of(tmp_path / "x.h5")
    order = order_of(FastLoader(dataset, 8, shuffle=Shuffle(10, "group"), seed=1))
    assert sorted(order) == list(range(160))
    assert decoded(dataset) == 40 * 4 * (4 * 16 * 16 * 4)


@pytest.mark.parametrize("view", ["Subset", "ConcatDataset", "several files"])
def test_views_and_several_files_have_common_groups(path: Path, decoded: Any, view: str) -> None:
    bases = [dataset_of(path), dataset_of(path)]
    chosen = torch.randperm(ROWS)[:900].tolist()
    several: Any = dataset_of([path, path])
    dataset, everything = {
        "Subset": (Subset(bases[0], chosen), chosen),
        "ConcatDataset": (ConcatDataset([bases[0], Subset(bases[1], chosen)]), [*range(ROWS), *chosen]),
        "several files": (several, [*range(ROWS)] * 2),
    }[view]
    assert sorted(order_of(FastLoader(dataset, 7, shuffle=GROUPS, seed=3))) == sorted(everything)
    for base, files in ((several, 2), (bases[0], 1), (bases[1], 1)):
        assert decoded(base) <= files * NBYTES


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_datasets_without_groups_are_refused(path: Path) -> None:
    rows = TensorDataset(torch.arange(3))
    for dataset in (rows, Subset(rows, [0]), ConcatDataset([dataset_of(path), rows])):
        with pytest.raises(OptionError, match="those of a TensorDataset are not: use shuffle=True"):
            FastLoader(dataset, shuffle=GROUPS)
    with pytest.raises(OptionError, match="an IterableDataset has none"):
        FastLoader(_Stream(), shuffle=GROUPS)


# ---- the warning ----------------------------------------------------------------------------------


def warned(loader: Any, epochs: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(epochs):
            list(loader)
    return [str(one.message) for one in found]


@pytest.mark.parametrize(("kind", "keys", "size"), [(DataLoader, "x", 64), (FastLoader, ["x", "plain"], 4)])
def test_an_order_that_decodes_much_is_warned_of_once_with_the_figure(
    path: Path, decoded: Any, kind: Any, keys: Any, size: int
) -> None:
    dataset = rows_of(path, keys=keys)
    (text,) = sum((warned(kind(dataset, size, shuffle=True), 1) for _ in range(2)), [])
    found = re.search(r"(\d+) times as much is decoded as is used", text)
    assert found is not None
    true = decoded(dataset) / (2 * NBYTES)
    assert true / 1.5 < int(found[1]) < true * 1.5
    whole = NBYTES * (1 if keys == "x" else 2)  # in memory, what is not compressed is kept too
    remedies = "Shuffle(unit='group')", f"Cache('ram', max_bytes={whole})"
    for words in (str(path), *remedies, in_bytes(whole), "not kept (cache='off')"):
        assert words in text


QUIET: dict[str, Any] = {
    "in order": lambda path: FastLoader(rows_of(path), 16),
    "in order, stock": lambda path: DataLoader(rows_of(path), 16),
    "a part, in order": lambda path: FastLoader(Subset(rows_of(path), range(7, ROWS, 3)), 16),
    "windows": lambda path: FastLoader(rows_of(path), 16, shuffle=Shuffle(10, "group"), seed=1),
    "kept": lambda path: FastLoader(rows_of(path, Cache("ram", 1 << 22)), 16, shuffle=True),
    "kept from the second use on": lambda path: FastLoader(rows_of(path, "auto"), 16, shuffle=True),
    "not compressed": lambda path: FastLoader(rows_of(path, keys="plain"), 16, shuffle=True),
}


@pytest.mark.parametrize("name", QUIET)
def test_orders_that_decode_little_are_not_warned_of(path: Path, name: str) -> None:
    assert warned(QUIET[name](path)) == []


def test_a_cache_that_is_too_small_does_not_help(path: Path) -> None:
    (text,) = warned(FastLoader(rows_of(path, Cache("ram", 1 << 18)), 16, shuffle=True))
    assert "kept in memory, as many as fit" in text


def test_the_advised_remedies_help(path: Path, decoded: Any) -> None:
    shuffled = rows_of(path)
    assert warned(FastLoader(shuffled, 16, shuffle=Shuffle(unit="group")), 1) == []
    assert decoded(shuffled) == NBYTES
    kept = rows_of(path, Cache("ram", max_bytes=NBYTES))
    assert warned(FastLoader(kept, 16, shuffle=True)) == []
    assert "as many as fit" not in repr(kept)
