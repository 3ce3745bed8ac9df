"""What is read from a JPEG's segments, and which files are trusted."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from fastpipe.read.jpeg_header import read_jpeg_header
from fastpipe.testing import photograph

PHOTO = photograph(np.random.default_rng(3), (70, 93))


def facts(data: bytes) -> tuple[object, ...] | None:
    """Height, width, whether the file is trusted, orientation."""
    header = read_jpeg_header(data)
    return None if header is None else header[:4]


def encoded(image: Any = None, **options: Any) -> bytes:
    file = io.BytesIO()
    source = Image.fromarray(PHOTO) if image is None else image
    source.save(file, "JPEG", **options)
    return file.getvalue()


def with_segment(data: bytes, code: int, body: bytes) -> bytes:
    """The file with one more segment, right behind its start marker."""
    return data[:2] + struct.pack(">BBH", 0xFF, code, len(body) + 2) + body + data[2:]


def scan_of(data: bytes) -> int:
    """Position of the first scan's coded data."""
    start = data.index(b"\xff\xda")
    return start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("restarts", [{}, {"restart_marker_blocks": 2}, {"restart_marker_rows": 1}], ids=str)
def test_usual_files_are_trusted(sampling: str, progressive: bool, restarts: dict[str, int]) -> None:
    data = encoded(subsampling=sampling, progressive=progressive, **restarts)
    assert facts(data) == (70, 93, True, 1)


def test_grey_files_are_trusted() -> None:
    for options in ({}, {"progressive": True}, {"restart_marker_blocks": 3}):
        data = encoded(Image.fromarray(PHOTO).convert("L"), **options)
        assert facts(data) == (70, 93, True, 1)


@pytest.mark.parametrize("size", [(1, 1), (7, 1), (8, 8), (17, 16), (33, 31)])
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_restart_markers_are_counted_right_at_every_size(size: tuple[int, int], sampling: str) -> None:
    image = Image.fromarray(PHOTO[: size[0], : size[1]])
    for progressive in (False, True):
        data = encoded(image, subsampling=sampling, progressive=progressive, restart_marker_blocks=1)
        assert facts(data) == (*size, True, 1)


def test_components_in_scans_of_their_own_are_trusted() -> None:
    """Several scans, each of one component."""
    data = encoded(Image.fromarray(PHOTO).convert("L"), progressive=True)
    assert data.count(b"\xff\xda") > 1
    assert facts(data) == (70, 93, True, 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xd9", b"GIF89a", b"\x89PNG\r\n\x1a\n" * 9,
     b"\xff\xd8\xff\xe0\x00\x00" * 9, b"\xff\xd8\xff\xe0\x00\x01aa" * 9, b"\xff\xd8\xff\xff\xff\xff"],
    ids=str,
)  # fmt: skip
def test_what_is_no_jpeg(data: bytes) -> None:
    assert read_jpeg_header(data) is None


@settings(max_examples=300)
@given(st.data())
def test_spoilt_files_never_raise(data: st.DataObject) -> None:
    """Cut anywhere, or any bytes replaced: a header, an untrusted header or None."""
    whole = bytearray(encoded(progressive=data.draw(st.booleans()), restart_marker_blocks=4))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    header = read_jpeg_header(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    assert header is None or (header.height > 0 and header.width > 0)


# ---- files that only Pillow may judge -------------------------------------------------------


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_file_cut_short_is_not_trusted(progressive: bool, share: float) -> None:
    data = encoded(progressive=progressive)
    start = scan_of(data)
    cut = data[: start + int((len(data) - start) * share)]
    header = read_jpeg_header(cut)
    assert header is not None
    assert not header.trusted
    if progressive and share == 0.5:  # with an end marker, too: missing scans are smoothed over
        header = read_jpeg_header(cut + b"\xff\xd9")
        assert header is not None
        assert not header.trusted


def test_a_thumbnail_s_end_marker_is_not_the_file_s() -> None:
    data = encoded()
    header = read_jpeg_header(data[: len(data) // 2] + encoded(Image.fromarray(PHOTO[:8, :8])))
    assert header is not None
    assert not header.trusted


@pytest.mark.parametrize("marker", [b"\xff" + bytes([code]) for code in (0xD9, 0xD0, 1, 0xC4, 0xDA, 0xE0)])
@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 3}, {}], ids=str)
def test_a_marker_inside_a_scan_is_not_trusted(marker: bytes, options: dict[str, Any]) -> None:
    data = encoded(**options)
    middle = (scan_of(data) + len(data)) // 2
    middle += data[middle] == 0 or data[middle - 1] == 0xFF  # not between 0xFF and what belongs to it
    header = read_jpeg_header(data[:middle] + marker + data[middle:])
    assert header is not None
    if marker == b"\xff\xd9" and options != {"progressive": True}:
        # An early end: libjpeg fills up with grey, and every decoder is libjpeg.
        return
    assert not header.trusted


def test_restart_markers_out_of_order_or_missing_are_not_trusted() -> None:
    data = encoded(restart_marker_blocks=3)
    first = data.index(b"\xff\xd0", scan_of(data))
    for spoilt in (data[:first] + b"\xff\xd1" + data[first + 2 :], data[:first] + data[first + 2 :]):
        header = read_jpeg_header(spoilt)
        assert header is not None
        assert not header.trusted


def test_scans_that_do_not_fit_the_frame_are_not_trusted() -> None:
    progressive = encoded(progressive=True)
    frame, first = progressive.index(b"\xff\xc2"), progressive.index(b"\xff\xda")
    second = progressive.index(b"\xff\xda", first + 2)
    third = progressive.index(b"\xff\xda", second + 2)
    for spoilt in (
        progressive[:frame] + b"\xff\xc0" + progressive[frame + 2 :],  # said to be sequential
        progressive[:second] + progressive[first:second] + progressive[second:],  # a scan twice
        progressive[:second] + progressive[third:],  # a scan missing
    ):
        header = read_jpeg_header(spoilt)
        assert header is not None
        assert not header.trusted


def test_fill_bytes_are_allowed() -> None:
    data = encoded()
    for filled in (data[:2] + b"\xff\xff" + data[2:], data[:-2] + b"\xff\xff\xff\xd9"):
        assert facts(filled) == (70, 93, True, 1)


def test_what_follows_the_end_marker_does_not_matter() -> None:
    assert facts(encoded() + b"\xff\xd8\xff\xe1 trailing \xff") == (70, 93, True, 1)


@pytest.mark.parametrize("mode", ["CMYK"])
def test_other_colours_are_not_trusted(mode: str) -> None:
    header = read_jpeg_header(encoded(Image.fromarray(PHOTO).convert(mode)))
    assert header is not None
    assert not header.trusted


def test_rgb_is_not_trusted() -> None:
    header = read_jpeg_header(encoded(keep_rgb=True, subsampling="4:4:4"))
    assert header is not None
    assert not header.trusted


# ---- orientation -----------------------------------------------------------------------------


def exif(order: str, *entries: tuple[int, int, int, bytes]) -> bytes:
    """An EXIF segment: (tag, type, count, four bytes) of its first directory."""
    sign, header = ("<", b"II*\0") if order == "little" else (">", b"MM\0*")
    body = struct.pack(sign + "IH", 8, len(entries))
    for tag, kind, count, value in entries:
        body += struct.pack(sign + "HHI", tag, kind, count) + value
    return b"Exif\0\0" + header + body + bytes(4)


def short(order: str, value: int) -> bytes:
    return struct.pack("<H2x" if order == "little" else ">H2x", value)


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("value", range(1, 9))
def test_orientation(order: str, value: int) -> None:
    other = (0x0100, 3, 1, short(order, 6))
    data = with_segment(encoded(), 0xE1, exif(order, other, (0x0112, 3, 1, short(order, value))))
    assert facts(data) == (70, 93, True, value)


def test_no_orientation() -> None:
    data = with_segment(encoded(), 0xE1, exif("big", (0x0100, 3, 1, short("big", 6))))
    assert facts(data) == (70, 93, True, 1)


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
UNUSUAL = {
    "long": exif("big", (0x0112, 4, 1, struct.pack(">I", 6))),
    "out of range": exif("big", (0x0112, 3, 1, short("big", 9))),
    "other byte order mark": b"Exif\0\0MM*\0" + exif("big", (0x0112, 3, 1, short("big", 6)))[10:],
    "not TIFF": b"Exif\0\0garbage",
    "empty": b"Exif\0\0",
    "xmp": XMP,
}


@pytest.mark.parametrize("segment", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_an_unusual_orientation_is_left_to_pillow(segment: bytes) -> None:
    header = read_jpeg_header(with_segment(encoded(), 0xE1, segment))
    assert header is not None
    assert header.orientation == 0


def test_pillow_does_see_some_of_those() -> None:
    """The reason for asking it."""
    turned = 0
    for segment in UNUSUAL.values():
        image = Image.open(io.BytesIO(with_segment(encoded(), 0xE1, segment)))
        turned += ImageOps.exif_transpose(image).size != image.size
    assert turned >= 2


def test_two_exif_segments_are_left_to_pillow() -> None:
    one = exif("big", (0x0112, 3, 1, short("big", 6)))
    header = read_jpeg_header(with_segment(with_segment(encoded(), 0xE1, one), 0xE1, one))
    assert header is not None
    assert header.orientation == 0


@pytest.mark.parametrize("progressive", [False, True])
def test_where_the_frame_is_and_how_it_is_sent(progressive: bool) -> None:
    data = encoded(progressive=progressive)
    header = read_jpeg_header(data)
    assert header is not None
    assert header.is_progressive == progressive
    body = data[header.frame : header.frame + 5]
    assert body == bytes([8, *header.height.to_bytes(2, "big"), *header.width.to_bytes(2, "big")])
