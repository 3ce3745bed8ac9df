"""``Shuffle``: groups a window at a time; each sample once, each chunk decoded once, resumable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from fastpipe import FastHDF5Dataset, FastLoader, Shuffle
from fastpipe.core.order import grouped_order
from fastpipe.errors import OptionError
from fastpipe.hdf5 import cache as memory

pytestmark = pytest.mark.usefixtures("same_generators")

ROWS, CHUNK = 103, 8
GROUPS = Shuffle(window=3, unit="group")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shuffle") / "x.h5"
    with h5py.File(path, "w") as file:
        rows = np.arange(ROWS)[:, None] * np.ones(40, "i8")
        file.create_dataset("x", data=rows, chunks=(CHUNK, 40), compression="gzip")
        file["plain"] = rows
        file["n"] = np.arange(ROWS)
    return path


def dataset_of(path: Any, **options: Any) -> FastHDF5Dataset:
    return FastHDF5Dataset(path, ["x", "n"], **{"cache": "off", "threads": 2, **options})


def order_of(loader: Any) -> list[int]:
    return [number for batch in loader for number in np.ravel(batch[1]).tolist()]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=20), window=st.integers(1, 25),
    seed=st.integers(-5, 2**64), epoch=st.integers(0, 2**64 - 1), mixed=st.booleans(),
)  # fmt: skip
def test_groups_stay_within_their_windows(
    sizes: list[int], window: int, seed: int, epoch: int, mixed: bool
) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    if mixed:
        groups = np.random.default_rng(0).permutation(groups)
    order = grouped_order(groups, window, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(groups)))
    assert np.array_equal(order, grouped_order(groups, window, seed=seed, epoch=epoch))
    count = int(groups.max(initial=-1)) + 1
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
    assert count <= len(sizes)


def test_the_order_is_pinned() -> None:
    """It must not change between releases: states and results depend on it."""
    groups = np.repeat(np.arange(4), 3)
    assert grouped_order(groups, 2, seed=7, epoch=0).tolist() == PINNED[0]
    assert grouped_order(groups, 2, seed=7, epoch=1).tolist() == PINNED[1]
    assert grouped_order(groups, 2, seed=8, epoch=0).tolist() == PINNED[2]
    assert grouped_order(np.zeros(0, np.int64), 2, seed=7, epoch=0).tolist() == []


PINNED = [
    [1, 10, 9, 0, 2, 11, 3, 4, 6, 7, 8, 5],
    [4, 5, 3, 11, 10, 9, 6, 2, 1, 0, 8, 7],
    [10, 0, 11, 1, 9, 2, 7, 3, 4, 8, 5, 6],
]


@pytest.mark.parametrize("window", [2, 5])
def test_neighbours_share_a_group_with_the_documented_probability(window: int) -> None:
    """Two samples that are neighbours share their group as often as ``Shuffle`` says: one in a window."""
    groups = np.repeat(np.arange(20), 200)
    shared = []
    for epoch in range(20):
        found = groups[grouped_order(groups, window, seed=2, epoch=epoch)]
        shared.append((found[1:] == found[:-1]).mean())
    assert np.mean(shared) == pytest.approx(1 / window, rel=0.05)


def test_windows_that_cannot_be_are_named() -> None:
    for options in ({"window": 0, "unit": "group"}, {"window": -1, "unit": "group"}):
        with pytest.raises(OptionError, match="at least 1"):
            Shuffle(**options)
    for options, message in (
        ({"window": 1.5, "unit": "group"}, "integer or None, got 1.5"),
        ({"window": 4}, "counts groups: give unit='group'"), ({"unit": "chunk"}, "'sample', 'group'; got 'chunk'"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            Shuffle(**options)  # type: ignore[arg-type]
    assert Shuffle(window=np.int64(3), unit="group") == GROUPS
    assert repr(Shuffle()) == "Shuffle()"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 4])
def test_an_epoch_has_each_sample_once_and_decodes_each_chunk_once(
    path: Path, decoded: Any, monkeypatch: pytest.MonkeyPatch, seed: int | None, workers: int
) -> None:
    monkeypatch.setattr(memory, "_LEAST_NBYTES", 0)  # no more room than the window needs
    dataset = dataset_of(path)
    loader = FastLoader(dataset, 10, shuffle=GROUPS, seed=seed, num_workers=workers, workers="processes")
    orders = []
    for epoch in range(1, 4):
        orders.append(order_of(loader))
        assert sorted(orders[-1]) == list(range(ROWS))
        if not workers:
            # What an epoch ends with may still be there when the next begins.
            assert epoch == 1 or decoded(dataset) <= epoch * 13 * CHUNK * 40 * 8
            assert epoch > 1 or decoded(dataset) == 13 * CHUNK * 40 * 8
    assert len(set(map(tuple, orders))) == 3
    if seed is not None:
        expected = grouped_order(np.arange(ROWS) // CHUNK, 3, seed=seed, epoch=0)
        assert orders[0] == expected.tolist()
        again = FastLoader(dataset_of(path, seed=seed), 10, shuffle=GROUPS)
        assert [order_of(again) for _ in range(3)] == orders


def test_chunks_that_reach_beyond_the_data_are_decoded_once(
    tmp_path: Path, decoded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples a little larger than a chunk: what is decoded of a window is much more than its samples."""
    monkeypatch.setattr(memory, "_LEAST_NBYTES", 0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset(
            "x", (160, 17, 17), "f4", data=np.ones((160, 17, 17)), chunks=(4, 16, 16), compression="lzf"
        )
        file["n"] = np.arange(160)
    dataset = dataset_of(tmp_path / "x.h5")
    order = order_of(FastLoader(dataset, 8, shuffle=Shuffle(10, "group"), seed=1))
    assert sorted(order) == list(range(160))
    assert decoded(dataset) == 40 * 4 * (4 * 16 * 16 * 4)


@pytest.mark.parametrize("view", ["Subset", "ConcatDataset", "several files"])
def test_views_and_several_files_have_common_groups(path: Path, decoded: Any, view: str) -> None:
    bases = [dataset_of(path), dataset_of(path)]
    chosen = torch.randperm(ROWS)[:60].tolist()
    dataset: Any = {
        "Subset": Subset(bases[0], chosen),
        "ConcatDataset": ConcatDataset([bases[0], Subset(bases[1], chosen)]),
        "several files": dataset_of([path, path]),
    }[view]
    order = order_of(FastLoader(dataset, 7, shuffle=GROUPS, seed=3))
    everything = {
        "Subset": chosen, "ConcatDataset": [*range(ROWS), *chosen], "several files": [*range(ROWS)] * 2
    }[view]  # fmt: skip
    assert sorted(order) == sorted(everything)
    used = [dataset] if view == "several files" else bases
    files = 2 if view == "several files" else 1
    assert all(decoded(base) <= files * 13 * CHUNK * 40 * 8 for base in used)
    assert Counter(order) == Counter(everything)


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
    for options in ({"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(OptionError, match="and a sampler both define the order"):
            FastLoader(dataset_of(path), shuffle=GROUPS, **options)
