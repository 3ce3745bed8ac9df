"""Arrays that are not compressed: in files of NumPy's format, and in memory."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_files import write_npy
from volume_kit import boxes_equal_with_memory, random_box, whole

from fastpipe import FastPatchDataset
from fastpipe.core.files import lent
from fastpipe.errors import FastpipeError, OptionError, VolumeError
from fastpipe.sampling import Grid
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.raw import MemoryVolume, RawVolume, raw_unit, read_box
from fastpipe.volumes.volume import DamagedUnitError

VOXELS = np.random.default_rng(0).integers(0, 1 << 16, (30, 40, 50), np.uint16)


@pytest.mark.parametrize("is_fortran", [False, True])
@pytest.mark.parametrize("shape", [(3, 700, 1100), (1 << 20, 3), (2, 1 << 20), (70, 65, 66, 3), (1 << 21,)])
def test_arrays_of_many_units_are_those_of_numpy(tmp_path: Path, shape: Any, is_fortran: bool) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    write_npy(tmp_path / "x.npy", array, is_fortran=is_fortran)
    volume = open_volume(tmp_path / "x.npy")
    assert volume.grid.count > 2
    np.testing.assert_array_equal(whole(volume), array)
    boxes_equal_with_memory(volume, array, 0, 3, 3)


@settings(max_examples=120)
@given(
    shape=st.lists(st.integers(1, 3000), min_size=1, max_size=5), itemsize=st.sampled_from([1, 2, 3, 8, 16])
)
def test_units_are_within_the_array_and_of_runs_worth_a_call(shape: list[int], itemsize: int) -> None:
    unit = raw_unit(shape, itemsize)
    assert all(1 <= side <= size for side, size in zip(unit, shape, strict=True))
    total, nbytes = math.prod(shape) * itemsize, math.prod(unit) * itemsize
    assert nbytes <= 1 << 20
    assert unit == shape if total <= 1 << 19 else nbytes >= 1 << 19
    # Elements lie together as far as the last dimension that is not taken as a whole.
    run = itemsize
    for side, size in zip(reversed(unit), reversed(shape), strict=True):
        run *= side
        if side != size:
            break
    assert run >= min(total, 1 << 14)


@settings(max_examples=60)
@given(shape=st.lists(st.integers(1, 6), max_size=5), seed=st.integers(0, 99), offset=st.integers(0, 9))
def test_any_box_of_an_array_that_begins_anywhere_is_read(shape: list[int], seed: int, offset: int) -> None:
    array = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    box = random_box(np.random.default_rng(seed), shape)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\xff" * offset + array.tobytes() + b"behind")
        file.flush()
        out = np.zeros([side.stop - side.start for side in box], "<i4")
        read_box(file.fileno(), offset, shape, box, out)
        np.testing.assert_array_equal(out, array[box])
        status = os.stat(file.name)
        volume = RawVolume(file.name, array.shape, array.dtype, offset, False, "raw", status)
        np.testing.assert_array_equal(whole(volume), array)
        turned = RawVolume(file.name, shape[::-1], array.dtype, offset, True, "raw", status, "its name")
        np.testing.assert_array_equal(whole(turned), array.T)
        assert turned.name == "its name"


@pytest.mark.parametrize("kind", ["O", "<M8[s]", "S3", "U3", [("größe", "f4"), ("値", "i2")]])
def test_elements_that_are_no_numbers_are_refused(tmp_path: Path, kind: Any) -> None:
    """The names of the last one's fields are what NumPy's third version of the format is there for."""
    write_npy(tmp_path / "x.npy", np.zeros((4, 4), kind), version=(3, 0) if isinstance(kind, list) else None)
    error, said = OptionError, r"labels= must be an array of numbers, which .*x\.npy is not"
    if kind == "O":
        error, said = VolumeError, r"x\.npy holds Python objects"  # type: ignore[assignment]
    with pytest.raises(error, match=said):
        open_volume(tmp_path / "x.npy", "labels")
    with pytest.raises(OptionError, match="labels= must be an array of numbers, got"):
        open_volume(np.zeros((4, 4), kind), "labels")


# The description of a type, the order and the shape; or all of a header.
HEADERS = [
    *(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}" for shape in (
        "(3.0, 4)", "3", "(99999999999999999999999,)", "(4611686018427387904,)", "(-1, 4)", "(-3, -4)", "(2**62,)",
        "(0, 1180591620717411303424)", f"({'1,' * 1000})", "(" * 300 + "4,)" * 300)),
    *(f"{{'descr': {kind}, 'fortran_order': False, 'shape': (3, 3), }}" for kind in (
        "'zz'", "'<f8\0'", "'|O'", "__import__('os')", "'|V1000000000'", "{'names': ['a'], 'formats': ['O']}")),
    "{'descr': '<f8', 'fortran_order': 'no', 'shape': (3,), }", "{'descr': '<f8', 'shape': (3,), }", "[1, 2]",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), 'x': 1}", "'unfinished", "__import__('os').getpid()",
    "((((((((", "{'descr': '<f8', 'fortran_order': False, 'shape': (3", "x = 3\n   y = 4\n z = 3",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing")
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_cannot_be_is_named(tmp_path: Path, header: str) -> None:
    text = header.encode()
    for version in (1, 2, 3):
        length = len(text).to_bytes(2 if version == 1 else 4, "little")
        (tmp_path / "x.npy").write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + bytes(64))
        with pytest.raises(FastpipeError, match=r"x\.npy"):
            FastPatchDataset(tmp_path / "x.npy", (1, 1))


@pytest.mark.parametrize("rest", [b"", b"\1\0", b"\1\0\4\0{}  ", b"\1\0\xff\xffx", b"\x09\0\4\0{}  "])
def test_a_file_that_only_begins_like_numpy_s_format_is_an_error(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "x").write_bytes(b"\x93NUMPY" + rest)
    with pytest.raises(VolumeError, match="is not a NumPy array"):
        open_volume(tmp_path / "x")


@pytest.mark.parametrize("number", [0, -1])
def test_a_file_that_ends_within_a_unit_is_damaged_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Cut off between the look at its state and the reading."""

    @contextmanager
    def cut_off(file: Any, name: str) -> Iterator[int]:
        with lent(file, name) as descriptor:
            os.truncate(tmp_path / "x.npy", 1 << 20)
            yield descriptor

    np.save(tmp_path / "x.npy", np.zeros((1 << 10, 1 << 10)))
    volume = open_volume(tmp_path / "x.npy")
    reader, out = volume.open(), np.zeros(volume.unit_nbytes, np.uint8)
    monkeypatch.setattr(type(reader), "check", lambda self: None)
    monkeypatch.setattr("fastpipe.volumes.raw.lent", cut_off)
    said = r"x\.npy, the part at \[.*1024\]: the file ends within"
    with pytest.raises(DamagedUnitError, match=said) if number else nullcontext():
        reader.read(np.arange(volume.grid.count)[[number]], [out])


def mapped(path: Path, mode: Any = "r", order: Any = "C") -> Any:
    """A memmap whose elements begin somewhere in a file, not at a page."""
    path.write_bytes(b"\1" * 10007 + VOXELS.tobytes(order) + b"\2" * 9)
    return np.memmap(path, "u2", mode, 10007, VOXELS.shape, order)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda array: array,
    "box": lambda array: array[3:9, 5:, ::3],
    "backwards": lambda array: array[::-1, 7, ::-2],
    "transposed": lambda array: array.transpose(2, 0, 1)[4:],
    "plain": lambda array: np.asarray(array)[2:][:, 3],
    "repeated": lambda array: np.broadcast_to(array[:, :, None, :9], (30, 40, 6, 9)),
    "one": lambda array: array[3:4, 5:6, 6:7],
    "other elements": lambda array: array.view("i1")[..., 1:6],
}


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_mapped_file_is_mapped_by_other_processes_too(tmp_path: Path, order: str) -> None:
    for name, view in VIEWS.items():
        if name == "other elements" and order == "F":
            continue  # NumPy changes elements along the last dimension only
        array = view(mapped(tmp_path / name, order=order))
        data = pickle.dumps(MemoryVolume(array, "x"))
        assert len(data) < 1000
        volume = pickle.loads(data)
        assert (volume.array.dtype, volume.array.strides) == (array.dtype, array.strides)
        for one in (volume, pickle.loads(pickle.dumps(volume))):
            np.testing.assert_array_equal(one.array, view(VOXELS))
    array = mapped(tmp_path / "changed", "r+")
    found = pickle.loads(pickle.dumps(MemoryVolume(array, "x"))).array
    array[1, 2, 3] = 7
    assert found[1, 2, 3] == 7


def test_an_array_that_is_no_file_is_sent_as_a_copy(tmp_path: Path) -> None:
    changed = mapped(tmp_path / "x", "c")  # copied on write
    changed[0] = 5
    for array in (changed, VOXELS, changed[:, :0], changed + 1):
        data = pickle.dumps(MemoryVolume(array, "x"))
        assert len(data) > array.nbytes
        found = pickle.loads(data).array
        np.testing.assert_array_equal(found, array)
        assert not isinstance(getattr(found, "base", None), np.memmap)


def test_a_field_of_a_packed_structure_is_read() -> None:
    """Its elements are no whole number of elements apart: the native core does not take such memory."""
    structure = np.zeros((6, 8), [("a", "u1"), ("x", "<f4")])
    structure["x"] = np.arange(48).reshape(6, 8)
    assert MemoryVolume(structure["x"], "x").native_source() is None
    dataset = FastPatchDataset(structure["x"], (3, 8), sampling=Grid())
    np.testing.assert_array_equal(np.concatenate([dataset[0], dataset[1]]), structure["x"])


def test_a_dataset_of_a_mapped_file_is_sent_in_few_bytes(tmp_path: Path) -> None:
    array = mapped(tmp_path / "x")
    dataset = FastPatchDataset([(array, array[:])], (4, 4, 4), sampling=Grid(10))
    data = pickle.dumps(dataset)
    assert len(data) < 10_000
    for found, expected in zip(pickle.loads(data), dataset, strict=True):
        np.testing.assert_array_equal(found, expected)
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError, match="x"):
        pickle.loads(data)
