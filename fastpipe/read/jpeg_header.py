"""What a JPEG file says of itself before any pixel is decoded.

The fast decoders are trusted with a file only when its header shows that they decode it as
Pillow does.  Marker codes and segment layouts: ITU-T T.81, annex B; the Adobe APP14 segment:
ITU-T T.872, section 6.5.3; the EXIF orientation tag: CIPA DC-008, tag 0x0112.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["JpegHeader", "read_jpeg_header"]

_SOF0, _SOF1, _SOF2 = 0xC0, 0xC1, 0xC2  # baseline, extended sequential, progressive; Huffman
_ALL_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SOS, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
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
        trusted: the fast decoders give Pillow's pixels for this kind of file, and the
            data runs on to an end marker (a file cut short is left to Pillow to judge).
        orientation: EXIF orientation 1 … 8; 1 where there is none.
    """

    height: int
    width: int
    trusted: bool
    orientation: int


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
    structure_trusted = False
    adobe_transform, orientation, has_jfif = -1, 1, False
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
        elif code == _APP1 and blob[body : body + 6] == b"Exif\0\0":
            orientation = _orientation(blob[body + 6 : position + 2 + length])
        elif code == 0xE0 and blob[body : body + 5] == b"JFIF\0":
            has_jfif = True
        elif code == _APP14 and blob[body : body + 5] == b"Adobe" and length >= 14:
            adobe_transform = blob[body + 11]
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
        and _is_grey_or_ycbcr(blob, body, has_jfif, adobe_transform)
        # Entropy-coded data cannot contain an end marker, so one after the scan's start is real.
        and blob.rfind(b"\xff\xd9") > position
    )
    return JpegHeader(height, width, trusted, orientation)


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


def _is_grey_or_ycbcr(blob: bytes, body: int, has_jfif: bool, adobe_transform: int) -> bool:
    """Whether every decoder takes the components for what libjpeg takes them for.

    libjpeg takes three components for YCbCr when there is a JFIF segment, else as the Adobe
    segment says, else when they are numbered 1, 2, 3.  Files in which those disagree are
    left to Pillow.
    """
    if blob[body + 5] == 1:
        return True
    if adobe_transform >= 0:
        return adobe_transform == 1
    return has_jfif or blob[body + 6 : body + 15 : 3] == b"\1\2\3"


def _orientation(tiff: bytes) -> int:
    """The orientation in the first directory of an EXIF segment; 1 where it has none."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(tiff[:4])
    if order is None:
        return 1

    def number(offset: int, size: int) -> int:
        return int.from_bytes(tiff[offset : offset + size], order)  # type: ignore[arg-type]

    directory = number(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * min(number(directory, 2), 1000), 12):
        if number(entry, 2) == _ORIENTATION_TAG:
            value = number(entry + 8, 2)
            return value if 1 <= value <= 8 else 1
    return 1
