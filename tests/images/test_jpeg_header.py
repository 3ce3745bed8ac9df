"""What is read from a JPEG's segments, and which files are trusted."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from fastpipe.bench.synthetic import photograph
from fastpipe.images.reader import read_jpeg_header

PHOTO = photograph(np.random.default_rng(3), (70, 93))


def is_trusted(data: bytes) -> bool:
    header = read_jpeg_header(data)
    return header is not None and header.trusted


def encoded(image: Any = None, **options: Any) -> bytes:
    file = io.BytesIO()
    source = Image.fromarray(PHOTO) if image is None else image
    source.save(file, "JPEG", **options)
    return file.getvalue()


def with_segment(data: bytes, code: int, body: bytes) -> bytes:
    """The file with one more segment, right behind its start marker."""
    return data[:2] + struct.pack(">BBH", 0xFF, code, len(body) + 2) + body + data[2:]


def exif(order: str, *entries: tuple[int, int, int, bytes]) -> bytes:
    """An EXIF segment: (tag, type, count, four bytes) of its first directory."""
    sign, header = ("<", b"II*\0") if order == "little" else (">", b"MM\0*")
    body = struct.pack(sign + "IH", 8, len(entries))
    for tag, kind, count, value in entries:
        body += struct.pack(sign + "HHI", tag, kind, count) + value
    return b"Exif\0\0" + header + body + bytes(4)


def short(order: str, value: int) -> bytes:
    return struct.pack("<H2x" if order == "little" else ">H2x", value)


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
ONE = exif("big", (0x0112, 3, 1, short("big", 6)))
UNUSUAL = [
    exif("big", (0x0112, 4, 1, struct.pack(">I", 6))),  # of another type
    exif("big", (0x0112, 3, 1, short("big", 9))), b"Exif\0\0MM*\0" + ONE[10:], b"Exif\0\0garbage", b"Exif\0\0", XMP,
]  # fmt: skip


def test_an_unusual_orientation_is_left_to_pillow() -> None:
    turned, twice = 0, with_segment(with_segment(encoded(), 0xE1, ONE), 0xE1, ONE)
    for data in (twice, *(with_segment(encoded(), 0xE1, segment) for segment in UNUSUAL)):
        assert read_jpeg_header(data).orientation == 0  # type: ignore[union-attr]
        image = Image.open(io.BytesIO(data))
        turned += ImageOps.exif_transpose(image).size != image.size
    assert turned >= 3, "Pillow does see some of them"


def by_pillow(data: bytes) -> tuple[tuple[int, int], Any] | None:
    """Size and orientation; None where Pillow does not open it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about EXIF and MPF that it cannot read
        try:
            image = Image.open(io.BytesIO(data))
            return image.convert("RGB").size, image.getexif().get(0x0112, 1)
        except Exception:  # whichever it is: each is the sample's error
            return None


def resource(code: int, data: bytes, name: bytes = b"") -> bytes:
    """One of Photoshop's image resources."""
    head = b"8BIM" + struct.pack(">HB", code, len(name)) + name + bytes(1 - len(name) % 2)
    return head + struct.pack(">I", len(data)) + data + bytes(len(data) % 2)


def resolution(kind: int, count: int, value: bytes, more: bytes = b"") -> bytes:
    """EXIF with a resolution of some type."""
    return exif("big", (0x011A, kind, count, value), (0x0128, 3, 1, short("big", 2))) + more


def multi_picture(count: int) -> bytes:
    """MPF's index of pictures, of which only the first is in the file."""
    entries = b"".join(
        struct.pack(">LLLHH", 0x030000 if i == 0 else 0, 99, 99 * i, 0, 0) for i in range(count)
    )
    index = ((0xB000, 7, 4, b"0100"), (0xB001, 4, 1, struct.pack(">I", count)))
    # Behind the header and number of tags, three tags and the next directory's place.
    return b"MPF\0" + exif("big", *index, (0xB002, 7, 16 * count, struct.pack(">I", 50)))[6:] + entries


JFIF = b"JFIF\0\1\1\1" + struct.pack(">HH", 72, 72) + bytes(2)
PHOTOSHOP = b"Photoshop 3.0\0"
INCH = struct.pack(">IHHIHH", 72 << 16, 1, 1, 72 << 16, 1, 1)
TABLE = bytes(range(1, 65))
REFUSED: dict[str, list[tuple[int, bytes]]] = {
    "icc": [(0xE2, b"ICC_PROFILE\0\1")],
    "icc, nothing": [(0xE2, b"ICC_PROFILE\0")],
    "icc, second": [(0xE2, b"ICC_PROFILE\0\1\2" + bytes(9)), (0xE2, b"ICC_PROFILE\0\0")],
    "jfif": [(0xE0, b"JFIF\0")],
    "jfif, no zero": [(0xE0, b"JFIF")],
    "jfif, other": [(0xE0, b"JFIFX")],
    "jfif, second": [(0xE0, JFIF), (0xE0, b"JFIF\0\1")],
    "adobe": [(0xEE, b"Adobe")],
    "adobe, one byte": [(0xEE, b"Adobe\0")],
    "adobe, second": [(0xEE, b"Adobe\0\x64" + bytes(4) + b"\1"), (0xEE, b"Adobe")],
    "photoshop": [(0xED, PHOTOSHOP + b"8BIM\3\xed")],
    "photoshop, second": [(0xED, PHOTOSHOP + resource(0x03ED, INCH) + b"8BIM\4\4")],
    "photoshop, odd": [(0xED, PHOTOSHOP + resource(0x0404, b"odd", b"name") + b"8BIM\4\4")],
    "exif, byte": [(0xE1, resolution(1, 1, b"H\0\0\0"))],
    "exif, undefined": [(0xE1, resolution(7, 1, b"H\0\0\0"))],
    "exif, no text": [(0xE1, resolution(2, 1, bytes(4)))],
    "exif, digit": [(0xE1, resolution(2, 2, b"7\0\0\0"))],
    "exif, behind the orientation": [
        (0xE1, exif("little", (0x0112, 3, 1, short("little", 1)), (0x011A, 1, 1, b"H\0\0\0"),
                    (0x0128, 3, 1, short("little", 2)))),
    ],
    "exif, header with zeros changed": [(0xE1, b"Exif\0\0MM*\0" + resolution(1, 1, b"H\0\0\0")[10:])],
    "tables, cut": [(0xDB, bytes(1) + TABLE[:-1])],
    "tables, cut in the second": [(0xDB, bytes(1) + TABLE + b"\1")],
    "tables, cut, of 16 bits": [(0xDB, b"\x10" + TABLE)],
    "tables, a fifth": [(0xDB, b"\4" + TABLE)],
    "hierarchical": [(0xDE, b"\x08\0\x46\0\x5d\1\1\x11")],
    "unknown marker": [(0x02, b"")],
    "restart interval, none": [(0xDD, b"")],
    # By Pillow from 11.0; earlier ones read other parts.
    "new: exif, signature twice": [(0xE1, b"Exif\0\0" + resolution(1, 1, b"H\0\0\0"))],
    "new: exif, in two parts": [
        (0xE1, resolution(1, 1, b"H\0\0\0")[:20]), (0xE1, b"Exif\0\0" + resolution(1, 1, b"H\0\0\0")[20:]),
    ],
}  # fmt: skip


def with_segments(segments: list[tuple[int, bytes]], data: bytes) -> bytes:
    for code, body in reversed(segments):
        data = with_segment(data, code, body)
    return data


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_pillow_does_not_open_are_not_trusted(name: str) -> None:
    data = with_segments(REFUSED[name], without_jfif(encoded()))
    if not name.startswith("new") or int(PIL.__version__.partition(".")[0]) >= 11:
        assert by_pillow(data) is None
    assert not is_trusted(data)


def without_jfif(data: bytes) -> bytes:
    """As cameras write it; JFIF has a resolution, and Pillow looks for none in EXIF then."""
    assert data[2:4] == b"\xff\xe0"
    return data[:2] + data[4 + int.from_bytes(data[4:6], "big") :]


def test_a_camera_s_and_photoshop_s_segments_are_trusted() -> None:
    ratio = resolution(5, 1, struct.pack(">I", 38), struct.pack(">II", 72, 1))
    profile = bytes(range(256)) * 3  # any bytes will do
    parts = [profile[:200], profile[200:400], profile[400:]]
    long = b"Exif\0\0" + bytes(500)  # goes on where the first EXIF segment ends
    for segments in (
        [(0xE1, ratio)], [(0xE1, ratio), (0xE1, long)],
        [(0xE1, resolution(2, 5, struct.pack(">I", 38), b"300\0\0"))],
        [(0xE2, b"ICC_PROFILE\0" + bytes([i + 1, 3]) + part) for i, part in enumerate(parts)],
        [(0xE2, b"ICC_PROFILE\0\1\2" + profile)],  # the other one is missing
        [(0xE0, JFIF)], [(0xE0, JFIF + b"rgb"), (0xE0, b"JFXX\0\x10")],
        [(0xEE, b"Adobe\0\x64" + bytes(4) + b"\1")],
        [(0xED, PHOTOSHOP + resource(0x03ED, INCH) + resource(0x0404, b"odd", b"name"))],
        [(0xED, PHOTOSHOP)],
        [(0xED, PHOTOSHOP + resource(0x0404, bytes(99))[:60]), (0xED, PHOTOSHOP + b"the rest")],
        [(0xE2, multi_picture(2))], [(0xE2, multi_picture(1))], [(0xE2, b"FPXR\0")], [(0xE2, b"MPF\0")],
        [(0xE1, XMP)], [(0xE1, b"http://ns.adobe.com/xap/1.0/\0")], [(0xE1, b"")],
        [(0xEF, b"any")], [(0xFE, b"a comment")],
        [(0xDB, b"\0" + TABLE + b"\x13" + TABLE + TABLE)],
    ):  # fmt: skip
        for data in (encoded(), without_jfif(encoded())):
            full = with_segments(segments, data)
            assert is_trusted(full), segments
            assert by_pillow(full) is not None
    # The index above is one that Pillow reads.
    assert Image.open(io.BytesIO(with_segment(encoded(), 0xE2, multi_picture(2)))).format == "MPO"


SIGNATURES = [
    (0xE0, JFIF[:5]), (0xE1, b"Exif\0\0"), (0xE1, XMP[:29]), (0xE2, b"ICC_PROFILE\0"), (0xE2, b"MPF\0"),
    (0xED, PHOTOSHOP), (0xED, PHOTOSHOP + b"8BIM"), (0xEE, b"Adobe"), (0xDB, b""), (0xFE, b""),
]  # fmt: skip


@st.composite
def directories(draw: st.DrawFn) -> bytes:
    """What follows EXIF's or MPF's signature: tags that Pillow reads, of any type, perhaps cut."""
    tags = draw(st.permutations([0x0112, 0x011A, 0x011A, 0x0128, 0xB000, 0xB001, 0xB002]))
    order = draw(st.sampled_from(["little", "big"]))
    sizes = st.one_of(st.integers(0, 5), st.integers(0, (1 << 32) - 1))
    values = st.one_of(
        st.sampled_from([b"7\0\0\0", b"72\0\0", bytes(4), b"\0\0\0\x14"]), st.binary(min_size=4, max_size=4)
    )
    whole = exif(
        order,
        *(
            (tag, draw(st.integers(0, 17)), draw(sizes), draw(values))
            for tag in tags[: draw(st.integers(0, 6))]
        ),
    )
    whole = whole[6:] + draw(st.binary(max_size=30))
    if draw(st.booleans()):
        return whole
    begins = draw(st.sampled_from([whole[:4], b"MM*\0", b"II\0*", b"II+\0"]))
    return begins + whole[4 : draw(st.integers(4, 99))]


@st.composite
def crafted(draw: st.DrawFn) -> bytes:
    """A file with segments that begin as known ones do, and go on at random or end."""
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        code, begins = draw(st.sampled_from(SIGNATURES))
        body = begins[: draw(st.integers(0, len(begins)))] if draw(st.integers(0, 3)) == 0 else begins
        if begins in (b"Exif\0\0", b"MPF\0") and draw(st.booleans()):
            body += draw(directories())
        elif begins == PHOTOSHOP:
            body += b"".join(
                resource(draw(st.integers(0x3ED, 0x3EF)), draw(st.binary(max_size=9))) for _ in range(3)
            )
            body = body[: draw(st.integers(0, len(body)))]
        else:
            body += draw(st.one_of(st.binary(max_size=20), st.integers(0, 20).map(bytes)))
        segments.append((code, body))
    data = encoded(Image.fromarray(PHOTO[:16, :16]), progressive=draw(st.booleans()))
    return with_segments(segments, without_jfif(data) if draw(st.booleans()) else data)


@settings(max_examples=250)
@given(crafted())
def test_trusted_files_are_what_pillow_says(data: bytes) -> None:
    header = read_jpeg_header(data)
    if header is not None and header.trusted:
        found = by_pillow(data)
        assert found is not None and found[0] == (header.width, header.height)
        assert header.orientation in (0, found[1])
