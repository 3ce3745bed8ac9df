"""What a TIFF file can say: each of it is read as tifffile reads it, or refused by an error that says why."""

from __future__ import annotations

import os
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from volume_kit import reader_of, same_bits, whole

from fastpipe.errors import MissingDependencyError, VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import DamagedUnitError

uuid.uuid1()  # of which OME-TIFF takes one: libuuid then keeps the file of its clock open


def ramp(shape: Any, kind: str = "u2") -> Any:
    steps = np.random.default_rng(0).integers(0, 3, shape)
    return (np.cumsum(steps, axis=-1) % 3 > 1) if kind == "?" else np.cumsum(steps, axis=-1).astype(kind)


STACK, COLOUR = (3, 33, 29), (2, 33, 29, 3)
PLANES = (2, 3, 33, 29)

# What tifffile writes: the array, and options of ``imwrite``.
WRITTEN: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"{order}{'big' if big else ''} {kind} {compression} {predictor}": (
            ramp(STACK, kind),
            {"byteorder": order, "bigtiff": big, "compression": compression, "predictor": predictor},
        )
        for order, big, kind, compression, predictor in [
            ("<", False, "u1", None, False), (">", True, "u2", None, False), (">", False, "f2", None, False),
            ("<", True, "c8", "zlib", False), (">", False, "u8", "zlib", False), (">", True, "f8", "lzma", False),
            (">", False, "i4", "zlib", True), ("<", False, "u2", "zlib", True), (">", True, "i2", "lzma", True),
        ]
    },
    "samples together": (ramp(COLOUR), {"photometric": "rgb"}),
    "samples together, compressed": (ramp(COLOUR), {"photometric": "rgb", "compression": "zlib", "predictor": True}),
    "samples in planes": (ramp(PLANES), {"photometric": "rgb", "planarconfig": "separate"}),
    "samples in planes of tiles": (
        ramp(PLANES), {"photometric": "rgb", "planarconfig": "separate", "compression": "zlib", "tile": (16, 32)},
    ),
    "samples that are no colours": (ramp((2, 33, 29, 5)), {"planarconfig": "contig", "compression": "zlib"}),
    "one more sample": (ramp((2, 33, 29, 4), "u1"), {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
    "bits": (ramp(STACK, "?"), {}),
    "bits in strips": (ramp(STACK, "?"), {"rowsperstrip": 5}),
    "white is 0": (ramp(STACK), {"photometric": "miniswhite"}),
    "white is 0, compressed": (ramp(STACK, "u1"), {"photometric": "miniswhite", "compression": "zlib"}),
    "a palette": (ramp(STACK, "u1"), {"photometric": "palette", "colormap": np.zeros((3, 256), "u2")}),
    **{f"orientation {turn}": (ramp(STACK), {"extratags": [(274, "H", 1, turn, True)]}) for turn in (3, 6)},
    **{f"strips of {rows}": (ramp(STACK), {"rowsperstrip": rows, "compression": "zlib"}) for rows in (1, 32, 33, 99)},
    "bits from the other end": (ramp(STACK, "u1"), {"extratags": [(266, "H", 1, 2, True)]}),
    "bits from the other end, compressed": (
        ramp(STACK, "u1"), {"extratags": [(266, "H", 1, 2, True)], "compression": "zlib"},
    ),
    "a side of one, compressed": (ramp((5, 40, 1)), {"compression": "zlib"}),
    "one row, compressed": (ramp((5, 1, 50)), {"compression": "zlib"}),
    "one column in planes": (ramp((5, 3, 40, 1)), {"photometric": "rgb", "planarconfig": "separate", "compression": "zlib"}),
    "sides of one": (ramp((1, 6, 1, 33, 29)), {"compression": "zlib"}),
    "sides of one, unsaid": (ramp((1, 6, 1, 33, 29)), {"compression": "zlib", "metadata": None}),
    "one page for all": (ramp((6, 33, 29)), {"truncate": True}),
    "depth": (ramp((32, 64, 48)), {"volumetric": True}),
    **{
        f"imagej {axes}": (ramp(shape, kind), {"imagej": True, "metadata": {"axes": axes}, "compression": compression})
        for axes, shape, kind, compression in [
            ("ZYX", STACK, "f4", None), ("TZCYX", (2, 3, 2, 33, 29), "u2", None), ("TZYX", PLANES, "u2", "zlib"),
        ]
    },
    **{
        f"ome {axes} {options}": (ramp(shape), {"ome": True, "metadata": {"axes": axes}, **options})
        for axes, shape, options in [
            ("CTZYX", (2, 3, 2, 33, 29), {}), ("TZCYX", (2, 3, 2, 33, 29), {"compression": "zlib", "byteorder": ">"}),
            ("ZYXS", COLOUR, {"photometric": "rgb", "tile": (16, 16), "compression": "zlib"}), ("TZYX", (1, 1, 33, 29), {}),
        ]
    },
}  # fmt: skip


def is_as_tifffile_reads_it(path: Path) -> None:
    assert same_bits(whole(open_volume(path)), tifffile.imread(path))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_tifffile_writes_is_read(tmp_path: Path, name: str) -> None:
    data, options = WRITTEN[name]
    try:
        tifffile.imwrite(tmp_path / "x.tif", data, **{"photometric": "minisblack", **options})
        tifffile.imread(tmp_path / "x.tif")
    except (ImportError, NotImplementedError) as error:
        pytest.skip(f"pip install imagecodecs: {error}")
    is_as_tifffile_reads_it(tmp_path / "x.tif")


@pytest.mark.parametrize("bits", [12, 24])
def test_packed_bits_name_the_package_that_they_need(tmp_path: Path, bits: int) -> None:
    """Not a damaged part, which a policy for bad samples would leave out."""
    path, raw = tmp_path / "x.tif", np.arange(8 * 32 * bits // 8, dtype="u1").reshape(8, -1)
    tifffile.imwrite(path, raw, photometric="minisblack", metadata=None)
    overwrite(path, "BitsPerSample", bits)
    overwrite(path, "ImageWidth", 32)
    try:
        expected = tifffile.imread(path)
    except (ImportError, NotImplementedError):
        with pytest.raises(MissingDependencyError, match="pip install"):
            whole(open_volume(path))
    else:
        np.testing.assert_array_equal(whole(open_volume(path)), expected)


@pytest.mark.parametrize(
    ("compression", "options"),
    [("lzw", {}), ("jpeg", {"rowsperstrip": 16}), ("jpeg", {"tile": (32, 32)}), ("jpeg2000", {"tile": (32, 32)})],
)  # fmt: skip
def test_a_file_that_imagecodecs_decodes_is_read(
    tmp_path: Path, compression: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("imagecodecs", reason="pip install imagecodecs")
    options |= {"compression": compression, "photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "x.tif", ramp((2, 64, 48), "u1"), **options)
    is_as_tifffile_reads_it(tmp_path / "x.tif")


def overwrite(path: Path, tag: str, value: Any) -> None:
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags[tag].overwrite(value)  # type: ignore[union-attr]


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    ("kind", "said"), [("i2", 1), ("i2", 3), ("i2", 4), ("i4", 3), ("i4", 5), ("i8", 3), ("i8", 6), ("f4", 1), ("f8", 5)]
)  # fmt: skip
def test_the_format_of_samples_is_what_the_tag_says(
    tmp_path: Path, kind: str, said: int, compression: str | None
) -> None:
    options: Any = {"photometric": "minisblack", "metadata": None, "compression": compression}
    tifffile.imwrite(tmp_path / "x.tif", ramp((33, 30), kind), **options)
    overwrite(tmp_path / "x.tif", "SampleFormat", said)
    is_as_tifffile_reads_it(tmp_path / "x.tif")


@pytest.mark.parametrize(
    ("tag", "value", "pages"),
    [("RowsPerStrip", 2**32 - 1, 1), ("RowsPerStrip", 1000, 1), ("StripByteCounts", 10, 1), ("StripByteCounts", 0, 12)],
)  # fmt: skip
def test_tags_that_are_not_meant_literally_are_corrected(
    tmp_path: Path, tag: str, value: int, pages: int
) -> None:
    """tifffile needs no size of an image that is not compressed and has a single strip."""
    tifffile.imwrite(tmp_path / "x.tif", ramp((pages, 33, 29)), photometric="minisblack", metadata=None)
    overwrite(tmp_path / "x.tif", tag, value)
    is_as_tifffile_reads_it(tmp_path / "x.tif")


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    "text", ["images=6\nslices=6", "images=6\nchannels=2\nslices=3\nhyperstack=true", "images=60\nslices=60"]
)
def test_all_images_behind_the_one_page_of_imagej_are_read(tmp_path: Path, text: str, order: str) -> None:
    path, data = tmp_path / "x.tif", ramp((6, 33, 29)).astype(f"{order}u2")
    tifffile.imwrite(
        path, data[0], byteorder=order, photometric="minisblack", metadata=None, software=False,
        description=f"ImageJ=1.53t\n{text}\n",
    )  # fmt: skip
    begin = path.stat().st_size
    with path.open("ab") as file:
        file.write(data.tobytes() + b"behind")
    overwrite(path, "StripOffsets", begin)
    is_as_tifffile_reads_it(path)


def ome(order: str, channels: int, slices: int, times: int, inside: str = "<TiffData/>") -> bytes:
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0"
DimensionOrder="{order}" Type="uint16" SizeX="29" SizeY="33" SizeC="{channels}" SizeZ="{slices}" SizeT="{times}">
<Channel ID="Channel:0:0" SamplesPerPixel="1"/>{inside}</Pixels></Image></OME>""".encode()


def planes(pairs: Any) -> str:
    text = '<TiffData FirstC="0" FirstT="0" FirstZ="{}" IFD="{}" PlaneCount="1"/>'
    return "".join(text.format(*pair) for pair in pairs)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    "text",
    [
        ome("XYZCT", 2, 3, 2), ome("XYCTZ", 2, 3, 2), ome("XYTZC", 2, 3, 2),
        ome("XYZCT", 1, 12, 1, planes((z, (5 * z + 2) % 12) for z in range(12))),
    ],
)  # fmt: skip
def test_pages_are_in_the_order_that_ome_says(tmp_path: Path, text: bytes, compression: str | None) -> None:
    tifffile.imwrite(
        tmp_path / "x.tif", ramp((12, 33, 29)), description=text, metadata=None, photometric="minisblack",
        compression=compression,
    )  # fmt: skip
    is_as_tifffile_reads_it(tmp_path / "x.tif")


PAGE = ramp((33, 29))
PAGES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "another shape": [(PAGE, {}), (PAGE[:20], {}), (PAGE + 1, {})],
    "another shape first": [(PAGE[:20], {}), (PAGE, {}), (PAGE + 1, {})],
    "another type": [(PAGE, {}), (PAGE.astype("f4"), {}), (PAGE + 1, {})],
    "compressed or not": [(PAGE, {}), (PAGE + 1, {"compression": "zlib"}), (PAGE + 2, {})],
    "another predictor": [
        (PAGE, {"compression": "zlib"}), (PAGE + 1, {"compression": "zlib", "predictor": True}),
        (PAGE + 2, {"compression": "zlib"}),
    ],
    "other strips": [(PAGE, {"rowsperstrip": 5}), (PAGE + 1, {"rowsperstrip": 7}), (PAGE + 2, {})],
    "a pyramid": [
        (PAGE, {"tile": (16, 16)}), (PAGE[::2, ::2], {"tile": (16, 16), "subfiletype": 1}),
        (PAGE[::4, ::4], {"tile": (16, 16), "subfiletype": 1}),
    ],
    "a small one first": [(PAGE[::4, ::4], {"subfiletype": 1}), (PAGE, {})],
    "two series": [(ramp(STACK), {"metadata": {}}), (ramp((5, 33, 29)), {"metadata": {}})],
    "levels below each page": [
        (ramp((2, 64, 64)), {"subifds": 1, "tile": (16, 16), "metadata": {}, "compression": "zlib"}),
        (ramp((2, 32, 32)), {"subfiletype": 1, "tile": (16, 16), "compression": "zlib"}),
    ],
    **{
        f"{kind} {what}": [(PAGE, {"description": text, **first}), *others]
        for kind, text in [("imagej", "ImageJ=1.53t\nimages=3\nslices=3\n"), ("ome", ome("XYZCT", 1, 3, 1))]
        for what, first, others in [
            ("compressed or not", {}, [(PAGE + 1, {"compression": "zlib"}), (PAGE + 2, {})]),
            ("another shape", {}, [(PAGE[:20], {}), (PAGE, {})]),
            ("other strips", {"rowsperstrip": 5}, [(PAGE + 1, {"rowsperstrip": 7}), (PAGE + 2, {"tile": (16, 16)})]),
            ("another predictor", {"compression": "zlib"}, [(PAGE + 1, {"compression": "zlib", "predictor": True})] * 2),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_pages_that_are_not_alike_are_read_as_tifffile_reads_them(tmp_path: Path, name: str) -> None:
    path, usual = tmp_path / "x.tif", {"photometric": "minisblack", "metadata": None, "contiguous": False}
    with tifffile.TiffWriter(path) as writer:
        for data, options in PAGES[name]:
            writer.write(data, **usual | options)
    try:
        expected = tifffile.imread(path)
    except Exception:
        with pytest.raises(VolumeError, match=r"x\.tif"):
            whole(open_volume(path))
    else:
        assert same_bits(whole(open_volume(path)), expected)


ZLIB = {"compression": "zlib", "predictor": 2}
# What is written, by which options, which tag then has which value, and what is said.
REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, int] | None, str]] = {
    "compression": (PAGE, ZLIB, ("Compression", 34999), "cannot be read as TIFF: .*34999"),
    "predictor": (PAGE, ZLIB, ("Predictor", 77), "cannot be read as TIFF: .*77"),
    "pages": (ramp((4, 33, 29)), {"description": ome("XYZCT", 1, 4, 1, planes([(0, 2), (2, 1)]))}, None, "it misses pages"),
    "depth": (ramp((32, 64, 48)), {"volumetric": True, "tile": (16, 16, 16)}, None, "a depth of their own"),
    "rows": (PAGE, {"rowsperstrip": 9, "compression": "zlib"}, ("RowsPerStrip", 0), "its strips have 0 rows"),
    "type": (PAGE.astype("i2"), {}, ("SampleFormat", 9), "a format that NumPy has not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_and_not_called_damaged(tmp_path: Path, name: str) -> None:
    data, options, tag, why = REFUSED[name]
    metadata = {} if "volumetric" in options else {"metadata": None}
    tifffile.imwrite(tmp_path / "x.tif", data, photometric="minisblack", **metadata, **options)
    if tag is not None:
        overwrite(tmp_path / "x.tif", *tag)
    with pytest.raises(VolumeError, match=rf"x\.tif.*{why}") as caught:
        open_volume(tmp_path / "x.tif")
    assert not isinstance(caught.value, DamagedUnitError)


def test_a_page_whose_strips_lie_in_another_order_is_read(tmp_path: Path) -> None:
    path, data = tmp_path / "x.tif", np.arange(2 * 64 * 48, dtype="u2").reshape(2, 64, 48)
    with tifffile.TiffWriter(path, byteorder="<") as writer:
        for page in data:
            writer.write(page, rowsperstrip=16, contiguous=False, metadata=None)
    with tifffile.TiffFile(path) as file:
        offsets, sizes = list(file.pages[1].dataoffsets), file.pages[1].databytecounts
        tag = file.pages[1].tags["StripOffsets"]
    content = bytearray(path.read_bytes())
    first, second = (slice(offsets[n], offsets[n] + sizes[n]) for n in (1, 2))
    content[first], content[second] = content[second], content[first]
    offsets[1], offsets[2] = offsets[2], offsets[1]
    struct.pack_into("<4H" if tag.dtype == 3 else "<4I", content, tag.valueoffset, *offsets)
    path.write_bytes(content)
    np.testing.assert_array_equal(tifffile.imread(path), data)
    np.testing.assert_array_equal(whole(open_volume(path)), data)


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_tiles_that_were_never_written_are_what_the_file_says(tmp_path: Path, compression: Any) -> None:
    tiles = (None if number == 2 else np.full((64, 64), number + 1, "i2") for number in range(4))
    tifffile.imwrite(
        tmp_path / "x.tif", tiles, shape=(128, 128), dtype="i2", tile=(64, 64), compression=compression, metadata=None,
        extratags=[(42113, "s", 0, "-9999", True)],
    )  # fmt: skip
    assert whole(open_volume(tmp_path / "x.tif"))[::64, ::64].tolist() == [[1, 2], [-9999, 4]]
    is_as_tifffile_reads_it(tmp_path / "x.tif")


def slices(folder: Path, *names: str) -> list[str]:
    """Slices whose voxels say which it is; their paths."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        tifffile.imwrite(folder / name, np.full((16, 16), number, "u2"), photometric="minisblack")
    return [os.fspath(folder / name) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        [f"slice_{number}.tif" for number in range(1, 13)],
        ["z2_10.tif", "z10_2.tif", "z2_9.tif", "z10_11.tif", "a.tif", "Z1.tif"],
        ["007.tif", "08.tif", "7b.tif", "10.tif", "x1.5.tif", "x1.50.tif", "x1.9.tif"],
    ],
)
def test_slices_come_in_the_order_that_tifffile_has(tmp_path: Path, names: list[str]) -> None:
    slices(tmp_path / "x", *names)
    expected = tifffile.imread(f"{tmp_path}/x/*.tif")
    volume = open_volume(tmp_path / "x")
    np.testing.assert_array_equal(whole(volume), expected)
    first, last = (names[number] for number in (expected[0, 0, 0], expected[-1, 0, 0]))
    assert f"{len(names)} files in natural order ({first} … {last})" in volume.how


def test_a_list_of_slices_keeps_its_order(tmp_path: Path) -> None:
    paths = sorted(slices(tmp_path / "x", *(f"slice_{number}.tif" for number in range(12))))
    volume = open_volume([Path(paths[0]), *paths[1:]])
    np.testing.assert_array_equal(whole(volume), tifffile.imread(paths))
    assert "12 files in the given order (slice_0.tif … slice_9.tif)" in volume.how
    assert volume.state() == open_volume(paths).state()
    assert volume.state() != open_volume(paths[::-1]).state(), "what is kept about it is of another order"
    assert volume.state()[1] != open_volume(tmp_path / "x").state()[1]


def test_hidden_files_are_no_slices(tmp_path: Path) -> None:
    """As no pattern matches them: a Mac puts ``._slice_1.tif`` beside each file."""
    slices(tmp_path / "x", "1.tif", "2.tif")
    (tmp_path / "x" / "._1.tif").write_bytes(bytes.fromhex("0005160700020000") + bytes(200))
    assert whole(open_volume(tmp_path / "x"))[:, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    "other", [np.zeros((2, 16, 16), "u2"), np.zeros((16, 17), "u2"), np.zeros((16, 16), "f4")]
)
def test_a_slice_of_another_kind_is_an_error(tmp_path: Path, other: Any) -> None:
    paths = slices(tmp_path / "x", "1.tif", "2.tif")
    tifffile.imwrite(paths[1], other, photometric="minisblack")
    with pytest.raises(VolumeError, match=r"2\.tif is not like .*1\.tif"):
        whole(open_volume(tmp_path / "x"))


@pytest.mark.parametrize(
    "other", [{"predictor": False}, {"predictor": True, "byteorder": ">"}, {"predictor": True, "byteorder": "<"}]
)  # fmt: skip
def test_slices_that_are_compressed_in_different_ways_are_read(tmp_path: Path, other: Any) -> None:
    data = (np.add.outer(np.arange(64), np.arange(48)) * 7).astype("u2")
    for number, options in enumerate(({"predictor": True}, other, {"predictor": True})):
        tifffile.imwrite(tmp_path / f"{number}.tif", data + number, compression="zlib", **options)
    np.testing.assert_array_equal(whole(open_volume(tmp_path)), np.stack([data, data + 1, data + 2]))


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_slice_that_is_rewritten_is_an_error(tmp_path: Path, compression: str | None) -> None:
    data, folder = np.random.default_rng(0).integers(0, 9, (3, 64, 48)).astype("u2"), tmp_path / "slices"
    folder.mkdir()
    options: Any = {"compression": compression, "rowsperstrip": 16}
    for number, part in enumerate(data):
        tifffile.imwrite(folder / f"{number}.tif", part, **options)
    reader, out = reader_of(open_volume(folder)), np.zeros(data.shape, data.dtype)
    reader.read([0, 0, 0], out)
    np.testing.assert_array_equal(out, data)
    tifffile.imwrite(tmp_path / "new.tif", data[0], description="x" * 500, **options)
    (folder / "1.tif").write_bytes((tmp_path / "new.tif").read_bytes())
    with pytest.raises(VolumeError, match=r"1\.tif has changed since it was opened"):
        reader.read([0, 0, 0], out)


@pytest.mark.hang_after(20)
def test_a_slice_that_is_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "1.tif", np.zeros((40, 30), "u2"))
    os.mkfifo(tmp_path / "2.tif")
    with pytest.raises(OSError, match=r"Not a regular file: .*2\.tif"):
        whole(open_volume(tmp_path))
