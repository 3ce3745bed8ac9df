"""Whether a JPEG's coded data is whole, as far as its markers tell.

Decoders differ in what they make of a scan that stops early, of a marker in the middle of one,
and of a progressive file whose last scans are missing (which libjpeg smooths over whole rows,
and so not alike in a part of the image).  All of that shows without decoding: coded data holds
no byte 0xFF but before a zero, a restart marker whose number is known, or the next segment.
Scan headers and restart markers: ITU-T T.81, annexes B.2.3 and F.1.2.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["scans_are_whole"]

_DHT, _SOF2, _EOI, _SOS, _DQT, _DRI, _COM = 0xC4, 0xC2, 0xD9, 0xDA, 0xDB, 0xDD, 0xFE
_BETWEEN_SCANS = frozenset({_DHT, _DQT, _DRI, _COM, *range(0xE0, 0xF0)})
_RST0 = 0xD0
_NOTHING_SENT = 16  # more bits than a coefficient can have
_BLOCK = 64  # bytes that are looked at together

_t = require("numba.types", extra="image")


def scans_are_whole(blob: bytes, first_scan: int, frame: int, interval: int) -> bool:
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
    data = np.frombuffer(blob, np.uint8)
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
            position = -1 if restarts is None else _end_of_scan(data, end, restarts)
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


@compiled(_t.int64(_t.Array(_t.uint8, 1, "C", readonly=True), _t.int64, _t.int64))
def _end_of_scan(data: Any, position: int, restarts: int) -> int:
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
