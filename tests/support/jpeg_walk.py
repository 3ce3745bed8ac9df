"""What a JPEG's segments and scans say, by plain Python, for kernels that do the same to be compared with.

Marker codes and segment layouts: ITU-T T.81, annex B; restart markers: annexes B.2.3 and F.1.2.3; the
Adobe APP14 segment: ITU-T T.872, section 6.5.3; EXIF's directory and orientation: CIPA DC-008, tag 0x0112.
Where Pillow does not open a file: PIL/JpegImagePlugin.py (13.0).
"""

from __future__ import annotations

__all__ = ["walked_header"]


_SOF0, _SOF1, _SOF2 = 0xC0, 0xC1, 0xC2  # baseline, extended sequential, progressive; Huffman
_ALL_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SOS, _DRI, _APP0, _APP1, _APP2, _APP13, _APP14 = 0xDA, 0xDD, 0xE0, 0xE1, 0xE2, 0xED, 0xEE
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_ORIENTATION_TAG, _RESOLUTION_TAG = 0x0112, 0x011A
# Bytes of a value, by types of EXIF.
_VALUE_BYTES = dict(enumerate((0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8)))

_TRUSTED_SAMPLING = frozenset({
    (0x11, 0x11, 0x11),
    (0x21, 0x11, 0x11),
    (0x22, 0x11, 0x11),
})  # fmt: skip


_DHT, _EOI, _DQT, _COM = 0xC4, 0xD9, 0xDB, 0xFE
_BETWEEN_SCANS = frozenset({_DHT, _DQT, _DRI, _COM, *range(0xE0, 0xF0)})
_RST0 = 0xD0
_NOTHING_SENT = 16  # more bits than a coefficient can have


def walked_header(blob: bytes) -> tuple[int, int, bool, int, int, bool] | None:
    """Walk a JPEG's segments up to its first scan, and its scans where the rest would be trusted.

    Args:
        blob: the encoded file.

    Returns:
        Height and width, whether fast decoders may be trusted with it, its EXIF orientation (0 where that is
        not clear), where the frame header's body begins, and whether it is progressive; None where this is no
        JPEG or its structure is broken before the first scan.

    >>> walked_header(b"GIF89a") is None
    True
    """
    if blob[:3] != b"\xff\xd8\xff":
        return None
    position, end = 2, len(blob)
    frame: tuple[int, int, int] | None = None  # where its body starts, height, width
    structure_trusted = False
    others = _OtherSegments()
    while position + 4 <= end:
        if blob[position] != 0xFF:
            return None
        code = blob[position + 1]
        if code == 0xFF:  # fill byte
            position += 1
            continue
        if code in _STANDALONE:
            others.pillow_opens = False
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
        elif code == _SOS:
            break
        else:
            others.note(code, blob[body : position + 2 + length])
        position += 2 + length
    else:
        return None
    if frame is None or not frame[1] or not frame[2]:
        return None
    body, height, width = frame
    trusted = (
        structure_trusted
        and others.pillow_opens
        and _is_grey_or_ycbcr(blob, body, others)
        and _scans_are_whole(blob, position, body, others.interval)
    )
    return height, width, trusted, others.orientation, body, blob[body - 3] == _SOF2


class _OtherSegments:
    """What segments say besides the frame's, and whether Pillow opens a file with them."""

    def __init__(self) -> None:
        self.adobe_transform = -1
        self.has_jfif = False
        self.orientation = 1
        self.has_exif = False
        self.interval = 0
        self.pillow_opens = True

    def note(self, code: int, segment: bytes) -> None:
        """Take note of one segment, given its body."""
        if _APP0 <= code <= _APP14:
            self._note_application(code, segment)
        elif code == _DQT:
            self.pillow_opens &= _tables_fit(segment)
        elif code == _DRI:
            self.interval = int.from_bytes(segment[:2], "big")
            self.pillow_opens &= len(segment) == 2
        else:
            self.pillow_opens &= code in _BETWEEN_SCANS

    def _note_application(self, code: int, segment: bytes) -> None:
        is_short = False
        if code == _APP0 and segment.startswith(b"JFIF"):
            self.has_jfif = True
            is_short = len(segment) < 14 or segment[4] != 0
        elif code == _APP1 and segment.startswith(b"Exif\0\0"):
            # Pillow joins several EXIF segments: 0 stands for asking it.
            orientation = 0 if self.has_exif else _orientation(segment[6:])
            is_short = orientation is None
            self.orientation = (orientation or 0) if self.orientation == 1 else 0
            self.has_exif = True
        elif code == _APP1 and b"rientation" in segment:  # XMP, which Pillow looks at as well
            self.orientation = 0
        elif code == _APP2 and segment.startswith(b"ICC_PROFILE\0"):
            is_short = len(segment) < 14
        elif code == _APP13 and segment.startswith(b"Photoshop 3.0\0"):
            is_short = not _resources_fit(segment)
        elif code == _APP14 and segment.startswith(b"Adobe"):
            is_short = len(segment) < 12
            self.adobe_transform = self.adobe_transform if is_short else segment[11]
        self.pillow_opens &= not is_short


def _resources_fit(segment: bytes) -> bool:
    """Whether the heads of Photoshop's resources are whole: signature, code, name, size."""
    at = 14
    while segment[at : at + 4] == b"8BIM":
        if len(segment) < at + 7:
            return False
        at += 7 + segment[at + 6]
        at += at % 2
        if len(segment) < at + 4:
            return False
        at += 4 + int.from_bytes(segment[at : at + 4], "big")
        at += at % 2
    return True


def _tables_fit(segment: bytes) -> bool:
    """Whether a segment is made of whole quantisation tables, of which there can be four."""
    while segment:
        size = 65 if segment[0] < 16 else 129
        if segment[0] % 16 > 3 or len(segment) < size:
            return False
        segment = segment[size:]
    return True


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


def _is_grey_or_ycbcr(blob: bytes, body: int, others: _OtherSegments) -> bool:
    """Whether every decoder takes the components for what libjpeg takes them for.

    libjpeg takes three components for YCbCr when there is a JFIF segment, else as the Adobe
    segment says, else when they are numbered 1, 2, 3.  Files in which those disagree are
    left to Pillow.
    """
    if blob[body + 5] == 1:
        return True
    if others.adobe_transform >= 0:
        return others.adobe_transform == 1
    return others.has_jfif or blob[body + 6 : body + 15 : 3] == b"\1\2\3"


def _orientation(tiff: bytes) -> int | None:
    """The orientation in an EXIF segment's first directory; 1 if it has none, 0 if unclear.

    None where Pillow may not open the file, as it looks for a resolution, too, or warns of values outside.
    """
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return None

    def number(offset: int, size: int) -> int:
        return int.from_bytes(tiff[offset : offset + size], order)  # type: ignore[arg-type]

    directory, orientation = number(4, 4), None
    count = number(directory, 2)
    if count > 1000 or directory + 2 + 12 * count + 4 > len(tiff):
        return None
    total = 0
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, length = number(entry, 2), number(entry + 2, 2), number(entry + 4, 4)
        size = length * _VALUE_BYTES.get(kind, 0)
        if size > 4:
            total += size
            if total > len(tiff) or number(entry + 8, 4) + size > len(tiff):
                return None
        if tag == _RESOLUTION_TAG and kind in (1, 2, 7) and length <= 2:  # bytes, text
            return None
        if tag == _ORIENTATION_TAG and orientation is None:
            value, is_one_short = number(entry + 8, 2), (kind, length) == (3, 1)
            orientation = value if is_one_short and 1 <= value <= 8 else 0
    return 1 if orientation is None else orientation


def _scans_are_whole(blob: bytes, first_scan: int, frame: int, interval: int) -> bool:
    """Walk all scans of a JPEG up to its end marker.

    Args:
        blob: the encoded file.
        first_scan: position of the first scan's SOS marker.
        frame: position of the frame header's body, behind its length.
        interval: MCUs between restart markers, as said before the first scan; 0 for none.

    Returns:
        Whether every scan ends where a segment begins, has its restart markers in order, and
        all coefficients of all components have been sent to their last bit.
    """
    coverage = _Coverage(blob, frame)
    position = first_scan
    while True:
        code, length = blob[position + 1], int.from_bytes(blob[position + 2 : position + 4], "big")
        end = position + 2 + length
        if code == _EOI:
            return coverage.is_complete()
        if length < 2 or end + 2 > len(blob):
            return False
        if code == _DRI:
            interval = int.from_bytes(blob[position + 4 : position + 6], "big")
        if code == _SOS:
            restarts = coverage.restarts_of_scan(position, length, interval)
            position = -1 if restarts is None else _end_of_scan(blob, end, restarts)
            if position < 0:
                return False
        elif code in _BETWEEN_SCANS:
            position = end
        else:
            return False
        while blob[position : position + 2] == b"\xff\xff":
            position += 1
        if blob[position] != 0xFF or position + 2 > len(blob):
            return False


def _end_of_scan(blob: bytes, position: int, restarts: int) -> int:
    """Position of the marker behind coded data; -1 where there is none or a restart marker is missing."""
    passed = 0
    while 0 <= (position := blob.find(b"\xff", position)) < len(blob) - 1:
        code = blob[position + 1]
        if code not in (0, 0xFF):
            if passed == restarts:
                return position
            if code != _RST0 + passed % 8:
                return -1
            passed += 1
        position += 1
    return -1


class _Coverage:
    """What the scans so far have sent."""

    def __init__(self, blob: bytes, frame: int) -> None:
        self._blob = blob
        self._is_progressive = blob[frame - 3] == _SOF2
        self._size = blob[frame + 1] << 8 | blob[frame + 2], blob[frame + 3] << 8 | blob[frame + 4]
        # By component: sampling factors (vertical, horizontal), and the bits still to come of each
        # coefficient; of all together where a scan always sends all.
        self._factors: dict[int, tuple[int, int]] = {}
        self._missing: dict[int, list[int]] = {}
        for i in range(blob[frame + 5]):
            name, factors = blob[frame + 6 + 3 * i], blob[frame + 7 + 3 * i]
            self._factors[name] = factors & 15, factors >> 4
            self._missing[name] = [_NOTHING_SENT] * (64 if self._is_progressive else 1)

    def restarts_of_scan(self, position: int, length: int, interval: int) -> int | None:
        """Take note of a scan; how many restart markers it has, or None if it is malformed."""
        count = (length - 6) // 2
        if count < 1 or length != 6 + 2 * count or self._blob[position + 4] != count:
            return None
        names = [self._blob[position + 5 + 2 * i] for i in range(count)]
        if not set(names) <= set(self._factors):
            return None
        start, stop, bits = self._blob[position + 5 + 2 * count : position + 8 + 2 * count]
        if not self._is_progressive:
            if (start, stop, bits) != (0, 63, 0):
                return None
            stop = 0
        if start > stop or stop > 63:
            return None
        before, after = bits >> 4 or _NOTHING_SENT, bits & 15
        for name in names:
            missing = self._missing[name]
            if missing[start : stop + 1] != [before] * (stop + 1 - start):
                return None  # sent already, or another bit is next
            missing[start : stop + 1] = [after] * (stop + 1 - start)
        return (self._units(names) - 1) // interval if interval else 0

    def is_complete(self) -> bool:
        return not any(any(missing) for missing in self._missing.values())

    def _units(self, names: list[int]) -> int:
        """How many MCUs a scan of these components has: a block each, where it is one alone."""
        units = 1
        for axis, size in enumerate(self._size):
            most = max(factors[axis] for factors in self._factors.values())
            if len(names) > 1:
                units *= -(-size // (8 * most))
            else:
                units *= -((-size * self._factors[names[0]][axis] // most) // 8)
        return units
