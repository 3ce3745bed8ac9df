"""What a cache holds: records of a fixed size, found by the digest of what they are about.

Records are appended to a log that several processes share and never changed.  Each process
keeps a copy of the log and a hash table over it in a few flat arrays, without a Python object
for an entry, so that forked workers share the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RECORD", "Entry", "EntryTable", "Part", "aligned", "pack_record", "pack_records"]

RECORD = np.dtype([
    ("low", "<u8"), ("high", "<u8"), ("offset", "<u8"), ("nbytes", "<u8"), ("sum", "<u8"),
    ("height", "<u4"), ("width", "<u4"), ("channels", "<u4"), ("note", "<u4"), ("flags", "<u4"),
    ("check", "<u4"),
])  # fmt: skip
_WORDS = RECORD.itemsize // 4
# Odd numbers that are unlike each other: a word that is lost or in another's place shows.
_FACTORS = (np.arange(1, _WORDS, dtype=np.uint32) * np.uint32(0x9E3779B1)) | np.uint32(1)
_FACTOR_LIST = _FACTORS.tolist()
_DIGEST, _BODY, _CHECK = struct.Struct("<QQ"), struct.Struct("<3Q5I"), struct.Struct("<I")
_WORD_LIST = struct.Struct(f"<{_WORDS - 1}I")
_SMALLEST = 1 << 10
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
        sum: of the bytes, see ``store.checksum``.
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


def pack_record(
    digest: bytes, offset: int, nbytes: int, shape: tuple[int, int, int], flags: int, total: int, note: int
) -> bytes:
    """The record of an entry, as the log holds it."""
    body = digest + _BODY.pack(offset, nbytes, total, *shape, note, flags)
    words = _WORD_LIST.unpack(body)
    # As ``_check``, which is slower for a single one.
    check = 1 + sum(word * factor for word, factor in zip(words, _FACTOR_LIST, strict=True))
    return body + _CHECK.pack(check % (1 << 32))


def pack_records(
    digests: Sequence[bytes], offset: int, step: int, nbytes: int, totals: Sequence[int], note: int
) -> bytes:
    """The records of several entries of rows of bytes, as the log holds them.

    Args:
        digests: of 16 bytes each.
        offset, step: where the first begins, and the bytes from one to the next.
        nbytes, note: of each, and of its note.
        totals: their checksums.
    """
    records = np.zeros(len(digests), RECORD)
    halves = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    records["low"], records["high"] = halves[:, 0], halves[:, 1]
    records["offset"] = offset + step * np.arange(len(digests))
    records["nbytes"], records["sum"], records["note"] = nbytes, totals, note
    records["height"], records["width"], records["channels"] = 1, nbytes, 1
    records["check"] = _check(records)
    return records.tobytes()


class EntryTable:
    """The entries that this process knows of.

    Looking up is safe beside a thread that extends the table; adding needs the caller's lock.
    """

    def __init__(self) -> None:
        self._count = 0
        # Replaced as one, so that a reader never combines old and new arrays.
        self._arrays = _empty(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, digest: bytes) -> Entry | None:
        """The entry of a digest of 16 bytes."""
        low, high = _DIGEST.unpack(digest)
        slots, records, lows, highs = self._arrays
        mask = len(slots) - 1
        place = low & mask
        while (number := slots.item(place)) >= 0:
            if lows.item(number) == low and highs.item(number) == high:
                return _entry(number, records[number].item())
            place = (place + 1) & mask
        return None

    def extend(self, log: bytes) -> int:
        """Add records from the log.

        Args:
            log: the part of the log behind what the table has, of whole records.

        Returns:
            The first byte of the data file that none of the new entries has.
        """
        new = np.frombuffer(log, RECORD)
        count = self._count + len(new)
        if 2 * count > len(self._arrays[0]):
            self._grow(count)
        slots, records, lows, highs = self._arrays
        records[self._count : count] = new
        lows[self._count : count], highs[self._count : count] = new["low"], new["high"]
        is_whole = _check(new) == new["check"]
        numbers = self._count + np.flatnonzero(is_whole)
        _insert(slots, lows, numbers.astype(np.int32))
        self._count = count
        whole = new[is_whole]
        return int((whole["offset"] + whole["nbytes"] + whole["note"]).max(initial=0))

    def append(self, record: bytes) -> None:
        """Add the one record that follows, which is whole."""
        if 2 * (self._count + 1) > len(self._arrays[0]):
            self._grow(self._count + 1)
        slots, records, lows, highs = self._arrays
        number = self._count
        records[number : number + 1] = np.frombuffer(record, RECORD)
        low, high = _DIGEST.unpack_from(record)
        lows[number], highs[number] = low, high
        mask = len(slots) - 1
        place = low & mask
        while slots.item(place) >= 0:
            place = (place + 1) & mask
        slots[place] = number
        self._count = number + 1

    def forget(self, number: int) -> None:
        """Never find this entry again: its bytes are not what they were."""
        _, records, lows, highs = self._arrays
        lows[number], highs[number] = 0, 0
        records["check"][number] = ~_check(records[number : number + 1])[0]  # also when the table grows

    def entries(self) -> list[Entry]:
        """All entries."""
        records = self._arrays[1][: self._count]
        whole = np.flatnonzero(_check(records) == records["check"])
        return [_entry(number, records[number].item()) for number in whole.tolist()]

    def _grow(self, count: int) -> None:
        size = len(self._arrays[0])
        while size < 2 * count:
            size *= 2
        slots, records, lows, highs = arrays = _empty(size)
        old = self._arrays[1][: self._count]
        records[: self._count] = old
        lows[: self._count], highs[: self._count] = old["low"], old["high"]
        _insert(slots, lows, np.flatnonzero(_check(old) == old["check"]).astype(np.int32))
        self._arrays = arrays


_Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[Any], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


def _empty(slots: int) -> _Arrays:
    """The slots of a hash table (-1 is free), and room for half as many records."""
    room = slots // 2
    return (
        np.full(slots, -1, np.int32), np.zeros(room, RECORD), np.zeros(room, np.uint64),
        np.zeros(room, np.uint64),
    )  # fmt: skip


def _insert(slots: npt.NDArray[np.int32], lows: npt.NDArray[np.uint64], numbers: Any) -> None:
    """Put many numbers into the table at once: all try, those that find their place taken go on."""
    mask = len(slots) - 1
    places = (lows[numbers] & np.uint64(mask)).astype(np.int64)
    while numbers.size:
        free = slots[places] < 0
        slots[places[free]] = numbers[free]  # of several at one place, one stays
        left = slots[places] != numbers
        numbers, places = numbers[left], (places[left] + 1) & mask


def _check(records: Any) -> Any:
    """A checksum of each record's other words: uint32 (N,)."""
    words = np.ascontiguousarray(records).view(np.uint32).reshape(-1, _WORDS)
    return (words[:, :-1] * _FACTORS).sum(axis=1, dtype=np.uint32) + np.uint32(1)


def _entry(number: int, record: tuple[int, ...]) -> Entry:
    _, _, offset, nbytes, total, height, width, channels, note, flags, _ = record
    return Entry(number, offset, nbytes, (height, width, channels), flags, total, note)
