"""Byte surgery on image files: what Pillow reads but cannot write, and what nothing can read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

# First column, first row, column step and row step of the seven passes of an interlaced PNG.
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of every segment of a JPEG file up to its first scan header."""
    at = 2
    while True:
        marker = data[at + 1]
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield marker, at, end
        if marker == 0xDA:
            return
        at = end


def _find(data: bytes, *markers: int) -> tuple[int, int]:
    return next((start, end) for marker, start, end in _segments(data) if marker in markers)


def jpeg_insert(data: bytes, marker: int, payload: bytes) -> bytes:
    """Put a segment of at most 65,533 bytes right behind the start of the image."""
    return data[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload + data[2:]


def jpeg_without(data: bytes, marker: int) -> bytes:
    """Leave out the first segment of a kind."""
    start, end = _find(data, marker)
    return data[:start] + data[end:]


def jpeg_payload(data: bytes, marker: int) -> bytes:
    """What the first segment of a kind holds, without marker and length."""
    start, end = _find(data, marker)
    return data[start + 4 : end]


def jpeg_replace(data: bytes, marker: int, payload: bytes, *, claimed: int | None = None) -> bytes:
    """Change the first segment of a kind; ``claimed`` is a wrong length for its header."""
    start, end = _find(data, marker)
    length = struct.pack(">H", len(payload) + 2 if claimed is None else claimed)
    return data[: start + 2] + length + payload + data[end:]


def jpeg_edit_frame(
    data: bytes, *, size: tuple[int, int] | None = None, sampling: tuple[int, int] | None = None,
    precision: int | None = None,
) -> bytes:  # fmt: skip
    """Rewrite the frame header: (height, width), the first component's factors, bits a sample."""
    start, _ = _find(data, 0xC0, 0xC1, 0xC2)
    edited = bytearray(data)
    if precision is not None:
        edited[start + 4] = precision
    if size is not None:
        edited[start + 5 : start + 9] = struct.pack(">HH", *size)
    if sampling is not None:
        edited[start + 11] = sampling[0] << 4 | sampling[1]
    return bytes(edited)


def jpeg_scan_span(data: bytes) -> tuple[int, int]:
    """Where the entropy-coded bytes of a baseline file lie: behind the scan header, before the end."""
    return _find(data, 0xDA)[1], data.rindex(b"\xff\xd9")


def exif_block(orientation: int, thumbnail: bytes) -> bytes:
    """An EXIF segment's payload: the orientation tag, and a JPEG thumbnail in the second directory."""
    first = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 26)
    entries = ((0x0103, 3, 6), (0x0201, 4, 26 + 2 + 3 * 12 + 4), (0x0202, 4, len(thumbnail)))
    second = struct.pack("<H", len(entries))
    second += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"Exif\0\0" + b"II*\0\x08\0\0\0" + first + second + bytes(4) + thumbnail


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    """One chunk of a PNG file with its checksum."""
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(
    samples: npt.NDArray[np.unsignedinteger], *, colour: int, interlaced: bool = False, extra: bytes = b"",
    claimed_size: tuple[int, int] | None = None, behind: bytes = b"", filters: bytes = b"\0", piece: int = 1 << 30,
) -> bytes:  # fmt: skip
    """A PNG file of samples, uint8 or uint16 (H, W, channels).

    ``colour`` is PNG's type: 0 grey, 2 RGB, 3 palette, 4 grey + alpha, 6 RGBA.  ``extra`` are whole chunks
    before the pixels, ``behind`` are whole chunks after them, and ``claimed_size`` is a wrong (height, width)
    for the header.  ``filters`` are the numbers of the rows' filters, used in turn; the samples are taken for
    filtered ones.  ``piece`` is the most bytes of a chunk of pixels.
    """
    height, width = samples.shape[:2] if claimed_size is None else claimed_size
    header = struct.pack(">IIBBBBB", width, height, 8 * samples.itemsize, colour, 0, 0, int(interlaced))
    passes = [samples]
    if interlaced:
        passes = [samples[row::down, column::right] for column, row, right, down in _ADAM7]
    # Every row starts with the number of its filter, 0 = none; empty passes have no rows at all.
    rows = [row.astype(row.dtype.newbyteorder(">")).tobytes() for p in passes if p.size for row in p]
    stored = zlib.compress(b"".join(filters[y % len(filters) :][:1] + row for y, row in enumerate(rows)))
    pixels = [png_chunk(b"IDAT", stored[at : at + piece]) for at in range(0, len(stored), piece)]
    body = png_chunk(b"IHDR", header) + extra + b"".join(pixels) + behind
    return b"\x89PNG\r\n\x1a\n" + body + png_chunk(b"IEND", b"")


def bmp_rle8(indices: npt.NDArray[np.uint8]) -> bytes:
    """A run-length coded BMP file of 8 bits a pixel with a palette of colours; (H, W) in."""
    height, width = indices.shape
    rows = [b"".join(bytes((1, value)) for value in row) for row in indices[::-1]]
    coded = b"\0\0".join([*rows, b"\0\1"])
    palette = b"".join(bytes((i, 255 - i, i * 7 % 256, 0)) for i in range(256))
    offset = 14 + 40 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(coded), 2835, 2835, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(coded), 0, 0, offset) + info + palette + coded


def icc_profile() -> bytes:
    """An ICC profile's header (ICC.1, section 7.2), of an RGB display, with no tags behind it."""
    header = bytearray(132)
    header[0:4] = len(header).to_bytes(4, "big")
    header[8:24] = b"\x04\x30\0\0mntrRGB XYZ "
    header[36:40] = b"acsp"
    return bytes(header)
