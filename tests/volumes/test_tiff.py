"""TIFF: what tifffile reads, page by page; files of a folder may be compressed in different ways."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kit import random_array, reader_of, same_bits, whole

from fastpipe.errors import VolumeError
from fastpipe.volumes.opening import open_volume


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(2, 40), min_size=2, max_size=4), kind=st.sampled_from(["u1", "<u2", ">i2", "<f4"]),
    options=st.sampled_from([{}, {"compression": "zlib"}, {"compression": "zlib", "predictor": True}, {"tile": (16, 16)}]),
    rows=st.sampled_from([None, 1, 7]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_file_is_as_tifffile_reads_it(
    shape: list[int],
    kind: str,
    options: dict[str, Any],
    rows: int | None,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = random_array(tuple(shape), kind, seed)
    if data.dtype.kind == "f":
        options = {**options, "predictor": False}  # which would need the package imagecodecs
    path = tmp_path_factory.mktemp("tiff") / "x.tif"
    order = ">" if kind[0] == ">" else "<"
    strips = {} if "tile" in options else {"rowsperstrip": rows}
    tifffile.imwrite(path, data, byteorder=order, photometric="minisblack", **options, **strips)
    expected = tifffile.imread(path)
    assert same_bits(whole(open_volume(path), seed), expected)


@pytest.mark.parametrize(
    "other", [{"predictor": False}, {"predictor": True, "byteorder": ">"}, {"predictor": True, "byteorder": "<"}]
)  # fmt: skip
def test_slices_that_are_compressed_in_different_ways(tmp_path: Path, other: Any) -> None:
    data = (np.add.outer(np.arange(64), np.arange(48)) * 7).astype("u2")
    for number, options in enumerate(({"predictor": True}, other, {"predictor": True})):
        tifffile.imwrite(tmp_path / f"{number}.tif", data + number, compression="zlib", **options)
    np.testing.assert_array_equal(whole(open_volume(tmp_path)), np.stack([data, data + 1, data + 2]))


def test_a_page_whose_strips_lie_in_another_order_than_those_of_the_first(tmp_path: Path) -> None:
    path, data = tmp_path / "x.tif", np.arange(2 * 64 * 48, dtype="u2").reshape(2, 64, 48)
    with tifffile.TiffWriter(path, byteorder="<") as writer:
        for page in data:
            writer.write(page, rowsperstrip=16, contiguous=False, metadata=None)
    with tifffile.TiffFile(path) as file:
        offsets, sizes = list(file.pages[1].dataoffsets), file.pages[1].databytecounts
        tag = file.pages[1].tags["StripOffsets"]
    content, first, second = bytearray(path.read_bytes()), offsets[1], offsets[2]
    one, two = bytes(content[first : first + sizes[1]]), bytes(content[second : second + sizes[2]])
    content[first : first + sizes[1]], content[second : second + sizes[2]] = two, one
    offsets[1], offsets[2] = second, first
    struct.pack_into("<4H" if tag.dtype == 3 else "<4I", content, tag.valueoffset, *offsets)
    path.write_bytes(content)
    np.testing.assert_array_equal(tifffile.imread(path), data)
    np.testing.assert_array_equal(whole(open_volume(path)), data)


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_what_was_never_written_is_what_the_file_says(tmp_path: Path, compression: str | None) -> None:
    tiles = (None if number == 2 else np.full((64, 64), number + 1, "i2") for number in range(4))
    tifffile.imwrite(
        tmp_path / "x.tif", tiles, shape=(128, 128), dtype="i2", tile=(64, 64), compression=compression, metadata=None,
        extratags=[(42113, "s", 0, "-9999", True)],
    )  # fmt: skip
    found = whole(open_volume(tmp_path / "x.tif"))
    assert found[::64, ::64].tolist() == [[1, 2], [-9999, 4]]
    np.testing.assert_array_equal(found, tifffile.imread(tmp_path / "x.tif"))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 40, 1), {}),
        ((40, 1), {}),
        ((5, 1, 50), {}),
        ((5, 3, 40, 1), {"photometric": "rgb", "planarconfig": "separate"}),
        ((5, 3, 40, 30), {"photometric": "rgb", "planarconfig": "separate"}),
        ((5, 40, 30, 3), {"photometric": "rgb"}),
    ],
)
def test_sides_of_one_and_samples(tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    data = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    tifffile.imwrite(tmp_path / "x.tif", data, compression="zlib", **options)
    np.testing.assert_array_equal(whole(open_volume(tmp_path / "x.tif")), data)


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_slice_that_is_rewritten_is_an_error(tmp_path: Path, compression: str | None) -> None:
    data = np.random.default_rng(0).integers(0, 9, (3, 64, 48)).astype("u2")
    folder = tmp_path / "slices"
    folder.mkdir()
    for number, part in enumerate(data):
        tifffile.imwrite(folder / f"{number}.tif", part, compression=compression, rowsperstrip=16)
    reader, out = reader_of(open_volume(folder)), np.zeros(data.shape, data.dtype)
    reader.read([0, 0, 0], out)
    np.testing.assert_array_equal(out, data)
    tifffile.imwrite(
        tmp_path / "new.tif", data[0], compression=compression, rowsperstrip=16, description="x" * 500
    )
    new = (tmp_path / "new.tif").read_bytes()
    descriptor = os.open(folder / "1.tif", os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, new)
    os.close(descriptor)
    with pytest.raises(VolumeError, match=r"1\.tif has changed since it was opened"):
        reader.read([0, 0, 0], out)


@pytest.mark.parametrize(
    ("compression", "function"), [(None, "_is_together"), ("zlib", "_segments"), ("zlib", "_series")]
)
def test_a_file_that_is_replaced_while_it_is_opened(
    tmp_path: Path, compression: str | None, function: str, replaced_after: Any
) -> None:
    """The last is a folder's first slice."""
    for name, value in (("x/1.tif", 1), ("x/2.tif", 1), ("new.tif", 2)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        description = "x" * 500 * value
        data = np.full((40, 30), value, "u2")
        tifffile.imwrite(tmp_path / name, data, compression=compression, description=description)
    path = tmp_path / "x" / "1.tif"
    replaced_after(f"fastpipe.volumes.tiff.{function}", path, tmp_path / "new.tif")
    volume = open_volume(path.parent if function == "_series" else path)
    with pytest.raises(VolumeError, match="has changed since it was opened"):
        whole(volume)


@pytest.mark.hang_after(20)
def test_a_slice_that_is_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "1.tif", np.zeros((40, 30), "u2"))
    os.mkfifo(tmp_path / "2.tif")
    volume = open_volume(tmp_path)
    with pytest.raises(OSError, match=r"Not a regular file: .*2\.tif"):
        whole(volume)
