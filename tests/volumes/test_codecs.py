"""What compresses whole chunks: undone as the libraries that made them do, and damage is an error."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import numcodecs
import numcodecs.blosc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.reads import ChunkError
from fastpipe.volumes.zarr import BloscHeader, decode

CNAMES = ["blosclz", "lz4", "lz4hc", "zlib", "zstd"]
CODECS: dict[str, Any] = {
    "none": bytes,
    "gzip": lambda data: gzip.compress(data, 3),
    "zlib": lambda data: zlib.compress(data, 3),
    "zstd": lambda data: numcodecs.Zstd(3).encode(data),
    "blosc": lambda data: numcodecs.blosc.compress(data, b"lz4", 3, 1, 0, typesize=4),
}


def content(nbytes: int, seed: int = 0, values: int = 5) -> Any:
    return np.random.default_rng(seed).integers(0, values, nbytes).astype(np.uint8)


def decoded(codec: str, stored: bytes, nbytes: int) -> bytes:
    out = np.full(nbytes, 0xAB, np.uint8)
    decode(codec, stored, out)
    return out.tobytes()


@settings(max_examples=150)
@given(
    cname=st.sampled_from(CNAMES), level=st.integers(0, 9), shuffle=st.integers(0, 2),
    block=st.sampled_from([0, 256, 1 << 10, 1 << 14]), size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    elements=st.integers(1, 3000), values=st.sampled_from([1, 3, 256]),
)  # fmt: skip
def test_any_buffer_of_blosc_is_decoded(
    cname: str, level: int, shuffle: int, block: int, size: int, elements: int, values: int
) -> None:
    made = content(elements * size, 1, values).tobytes()
    stored = bytes(numcodecs.blosc.compress(made, cname.encode(), level, shuffle, block, typesize=size))
    assert decoded("blosc", stored, len(made)) == made


@settings(max_examples=60)
@given(codec=st.sampled_from([*CODECS]), nbytes=st.integers(1, 20_000), values=st.sampled_from([1, 3, 256]))
def test_any_chunk_is_decoded(codec: str, nbytes: int, values: int) -> None:
    made = content(nbytes, 2, values).tobytes()
    stored = bytes(CODECS[codec](made))
    assert decoded(codec, stored, nbytes) == made
    for wrong in (nbytes - 1, nbytes + 1):
        with pytest.raises(ChunkError):
            decoded(codec, stored, wrong)


@pytest.mark.parametrize("codec", [*CODECS])
def test_a_chunk_that_is_cut_off_anywhere_is_an_error(codec: str) -> None:
    made = content(600).tobytes()
    stored = bytes(CODECS[codec](made))
    for length in range(len(stored)):
        with pytest.raises(ChunkError, match=r"."):
            decoded(codec, stored[:length], len(made))


def test_what_only_the_library_knows_is_decoded_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blosc's buffers say by a number which compressor made them: that of Snappy is 2."""
    stored = bytearray(CODECS["blosc"](content(4096).tobytes()))
    stored[2] = stored[2] & 31 | 2 << 5
    with pytest.raises(ChunkError, match="blosc: "):
        decoded("blosc", bytes(stored), 4096)
    monkeypatch.setattr(numcodecs.blosc, "decompress", lambda data: bytes(4096))
    assert decoded("blosc", bytes(stored), 4096) == bytes(4096)
    with pytest.raises(ChunkError, match="4096 bytes instead of 5"):
        stored[4:8] = (5).to_bytes(4, "little")
        stored[8:12] = (5).to_bytes(4, "little")
        decoded("blosc", bytes(stored), 5)


def test_a_header_says_what_a_buffer_is() -> None:
    made = content(10_000)
    stored = bytes(numcodecs.blosc.compress(made.tobytes(), b"zstd", 3, 1, 1 << 10, typesize=2))
    assert BloscHeader.of(stored, len(made)) == (2, len(made), 1 << 10, len(stored))
    for place, value in [(3, 0), (4, 0), (4, 1), (8, 0), (12, 15)]:
        spoiled = bytearray(stored)
        width = 1 if place == 3 else 4
        spoiled[place : place + width] = value.to_bytes(width, "little")
        with pytest.raises(ChunkError, match="not that of 10000 bytes"):
            BloscHeader.of(bytes(spoiled), len(made))
    for length in range(16):
        with pytest.raises(ChunkError, match="cut off"):
            BloscHeader.of(stored[:length], len(made))
