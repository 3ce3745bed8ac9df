"""Decoded chunks that are remembered: until all was taken of them, and never more than said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.read.hdf5.recent import RecentChunks


class Decoder:
    """Makes chunks of 10 bytes, and counts."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def of(self, key: Any, nbytes: int = 10) -> Callable[[], Any]:
        def decode() -> Any:
            self.made.append(key)
            return np.full(nbytes, key, np.uint8)

        return decode


def test_it_is_remembered_until_all_was_taken() -> None:
    recent, decoder = RecentChunks(100), Decoder()
    for taken in (1, 2, 1):
        assert recent.get(7, decoder.of(7), taken, 4).tolist() == [7] * 10
    assert decoder.made == [7]
    assert (recent.nbytes, recent.decoded_nbytes) == (0, 10)
    recent.get(7, decoder.of(7), 1, 4)
    assert (decoder.made, recent.nbytes, recent.decoded_nbytes) == ([7, 7], 10, 20)


def test_who_takes_everything_leaves_nothing() -> None:
    recent, decoder = RecentChunks(100), Decoder()
    for _ in range(2):
        recent.get(1, decoder.of(1), 4, 4)
        recent.get(2, decoder.of(2), 9, 4)  # a sample twice
    assert recent.nbytes == 0
    assert decoder.made == [1, 2, 1, 2]


def test_the_one_not_used_for_longest_goes_first() -> None:
    recent, decoder = RecentChunks(30), Decoder()
    for key in (1, 2, 3, 1, 4):
        recent.get(key, decoder.of(key), 1, 99)
    assert recent.nbytes == 30
    for key in (1, 3, 4):
        recent.get(key, decoder.of(key), 1, 99)
    assert decoder.made == [1, 2, 3, 4]
    recent.get(2, decoder.of(2), 1, 99)
    assert decoder.made == [1, 2, 3, 4, 2]


def test_one_that_is_too_large_is_not_remembered() -> None:
    recent, decoder = RecentChunks(9), Decoder()
    for _ in range(2):
        assert len(recent.get(1, decoder.of(1), 1, 4)) == 10
    assert (recent.nbytes, decoder.made) == (0, [1, 1])


def test_an_error_is_everybodys_own_and_is_forgotten() -> None:
    recent, decoder = RecentChunks(100), Decoder()

    def fail() -> Any:
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            recent.get(1, fail, 1, 4)
    assert recent.nbytes == recent.decoded_nbytes == 0
    assert recent.get(1, decoder.of(1), 1, 4).tolist() == [1] * 10
    assert recent.nbytes == 10


def test_threads_that_want_the_same_chunk_decode_it_once() -> None:
    recent, barrier, made = RecentChunks(1000), threading.Barrier(4), []

    def decode() -> Any:
        made.append(threading.get_ident())
        return np.arange(10, dtype=np.uint8)

    def work(_: int) -> list[int]:
        barrier.wait(60)
        found: list[int] = recent.get(1, decode, 1, 4).tolist()
        return found

    for epoch in range(1, 30):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [list(range(10))] * 4
        assert len(made) == epoch
        assert recent.nbytes == 0


@given(
    asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=40), most=st.integers(0, 45),
)  # fmt: skip
def test_never_more_than_said_and_always_right(asked: list[tuple[int, int]], most: int) -> None:
    recent, decoder = RecentChunks(most), Decoder()
    for key, taken in asked:
        assert recent.get(key, decoder.of(key), taken, 5).tolist() == [key] * 10
        assert recent.nbytes <= most
    assert recent.decoded_nbytes == 10 * len(decoder.made)
