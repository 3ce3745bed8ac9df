"""The hash table over a log of records."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core.cache_store import RECORD_SIZE, Entry
from fastpipe.core.native import native


def _digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def _entry(number: int, place: int | None = None) -> Entry:
    """Entry ``number``, all of whose fields differ from other entries', at a place of the log."""
    at = number if place is None else place
    return Entry(
        at, 64 * number, 3 * number, (number, number + 1, 3), number % 7, 2**63 + number, number % 11
    )


def _record(number: int, digest: bytes | None = None) -> bytes:
    entry = _entry(number)
    return _packed(digest or _digest(number), entry)


def _packed(digest: bytes, entry: Entry) -> bytes:
    return native.pack_records(
        digest, entry.offset, 0, entry.nbytes, entry.shape, entry.flags, [entry.sum], entry.note
    )


def test_an_empty_table_finds_nothing() -> None:
    table = native.EntryTable()
    assert (len(table), table.find(_digest(0)), table.entries()) == (0, None, [])


def test_nothing_may_be_added() -> None:
    table = native.EntryTable()
    assert table.extend(b"") == 0
    assert len(table) == 0


def test_a_record_comes_back_with_all_its_fields() -> None:
    table = native.EntryTable()
    assert table.extend(_record(5)) == 64 * 5 + 3 * 5 + 5
    assert table.find(_digest(5)) == _entry(5, 0)
    assert table.entries() == [_entry(5, 0)]
    largest = (2**64 - 1) // 2
    entry = Entry(1, largest, largest - 9, (2**32 - 1,) * 3, 2**32 - 1, 2**64 - 1, 9)
    table.extend(_packed(b"\xff" * 16, entry))
    assert table.find(b"\xff" * 16) == entry


@pytest.mark.parametrize("step", [1, 7, 511, 512, 513, 5000])
def test_many_entries_in_pieces_of_any_size(step: int) -> None:
    records = [_record(number) for number in range(5000)]
    table = native.EntryTable()
    for start in range(0, len(records), step):
        table.extend(b"".join(records[start : start + step]))
    assert len(table) == 5000
    assert [table.find(_digest(number)) for number in range(5000)] == [_entry(n) for n in range(5000)]
    assert all(table.find(_digest(number)) is None for number in range(5000, 6000))
    assert table.entries() == [_entry(number) for number in range(5000)]


def test_digests_that_want_the_same_place() -> None:
    # They begin alike, so that all are in one chain, which goes over the end of the table.
    digests = [b"\xff" * 8 + number.to_bytes(8, "little") for number in range(300)]
    table = native.EntryTable()
    table.extend(b"".join(_record(number, digest) for number, digest in enumerate(digests)))
    assert [table.find(digest) for digest in digests] == [_entry(number) for number in range(300)]
    assert table.find(b"\xff" * 8 + (300).to_bytes(8, "little")) is None


@given(
    numbers=st.lists(st.integers(0, 40), max_size=60),
    pieces=st.lists(st.integers(0, 9), max_size=30),
    forgotten=st.sets(st.integers(0, 59), max_size=8),
    damaged=st.dictionaries(st.integers(0, 59), st.integers(0, RECORD_SIZE - 1), max_size=8),
)
def test_any_log_in_any_pieces(
    numbers: list[int], pieces: list[int], forgotten: set[int], damaged: dict[int, int]
) -> None:
    """The same digest may come more than once, records may be damaged, entries are forgotten."""
    records = [bytearray(_record(number, _digest(number % 13))) for number in numbers]
    for place, at in damaged.items():
        if place < len(records):
            records[place][at] ^= 0x40
    table, done = native.EntryTable(), 0
    for piece in [*pieces, len(records)]:
        part = records[done : done + piece]
        whole = [number for n, number in enumerate(numbers[done : done + piece], done) if n not in damaged]
        end = max((64 * n + 3 * n + n % 11 for n in whole), default=0)
        assert table.extend(b"".join(part)) == end
        done = min(len(records), done + piece)
        for number in forgotten:
            if number < done:
                table.forget(number)
                table.forget(number)  # as two threads may
    left = {n for n in range(len(records)) if n not in forgotten and n not in damaged}
    assert len(table) == len(records)
    assert [entry[0] for entry in table.entries()] == sorted(left)
    for digest in range(14):
        found = table.find(_digest(digest))
        possible = [_entry(numbers[n], n) for n in sorted(left) if numbers[n] % 13 == digest]
        assert found in possible if possible else found is None


def test_no_damage_of_one_byte_is_taken_for_an_entry() -> None:
    record = _record(3)
    for at in range(len(record)):
        for bit in range(8):
            changed = bytearray(record)
            changed[at] ^= 1 << bit
            table = native.EntryTable()
            table.extend(bytes(changed))
            assert table.entries() == [], (at, bit)


@pytest.mark.parametrize("content", [bytes(64), b"\xff" * 64, _record(3)[32:] + _record(3)[:32]])
def test_what_was_never_a_record_is_none(content: bytes) -> None:
    table = native.EntryTable()
    assert table.extend(content + _record(1)) == 64 + 3 + 1
    assert table.entries() == [_entry(1, 1)]
    assert table.find(bytes(16)) is None


def test_what_was_forgotten_stays_so_when_the_table_grows() -> None:
    table = native.EntryTable()
    table.extend(b"".join(_record(number) for number in range(400)))
    for number in range(0, 400, 3):
        table.forget(number)
    table.extend(b"".join(_record(number) for number in range(400, 4000)))
    for number in range(4000):
        gone = number < 400 and number % 3 == 0
        assert table.find(_digest(number)) == (None if gone else _entry(number))


def test_what_was_forgotten_may_come_again() -> None:
    table = native.EntryTable()
    table.extend(_record(1))
    table.forget(0)
    table.extend(_record(1))
    assert table.find(_digest(1)) == _entry(1, 1)


def test_a_log_in_which_everything_comes_many_times() -> None:
    random = np.random.default_rng(0)
    records = np.frombuffer(b"".join(_record(n) for n in range(1000)), np.uint8).reshape(1000, -1)
    table = native.EntryTable()
    for _ in range(20):
        table.extend(records[random.permutation(1000)].tobytes())
    assert len(table) == 20_000
    assert {found[1] for n in range(1000) if (found := table.find(_digest(n)))} == {
        64 * n for n in range(1000)
    }
