"""A JPEG's segments up to its first scan, walked by a kernel: it is done for each image, and Python's lock is
free meanwhile.

Pillow parses segments that no pixel depends on, and does not open a file in which it comes to their end too
soon.  Fast decoders do not look at them, so that such files are told from others here; which these are has
been read off PIL/JpegImagePlugin.py (13.0).

Marker codes and segment layouts: ITU-T T.81, annex B; the Adobe APP14 segment: ITU-T T.872, section 6.5.3;
EXIF's directory and orientation: CIPA DC-008, tag 0x0112.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.jpeg_scans import FILE, big_endian, scans_are_whole

__all__ = ["header_of"]

_SOF0, _SOF1, _SOF2, _SOF15 = 0xC0, 0xC1, 0xC2, 0xCF  # baseline, extended sequential, progressive; the last
_DHT, _JPG, _DAC = 0xC4, 0xC8, 0xCC  # among these, and no frames
_SOS, _DQT, _DRI, _COM = 0xDA, 0xDB, 0xDD, 0xFE
_APP0, _APP1, _APP2, _APP13, _APP14, _APP15 = 0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xEF
_TEM, _RST0, _EOI = 0x01, 0xD0, 0xD9
_ORIENTATION_TAG, _RESOLUTION_TAG, _MOST_TAGS = 0x0112, 0x011A, 1000
_BYTES, _TEXT, _UNDEFINED = 1, 2, 7  # types of EXIF values that Pillow gives as bytes or text
_MAY_NOT_OPEN = -1

# What segments begin with, and XMP data about the orientation has in it.
_EXIF = np.frombuffer(b"Exif\0\0", np.uint8)
_JFIF = np.frombuffer(b"JFIF", np.uint8)  # Pillow asks for no zero behind it
_ADOBE = np.frombuffer(b"Adobe", np.uint8)
_ICC = np.frombuffer(b"ICC_PROFILE\0", np.uint8)
_PHOTOSHOP = np.frombuffer(b"Photoshop 3.0\0", np.uint8)
_RESOURCE = np.frombuffer(b"8BIM", np.uint8)
_LITTLE = np.frombuffer(b"II*\0", np.uint8)
_BIG = np.frombuffer(b"MM\0*", np.uint8)
_XMP = np.frombuffer(b"rientation", np.uint8)

_t = require("numba.types", extra="image")


@compiled(_t.boolean(FILE, _t.int64, _t.int64, FILE))
def _begins(data: Any, first: int, end: int, text: Any) -> Any:
    """Whether data from ``first`` to ``end`` begins with a text."""
    if end - first < len(text):
        return False
    same = True
    for k in range(len(text)):
        same &= data[first + k] == text[k]
    return same


@compiled(_t.boolean(FILE, _t.int64, _t.int64, FILE))
def _has(data: Any, first: int, end: int, text: Any) -> Any:
    """Whether a text is in data from ``first`` to ``end``."""
    for at in range(first, end - len(text) + 1):
        if data[at] == text[0] and _begins(data, at, end, text):
            return True
    return False


@compiled(_t.int64(FILE, _t.int64, _t.int64, _t.int64, _t.boolean))
def _number(data: Any, first: int, size: int, end: int, is_big: bool) -> Any:
    """A number of EXIF data that ends at ``end``."""
    if is_big:
        return big_endian(data, first, size, end)
    number: Any = 0
    for at in range(min(first + size, end) - 1, first - 1, -1):
        number = number << 8 | np.int64(data[at])
    return number


@compiled(_t.int64(FILE, _t.int64, _t.int64))
def _orientation(data: Any, tiff: int, end: int) -> Any:
    """The orientation in EXIF data's first directory; 1 if it has none, 0 if unclear.

    -1 where Pillow may not open the file: it looks for a resolution, too, and takes the first two bytes or
    characters of one for a ratio.
    """
    is_big = _begins(data, tiff, end, _BIG)
    if end - tiff < 8 or not (is_big or _begins(data, tiff, end, _LITTLE)):
        return _MAY_NOT_OPEN  # Pillow reads some other headers, too
    directory = tiff + _number(data, tiff + 4, 4, end, is_big)
    entry, count = directory + 2, _number(data, directory, 2, end, is_big)
    orientation, has_orientation = 0, False
    if count > _MOST_TAGS or entry + 12 * count > end:  # cut off: another segment may go on with it
        return _MAY_NOT_OPEN
    for _ in range(count):
        tag, kind = _number(data, entry, 2, end, is_big), _number(data, entry + 2, 2, end, is_big)
        length = _number(data, entry + 4, 4, end, is_big)
        if tag == _RESOLUTION_TAG and length <= 2 and kind in (_BYTES, _TEXT, _UNDEFINED):
            return _MAY_NOT_OPEN
        if tag == _ORIENTATION_TAG and not has_orientation:
            has_orientation = True
            value = _number(data, entry + 8, 2, end, is_big)
            if kind == 3 and length == 1 and 1 <= value <= 8:  # one short number
                orientation = value
        entry += 12
    return orientation if has_orientation else 1


@compiled(_t.boolean(FILE, _t.int64, _t.int64))
def _resources_fit(data: Any, body: int, end: int) -> Any:
    """Whether the heads of Photoshop's resources are whole: signature, code, name, size."""
    at: Any = body + len(_PHOTOSHOP)
    while _begins(data, at, end, _RESOURCE):
        name = at + 6
        if name >= end:
            return False
        size = name + 1 + np.int64(data[name])
        size += (size - body) & 1  # both are padded to an even place
        if size + 4 > end:
            return False
        at = size + 4 + big_endian(data, size, 4, end)
        at += (at - body) & 1
    return True


@compiled(_t.boolean(FILE, _t.int64, _t.int64))
def _tables_fit(data: Any, body: int, end: int) -> Any:
    """Whether a segment is made of whole quantisation tables, of which there can be four."""
    at: Any = body
    while at < end:
        if data[at] & 15 > 3:
            return False
        at += 1 + 64 * (1 if data[at] < 16 else 2)  # bytes, or numbers of two
    return at == end


@compiled(_t.boolean(FILE, _t.int64, _t.int64, _t.int64))
def _frame_is_trusted(data: Any, body: int, length: int, code: int) -> Any:
    """Whether the fast decoders have been compared with Pillow for such a frame: Huffman coding, 8 bits, grey
    or three components sampled 4:4:4, 4:2:2 or 4:2:0."""
    if code > _SOF2 or data[body] != 8:
        return False
    components = np.int64(data[body + 5])
    if length != 8 + 3 * components:
        return False
    first = data[body + 7] if components else np.uint8(0)
    if components == 1:
        return first == 0x11
    if components != 3 or (first != 0x11 and first != 0x21 and first != 0x22):
        return False
    return data[body + 10] == 0x11 and data[body + 13] == 0x11


@compiled(_t.boolean(FILE, _t.int64, _t.int64, _t.int64, _t.int64[::1]))
def _note_application(data: Any, code: int, body: int, end: int, said: Any) -> Any:
    """Take note of an application segment.

    Args:
        data: uint8 (N,), the file.
        code: of its marker.
        body, end: where its body begins and ends.
        said: int64 (5,), which is written: the orientation, Adobe's transform or -1, whether there is JFIF,
            whether there is EXIF; the last is not this function's.

    Returns:
        Whether Pillow opens a file with such a segment; False where that is not clear.
    """
    if code == _APP0 and _begins(data, body, end, _JFIF):
        said[2] = 1
        # Fewer bytes, or no zero, are no JFIF for libjpeg; fewer than 7 are an error of Pillow's.
        return end - body >= 14 and data[body + 4] == 0
    if code == _APP1 and _begins(data, body, end, _EXIF):
        # Pillow joins several EXIF segments: 0 stands for asking it.
        is_first, said[3] = said[3] == 0, 1
        orientation = _orientation(data, body + 6, end) if is_first else 0
        said[0] = max(orientation, 0) if said[0] == 1 else 0
        return orientation != _MAY_NOT_OPEN
    if code == _APP1 and _has(data, body, end, _XMP):  # XMP, which Pillow looks at as well
        said[0] = 0
    if code == _APP2 and _begins(data, body, end, _ICC):
        return end - body >= 14  # with a part's number, and how many there are
    if code == _APP13 and _begins(data, body, end, _PHOTOSHOP):
        return _resources_fit(data, body, end)
    if code == _APP14 and _begins(data, body, end, _ADOBE):
        if end - body < 12:
            return False
        said[1] = data[body + 11]
    return True


@compiled(_t.boolean(FILE, _t.int64, _t.int64, _t.int64, _t.int64[::1]))
def _note_segment(data: Any, code: int, body: int, end: int, said: Any) -> Any:
    """Take note of any segment but a frame's or scan's: as of ``_note_application``.

    The last of ``said`` is written as well: how many MCUs are between restart markers, 0 for none.
    """
    if _APP0 <= code <= _APP14:
        return _note_application(data, code, body, end, said)
    if code == _DQT:
        return _tables_fit(data, body, end)
    if code == _DRI:
        said[4] = big_endian(data, body, 2, end)
        return end - body == 2
    return code in (_DHT, _COM, _APP15)


@compiled(_t.boolean(FILE, _t.int64, _t.int64, _t.boolean))
def _is_grey_or_ycbcr(data: Any, body: int, adobe: int, has_jfif: bool) -> Any:
    """Whether every decoder takes the components for what libjpeg takes them for.

    libjpeg takes three components for YCbCr when there is a JFIF segment, else as the Adobe segment says,
    else when they are numbered 1, 2, 3.  Files in which those disagree are left to Pillow.
    """
    if data[body + 5] == 1:
        return True
    if adobe >= 0:
        return adobe == 1
    return has_jfif or (data[body + 6] == 1 and data[body + 9] == 2 and data[body + 12] == 3)


@compiled(_t.UniTuple(_t.int64, 6)(FILE))
def header_of(data: Any) -> Any:
    """Walk a JPEG's segments up to its first scan, and its scans where it would be trusted.

    Args:
        data: uint8 (N,), the encoded file.

    Returns:
        The fields of a ``JpegHeader``; height and width are 0 where this is no JPEG or its structure is
        broken before the first scan.
    """
    none, end = (0, 0, 0, 0, 0, 0), len(data)
    if end < 3 or data[0] != 0xFF or data[1] != 0xD8 or data[2] != 0xFF:
        return none
    position, frame, height, width, trusted, opens = 2, 0, 0, 0, False, True
    said = np.empty(5, np.int64)
    said[0], said[1], said[2], said[3], said[4] = 1, -1, 0, 0, 0
    while True:
        if position + 4 > end or data[position] != 0xFF:
            return none
        code = np.int64(data[position + 1])
        if code in (0xFF, _TEM) or _RST0 <= code < _EOI:  # a fill byte, or a marker alone
            position += 1 if code == 0xFF else 2
            opens &= code == 0xFF  # some of those markers are errors, and none belongs here
            continue
        length = big_endian(data, position + 2, 2, end)
        body, after = position + 4, position + 2 + length
        if length < 2 or after > end:
            return none
        if _SOF0 <= code <= _SOF15 and code != _DHT and code != _JPG and code != _DAC:
            if frame or length < 8:
                return none
            frame, height, width = (
                body,
                big_endian(data, body + 1, 2, end),
                big_endian(data, body + 3, 2, end),
            )
            trusted = _frame_is_trusted(data, body, length, code)
        elif code == _SOS:
            break
        else:
            opens &= _note_segment(data, code, body, after, said)
        position = after
    if not frame or not height or not width:
        return none
    if trusted:
        trusted = opens and _is_grey_or_ycbcr(data, frame, said[1], said[2] == 1)
    if trusted:
        trusted = scans_are_whole(data, position, frame, said[4])
    return height, width, np.int64(trusted), said[0], frame, np.int64(data[frame - 3] == _SOF2)
