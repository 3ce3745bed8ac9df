"""``group_batches`` and ``segment_reduce``: evaluation by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fastpipe import FastHDF5Dataset, group_batches, segment_reduce
from fastpipe.errors import OptionError


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of recordings (4 and 3) of 6 segments, each of 2 channels."""
    folder = tmp_path_factory.mktemp("groups")
    for number, rows in enumerate((4, 3)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["n"] = values = np.arange(rows * 12).reshape(rows, 6, 2) + 1000 * number
            file.create_dataset("x", data=values, chunks=(3, 4, 2), compression="gzip")
    return [folder / "0.h5", folder / "1.h5"]


@pytest.mark.parametrize(("k", "workers"), [(1, 0), (3, 1), (100, 0)])
def test_a_batch_has_k_whole_groups(k: int, workers: int) -> None:
    groups = np.random.default_rng(k).integers(-3, 5, 40)
    dataset = TensorDataset(torch.arange(40))
    batches = group_batches(dataset, k, groups=groups, num_workers=workers)
    ids = np.unique(groups).tolist()
    assert len(batches) == -(-len(ids) // k)
    for _ in range(2):
        found = [(values[0].tolist(), numbers.tolist()) for values, numbers in batches]
        assert [sorted(set(numbers)) for _, numbers in found] == [
            ids[first : first + k] for first in range(0, len(ids), k)
        ]
        for values, numbers in found:
            assert numbers == sorted(numbers)
            assert groups[values].tolist() == numbers
            for one in set(numbers):  # in the dataset's order
                mine = [value for value, number in zip(values, numbers, strict=True) if number == one]
                assert mine == np.flatnonzero(groups == one).tolist()


def test_files_and_rows_of_views_are_groups(paths: list[Path]) -> None:
    rows = list(group_batches(FastHDF5Dataset(paths, "n"), 1))
    assert [ids.tolist() for _, ids in rows] == [[0] * 4, [1] * 3]
    assert [int(values[0, 0, 0]) for values, _ in rows] == [0, 1000]
    cells = list(group_batches(FastHDF5Dataset(paths, "x", sample_dims=2), 2))
    assert [sorted(set(ids.tolist())) for _, ids in cells] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [len(ids) for _, ids in cells] == [12, 12, 12, 6]
    one, two = (FastHDF5Dataset(path, "n", sample_dims=2) for path in paths)
    part = list(group_batches(Subset(one, [23, 0, 7, 1]), 2))
    assert [ids.tolist() for _, ids in part] == [[0, 0, 1], [3]]
    assert [int(values[0, 0]) for values, _ in part] == [0, 46]
    [(values, ids)] = group_batches(ConcatDataset([one, Subset(two, range(6, 18))]), 100)
    assert ids.tolist() == sorted([0, 1, 2, 3, 5, 6] * 6)
    assert int(values[24, 0]) == 1012


def test_groups_that_cannot_work_are_named(paths: list[Path]) -> None:
    dataset = TensorDataset(torch.arange(4))
    for k in (0, -1):
        with pytest.raises(OptionError, match=f"a number from 1, got {k}"):
            group_batches(dataset, k, groups=[0, 0, 1, 1])
    beyond = np.arange(4, dtype=np.uint64) + 2**63
    for groups in ([0, 1], beyond, [[0, 1, 2, 3]], [0.0, 1, 2, 3], list("abcd")):
        with pytest.raises(OptionError, match="one integer for each of the 4 samples"):
            group_batches(dataset, 1, groups=groups)
    for one in (dataset, Subset(dataset, [1])):
        with pytest.raises(OptionError, match=r"this TensorDataset does not know the file .* pass groups="):
            group_batches(one, 1)
    with pytest.raises(OptionError, match="this FastHDF5Dataset does not know"):
        group_batches(FastHDF5Dataset(paths[0], "n"), 1)
    with pytest.raises(OptionError, match="bad_samples='skip' leaves samples out"):
        group_batches(FastHDF5Dataset(paths, "n", bad_samples="skip"), 1)
    assert len(group_batches(FastHDF5Dataset(paths, "n", bad_samples="replace"), 1)) == 2


@settings(max_examples=80)
@given(
    groups=st.lists(st.integers(-3, 4), min_size=1, max_size=12), inner=st.lists(st.integers(1, 3), max_size=2),
    how=st.sampled_from(["mean", "max", "vote"]), dtype=st.sampled_from(["f4", "f8", "i8", "i2", "u1"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_segment_reduce_is_what_a_loop_makes(
    groups: list[int], inner: list[int], how: Any, dtype: str, seed: int
) -> None:
    if how == "vote":  # few values, so that there are ties
        inner, dtype = inner[:1], dtype if inner else "i8"
    values = np.random.default_rng(seed).integers(0, 4, (len(groups), *inner)).astype(dtype)
    ids, expected = sorted(set(groups)), []
    for one in ids:  # the loop
        mine = values[[place for place, group in enumerate(groups) if group == one]]
        votes = np.bincount(mine.argmax(1) if mine.ndim == 2 else mine) if how == "vote" else None
        expected.append(getattr(mine, how)(0) if votes is None else int(votes.argmax()))
    found = segment_reduce(torch.from_numpy(values), torch.tensor(groups), how)
    assert found.groups.tolist() == ids
    assert (found.groups.dtype, len(found.values)) == (torch.int64, len(ids))
    np.testing.assert_allclose(found.values.numpy(), np.array(expected), rtol=1e-6)
    if how == "vote":
        assert found.values.dtype == torch.int64
    elif how == "max" or dtype[0] == "f":
        assert found.values.dtype == torch.from_numpy(values).dtype
    else:
        assert found.values.dtype == torch.get_default_dtype()


def test_nan_and_infinity_are_kept() -> None:
    values, groups = torch.tensor([1.0, float("nan"), 2.0, float("inf"), -1.0]), torch.tensor([0, 0, 1, 1, 2])
    for how in ("mean", "max"):
        found = segment_reduce(values, groups, how).values  # type: ignore[arg-type]
        assert torch.isnan(found[0])
        assert found[1:].tolist() == [float("inf"), -1.0]


@pytest.mark.parametrize(
    ("values", "groups", "how", "message"),
    [
        (torch.zeros(3), [0, 0], "mean", r"got \(3,\) and \(2,\)"), (torch.tensor(3.0), [0], "mean", r"got \(\) and \(1,\)"),
        (torch.zeros(3), [[0], [0], [0]], "max", r"got \(3,\) and \(3, 1\)"),
        (torch.zeros(3), [0, 0, 0], "median", "'mean', 'max', 'vote'; got 'median'"),
        (torch.zeros(3), [0, 0, 0], "vote", r"got torch.float32 of shape \(3,\)"),
        (torch.zeros(3, 2, 2), [0, 0, 0], "vote", "scores"), (torch.zeros(2, 0), [0, 0], "vote", "at least one class"),
        (torch.tensor([1, -1]), [0, 0], "vote", "from 0, got -1"),
        (torch.zeros(2), [0.0, 0.0], "mean", "groups of integers, got torch.float32"),
        (torch.zeros(2), [True, False], "mean", "groups of integers, got torch.bool"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_named(values: Any, groups: Any, how: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        segment_reduce(values, torch.tensor(groups), how)
