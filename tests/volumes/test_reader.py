"""Boxes of volumes, copied from units that are remembered or not, by threads and processes at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kit import boxes_equal, random_array, random_box, reader_of

from fastpipe.core.shared_chunks import UnitFile
from fastpipe.volumes.reader import PatchReader
from fastpipe.volumes.volume import DamagedUnitError, UnitGrid, UnitReader, Volume


class Numbers(Volume, UnitReader):
    """An array that is read in units, some of them in a chunk, of which some are damaged, or wait; it counts
    those that are read."""

    name, how = "numbers", "in memory"

    def __init__(self, array: Any, unit: Sequence[int], along: int = 1) -> None:
        self._array, self._along = array, along
        self.shape, self.dtype, self.grid = array.shape, array.dtype, UnitGrid(array.shape, unit)
        self.decoded: list[list[int]] = []
        self.damaged: set[int] = set()
        self.before: Callable[[], object] = lambda: None

    def open(self) -> UnitReader:
        return self

    def stored_in(self, numbers: Any) -> Any:
        return numbers // self._along

    def state(self) -> tuple[str, str]:
        return "", ""

    def read(self, numbers: Any, outs: Sequence[Any]) -> None:
        self.decoded.append(numbers.tolist())
        self.before()
        for number, out in zip(numbers.tolist(), outs, strict=True):
            assert (out.__array_interface__["data"][0] % 16, len(out)) == (0, self.unit_nbytes)
            if number in self.damaged:
                raise DamagedUnitError(f"unit {number} is damaged")
            out[:] = 0xEE
            self.put(self._array[self.grid.box(number)], out)


@contextmanager
def remembering(volume: Volume, slots: int, first: int = 0) -> Iterator[tuple[PatchReader, Any]]:
    """A volume's reader with room for so many units, or none, and this room."""
    file = UnitFile(first + volume.grid.count, slots, volume.unit_nbytes) if slots else None
    units = file and file.opened()
    yield reader_of(volume, units, first), units
    if file is not None:
        file.close()


@settings(max_examples=120)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5), along=st.integers(1, 3),
    kind=st.sampled_from(["u1", "<u2", ">f4", "c16", "S3", "?"]), slots=st.integers(0, 6), first=st.integers(0, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_box_is_that_of_the_array(
    sizes: list[tuple[int, int]], along: int, kind: str, slots: int, first: int, seed: int
) -> None:
    array = random_array([min(size, 40 // len(sizes)) for size, _ in sizes], kind, seed)
    with remembering(Numbers(array, [side for _, side in sizes], along), slots, first) as (reader, _):
        boxes_equal(reader, array, seed, 6)


@pytest.mark.parametrize("slots", [0, 1, 9])
def test_a_damaged_unit_is_an_error_and_leaves_nothing_behind(slots: int) -> None:
    array = np.arange(81).reshape(9, 9)
    volume, out = Numbers(array, (3, 3)), np.empty((9, 9), array.dtype)
    with remembering(volume, slots) as (reader, units):
        volume.damaged = {4}
        for _ in range(2):
            with pytest.raises(DamagedUnitError, match="unit 4"):
                reader.read([0, 0], out)
        reader.read([0, 6], out[:, 6:])  # where all is well
        np.testing.assert_array_equal(out[:, 6:], array[:, 6:])
        assert not slots or not any(units.is_coming(key) for key in range(9))
        volume.damaged = set()
        reader.read([0, 0], out)
        np.testing.assert_array_equal(out, array)


def test_one_of_the_threads_that_want_a_unit_decodes_it() -> None:
    """All begin before the one that decodes is done: it goes on when it is the only one on its way."""
    array, begun, count = np.arange(16), threading.Semaphore(0), 6
    volume = Numbers(array, (16,))
    volume.before = lambda: [begun.acquire() for _ in range(count)]
    with remembering(volume, 1) as (reader, _), ThreadPoolExecutor(count) as pool:

        def work(_: int) -> bool:
            begun.release()
            out = np.empty(10, array.dtype)
            reader.read([3], out)
            return bool((out == array[3:13]).all())

        assert list(pool.map(work, range(count))) == [True] * count
    assert volume.decoded == [[0]]


@pytest.mark.parametrize(
    ("slots", "processes", "boxes"),
    [(1, 2, 60), (2, 2, 60), (5, 2, 60), *(pytest.param(n, 4, 4000, marks=pytest.mark.slow) for n in (1, 2, 3, 7, 20))],
)  # fmt: skip
def test_threads_and_processes_with_little_memory_read_the_array(
    slots: int, processes: int, boxes: int, forked: Callable[[Callable[[], object]], int]
) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 40, (20, 21, 22))
    volume = Numbers(array, (7, 8, 9), 2)
    volume.damaged = {3}
    memory = UnitFile(volume.grid.count, slots, -(-volume.unit_nbytes // 16) * 16)

    def work(seed: int) -> None:
        reader = reader_of(volume, memory.opened())

        def read(number: int) -> None:
            random = np.random.default_rng([seed, number])
            for _ in range(boxes):
                box = random_box(random, array.shape)
                out = np.empty([side.stop - side.start for side in box], array.dtype)
                with suppress(DamagedUnitError):
                    reader.read([side.start for side in box], out)
                    np.testing.assert_array_equal(out, array[box])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, range(2)))

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(processes)]  # type: ignore[misc]
    work(99)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    memory.close()


def test_numbers_of_units_of_large_and_empty_arrays_are_right() -> None:
    assert (UnitGrid((0, 5), (2, 2)).count, UnitGrid((3, 0), (2, 2)).counts) == (0, (2, 0))
    grid = UnitGrid((1 << 40, 1 << 20), (4, 4))
    (number,) = grid.touched((slice((1 << 40) - 1, 1 << 40), slice((1 << 20) - 1, 1 << 20))).tolist()
    assert number == grid.count - 1 == (1 << 56) - 1
    assert grid.place(number) == ((1 << 38) - 1, (1 << 18) - 1)
