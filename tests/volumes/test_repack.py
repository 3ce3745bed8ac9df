"""Copies of volumes as Zarr arrays: their values, their options, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tracemalloc
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_files import write_n5, write_nifti

from fastpipe.cli import main
from fastpipe.console import sides, size
from fastpipe.errors import OptionError
from fastpipe.volumes import repack as repacking
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.repack import Codec, ZarrLayout
from fastpipe.volumes.volume import UnitGrid

Repack = Callable[..., tuple[int, str, str]]
VOXELS = np.random.default_rng(0).integers(0, 3000, (40, 50, 61), np.uint16)
KINDS = ["?", "i1", "<u2", ">i4", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16"]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other programs have written need not be on the disk for a test; zarr-python's threads end with it."""
    monkeypatch.setattr(os, "sync", lambda: None)
    yield
    zarr.core.sync.cleanup_resources()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "in.npy", VOXELS)
    return tmp_path / "in.npy"


@pytest.fixture
def out(source: Path) -> Path:
    return source.with_name("out.zarr")


@pytest.fixture
def run(source: Path, out: Path, repack: Repack) -> Repack:
    return partial(repack, source, out)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has something done before the copy is compared."""
    real = repacking._check_copy

    def do(work: Callable[[], object]) -> None:
        monkeypatch.setattr(repacking, "_check_copy", lambda *some: (work(), real(*some))[1])

    return do


def refused(result: tuple[int, str, str]) -> str:
    code, output, errors = result
    assert (code, output) == (2, "")
    line = errors.splitlines()[-1]
    assert line.startswith("fastpipe repack: ")
    return line


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copied(path: Path) -> Any:
    return zarr.open_array(path, mode="r")


def chunks_of(path: Path) -> set[str]:
    return {name for name in content(path) if name.startswith("c/")}


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


def test_the_result_is_printed_at_the_end(out: Path, run: Repack) -> None:
    code, output, errors = run("--chunks", "16,16,16")
    assert (code, errors) == (0, "")
    assert re.fullmatch(
        rf"{out}: 238 KiB → \d+ KiB \([\d.]+× of what is decoded\); 48 chunks in [\d.]+ s "
        r"\([\d.]+ [KM]iB/s\), every one read back and equal\n",
        output,
    )
    assert names(out) == ["in.npy", "out.zarr"]


@pytest.mark.parametrize(
    ("kind", "codec"), list(zip(KINDS, itertools.cycle(["blosc-zstd", "zstd", "none"]), strict=False))
)
def test_zarr_python_reads_the_copy(tmp_path: Path, repack: Repack, kind: str, codec: str) -> None:
    rng = np.random.default_rng(1)
    array = rng.integers(0, 2, (9, 11, 10)) if kind == "?" else rng.normal(0, 50, (9, 11, 10))
    with np.errstate(invalid="ignore"):
        array = array.astype(kind)
    np.save(tmp_path / "in.npy", array)
    assert repack(tmp_path / "in.npy", tmp_path / "o.zarr", "--chunks", "4,5,3", "--codec", codec)[0] == 0
    copy = copied(tmp_path / "o.zarr")
    assert copy.dtype == array.dtype.newbyteorder("=") and copy.chunks == (4, 5, 3)
    assert bits(copy[:]) == bits(array)
    assert np.dtype(open_volume(tmp_path / "o.zarr").dtype).itemsize == array.itemsize


@settings(max_examples=25)
@given(data=st.data())
def test_any_shape_is_copied_in_any_chunks(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    chunk = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=len(shape)))
    array = np.random.default_rng(0).integers(0, 9, shape, np.int16)
    np.save(folder / "in.npy", np.asfortranarray(array) if data.draw(st.booleans()) else array)
    arguments = ["--chunks", ",".join(map(str, chunk)), "--threads", str(data.draw(st.integers(1, 3)))]
    assert main(["repack", str(folder / "in.npy"), str(folder / "o.zarr"), *arguments]) == 0
    copy = copied(folder / "o.zarr")
    np.testing.assert_array_equal(copy[:], array)
    whole = [1] * (len(shape) - len(chunk)) + chunk
    assert copy.chunks == tuple(map(min, whole, shape))


def _zarr(path: Path, version: int) -> Path:
    options: dict[str, Any] = {} if version == 2 else {"dimension_names": ["z", "y", "x"]}
    array = zarr.create_array(
        path, shape=VOXELS.shape, dtype="uint16", chunks=(7, 50, 20), zarr_format=version,
        attributes={"voxel_nm": [30, 8, 8]}, fill_value=7, **options,
    )  # fmt: skip
    array[:21] = VOXELS[:21]
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_and_attributes_are_copied(tmp_path: Path, repack: Repack, version: int) -> None:
    source = _zarr(tmp_path / "in.zarr", version)
    assert repack(source, tmp_path / "out.zarr", "--chunks", "16,16,16")[0] == 0
    copy = copied(tmp_path / "out.zarr")
    np.testing.assert_array_equal(copy[:21], VOXELS[:21])
    assert (copy[21:] == 7).all() and copy.fill_value == 7
    # What was never written is not written now.
    chunks = chunks_of(tmp_path / "out.zarr")
    assert len(chunks) == 2 * 4 * 4 and {name[:4] for name in chunks} == {"c/0/", "c/1/"}
    assert dict(copy.attrs) == {"voxel_nm": [30, 8, 8]}
    assert copy.metadata.dimension_names == (("z", "y", "x") if version == 3 else None)


NOTED = {
    "_FillValue": math.nan, "range": [-math.inf, math.inf], "id": [1 << 64, -(1 << 80)], "name": "µ\udcb5\0",
    "": {"deep": [None, True, 0.1, -0.0, {}]},
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("names", [["x", "x", None], ["", "y", "y"], [1, None, {"a": []}], "zyx", ["z"]])
@pytest.mark.parametrize("version", [2, 3])
def test_any_attributes_and_names_of_dimensions_are_kept(
    tmp_path: Path, repack: Repack, version: int, names: Any
) -> None:
    source = _zarr(tmp_path / "in.zarr", version)
    if version == 3:
        content = json.loads((source / "zarr.json").read_text()) | {"attributes": NOTED}
        (source / "zarr.json").write_text(json.dumps(content | {"dimension_names": names}))
    else:
        (source / ".zattrs").write_text(json.dumps(NOTED | {"_ARRAY_DIMENSIONS": names}))
    assert repack(source, tmp_path / "out.zarr", "--chunks", "16,16,16")[::2] == (0, "")
    found = json.loads((tmp_path / "out.zarr" / "zarr.json").read_text())
    is_kept = len(names) == 3 and isinstance(names, list)
    # Those that version 3 has not stay what they were in version 2, and zarr-python reads the copy.
    is_attribute = version == 2 and (not is_kept or 1 in names)
    expected = NOTED | ({"_ARRAY_DIMENSIONS": names} if is_attribute else {})
    assert json.dumps(found["attributes"]) == json.dumps(expected)  # one NaN is not another
    assert found.get("dimension_names") == (names if is_kept and not is_attribute else None)
    if version == 2:
        np.testing.assert_array_equal(copied(tmp_path / "out.zarr")[:21], VOXELS[:21])
        assert json.dumps(dict(copied(tmp_path / "out.zarr").attrs)) == json.dumps(expected)


FILLS: dict[str, list[Any]] = {
    "?": [True, False], "<i4": [-(1 << 31), 0], ">u8": [(1 << 64) - 1], ">f4": [-0.0, np.inf, -np.inf, np.nan, 0.1],
    "<f8": [np.finfo("f8").max], ">c8": [complex(np.nan, -np.inf), 1 - 2j], "<c16": [complex(-0.0, 0.1)],
}  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.parametrize(("kind", "fill"), [(kind, fill) for kind, fills in FILLS.items() for fill in fills])
@pytest.mark.parametrize("form", ["hdf5", "tensorstore"])
def test_chunks_of_nothing_but_the_fill_value_are_not_written(
    tmp_path: Path, repack: Repack, form: str, kind: str, fill: Any
) -> None:
    array = np.full((12, 10), fill, kind)
    array[5, 8:] = not fill  # in one chunk of the copy, which the array's end cuts
    if form == "hdf5":
        with h5py.File(tmp_path / "in.h5", "w") as file:
            file.create_dataset("x", data=array, chunks=(6, 5), fillvalue=np.array(fill, kind)[()])
    else:
        options: Any = {"chunks": (6, 5), "fill_value": array[0, 0], "zarr_format": 2, "order": "F"}
        zarr.create_array(tmp_path / "in.h5", data=array, **options)
    code, said, _ = repack(tmp_path / "in.h5", tmp_path / "out.zarr", "--chunks", "4,4", "--codec", "none")
    assert code == 0 and "9 chunks, 8 of them without a file, as they hold nothing but the fill" in said
    assert chunks_of(tmp_path / "out.zarr") == {"c/1/2"}
    assert bits(copied(tmp_path / "out.zarr")[:]) == bits(array)
    # Behind the array's end, too, there is what was never written.
    stored = np.fromfile(tmp_path / "out.zarr/c/1/2", np.dtype(kind).newbyteorder("<")).reshape(4, 4)
    assert bits(stored[1, :2]) == bits(array[5, 8:]) and bits(stored[1, 2:]) == bits(array[0, :2])


def test_chunks_of_a_nan_that_is_not_the_usual_one_are_written(tmp_path: Path, repack: Repack) -> None:
    """Not all readers would give back which one a fill value is."""
    array = (np.arange(64, dtype="<u4") % 2 + 0xFFC00001).view("<f4").reshape(8, 8)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(4, 4), fillvalue=array[0, 0])
    assert repack(tmp_path / "in.h5", tmp_path / "out.zarr", "--chunks", "4,4")[0] == 0
    assert len(chunks_of(tmp_path / "out.zarr")) == 4
    copy = copied(tmp_path / "out.zarr")
    assert np.isnan(copy.fill_value) and bits(copy[:]) == bits(array)


def test_attributes_of_an_hdf5_dataset_are_copied(tmp_path: Path, repack: Repack) -> None:
    kept = {"element_size_um": [0.03, 0.008, 0.008], "n": np.int16(3), "unit": "µm", "raw": np.bytes_(b"x")}
    with h5py.File(tmp_path / "in.h5", "w") as file:
        dataset = file.create_dataset("a/raw", data=VOXELS, chunks=(7, 50, 20))
        for name, value in (kept | {"offset": np.nan, "other": dataset.ref}).items():
            dataset.attrs[name] = value
    status, _, said = repack(tmp_path / "in.h5" / "a" / "raw", tmp_path / "out.zarr", "--chunks", "16,16,16")
    assert status == 0
    np.testing.assert_array_equal(copied(tmp_path / "out.zarr")[:], VOXELS)
    assert dict(copied(tmp_path / "out.zarr").attrs) == kept | {"raw": "x"}
    assert "attributes offset, other" in said


@pytest.mark.parametrize("name", ["in.n5", "in.nii.gz"])
def test_other_formats_are_copied(tmp_path: Path, repack: Repack, name: str) -> None:
    noted = {"resolution": [30, 8, 8]} if name == "in.n5" else {}
    if noted:
        write_n5(tmp_path / name, VOXELS, (9, 9, 9))
        attributes = json.loads((tmp_path / name / "attributes.json").read_text())
        (tmp_path / name / "attributes.json").write_text(json.dumps(attributes | noted))
    else:
        write_nifti(tmp_path / name, VOXELS)
    assert repack(tmp_path / name, tmp_path / "out.zarr", "--chunks", "16,16,16")[0] == 0
    np.testing.assert_array_equal(copied(tmp_path / "out.zarr")[:], VOXELS)
    assert dict(copied(tmp_path / "out.zarr").attrs) == noted


def test_an_hdf5_file_is_copied_to_what_the_name_of_the_copy_says(tmp_path: Path, repack: Repack) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("raw", data=VOXELS, chunks=(8, 8, 8), compression="gzip")
    for name, out in (("in.h5", "one.zarr"), ("in.h5/raw", "out.zarr")):
        assert repack(tmp_path / name, tmp_path / out, "--chunks", "16,16,16")[0] == 0
        np.testing.assert_array_equal(copied(tmp_path / out)[:], VOXELS)
    # Without a name that says Zarr, a file is copied as it always was.
    line = refused(repack(tmp_path / "in.h5", tmp_path / "out.h5", "--chunks", "16,16,16"))
    assert "--chunks is for a copy in Zarr: name an OUT such as scan.zarr" in line
    assert repack(tmp_path / "in.h5", tmp_path / "out.h5", "--codec", "lzf", "--dataset", "raw")[0] == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["raw"].compression == "lzf"


def test_folders_and_groups_above_the_copy_are_made(source: Path, repack: Repack) -> None:
    folder = source.parent / "new" / "deeper" / "scan.zarr"
    for name in ("image", "masks/bone"):
        assert repack(source, folder / name, "--chunks", "16,16,16")[0] == 0
        np.testing.assert_array_equal(zarr.open_group(folder, mode="r")[name][:], VOXELS)
    # Groups that could not show the copy are left as they are.
    zarr.open_group(source.parent / "known.zarr", mode="w", zarr_format=3)
    metadata = source.parent / "known.zarr" / "zarr.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "consolidated_metadata": {}}))
    zarr.open_group(source.parent / "old.zarr", mode="w", zarr_format=2)
    before = content(source.parent)
    for out, said in (
        (metadata.with_name("image"), "consolidated metadata, which would not list"),
        (source.parent / "old.zarr" / "image", "is a Zarr group of version 2"),
        (folder / "image" / "below", "is a Zarr array"),
    ):
        assert said in refused(repack(source, out, "--chunks", "16,16,16"))
    assert content(source.parent) == before


def test_folders_that_were_made_are_removed_if_there_is_no_copy(out: Path, repack: Repack) -> None:
    damaged = _zarr(out.with_name("damaged.zarr"), 3)
    (damaged / "c" / "1" / "0" / "2").write_bytes(b"damaged")
    refused(repack(damaged, out.parent / "new" / "deeper.zarr" / "image", "--chunks", "16,16"))
    assert names(out) == ["damaged.zarr", "in.npy"]


def test_the_copy_is_the_same_with_any_threads_and_memory(source: Path, repack: Repack) -> None:
    for number, more in enumerate(([], ["--threads", "1"], ["--memory", "1500KiB"], ["--threads", "7"])):
        assert repack(source, source.with_name(f"{number}.zarr"), "--chunks", "16,32,32", *more)[0] == 0
    one, *others = (content(source.with_name(f"{number}.zarr")) for number in range(4))
    assert len(one) == 13 and all(other == one for other in others)


def test_parts_of_chunks_can_be_read_alone(tmp_path: Path, repack: Repack) -> None:
    np.save(tmp_path / "in.npy", np.random.default_rng(0).integers(0, 9, (64, 128, 128), np.uint8))
    assert repack(tmp_path / "in.npy", tmp_path / "out.zarr", "--chunks", "64,128,128")[0] == 0
    volume = open_volume(tmp_path / "out.zarr")
    assert volume.grid.unit == (8, 128, 128) and "in 8 parts" in volume.how


@pytest.mark.parametrize(
    ("shape", "unit", "chunk", "threads", "times"),
    [
        ((2, 192, 2048, 2048), (1, 1, 2048, 2048), (1, 64, 64, 64), 8, 8),
        ((640, 4000, 4000), (1, 4000, 4000), (64, 128, 128), 2, 32),
        ((512, 3072, 3000), (1, 256, 3000), (128, 128, 128), 2, 2), ((100, 512, 512), (1, 512, 512), (32, 64, 64), 2, 1),
    ],
)  # fmt: skip
def test_bricks_use_the_memory_that_there_is(
    shape: Any, unit: Any, chunk: Any, threads: int, times: float
) -> None:
    grid, dtype = UnitGrid(shape, unit), np.dtype("u2")
    volume: Any = SimpleNamespace(dtype=dtype, grid=grid, unit_nbytes=2 * math.prod(unit))
    layout, memory = ZarrLayout.of(shape, dtype, chunk, Codec("none", 0)), 256 << 20
    bricks = repacking.planned_bricks(volume, layout, threads, memory)
    decoded = sum(len(grid.touched(box)) for box in bricks.boxes(shape))
    assert bricks.threads == threads and decoded <= times * grid.count
    each = 2 * max(volume.unit_nbytes, layout.chunk_nbytes)
    assert 2 * 2 * math.prod(bricks.shape) + threads * each <= memory
    assert 2 * math.prod(bricks.part) <= each // 2


def test_memory_is_bounded(tmp_path: Path, repack: Repack) -> None:
    array = np.random.default_rng(0).integers(0, 9, (128, 256, 256), np.uint8)
    zarr.create_array(tmp_path / "in.zarr", data=array, chunks=(2, 256, 256))
    assert repack(tmp_path / "in.zarr", tmp_path / "warm.zarr", "--chunks", "64,128,128")[0] == 0
    tracemalloc.start()
    try:
        arguments = ["--chunks", "32,64,64", "--memory", "3MiB", "--threads", "2"]
        assert repack(tmp_path / "in.zarr", tmp_path / "out.zarr", *arguments)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 7 << 19
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(copied(tmp_path / "out.zarr")[:], array)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--chunks is missing: give the shape of a chunk, such as --chunks 64,128,128"),
        (["--chunks", "8,8,8,8"], "in.npy: --chunks has 4 numbers, and the volume 3 dimensions"),
        (["--chunks", "8,8", "--codec", "lzf"], "--codec for Zarr must be one of blosc-zstd, zstd, none; got 'lzf'"),
        (["--chunks", "8,8", "--level", "10"], "--level of blosc-zstd is from 0 to 9, got 10"),
        (["--chunks", "8,8", "--codec", "zstd", "--level", "0"], "--level of zstd is from 1 to 22, got 0"),
        (["--chunks", "8,8", "--codec", "none", "--level", "1"], "--level goes with a codec"),
        (["--chunks", "40,50,61", "--memory", "1KiB"], "--memory of 1 KiB is too little"),
        (["--chunks", "8,8", "--force"], "--force is for copies in HDF5, not in Zarr"),
        (["--chunks", "8,8", "--chunk-rows", "1"], "--chunk-rows is for copies in HDF5"),
        (["--chunks", "8,8", "--dataset", "x"], "--dataset is for copies in HDF5"),
        (["--chunks", "8,8", "--no-shuffle"], "--shuffle and --no-shuffle is for copies in HDF5"),
        (["--chunks", "8,8", "--sample-dims", "2"], "--sample-dims is for copies in HDF5"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(out: Path, run: Repack, options: list[str], said: str) -> None:
    assert said in refused(run(*options))
    assert names(out) == ["in.npy"]


def test_arrays_that_zarr_has_not_are_refused() -> None:
    no_type = "for which Zarr has no type"
    for shape, dtype, chunk, said in (
        ((4, 4), [("a", "i4")], (2, 2), no_type), ((4, 4), "M8[s]", (2, 2), no_type), ((), "f4", (2,), "it is a single value"),
        ((2048,) * 3, "u2", (1024,) * 3, "--chunks 1024,1024,1024 makes chunks of more than 1 GiB"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            ZarrLayout.of(shape, np.dtype(dtype), chunk, Codec("none", 0))


@pytest.mark.parametrize("is_meanwhile", [False, True])
def test_a_path_that_exists_is_never_replaced(
    source: Path, repack: Repack, monkeypatch: pytest.MonkeyPatch, is_meanwhile: bool
) -> None:
    def folder_of_mine(path: Path) -> None:
        path.mkdir()
        (path / "mine").write_bytes(b"mine")

    makers: list[Callable[[Path], object]] = [
        lambda path: path.write_bytes(b"mine"), Path.mkdir, folder_of_mine, lambda path: path.symlink_to("nowhere"),
    ]  # fmt: skip
    real = repacking.rename_anew
    for number, make in enumerate(makers):
        out = source.with_name(f"{number}.zarr")
        if is_meanwhile:
            monkeypatch.setattr(repacking, "rename_anew", lambda one, other: (make(out), real(one, other))[1])
        else:
            make(out)
        line = refused(repack(source, out, "--chunks", "16,16"))
        assert f"{number}.zarr exists; name another folder, or remove it first" in line
    assert names(source) == ["0.zarr", "1.zarr", "2.zarr", "3.zarr", "in.npy"]
    assert source.with_name("0.zarr").read_bytes() == b"mine" and not content(source.with_name("1.zarr"))
    assert content(source.with_name("2.zarr")) == {"mine": b"mine"}


def test_a_copy_within_its_input_is_refused_at_once(tmp_path: Path, repack: Repack) -> None:
    source = _zarr(tmp_path / "group" / "image", 3)
    before = content(source)
    (tmp_path / "link").symlink_to(source)
    for within in (source / "copy.zarr", source / "c" / "copy.zarr", tmp_path / "link" / "copy.zarr"):
        assert "is within the input" in refused(repack(source, within, "--chunks", "16,16"))
    assert content(source) == before
    assert repack(source, tmp_path / "group" / "copy.zarr", "--chunks", "16,16")[0] == 0
    assert repack(source, tmp_path / "group" / "image2.zarr", "--chunks", "16,16")[0] == 0


def test_paths_that_cannot_be_used_are_refused(source: Path, out: Path, repack: Repack) -> None:
    some, folder = ["--chunks", "8,8,8"], source.parent
    (folder / "text").write_text("text")
    for one, other, said in (
        (folder / "none.npy", out, "No such file"), (folder / "none.zarr" / "0", out, "No such file"),
        (folder / "text", out, "is not an HDF5 file either"), (source, folder / "text" / "out.zarr", "Not a directory"),
        (source, "gs://bucket/out.zarr", "is not on this machine"),
        *((source, folder / f"copy.{ending}", "volumes are written as Zarr, in a folder")
          for ending in ("h5", "hdf5", "tif", "TIFF", "nii.gz", "npy", "b2nd", "n5")),
    ):  # fmt: skip
        line = refused(repack(one, other, *some))
        assert said in line
        assert "as Zarr" not in said or ".zarr" in line.split("name it")[1]
    assert repack(source, out, *some)[0] == 0
    assert "is the input itself" in refused(repack(out, out, *some))
    assert names(out) == ["in.npy", "out.zarr", "text"]


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (sides, ["", "0,4", "4,-1", "4;4", "a", "4,,4"], "must be whole numbers from 1, such as 64,128,128"),
        (size, ["", "0", "-1", "8XiB", "GiB", "1e9", "0.1"], "must be a number of bytes, such as 8GiB"),
    ],
)
def test_a_shape_or_size_that_is_none_is_refused(parse: Any, texts: list[str], said: str) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=said):
            parse(text)


def test_a_damaged_input_is_named(tmp_path: Path, repack: Repack) -> None:
    source = _zarr(tmp_path / "in.zarr", 3)
    (source / "c" / "1" / "0" / "2").write_bytes(b"damaged")
    line = refused(repack(source, tmp_path / "out.zarr", "--chunks", "16,16"))
    assert "the chunk at [7:14, 0:50, 40:60]" in line and "in.zarr" in line
    assert not (tmp_path / "out.zarr").exists()


def test_a_copy_grows_in_a_folder_of_this_user_alone_and_nothing_stays_of_it(
    out: Path, run: Repack, meanwhile: Any
) -> None:
    seen: list[Path] = []

    def interrupt_once() -> None:
        if not seen:
            seen.extend(out.parent.glob("fastpipe-repack-*"))
            assert seen[0].stat().st_mode & 0o777 == 0o700 and (seen[0] / "array" / "zarr.json").exists()
            raise KeyboardInterrupt

    meanwhile(interrupt_once)
    before = os.umask(0)
    try:
        assert run("--chunks", "16,16")[0] == 130
    finally:
        os.umask(before)
    assert names(out) == ["in.npy"] and len(seen) == 1
    assert run("--chunks", "16,16")[0] == 0


def test_a_folder_that_is_put_at_the_path_of_the_copy_is_not_taken(
    out: Path, run: Repack, meanwhile: Any
) -> None:
    def move() -> None:
        for folder in out.parent.glob("fastpipe-repack-*"):
            folder.rename(out.with_name("moved"))
            (folder / "array").mkdir(parents=True)

    meanwhile(move)
    assert run("--chunks", "16,16,16")[0] == 0
    np.testing.assert_array_equal(copied(out)[:], VOXELS)


def test_a_full_disk_is_an_error(source: Path, out: Path) -> None:
    """Files of this process must not become as large as a chunk."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)); "
        "from fastpipe.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ["repack", str(source), str(out), "--chunks", "40,50,61", "--codec", "none"]
    done = subprocess.run([sys.executable, "-c", limited, *command], capture_output=True, text=True)
    assert done.returncode == 2 and "the copy cannot be written: " in done.stderr
    assert "too large" in done.stderr and "/proc" not in done.stderr
    assert names(out) == ["in.npy"]


def test_an_error_of_tensorstore_has_the_remedy_and_no_settings() -> None:
    said = repacking._reason(ValueError("writing: [OS error 28: ENOSPC No space left on device]"), "/x/")
    assert said.endswith("No space left on device]: free some, and try again")
    more = "[tensorstore_spec='{\"path\":\"/x/\"}'] [source locations='a.cc:1']"
    said = repacking._reason(ValueError(f"INVALID_ARGUMENT: Error in /x/a {more}"), "/x/")
    assert said == "INVALID_ARGUMENT: Error in a"


@pytest.mark.parametrize("codec", ["blosc-zstd", "none"])
def test_a_copy_that_is_wrong_never_gets_its_name(out: Path, run: Repack, meanwhile: Any, codec: str) -> None:
    def change() -> None:
        (chunk,) = out.parent.glob("fastpipe-repack-*/array/c/1/2/3")
        data = chunk.read_bytes()
        chunk.write_bytes(data[:-9] + bytes(byte ^ 1 for byte in data[-9:]))

    meanwhile(change)
    line = refused(run("--chunks", "16,16,16", "--codec", codec))
    assert "is not what the source holds when it is read back" in line
    assert codec != "none" or "the copy's part at [16:32, 32:48, 48:61] " in line
    assert names(out) == ["in.npy"]


@pytest.mark.parametrize("changed", ["in.npy", "in.zarr/c/5/0/3", "in.zarr/zarr.json"])
def test_an_input_that_changes_is_an_error(
    source: Path, out: Path, repack: Repack, meanwhile: Any, changed: str
) -> None:
    file = source.with_name("in.zarr") if "zarr" in changed else source
    if file != source:
        _zarr(file, 3)

    def change() -> None:
        path = source.parent / changed
        if path == source:
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
            return
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes((path.read_bytes() if path.exists() else b"") + b" ")

    meanwhile(change)
    line = refused(repack(file, out, "--chunks", "16,16"))
    assert re.search(r"in\.(npy|zarr) has changed (meanwhile|since)", line)
    assert not out.exists()
