"""Arrays in memory, and what other processes get of those that are files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe import FastPatchDataset
from fastpipe.sampling import Grid
from fastpipe.volumes.raw import MemoryVolume

VOXELS = np.random.default_rng(0).integers(0, 1 << 16, (30, 40, 50), np.uint16)


def mapped(path: Path, mode: Any = "r", order: Any = "C") -> Any:
    """A memmap whose elements begin somewhere in a file, not at a page."""
    with open(path, "wb") as file:
        file.write(b"\1" * 10007 + VOXELS.tobytes(order) + b"\2" * 9)
    return np.memmap(path, "u2", mode, 10007, VOXELS.shape, order)


def sent(array: Any) -> tuple[Any, int]:
    """What another process has of it, and how many bytes were sent."""
    data = pickle.dumps(MemoryVolume(array, "x"))
    return pickle.loads(data).array, len(data)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda array: array,
    "box": lambda array: array[3:9, 5:, ::3],
    "backwards": lambda array: array[::-1, 7, ::-2],
    "transposed": lambda array: array.transpose(2, 0, 1)[4:],
    "plain": lambda array: np.asarray(array)[2:][:, 3],
    "other elements": lambda array: array.view("i1")[..., 1:6],
    "repeated": lambda array: np.broadcast_to(array[:, :, None, :9], (30, 40, 6, 9)),
    "one": lambda array: array[3:4, 5:6, 6:7],
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", VIEWS)
def test_of_a_mapped_file_the_file_is_mapped(tmp_path: Path, name: str, order: str) -> None:
    if name == "other elements" and order == "F":
        order = "C"  # NumPy changes elements along the last dimension only
    array = VIEWS[name](mapped(tmp_path / "x", order=order))
    found, nbytes = sent(array)
    assert nbytes < 1000
    assert found.dtype == array.dtype and found.strides == array.strides
    np.testing.assert_array_equal(found, VIEWS[name](VOXELS))
    again, _ = sent(found)
    np.testing.assert_array_equal(again, found)


def test_a_change_is_seen(tmp_path: Path) -> None:
    array = mapped(tmp_path / "x", "r+")
    found, _ = sent(array)
    array[1, 2, 3] = 7
    assert found[1, 2, 3] == 7


def test_a_field_of_a_packed_structure_is_read() -> None:
    """Its elements are no whole number of elements apart: the native core does not take such memory."""
    structure = np.zeros((6, 8), [("a", "u1"), ("x", "<f4")])
    structure["x"] = np.arange(48).reshape(6, 8)
    assert MemoryVolume(structure["x"], "x").native_source() is None
    dataset = FastPatchDataset(structure["x"], (3, 8), sampling=Grid())
    np.testing.assert_array_equal(np.concatenate([dataset[0], dataset[1]]), structure["x"])


@pytest.mark.parametrize("kind", ["copy on write", "memory", "empty", "calculated"])
def test_of_others_there_is_a_copy(tmp_path: Path, kind: str) -> None:
    array = mapped(tmp_path / "x", "c")
    array[0] = 5
    array = {"copy on write": array, "memory": VOXELS, "empty": array[:, :0], "calculated": array + 1}[kind]
    found, nbytes = sent(array)
    assert nbytes > array.nbytes
    np.testing.assert_array_equal(found, array)
    assert not isinstance(getattr(found, "base", None), np.memmap)


def test_a_dataset_of_a_mapped_file_is_sent_in_few_bytes(tmp_path: Path) -> None:
    array = mapped(tmp_path / "x")
    dataset = FastPatchDataset([(array, array[:])], (4, 4, 4), sampling=Grid(10))
    data = pickle.dumps(dataset)
    assert len(data) < 10_000
    other = pickle.loads(data)
    for index in range(len(dataset)):
        for found, expected in zip(other[index], dataset[index], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    data = pickle.dumps(MemoryVolume(mapped(tmp_path / "x"), "x"))
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError, match="x"):
        pickle.loads(data)
