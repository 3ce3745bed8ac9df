"""What every reader of volumes and arrays does, for each format: it is compared with the format's own library."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import pkgutil
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_files import FORMATS, write_hdf5, write_tiff
from volume_kit import boxes_equal_with_memory, random_array, reader_of, same_bits, whole

from fastpipe import Cache, FastPatchDataset
from fastpipe.errors import FastpipeError, VolumeError
from fastpipe.sampling import Grid
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import DamagedUnitError

CHANGED = "has changed since it was opened"
FILES = [name for name, form in FORMATS.items() if form.is_file]
DATA = random_array((12, 10, 14), "u1", 3)


@pytest.fixture(scope="module", autouse=True)
def zarr_has_its_threads() -> Iterator[None]:
    """zarr-python starts threads when it is first used, and keeps them: that is to be before any test."""
    with zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1}):
        zarr.create_array({}, shape=(4,), chunks=(2,), dtype="u1")[:] = 1  # type: ignore[arg-type]
        yield


def written(name: str, folder: Path, data: Any = DATA, chunk: Any = (4, 5, 7), **options: Any) -> Any:
    """Writes a file; returns it, and what opens its volume."""
    form = FORMATS[name]
    folder.mkdir(exist_ok=True)
    form.write(folder / form.name, data, chunk, **options)
    return folder / form.name, form.opened_by(folder / form.name)


def opened(opened_by: Any) -> tuple[Any, Callable[[], bytes]]:
    """Opens a volume; returns it, and what reads its first unit."""
    volume = open_volume(opened_by, may_write=True)
    reader, out = volume.open(), np.zeros(volume.unit_nbytes, np.uint8)

    def read() -> bytes:
        reader.read(np.array([0]), [out])
        return out.tobytes()

    return volume, read


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_array_is_as_its_library_reads_it(name: str, data: Any) -> None:
    """All of it, and any box, with room to remember any number of parts; parts never written are filled."""
    form = FORMATS[name]
    rank = data.draw(st.integers(form.least_dims, form.most_dims))
    most = {1: 60, 2: 20, 3: 9, 4: 6}[rank]
    shape = tuple(data.draw(st.integers(2 if form.least_dims > 1 else 1, most)) for _ in range(rank))
    chunk = tuple(data.draw(st.integers(max(1, most // 4), most + 2)) for _ in shape)
    options = {key: data.draw(values) for key, values in form.options.items()}
    if form.has_parts:
        options["rows"] = data.draw(st.one_of(st.none(), st.integers(0, shape[0])))
    seed = data.draw(st.integers(0, 99))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / form.name
        form.write(path, random_array(shape, data.draw(st.sampled_from(form.kinds)), seed), chunk, **options)
        expected = form.read(path)
        volume = open_volume(form.opened_by(path), may_write=True)
        assert volume.shape == expected.shape
        for one in (volume, volume.finer or volume):
            assert same_bits(whole(one, seed), expected)
        boxes_equal_with_memory(volume, expected.astype(volume.dtype), seed, 1 + seed % 7, 3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_volume_can_be_sent_to_another_process(tmp_path: Path, name: str) -> None:
    path, opened_by = written(name, tmp_path)
    volume = pickle.loads(pickle.dumps(open_volume(opened_by, may_write=True)))
    assert same_bits(whole(volume), FORMATS[name].read(path))


@pytest.mark.parametrize("name", FORMATS)
def test_no_file_stays_open(tmp_path: Path, name: str) -> None:
    _, opened_by = written(name, tmp_path)
    whole(open_volume(opened_by, may_write=True))
    gc.collect()
    before = open_files(tmp_path)
    volume = open_volume(opened_by, may_write=True)
    reader = volume.open()
    reader.read(np.arange(1), [np.zeros(volume.unit_nbytes, np.uint8)])
    del reader, volume
    gc.collect()
    while set(open_files(tmp_path)) - set(
        before
    ):  # tensorstore's threads may still close one; see hang_guard
        pass


def open_files(folder: Path) -> list[str]:
    """Files of the folder that this process has open."""
    found = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_state_of_a_volume_changes_with_its_file(tmp_path: Path, name: str) -> None:
    path, opened_by = written(name, tmp_path)
    before = open_volume(opened_by, may_write=True).state()
    assert open_volume(opened_by, may_write=True).state() == before
    if FORMATS[name].is_url:
        assert before == ("", ""), "it is not known"
        return
    written(name, tmp_path / "new", np.concatenate([DATA, DATA]))
    os.rename(path, tmp_path / "old")
    os.rename(tmp_path / "new" / path.name, path)
    assert open_volume(opened_by, may_write=True).state() != before


# ---- damage ---------------------------------------------------------------------------------------


def cut_first_file(path: Path) -> None:
    names = {".zarray", ".zattrs", "zarr.json", "attributes.json"}
    first = min(file for file in path.rglob("*") if file.is_file() and file.name not in names)
    os.truncate(first, first.stat().st_size // 2)


def first_chunk(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file["x"].id.get_chunk_info(0).byte_offset)


def first_strip(path: Path) -> int:
    with tifffile.TiffFile(path) as file:
        return int(file.pages[0].dataoffsets[0])  # type: ignore[union-attr]


def second_chunk(path: Path) -> int:
    content = path.read_bytes()
    first = int.from_bytes(content[11:15], "big")  # c-blosc2 looks at its header when it opens the file
    return first + int.from_bytes(content[first + 12 : first + 16], "little")


# Where a file is damaged, and how it is written; of folders the first file is cut off.
DAMAGES: dict[str, tuple[Callable[[Path], int], dict[str, Any]]] = {
    "hdf5": (first_chunk, {"compression": "gzip"}), "blosc2": (second_chunk, {}),
    "tiff": (first_strip, {"compression": "zlib", "rowsperstrip": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["zarr 2", "zarr 3", "zarr 3, sharded", "n5", "n5 by its URL", *DAMAGES])
def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    find, options = DAMAGES.get(name, (None, {}))
    path, opened_by = written(name, tmp_path, **options)
    volume = open_volume(opened_by)
    if find is None:
        cut_first_file(path)
    else:
        content, at = bytearray(path.read_bytes()), find(path)
        content[at : at + 16] = b"\xff" * 16
        path.write_bytes(content)
        volume = open_volume(opened_by)
    reader, out = reader_of(volume), np.zeros((4, 4, 6), "u1")
    reader.read([8, 5, 8], out)
    np.testing.assert_array_equal(out, DATA[8:12, 5:9, 8:14])
    with pytest.raises(DamagedUnitError, match=path.name.replace(".", r"\.")):
        reader.read([0, 1, 3], out)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path, opened_by = written(name, tmp_path)
    content = path.read_bytes()
    for length in (*range(0, len(content), max(1, len(content) // 25)), len(content) - 1):
        path.write_bytes(content[:length])
        try:
            made = whole(open_volume(opened_by, may_write=True))
        except FastpipeError as error:
            assert path.name in str(error)
        else:  # it ends with bytes that are no values
            assert same_bits(made, FORMATS[name].read(path))


@pytest.mark.hang_after(20)
@pytest.mark.parametrize("name", FILES)
def test_a_fifo_is_an_error_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / FORMATS[name].name
    os.mkfifo(path)
    with pytest.raises(OSError, match=rf"Not a regular file: .*{path.name}"):
        open_volume(path)


JSON_VALUES = [
    0, -1, 1, 7, 1 << 31, 1 << 62, 10**40, 1.5, True, None, "", "x", [], {}, [1], "<f4", ">i4", {"id": "zlib"}
]  # fmt: skip
METADATA = {"zarr 2": ".zarray", "zarr 3": "zarr.json", "n5": "attributes.json"}


def _changed(content: bytes, draw: random.Random, is_json: bool) -> bytes:
    if is_json and draw.random() < 0.7:
        found = json.loads(content)
        key = draw.choice(sorted(found))
        if isinstance(found[key], list) and found[key] and draw.random() < 0.5:
            found[key][draw.randrange(len(found[key]))] = draw.choice(JSON_VALUES)
        else:
            found[key] = draw.choice(JSON_VALUES)
        return json.dumps(found).encode()
    if draw.random() < 0.1:
        return content[: draw.randrange(len(content))]
    made = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at, size = draw.randrange(min(len(made), 400)), draw.choice([1, 2, 4, 8])
        made[at : at + size] = bytes([draw.choice([0, 1, 0x7F, 0x80, 0xFF])] * size)[: len(made) - at]
    return bytes(made)


def _check_changed(tmp_path: Path, name: str, count: int) -> None:
    path, opened_by = written(name, tmp_path, DATA[:, :9].astype("<i4" if name != "nifti" else "<i2"))
    inside = METADATA.get(name, "")
    file, draw = path / inside if inside else path, random.Random(name)
    content = file.read_bytes()
    for number in range(count):
        file.unlink()  # not the same file: a program that has it mapped keeps what it was
        file.write_bytes(_changed(content, draw, bool(inside)))
        try:
            shape = open_volume(opened_by).shape
            if not 0 < np.prod(shape, dtype=float) <= 1 << 20:
                continue
            made = FastPatchDataset(opened_by, shape, sampling=Grid(), cache=Cache("ram", 1 << 20))[0]
        except FastpipeError as error:
            assert path.name in str(error), f"change {number}"
            continue
        try:
            expected = np.asarray(FORMATS[name].read(path))
        except Exception:  # fastpipe does not look at all that the library looks at
            continue
        assert expected.astype(made.dtype).tobytes() == made.tobytes(), f"change {number}"


CHANGED_FORMATS = pytest.mark.parametrize(
    "name", ["zarr 2", "zarr 3", "n5", "numpy", "nifti", "tiff", "blosc2"]
)


@CHANGED_FORMATS
@pytest.mark.hang_after(120)
@pytest.mark.filterwarnings("ignore")
def test_a_changed_file_is_read_as_by_its_library_or_named(tmp_path: Path, name: str) -> None:
    _check_changed(tmp_path, name, 30)


@CHANGED_FORMATS
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_changed_file_is_read_as_by_its_library_or_named(tmp_path: Path, name: str) -> None:
    _check_changed(tmp_path, name, 2000)


# ---- files that change ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_replaced_while_it_is_open_is_noticed_or_read_on_as_it_was(
    tmp_path: Path, name: str
) -> None:
    """Opened anew, it has changed; but not a copy that was unpacked from it.  If it is written to, that is noticed."""
    path, opened_by = written(name, tmp_path)
    _, read = opened(opened_by)
    read()
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(VolumeError, match=CHANGED):
        read()
    volume, read = opened(opened_by)
    before = read()
    new, _ = written(name, tmp_path / "new", np.concatenate([DATA ^ 1, DATA ^ 1]))
    os.replace(new, path)
    try:
        assert read() == before
    except VolumeError as error:
        assert f"{path.name} {CHANGED}" in str(error).replace(opened_by, path.name)
    with pytest.raises(VolumeError, match=CHANGED):
        volume.open().read(np.array([0]), [np.zeros(volume.unit_nbytes, np.uint8)])


def _tiff(folder: Path, data: Any, **options: Any) -> None:
    write_tiff(folder / "x.tif", data, description="x" * 500 * int(data.flat[0]), metadata=None, **options)


def _slices(folder: Path, data: Any) -> None:
    _tiff(folder, data[0], compression="zlib")
    write_tiff(folder / "y.tif", data[0], compression="zlib")


# What returns, of the functions that open a file, before the file is replaced; how it is written; what is opened.
SEAMS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "hdf5": ("fastpipe.volumes.hdf5.read_layout", lambda folder, data: write_hdf5(folder / "x.h5", data, (4, 5, 7)), "x.h5"),
    "hdf5, contiguous": ("fastpipe.volumes.hdf5.read_layout",
                         lambda folder, data: write_hdf5(folder / "x.h5", data, None), "x.h5"),
    "nifti": ("nibabel.load", lambda folder, data: FORMATS["nifti"].write(folder / "x.nii", data), "x.nii"),
    "nifti, packed": ("nibabel.load", lambda folder, data: FORMATS["nifti"].write(folder / "x.nii.gz", data), "x.nii.gz"),
    "numpy": ("fastpipe.volumes.raw._npy_header",
              lambda folder, data: np.save(folder / "x.npy", data if data[0, 0, 0] == 1 else data[:, :5]), "x.npy"),
    "tiff": ("fastpipe.volumes.tiff._is_together", _tiff, "x.tif"),
    "tiff, packed": ("fastpipe.volumes.tiff._segments",
                     lambda folder, data: _tiff(folder, data, compression="zlib"), "x.tif"),
    "tiff, the first slice": ("fastpipe.volumes.tiff._series", _slices, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SEAMS)
def test_a_file_that_is_replaced_while_it_is_opened_is_noticed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write, path = SEAMS[name]
    for number, folder in enumerate(("one", "new")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, np.full((6, 40, 30), number + 1, "u2"))
    function, file = pkgutil.resolve_name(target), path or "x.tif"

    def called(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        if (tmp_path / "new" / file).exists():
            os.replace(tmp_path / "new" / file, tmp_path / "one" / file)
        return found

    monkeypatch.setattr(target, called)
    volume = open_volume(tmp_path / "one" / path, may_write=True)
    with pytest.raises(VolumeError, match=CHANGED):
        whole(volume)


# ---- arrays of odd shapes -------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_an_array_without_elements_is_read_or_refused_by_its_library(tmp_path: Path, name: str) -> None:
    try:
        path, opened_by = written(name, tmp_path, np.zeros((0, 5, 7), "u1"), (4, 5, 7))
        expected = FORMATS[name].read(path)
    except Exception:
        pytest.skip("its library does not write it")
    if math.prod(expected.shape):
        return
    try:
        volume = open_volume(opened_by, may_write=True)
    except VolumeError as error:
        assert path.name in str(error)
    else:
        assert whole(volume).size == 0
