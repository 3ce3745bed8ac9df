"""What a cache holds: records of a fixed size, found by the digest of what they are about.

Records are appended to a log that several processes share and never changed.  The native core has
the table over them (``native.EntryTable``), in which its threads look images up without Python's lock.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RECORD_SIZE", "Entry", "Part", "aligned"]

RECORD_SIZE = 64  # bytes of a record in the log
_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Bytes of a data file that an entry takes, its note included; and where the next one may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Entry(NamedTuple):
    """One thing that is kept.

    Attributes:
        number: its place in the log.
        offset: where its bytes begin in the data file.
        nbytes: how many they are.
        shape: (height, width, channels) of the uint8 array that they are.
        flags: as given to ``put``.
        sum: of the bytes, see ``native.sum_of``.
        note: length of the note that follows the bytes.
    """

    number: int
    offset: int
    nbytes: int
    shape: tuple[int, int, int]
    flags: int
    sum: int
    note: int


class Part(NamedTuple):
    """A part of the data file in which one process alone puts entries."""

    pid: int
    start: int
    stop: int
