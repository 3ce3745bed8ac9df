"""Whether a JPEG's coded data is whole, as far as its markers tell.

Decoders differ in what they make of a scan that stops early, of a marker in the middle of one,
and of a progressive file whose last scans are missing (which libjpeg smooths over whole rows,
and so not alike in a part of the image).  All of that shows without decoding: coded data holds
no byte 0xFF but before a zero, a restart marker whose number is known, or the next segment.
Scan headers and restart markers: ITU-T T.81, annexes B.2.3 and F.1.2.3.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["FILE", "big_endian", "scans_are_whole"]

_DHT, _SOF2, _EOI, _SOS, _DQT, _DRI, _COM = 0xC4, 0xC2, 0xD9, 0xDA, 0xDB, 0xDD, 0xFE
_APP0, _APP15 = 0xE0, 0xEF
_RST0 = 0xD0
_NOTHING_SENT = 16  # more bits than a coefficient can have
_BLOCK = 64  # bytes that are looked at together

_t = require("numba.types", extra="image")
FILE = _t.Array(_t.uint8, 1, "C", readonly=True)
_NUMBERS, _TABLE = _t.Array(_t.int64, 2, "C"), _t.Array(_t.uint8, 2, "C")


@compiled(_t.int64(FILE, _t.int64, _t.int64, _t.int64))
def big_endian(data: Any, first: int, size: int, end: int) -> Any:
    """A number of so many bytes; of fewer, where they would be at the end or behind it."""
    number: Any = 0
    for at in range(first, min(first + size, end)):
        number = number << 8 | np.int64(data[at])
    return number


@compiled(_t.int64(FILE, _t.int64, _t.int64))
def _end_of_scan(data: Any, position: int, restarts: int) -> Any:
    """Walk coded data, whose bytes 0xFF are each followed by a zero, or padding.

    Args:
        data: uint8 (N,), the file.
        position: where the coded data begins.
        restarts: how many restart markers it has.

    Returns:
        Position of the marker behind it; -1 where there is none or a restart marker is missing.
    """
    last, passed = len(data) - 1, 0
    while position < last:
        stop = min(position + _BLOCK, last)
        if position + _BLOCK <= last:
            # Nearly all blocks hold no 0xFF but before a zero: they need no look at their bytes one by one.
            here, behind = data[position:stop], data[position + 1 : stop + 1]
            found = np.uint8(0)
            for k in range(_BLOCK):
                # One more makes 0xFF and 0, the two that may follow, 0 and 1.
                may_not_follow = np.uint8(behind[k] + np.uint8(1)) > np.uint8(1)
                found |= np.uint8(here[k] == 0xFF) & np.uint8(may_not_follow)
            if found == 0:
                position = stop
                continue
        while position < stop:
            code = data[position + 1]
            if data[position] == 0xFF and code != 0 and code != 0xFF:
                if passed == restarts:
                    return position
                if code != _RST0 + passed % 8:
                    return -1
                passed += 1
            position += 1
    return -1


@compiled(_t.int64(FILE, _t.int64, _NUMBERS))
def _note_components(data: Any, frame: int, components: Any) -> Any:
    """Write what a frame says of its components; of a name that comes twice, what it says last.

    Args:
        data: uint8 (N,), the file.
        frame: position of the frame header's body, behind its length.
        components: int64 (≥ components, 3), which is written: name, sampling factors vertical and horizontal.

    Returns:
        How many there are, by different names.
    """
    count = 0
    for i in range(np.int64(data[frame + 5])):
        name, factors = np.int64(data[frame + 6 + 3 * i]), np.int64(data[frame + 7 + 3 * i])
        place = 0
        while place < count and components[place, 0] != name:
            place += 1
        count = max(count, place + 1)
        components[place, 0], components[place, 1], components[place, 2] = name, factors & 15, factors >> 4
    return count


@compiled(_t.int64(FILE, _t.int64, _NUMBERS, _t.int64, _t.int64, _t.int64))
def _units(data: Any, frame: int, components: Any, count: int, sent: int, first: int) -> Any:
    """How many MCUs a scan of so many components has: a block each, where it is the first of them alone."""
    units = 1
    for axis in range(2):
        size, most = big_endian(data, frame + 1 + 2 * axis, 2, len(data)), 0
        for place in range(count):
            most = max(most, components[place, 1 + axis])
        if sent > 1:
            units *= -(-size // (8 * most))
        else:
            units *= -((-size * components[first, 1 + axis] // most) // 8)
    return units


@compiled(_t.int64(FILE, _t.int64, _t.int64, _NUMBERS, _t.int64, _TABLE, _t.int64, _t.int64))
def _restarts_of_scan(
    data: Any, frame: int, position: int, components: Any, count: int, missing: Any, length: int,
    interval: int,
) -> Any:  # fmt: skip
    """Take note of a scan; how many restart markers it has, or -1 if it is malformed.

    Args:
        data, frame: as of ``scans_are_whole``.
        position, length: of its header.
        components, count: of the frame.
        missing: of each component, the bits still to come of each coefficient; which is written.
        interval: MCUs between restart markers; 0 for none.
    """
    sent = (length - 6) // 2
    if sent < 1 or length != 6 + 2 * sent or np.int64(data[position + 4]) != sent:
        return -1
    end = position + 5 + 2 * sent
    start, bits = np.int64(data[end]), np.int64(data[end + 2])
    stop: Any = np.int64(data[end + 1])
    if missing.shape[1] == 1:  # a scan sends all of a coefficient
        if start != 0 or stop != 63 or bits != 0:
            return -1
        stop = 0
    if start > stop or stop > 63:
        return -1
    before, after = bits >> 4 or _NOTHING_SENT, bits & 15
    first: Any = -1
    for i in range(sent):
        place = 0
        while place < count and components[place, 0] != data[position + 5 + 2 * i]:
            place += 1
        if place == count:
            return -1
        first = place if i == 0 else first
        for k in range(start, stop + 1):
            if missing[place, k] != before:
                return -1  # sent already, or another bit is next
            missing[place, k] = after
    return (_units(data, frame, components, count, sent, first) - 1) // interval if interval else 0


@compiled(_t.boolean(FILE, _t.int64, _t.int64, _t.int64))
def scans_are_whole(data: Any, position: int, frame: int, interval: int) -> Any:
    """Walk all scans of a JPEG up to its end marker.

    Args:
        data: uint8 (N,), the encoded file.
        position: of the first scan's SOS marker.
        frame: position of the frame header's body, behind its length.
        interval: MCUs between restart markers, as said before the first scan; 0 for none.

    Returns:
        Whether every scan ends where a segment begins, has its restart markers in order, and
        all coefficients of all components have been sent to their last bit.
    """
    size = len(data)
    most: Any = max(1, np.int64(data[frame + 5]))
    components = np.empty((most, 3), np.int64)
    count = _note_components(data, frame, components)
    missing = np.empty((count, 64 if data[frame - 3] == _SOF2 else 1), np.uint8)
    for place in range(count):  # loops, as NumPy's functions take long to compile
        for k in range(missing.shape[1]):
            missing[place, k] = _NOTHING_SENT
    while True:
        code, length = data[position + 1], big_endian(data, position + 2, 2, size)
        end = position + 2 + length
        if code == _EOI:
            left = 0
            for place in range(count):
                for k in range(missing.shape[1]):
                    left |= missing[place, k]
            return left == 0
        if length < 2 or end + 2 > size:
            return False
        if code == _DRI:
            interval = big_endian(data, position + 4, 2, size)
        if code == _SOS:
            restarts = _restarts_of_scan(data, frame, position, components, count, missing, length, interval)
            position = -1 if restarts < 0 else _end_of_scan(data, end, restarts)
            if position < 0:
                return False
        elif code in (_DHT, _DQT, _DRI, _COM) or _APP0 <= code <= _APP15:
            position = end
        else:
            return False
        while position + 1 < size and data[position] == 0xFF and data[position + 1] == 0xFF:
            position += 1
        if data[position] != 0xFF or position + 2 > size:
            return False
