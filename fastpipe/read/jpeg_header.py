"""What a JPEG file says of itself before any pixel is decoded.

The fast decoders are trusted with a file only when its header shows that they decode it as
Pillow does, and when its scans are whole.  Marker codes and segment layouts: ITU-T T.81, annex
B; the Adobe APP14 segment: ITU-T T.872, section 6.5.3; the EXIF orientation tag: CIPA DC-008,
tag 0x0112.
"""

from __future__ import annotations

from typing import NamedTuple

from fastpipe.read.jpeg_scans import scans_are_whole

__all__ = ["JpegHeader", "read_jpeg_header"]

_SOF0, _SOF1, _SOF2 = 0xC0, 0xC1, 0xC2  # baseline, extended sequential, progressive; Huffman
_ALL_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SOS, _DRI, _APP0, _APP1, _APP14 = 0xDA, 0xDD, 0xE0, 0xE1, 0xEE
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_ORIENTATION_TAG = 0x0112

# Sampling factors (horizontal, vertical) of Y, Cb, Cr for which the fast decoders have been
# compared with Pillow: 4:4:4, 4:2:2, 4:2:0.
_TRUSTED_SAMPLING = frozenset({
    (0x11, 0x11, 0x11),
    (0x21, 0x11, 0x11),
    (0x22, 0x11, 0x11),
})  # fmt: skip


class JpegHeader(NamedTuple):
    """Facts from a JPEG's header.

    Attributes:
        height, width: in pixels, before any EXIF turn.
        trusted: the fast decoders give Pillow's pixels for this kind of file, and all its
            scans are there (a file cut short or spoilt is left to Pillow to judge).
        orientation: EXIF orientation 1 … 8; 1 where there is none; 0 where Pillow has to be
            asked, as the tag is in XMP data or has an unusual form.
        frame: where the frame header's body begins in the file.
        is_progressive: rows are not sent one after the other.
    """

    height: int
    width: int
    trusted: bool
    orientation: int
    frame: int
    is_progressive: bool


def read_jpeg_header(blob: bytes) -> JpegHeader | None:
    """Walk a JPEG's segments up to its first scan.

    Args:
        blob: the encoded file.

    Returns:
        The header, or None where this is no JPEG or its structure is broken before the
        first scan.
    """
    if blob[:3] != b"\xff\xd8\xff":
        return None
    position, end = 2, len(blob)
    frame: tuple[int, int, int] | None = None  # where its body starts, height, width
    structure_trusted, interval = False, 0
    applications = _Applications()
    while position + 4 <= end:
        if blob[position] != 0xFF:
            return None
        code = blob[position + 1]
        if code == 0xFF:  # fill byte
            position += 1
            continue
        if code in _STANDALONE:
            position += 2
            continue
        length = blob[position + 2] << 8 | blob[position + 3]
        body = position + 4
        if length < 2 or position + 2 + length > end:
            return None
        if code in _ALL_SOF:
            if frame is not None or length < 8:
                return None
            height = blob[body + 1] << 8 | blob[body + 2]
            width = blob[body + 3] << 8 | blob[body + 4]
            frame = (body, height, width)
            structure_trusted = _frame_is_trusted(blob, body, length, code)
        elif _APP0 <= code <= _APP14:
            applications.note(code, blob[body : position + 2 + length])
        elif code == _DRI and length >= 4:
            interval = blob[body] << 8 | blob[body + 1]
        elif code == _SOS:
            break
        position += 2 + length
    else:
        return None
    if frame is None or not frame[1] or not frame[2]:
        return None
    body, height, width = frame
    trusted = (
        structure_trusted
        and _is_grey_or_ycbcr(blob, body, applications)
        and scans_are_whole(blob, position, body, interval)
    )
    return JpegHeader(height, width, trusted, applications.orientation, body, blob[body - 3] == _SOF2)


class _Applications:
    """What the application segments say."""

    def __init__(self) -> None:
        self.adobe_transform = -1
        self.has_jfif = False
        self.orientation = 1

    def note(self, code: int, segment: bytes) -> None:
        """Take note of one segment, given its body."""
        if code == _APP1 and segment.startswith(b"Exif\0\0"):
            # Pillow joins several EXIF segments: 0 stands for asking it.
            self.orientation = _orientation(segment[6:]) if self.orientation == 1 else 0
        elif code == _APP1 and b"rientation" in segment:  # XMP, which Pillow looks at as well
            self.orientation = 0
        elif code == _APP0 and segment.startswith(b"JFIF\0"):
            self.has_jfif = True
        elif code == _APP14 and segment.startswith(b"Adobe") and len(segment) >= 12:
            self.adobe_transform = segment[11]


def _frame_is_trusted(blob: bytes, body: int, length: int, code: int) -> bool:
    if code not in (_SOF0, _SOF1, _SOF2) or blob[body] != 8:  # Huffman coding, 8 bits
        return False
    components = blob[body + 5]
    if length != 8 + 3 * components:
        return False
    if components == 1:
        return blob[body + 7] == 0x11
    sampling = tuple(blob[body + 7 + 3 * i] for i in range(components))
    return sampling in _TRUSTED_SAMPLING


def _is_grey_or_ycbcr(blob: bytes, body: int, applications: _Applications) -> bool:
    """Whether every decoder takes the components for what libjpeg takes them for.

    libjpeg takes three components for YCbCr when there is a JFIF segment, else as the Adobe
    segment says, else when they are numbered 1, 2, 3.  Files in which those disagree are
    left to Pillow.
    """
    if blob[body + 5] == 1:
        return True
    if applications.adobe_transform >= 0:
        return applications.adobe_transform == 1
    return applications.has_jfif or blob[body + 6 : body + 15 : 3] == b"\1\2\3"


def _orientation(tiff: bytes) -> int:
    """The orientation in an EXIF segment's first directory; 1 if it has none, 0 if unclear."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(tiff[:4])
    if order is None:
        return 0

    def number(offset: int, size: int) -> int:
        return int.from_bytes(tiff[offset : offset + size], order)  # type: ignore[arg-type]

    directory = number(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * min(number(directory, 2), 1000), 12):
        if number(entry, 2) == _ORIENTATION_TAG:
            value, is_one_short = number(entry + 8, 2), (number(entry + 2, 2), number(entry + 4, 4)) == (3, 1)
            return value if is_one_short and 1 <= value <= 8 else 0
    return 1
