"""Decoded chunks that are remembered: until all was taken of them, and never more than said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fastpipe.read.hdf5.recent import RecentChunks
from hypothesis import given
from hypothesis import strategies as st


def get(recent: RecentChunks, key: Any, decode: Callable[[], Any], taken: int, samples: int) -> Any:
    """One chunk."""
    (chunk,) = recent.get([key], [taken], [samples], lambda places: [decode() for _ in places])
    assert chunk.address == chunk.data.ctypes.data
    return chunk.data


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
        assert get(recent, 7, decoder.of(7), taken, 4).tolist() == [7] * 10
    assert decoder.made == [7]
    assert (recent.nbytes, recent.decoded_nbytes) == (0, 10)
    get(recent, 7, decoder.of(7), 1, 4)
    assert (decoder.made, recent.nbytes, recent.decoded_nbytes) == ([7, 7], 10, 20)


def test_who_takes_everything_leaves_nothing() -> None:
    recent, decoder = RecentChunks(100), Decoder()
    for _ in range(2):
        get(recent, 1, decoder.of(1), 4, 4)
        get(recent, 2, decoder.of(2), 9, 4)  # a sample twice
    assert recent.nbytes == 0
    assert decoder.made == [1, 2, 1, 2]


def test_the_one_not_used_for_longest_goes_first() -> None:
    recent, decoder = RecentChunks(30), Decoder()
    for key in (1, 2, 3, 1, 4):
        get(recent, key, decoder.of(key), 1, 99)
    assert recent.nbytes == 30
    for key in (1, 3, 4):
        get(recent, key, decoder.of(key), 1, 99)
    assert decoder.made == [1, 2, 3, 4]
    get(recent, 2, decoder.of(2), 1, 99)
    assert decoder.made == [1, 2, 3, 4, 2]


def test_one_that_is_too_large_is_not_remembered() -> None:
    recent, decoder = RecentChunks(9), Decoder()
    for _ in range(2):
        assert len(get(recent, 1, decoder.of(1), 1, 4)) == 10
    assert (recent.nbytes, decoder.made) == (0, [1, 1])


def test_an_error_is_everybodys_own_and_is_forgotten() -> None:
    recent, decoder = RecentChunks(100), Decoder()

    def fail() -> Any:
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            get(recent, 1, fail, 1, 4)
    assert recent.nbytes == recent.decoded_nbytes == 0
    assert get(recent, 1, decoder.of(1), 1, 4).tolist() == [1] * 10
    assert recent.nbytes == 10


def test_threads_that_want_the_same_chunk_decode_it_once() -> None:
    recent, barrier, made = RecentChunks(1000), threading.Barrier(4), []

    def decode() -> Any:
        made.append(threading.get_ident())
        return np.arange(10, dtype=np.uint8)

    def work(_: int) -> list[int]:
        barrier.wait(60)
        found: list[int] = get(recent, 1, decode, 1, 4).tolist()
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
        assert get(recent, key, decoder.of(key), taken, 5).tolist() == [key] * 10
        assert recent.nbytes <= most
    assert recent.decoded_nbytes == 10 * len(decoder.made)


def test_several_at_once() -> None:
    recent, decoded = RecentChunks(1000), []

    def decode(places: list[int]) -> list[Any]:
        decoded.append(places)
        block = np.arange(100, dtype=np.uint8).reshape(10, 10)
        return [block[place] for place in places]

    assert recent.expect("abc") == [False] * 3
    assert recent.expect("cd") == [True, False]
    found = recent.get("abc", [1, 4, 2], [4, 4, 4], decode)
    assert [chunk.data[0] for chunk in found] == [0, 10, 20]
    found = recent.get("cab", [1, 2, 4], [4, 4, 4], decode)
    assert [chunk.data[0] for chunk in found] == [20, 0, 20]
    assert decoded == [[0, 1, 2], [2]]
    assert recent.nbytes == 20
    assert recent.decoded_nbytes == 40
    assert recent.used_nbytes == 10 * (1 + 4 + 2 + 1 + 2 + 4) / 4


def test_one_of_a_block_does_not_keep_all_of_it() -> None:
    recent, block = RecentChunks(1000), np.zeros((50, 10), np.uint8)
    for decode in (lambda places: [block[7]], lambda places: []):
        (chunk,) = recent.get([1], [1], [3], decode)
        assert chunk.data.base is None
        assert chunk.address == chunk.data.ctypes.data


def test_all_of_a_call_that_failed_are_decoded_anew() -> None:
    recent = RecentChunks(1000)

    def fail(places: list[int]) -> Any:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        recent.get("abc", [1] * 3, [4] * 3, fail)
    assert recent.nbytes == 0
    assert len(recent.get("ab", [1] * 2, [4] * 2, lambda places: [np.zeros(3, np.uint8)] * len(places))) == 2


def test_threads_that_want_some_of_the_same_chunks() -> None:
    """In orders of their own: who waited for another's while others wait for its own would wait for ever."""
    recent, barrier = RecentChunks(100_000), threading.Barrier(4)
    lock, made = threading.Lock(), []

    def decode(keys: list[int]) -> list[Any]:
        with lock:
            made.extend(keys)
        return [np.full(10, key, np.uint8) for key in keys]

    def work(seed: int) -> bool:
        order = np.random.default_rng(seed).permutation(200).tolist()
        barrier.wait(60)
        found = []
        for first in range(0, 200, 20):
            keys = order[first : first + 20]
            chunks = recent.get(
                keys, [1] * 20, [5] * 20, lambda places, keys=keys: decode([keys[k] for k in places])
            )  # type: ignore[misc]
            found += [chunk.data.tolist() == [key] * 10 for key, chunk in zip(keys, chunks, strict=True)]
        return all(found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert sorted(made) == list(range(200))
