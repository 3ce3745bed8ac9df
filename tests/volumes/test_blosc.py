"""Parts of Blosc's buffers, and what damaged ones can do: an error or wrong bytes, but nothing outside of them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.read.chunks.errors import ChunkError
from fastpipe.volumes.blosc import BloscHeader, decompress, read_parts

CNAMES = ["blosclz", "lz4", "lz4hc", "zlib", "zstd"]


def content(nbytes: int, seed: int = 0, values: int = 5) -> Any:
    return np.random.default_rng(seed).integers(0, values, nbytes).astype(np.uint8)


def compressed(
    data: Any, cname: str = "zstd", level: int = 3, shuffle: int = 1, block: int = 0, size: int = 4
) -> bytes:
    return bytes(
        numcodecs.blosc.compress(data.tobytes(), cname.encode(), level, shuffle, block, typesize=size)
    )


def read(stored: bytes, nbytes: int, parts: Sequence[tuple[int, int]]) -> list[Any]:
    """Parts of a buffer in a file: each a begin and an end."""
    outs = [np.full(end - begin, 0xAB, np.uint8) for begin, end in parts]
    with tempfile.TemporaryFile() as file:
        file.write(stored)
        file.flush()
        memory = np.full(len(stored), 0xCD, np.uint8)
        some = [(begin, out) for (begin, _), out in zip(parts, outs, strict=True)]
        read_parts(file.fileno(), len(stored), nbytes, some, memory)
    return outs


@settings(max_examples=150)
@given(
    cname=st.sampled_from(CNAMES), level=st.integers(0, 9), shuffle=st.integers(0, 2), block=st.sampled_from([0, 256, 1 << 10, 1 << 14]),
    size=st.sampled_from([1, 2, 3, 4, 8, 16]), elements=st.integers(1, 3000), seed=st.integers(0, 99), data=st.data(),
)  # fmt: skip
def test_parts_are_those_of_the_content(
    cname: str, level: int, shuffle: int, block: int, size: int, elements: int, seed: int, data: Any
) -> None:
    """Any parts of any buffer, in any order, also those that begin within an element."""
    made = content(elements * size, seed, data.draw(st.sampled_from([1, 3, 256])))
    stored = compressed(made, cname, level, shuffle, block, size)
    places = st.tuples(st.integers(0, len(made)), st.integers(0, len(made))).filter(
        lambda ends: ends[0] < ends[1]
    )
    if data.draw(st.booleans()):  # by whole elements
        places = st.tuples(st.integers(0, elements - 1), st.integers(1, elements)).map(
            lambda ends: (size * min(ends[0], ends[1] - 1), size * ends[1])
        )
    parts = data.draw(st.lists(places, min_size=1, max_size=4))
    outs = read(stored, len(made), parts)
    for (begin, end), out in zip(parts, outs, strict=True):
        np.testing.assert_array_equal(out, made[begin:end])


def test_more_than_the_whole_in_parts() -> None:
    made = content(1 << 12)
    parts = [(0, len(made)), (16, 64), (0, len(made))]
    outs = read(compressed(made), len(made), parts)
    for out, (begin, end) in zip(outs, parts, strict=True):
        np.testing.assert_array_equal(out, made[begin:end])


def test_two_blocks_that_begin_at_the_same_place() -> None:
    """Damage, or a compressor that saves room: both have all that follows."""
    made = np.tile(content(4096), 4)
    stored = bytearray(compressed(made, block=4096))
    begins = struct.unpack_from("<4I", stored, 16)
    struct.pack_into("<I", stored, 16 + 4 * 2, begins[1])
    (out,) = read(bytes(stored), len(made), [(2 * 4096, 3 * 4096)])
    np.testing.assert_array_equal(out, made[:4096])


@pytest.mark.parametrize("cname", CNAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_buffers_of_many_blocks(cname: str, size: int) -> None:
    """Which are large for some compressors, whatever they are asked for."""
    made, random = content(1 << 19, 1), np.random.default_rng(2)
    stored = compressed(made, cname, 1, 1, 1 << 12, size)
    assert BloscHeader.of(stored, len(made)).blocks >= 2
    for _ in range(12):
        ends = size * random.integers(0, len(made) // size + 1, (2, 2))
        parts = [(int(low), int(high)) for low, high in np.sort(ends, axis=1) if low < high]
        outs = read(stored, len(made), parts)
        for (begin, end), out in zip(parts, outs, strict=True):
            np.testing.assert_array_equal(out, made[begin:end])


def test_the_whole_is_decompressed() -> None:
    made = content(10_000)
    (out,) = read(compressed(made), len(made), [(0, len(made))])
    np.testing.assert_array_equal(out, made)
    out = np.zeros(len(made), np.uint8)
    decompress(np.frombuffer(compressed(made), np.uint8), out)
    np.testing.assert_array_equal(out, made)


def test_blocks_may_lie_in_any_order() -> None:
    """As threads of a compressor put them."""
    block = 1 << 10
    made = content(8 * block)
    stored = compressed(made, block=block)
    begins = list(struct.unpack_from("<8I", stored, 16))
    ends = [*begins[1:], len(stored)]
    table, body = [0] * 8, b""
    for number in (3, 0, 7, 1, 6, 2, 5, 4):
        table[number] = 48 + len(body)
        body += stored[begins[number] : ends[number]]
    turned = stored[:16] + struct.pack("<8I", *table) + body
    for parts in ([(0, len(made))], [(2 * block, 3 * block)], [(block, 5 * block), (7 * block, 8 * block)]):
        outs = read(turned, len(made), parts)
        for (begin, end), out in zip(parts, outs, strict=True):
            np.testing.assert_array_equal(out, made[begin:end])


def test_a_header_says_what_a_buffer_is() -> None:
    made = content(10_000)
    stored = compressed(made, block=1 << 10, size=2)
    header = BloscHeader.of(stored, len(made))
    assert (header.itemsize, header.nbytes, header.stored) == (2, len(made), len(stored))
    assert (header.block, header.blocks, header.is_copied) == (1 << 10, 10, False)
    assert BloscHeader.of(compressed(made, level=0), len(made)).is_copied


@pytest.mark.parametrize(
    ("place", "value"),
    [(3, b"\0"), (4, b"\0\0\0\0"), (4, b"\1\0\0\0"), (8, b"\0\0\0\0"), (12, b"\x0f\0\0\0")],
)
def test_a_header_of_something_else_is_an_error(place: int, value: bytes) -> None:
    made = content(10_000)
    stored = bytearray(compressed(made))
    stored[place : place + len(value)] = value
    with pytest.raises(ChunkError, match="not that of 10000 bytes"):
        BloscHeader.of(bytes(stored), len(made))


def test_a_header_that_is_cut_off_is_an_error() -> None:
    stored = compressed(content(1000))
    for length in range(16):
        with pytest.raises(ChunkError, match="cut off"):
            BloscHeader.of(stored[:length], 1000)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("parts", [[(0, 1024)], [(256, 512)]])
def test_a_buffer_of_another_length_is_an_error(level: int, parts: list[tuple[int, int]]) -> None:
    stored = compressed(content(1024), level=level, block=256)
    for length in range(len(stored)):
        with pytest.raises(ChunkError):
            read(stored[:length], 1024, parts)
    with pytest.raises(ChunkError, match="it says that it has"):
        read(stored + b"\0", 1024, parts)


# Damaged chunks between pages that nobody may touch: who reads or writes beyond ends the process.
FUZZ = r"""
import ctypes, faulthandler, json, mmap, os, struct, sys
import numcodecs, numcodecs.blosc, numpy as np
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.volumes.blosc import decompress, read_parts
from fastpipe.volumes.codecs import DECODE

faulthandler.enable()
codec, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random, MOST = np.random.default_rng(seed), 1 << 18
libc = ctypes.CDLL(None, use_errno=True)

class Arena:
    def __init__(self, nbytes):
        self.size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, self.size + 2 * mmap.PAGESIZE)
        self.data = np.frombuffer(self.map, np.uint8)
        self.base = self.data.__array_interface__["data"][0]
        for place in (0, self.size + mmap.PAGESIZE):
            assert libc.mprotect(ctypes.c_void_p(self.base + place), mmap.PAGESIZE, 0) == 0
        self.data = self.data[mmap.PAGESIZE : mmap.PAGESIZE + self.size]
    def take(self, nbytes, at_end):
        begin = self.size - nbytes if at_end else 0
        part = self.data[begin : begin + nbytes]
        part[:] = 0xCD
        return part

def changed(stored, head):
    '''A buffer with a few bytes changed, of which many in its first ones; or of another length.'''
    made = bytearray(stored)
    kind = int(random.integers(6))
    if kind == 0:
        return bytes(made[: int(random.integers(0, len(made) + 1))])
    if kind == 1 and head >= 16:  # a number of its header, or of its table
        place = int(random.choice([0, 1, 2, 3, 4, 8, 12] + list(range(16, head - 3, 4))))
        value = int(random.choice([0, 1, 2, 3, 15, 16, 127, 255, 256, 1 << 15, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
                                   len(made), len(made) - 1, len(made) - 4, int(random.integers(1 << 32))]))
        if place < 4:
            made[place] = value & 255
        else:
            struct.pack_into("<I", made, place, value)
        return bytes(made)
    if kind == 2:
        return bytes(made) + bytes(random.integers(0, 256, int(random.integers(1, 40)), np.uint8))
    if kind == 3:
        begin = int(random.integers(len(made)))
        some = random.integers(0, 256, int(random.integers(1, 60)), np.uint8).tobytes()
        made[begin : begin + len(some)] = some[: len(made) - begin]
        return bytes(made)
    for _ in range(int(random.integers(1, 4))):
        end = head if random.random() < 0.4 else len(made)
        made[int(random.integers(end))] = int(random.integers(256))
    return bytes(made)

def sources():
    # Some compressors make large blocks, whatever they are asked for.
    nbytes = MOST if "lz" in codec else 1 << 13
    for values in (1, 4, 256):
        data = random.integers(0, values, nbytes).astype(np.uint8)
        if codec == "zstd":
            yield nbytes, numcodecs.Zstd(3).encode(data), 12
        elif codec == "gzip":
            yield nbytes, numcodecs.GZip(3).encode(data), 12
        elif codec == "zlib":
            yield nbytes, numcodecs.Zlib(3).encode(data), 4
        else:
            cname = codec.split("-")[1].encode()
            for shuffle in (0, 1, 2):
                for block, size in ((0, 4), (1 << 10, 2), (1 << 10, 1)):
                    stored = numcodecs.blosc.compress(data.tobytes(), cname, 1, shuffle, block, typesize=size)
                    blocks = -(-nbytes // struct.unpack_from("<I", stored, 8)[0])
                    yield nbytes, stored, 16 + 4 * blocks

counts = {"error": 0, "made": 0}
arena, target, file = Arena(2 * MOST), Arena(MOST), os.memfd_create("x")
for nbytes, stored, head in sources():
    for step in range(rounds):
        made, at_end = changed(stored, head), bool(step % 2)
        os.ftruncate(file, 0)
        os.pwrite(file, made, 0)
        memory = arena.take(len(made), at_end)
        begin = 16 * int(random.integers(nbytes // 16 - 1))
        end = 16 * int(random.integers(begin // 16 + 1, nbytes // 16 + 1))
        if step % 3 == 0:
            begin, end = 0, nbytes
        try:
            if not codec.startswith("blosc"):
                memory[:] = np.frombuffer(made, np.uint8)
                DECODE[codec](memory, target.take(nbytes, at_end))
            else:
                out = target.take(end - begin, at_end)
                parts = [(begin, out)] if step % 5 else [(begin, out), (begin, out)]
                read_parts(file, len(made), nbytes, parts, memory)
        except ValueError as error:
            assert str(error), "an error that says nothing"
            counts["error"] += 1
        else:
            counts["made"] += 1
print(json.dumps(counts))
"""


def fuzzed(codec: str, rounds: int, seed: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, codec, str(rounds), str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stderr[-3000:]}"
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


@pytest.mark.few(3)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="run it on Linux, where pages can be protected")
@pytest.mark.parametrize("codec", [*(f"blosc-{cname}" for cname in CNAMES), "zstd", "gzip", "zlib"])
def test_a_damaged_chunk_touches_nothing_beyond_it(codec: str) -> None:
    rounds = 100 if codec.startswith("blosc") else 500
    counts = fuzzed(codec, rounds, 0)
    assert sum(counts.values()) == rounds * (27 if codec.startswith("blosc") else 3)
    assert counts["error"] > 100


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="run it on Linux, where pages can be protected")
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("codec", [*(f"blosc-{cname}" for cname in CNAMES), "zstd", "gzip", "zlib"])
def test_many_damaged_chunks_touch_nothing_beyond_them(codec: str, seed: int) -> None:
    assert fuzzed(codec, 3000 if codec.startswith("blosc") else 30_000, seed)["error"] > 1000


@pytest.mark.parametrize("length", [0, 1, 15])
def test_a_file_that_is_shorter_than_it_was_is_an_error(tmp_path: Path, length: int) -> None:
    """Cut off between the look at its size and the reading."""
    stored = compressed(content(4096), block=512)
    (tmp_path / "x").write_bytes(stored[:length])
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        for end in (1024, 4096):
            out = np.empty(end, np.uint8)
            with pytest.raises(ChunkError, match="ends within"):
                read_parts(descriptor, len(stored), 4096, [(0, out)], np.empty(len(stored), np.uint8))
    finally:
        os.close(descriptor)
