"""Arrays in files of NumPy's format, read without NumPy."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kit import boxes_equal, random_array, reader_of, whole

from fastpipe.core.files import lent
from fastpipe.errors import OptionError, VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.raw import RawVolume, npy_volume, raw_unit, read_box
from fastpipe.volumes.volume import DamagedUnitError

KINDS = ["i1", "<i2", ">i4", "<u8", ">u2", "<f2", ">f4", "<f8", "<c8", ">c16", "?"]


def save(path: Path, array: Any, version: tuple[int, int] | None = None) -> Path:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version)
    return path


@settings(max_examples=150)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=5), kind=st.sampled_from(KINDS), is_fortran=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]), seed=st.integers(0, 99), slots=st.integers(1, 4),
)  # fmt: skip
def test_any_array_is_that_of_numpy(
    shape: list[int],
    kind: str,
    is_fortran: bool,
    version: tuple[int, int],
    seed: int,
    slots: int,
    memory_for: Any,
) -> None:
    array = random_array(tuple(shape), kind, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "x.npy", np.asfortranarray(array) if is_fortran else array, version)
        volume = open_volume(path)
        assert volume.shape == array.shape
        if array.dtype.kind in "iufc":  # in the machine's order of bytes
            array = array.astype(array.dtype.newbyteorder("="))
        assert volume.dtype == array.dtype
        assert whole(volume, seed).tobytes() == array.tobytes()
        memory = memory_for(volume, slots)
        boxes_equal(reader_of(volume), array, seed, 4)
        boxes_equal(reader_of(volume, memory.opened()), array, seed, 4)
        memory.close()


@pytest.mark.parametrize("is_fortran", [False, True])
@pytest.mark.parametrize("shape", [(3, 700, 1100), (1 << 20, 3), (2, 1 << 20), (70, 65, 66, 3), (1 << 21,)])
def test_arrays_of_many_units(
    tmp_path: Path, shape: tuple[int, ...], is_fortran: bool, memory_for: Any
) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    volume = open_volume(save(tmp_path / "x.npy", np.asfortranarray(array) if is_fortran else array))
    assert volume.grid.count > 2
    np.testing.assert_array_equal(whole(volume), array)
    memory = memory_for(volume, 3)
    boxes_equal(reader_of(volume), array, 0, 3)
    boxes_equal(reader_of(volume, memory.opened()), array, 1, 3)
    memory.close()


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(1, 3000), min_size=1, max_size=5), itemsize=st.sampled_from([1, 2, 3, 8, 16])
)
def test_units_are_within_the_array_and_of_runs_worth_a_call(shape: list[int], itemsize: int) -> None:
    unit = raw_unit(shape, itemsize)
    assert all(1 <= side <= size for side, size in zip(unit, shape, strict=True))
    total, nbytes = math.prod(shape) * itemsize, math.prod(unit) * itemsize
    assert nbytes <= 1 << 20
    if total <= 1 << 19:
        assert unit == shape
    else:
        assert nbytes >= 1 << 19
    # Elements lie together as far as the last dimension that is not taken as a whole.
    run = itemsize
    for side, size in zip(reversed(unit), reversed(shape), strict=True):
        run *= side
        if side != size:
            break
    assert run >= min(total, 1 << 14)


def test_an_array_that_begins_anywhere(tmp_path: Path) -> None:
    array = np.arange(60, dtype=">i4").reshape(3, 4, 5)
    for offset in (0, 1, 7, 4096):
        (tmp_path / "x").write_bytes(b"\xff" * offset + array.tobytes() + b"behind")
        path, status = os.fspath(tmp_path / "x"), os.stat(tmp_path / "x")
        volume = RawVolume(path, array.shape, array.dtype, offset, False, "raw", status)
        np.testing.assert_array_equal(whole(volume), array)
        turned = RawVolume(path, (5, 4, 3), array.dtype, offset, True, "raw", status, "its name")
        np.testing.assert_array_equal(whole(turned), array.T)
        assert turned.name == "its name"


@settings(max_examples=100)
@given(shape=st.lists(st.integers(1, 6), max_size=5), data=st.data(), offset=st.integers(0, 9))
def test_any_box_is_that_of_the_array(shape: list[int], data: Any, offset: int) -> None:
    array = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    box = []
    for size in shape:
        low = data.draw(st.integers(0, size - 1))
        box.append(slice(low, data.draw(st.integers(low + 1, size))))
    with tempfile.TemporaryFile() as file:
        file.write(b"\xff" * offset + array.tobytes())
        file.flush()
        out = np.zeros([side.stop - side.start for side in box], "<i4")
        read_box(file.fileno(), offset, shape, box, out)
    np.testing.assert_array_equal(out, array[tuple(box)])


def test_arrays_without_dimensions(tmp_path: Path) -> None:
    assert whole(open_volume(save(tmp_path / "x.npy", np.array(2.5)))) == 2.5


def test_arrays_without_elements(tmp_path: Path) -> None:
    volume = open_volume(save(tmp_path / "x.npy", np.zeros((0, 4))))
    assert volume.grid.count == 0
    assert whole(volume).shape == (0, 4)


@pytest.mark.parametrize("is_fortran", [False, True])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, is_fortran: bool) -> None:
    array = np.arange(60.0).reshape(3, 20)
    path = save(tmp_path / "x.npy", np.asfortranarray(array) if is_fortran else array)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(VolumeError, match=str(path)):
            open_volume(path)
    path.write_bytes(content + b"more")  # as numpy.load bears it
    open_volume(path)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "x.npy", np.array([1, "a", None], object))
    with pytest.raises(VolumeError, match=r"x\.npy holds Python objects"):
        open_volume(tmp_path / "x.npy")
    with pytest.raises(OptionError, match="must be an array of numbers"):
        open_volume(np.array([None]))


def test_what_only_begins_like_numpy_s_format_is_an_error(tmp_path: Path) -> None:
    for text in (b"\x93NUMPY", b"\x93NUMPY\1\0", b"\x93NUMPY\1\0\4\0{}  ", b"\x93NUMPY\1\0\xff\xffx"):
        (tmp_path / "x").write_bytes(text)
        with pytest.raises(VolumeError, match="is no array of NumPy's"):
            npy_volume(os.fspath(tmp_path / "x"))


HEADERS = [
    "{'descr': '<f8', 'fortran_order': False, 'shape': (3.0, 4), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': 3, }",
    "{'descr': '<f8', 'fortran_order': 'no', 'shape': (3,), }",
    "{'descr': 'zz', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<f8', 'shape': (3,), }",
    "[1, 2]",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), 'x': 1}",
    "{'descr': '<f8\0', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
    "'unfinished",
    "__import__('os').getpid()",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, -4), }",
    "((((((((",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (3",
    "x = 3\n   y = 4\n z = 3",
]


@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing")
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_damaged_header_is_an_error(tmp_path: Path, header: str, version: int) -> None:
    text = header.encode()
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + bytes(1000))
    with pytest.raises(VolumeError, match=str(tmp_path)):
        open_volume(tmp_path / "x.npy")


def test_names_of_fields_in_any_script_are_read(tmp_path: Path) -> None:
    """NumPy's third version of the format is there for them."""
    array = np.zeros(3, [("größe", "f4"), ("値", "i2")])
    assert npy_volume(os.fspath(save(tmp_path / "x.npy", array, (3, 0)))).dtype == array.dtype


def test_a_version_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    content = bytearray(save(tmp_path / "x.npy", np.zeros(3)).read_bytes())
    content[6] = 9
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(VolumeError, match="is no array of NumPy's"):
        open_volume(tmp_path / "x.npy")


def test_a_file_that_was_changed_since_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.zeros(100))
    volume = open_volume(path)
    reader, outs = volume.open(), [np.zeros(volume.unit_nbytes, np.uint8)]
    reader.read(np.array([0]), outs)
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(VolumeError, match="has changed since it was opened"):
        reader.read(np.array([0]), outs)
    with pytest.raises(VolumeError, match="has changed since it was opened"):
        volume.open()


def test_a_file_that_was_replaced_is_read_on_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.zeros(100))
    volume = open_volume(path)
    reader, out = volume.open(), np.ones(volume.unit_nbytes, np.uint8)
    os.replace(save(tmp_path / "y.npy", np.ones(100)), path)
    reader.read(np.array([0]), [out])
    assert not out.any()
    with pytest.raises(VolumeError, match="has changed since it was opened"):
        volume.open()


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, replaced_after: Any) -> None:
    path, new = save(tmp_path / "x.npy", np.zeros(100)), save(tmp_path / "new.npy", np.ones(2000, "u1"))
    replaced_after("fastpipe.volumes.raw._npy_header", path, new)
    volume = open_volume(path)
    with pytest.raises(VolumeError, match=r"x\.npy has changed since it was opened"):
        whole(volume)


@pytest.mark.hang_after(20)
@pytest.mark.parametrize("name", ["x.npy", "x.tif", "x.nii", "x.nii.gz", "x.h5", "x.b2nd"])
def test_a_fifo_is_an_error_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=rf"Not a regular file: .*{name}"):
        open_volume(tmp_path / name)


def test_a_file_that_ends_within_a_unit_is_damaged_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off between the look at its state and the reading."""
    path = tmp_path / "x.npy"

    @contextmanager
    def cut_off(file: Any, name: str) -> Iterator[int]:
        with lent(file, name) as descriptor:
            os.truncate(path, 1 << 20)
            yield descriptor

    for is_last in (False, True):
        volume = open_volume(save(path, np.zeros((1 << 10, 1 << 10))))
        assert isinstance(volume, RawVolume)
        reader, out = volume.open(), np.zeros(volume.unit_nbytes, np.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(type(reader), "check", lambda self: None)
            patch.setattr("fastpipe.volumes.raw.lent", cut_off)
            if not is_last:
                reader.read(np.array([0]), [out])
                continue
            with pytest.raises(
                DamagedUnitError, match=r"x\.npy, the part at \[.*1024\]: the file ends within"
            ):
                reader.read(np.array([volume.grid.count - 1]), [out])


def test_it_can_be_sent_to_another_process(tmp_path: Path) -> None:
    array = np.arange(24).reshape(4, 6)
    volume = pickle.loads(pickle.dumps(open_volume(save(tmp_path / "x.npy", array))))
    np.testing.assert_array_equal(whole(volume), array)


def test_its_state_is_its_file_s(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.zeros(4))
    before = open_volume(path).state()
    assert before[0] == os.fspath(path)
    assert open_volume(path).state() == before
    assert open_volume(path).state()[1] == before[1]
    save(path, np.zeros(5))
    assert open_volume(path).state() != before


@pytest.mark.parametrize("kind", ["<M8[s]", "S3", "U3", [("a", "f4"), ("b", "i2")]])
def test_elements_that_are_no_numbers_are_refused(tmp_path: Path, kind: Any) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 4), kind))
    with pytest.raises(OptionError, match=r"labels= must be an array of numbers, which .*x\.npy is not"):
        open_volume(tmp_path / "x.npy", "labels")
    with pytest.raises(OptionError, match="labels= must be an array of numbers, got"):
        open_volume(np.zeros((4, 4), kind), "labels")
