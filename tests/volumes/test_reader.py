"""Boxes of volumes, copied from units that are remembered or not, by threads and processes at once."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kit import boxes_equal, random_array, random_box, reader_of

from fastpipe.core.shared_chunks import UnitFile
from fastpipe.errors import OptionError
from fastpipe.volumes.reader import padded_indices
from fastpipe.volumes.volume import DamagedUnitError, UnitGrid, UnitReader, Volume, grown_unit

Forked = Callable[[Callable[[], object]], int]
MODES = ["constant", "edge", "reflect", "symmetric", "wrap"]


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
            assert out.__array_interface__["data"][0] % 16 == 0
            assert len(out) == self.unit_nbytes
            if number in self.damaged:
                raise DamagedUnitError(f"unit {number} is damaged")
            out[:] = 0xEE
            self.put(self._array[self.grid.box(number)], out)


class Remembering:
    """A volume's reader with room for so many units, or none; ``close`` it."""

    def __init__(self, volume: Volume, slots: int, first: int = 0) -> None:
        self._file = UnitFile(first + volume.grid.count, slots, volume.unit_nbytes) if slots else None
        self.units = self._file and self._file.opened()
        self.reader = reader_of(volume, self.units, first)

    def __enter__(self) -> Remembering:
        return self

    def __exit__(self, *_: object) -> None:
        del self.units, self.reader
        if self._file is not None:
            self._file.close()


@settings(max_examples=120)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5), along=st.integers(1, 3),
    kind=st.sampled_from(["u1", "<u2", ">f4", "c16", "S3", "?"]), slots=st.integers(0, 6), first=st.integers(0, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_box_is_that_of_the_array(
    sizes: list[tuple[int, int]], along: int, kind: str, slots: int, first: int, seed: int
) -> None:
    """By units of any shape, with room for any number of them: also for one, or none."""
    array = random_array([min(size, 40 // len(sizes)) for size, _ in sizes], kind, seed)
    with Remembering(Numbers(array, [side for _, side in sizes], along), slots, first) as remembering:
        boxes_equal(remembering.reader, array, seed, 6)


@pytest.mark.parametrize("slots", [0, 1, 3, 100])
def test_memory_with_gaps_is_filled(slots: int) -> None:
    """A batch in which a patch's rows do not lie together, but their elements do."""
    array = np.arange(8 * 9 * 10).reshape(8, 9, 10)
    batch = np.full((6, 12, 2, 14), -1)
    with Remembering(Numbers(array, (3, 4, 5)), slots) as remembering:
        remembering.reader.read([2, 1, 3], batch[1:5, 2:10:2, 0, 3:9])
    np.testing.assert_array_equal(batch[1:5, 2:10:2, 0, 3:9], array[2:6, 1:5, 3:9])
    batch[1:5, 2:10:2, 0, 3:9] = -1
    assert (batch == -1).all()


def test_a_remembered_unit_is_decoded_once() -> None:
    array = np.arange(100.0).reshape(10, 10)
    volume = Numbers(array, (3, 3), 4)
    with Remembering(volume, 16, 5) as remembering:
        for row in (*range(8), *range(8)):
            out = np.empty((3, 10))
            remembering.reader.read([row, 0], out)
            np.testing.assert_array_equal(out, array[row : row + 3])
    assert sorted(sum(volume.decoded, [])) == list(range(16))
    assert all(len({number // 4 for number in some}) == 1 for some in volume.decoded), "chunk by chunk"


def test_a_box_without_elements_needs_nothing() -> None:
    volume = Numbers(np.zeros((4, 4)), (2, 2))
    reader_of(volume).read([1, 1], np.empty((0, 2)))
    assert not volume.decoded


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(OptionError, match="numbers has 6 dimensions, of which 5 can be read"):
        reader_of(Numbers(np.zeros((1,) * 6), (1,) * 6))


@pytest.mark.parametrize("slots", [0, 1, 9])
def test_a_damaged_unit_is_an_error_and_leaves_nothing_behind(slots: int) -> None:
    array = np.arange(81).reshape(9, 9)
    volume = Numbers(array, (3, 3))
    with Remembering(volume, slots) as remembering:
        reader, out = remembering.reader, np.empty((9, 9), array.dtype)
        volume.damaged = {4}
        for _ in range(2):
            with pytest.raises(DamagedUnitError, match="unit 4"):
                reader.read([0, 0], out)
        reader.read([0, 6], out[:, 6:])  # where all is well
        np.testing.assert_array_equal(out[:, 6:], array[:, 6:])
        if slots:
            assert not any(remembering.units.is_coming(key) for key in range(9))
        volume.damaged = set()
        reader.read([0, 0], out)
        np.testing.assert_array_equal(out, array)
        del reader


def run_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_of_the_threads_that_want_a_unit_decodes_it() -> None:
    """All begin before the one that decodes is done: it goes on when it is the only one on its way."""
    array, begun, count = np.arange(16), threading.Semaphore(0), 6
    volume, right = Numbers(array, (16,)), list[bool]()
    volume.before = lambda: [begun.acquire() for _ in range(count)]
    with Remembering(volume, 1) as remembering:

        def work(_: int) -> None:
            begun.release()
            out = np.empty(10, array.dtype)
            remembering.reader.read([3], out)
            right.append(bool((out == array[3:13]).all()))

        run_threads(work, count)
    assert right == [True] * count
    assert volume.decoded == [[0]]


def stress(slots: int, forked: Forked, processes: int, boxes: int) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 40, (20, 21, 22))
    volume = Numbers(array, (7, 8, 9), 2)
    volume.damaged = {3}
    memory = UnitFile(volume.grid.count, slots, -(-volume.unit_nbytes // 16) * 16)

    def work(seed: int) -> None:
        reader, wrong = reader_of(volume, memory.opened()), list[Any]()

        def read(number: int) -> None:
            random = np.random.default_rng([seed, number])
            for _ in range(boxes):
                box = random_box(random, array.shape)
                out = np.empty([side.stop - side.start for side in box], array.dtype)
                try:
                    reader.read([side.start for side in box], out)
                except DamagedUnitError:
                    continue
                if (out != array[box]).any():
                    wrong.append(box)

        run_threads(read, 2)
        assert not wrong, wrong

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(processes)]  # type: ignore[misc]
    work(99)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    memory.close()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_threads_and_processes_with_little_memory_read_the_array(slots: int, forked: Forked) -> None:
    stress(slots, forked, 2, 60)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 20])
def test_threads_and_processes_read_the_array_for_long(slots: int, forked: Forked) -> None:
    stress(slots, forked, 4, 4000)


@settings(max_examples=150)
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=2), mode=st.sampled_from(MODES), data=st.data()
)
def test_padded_patches_are_those_of_numpy(shape: list[int], mode: str, data: Any) -> None:
    """However far from the array a patch begins, and ends."""
    array = np.arange(math.prod(shape)).reshape(shape)
    starts = [data.draw(st.integers(-60, 60)) for _ in shape]
    sizes = [data.draw(st.integers(1, 70)) for _ in shape]
    indices = [padded_indices(*some, mode) for some in zip(starts, sizes, shape, strict=True)]
    made = array[np.ix_(*indices)]
    if mode == "constant":
        made[np.any(np.stack(np.meshgrid(*indices, indexing="ij")) < 0, axis=0)] = 0
    ends = zip(starts, sizes, shape, strict=True)
    pads = [(max(0, -at), max(0, at + size - most)) for at, size, most in ends]
    padded = np.pad(array, pads, mode)  # type: ignore[call-overload]
    begins = [at + pad[0] for at, pad in zip(starts, pads, strict=True)]
    box = tuple(slice(at, at + size) for at, size in zip(begins, sizes, strict=True))
    np.testing.assert_array_equal(made, padded[box])


# ---- units ----------------------------------------------------------------------------------------


@st.composite
def grids(draw: Any) -> UnitGrid:
    rank = draw(st.integers(0, 5))
    most = {0: 1, 1: 30, 2: 12, 3: 7, 4: 5, 5: 4}[rank]
    shape, unit = ([draw(st.integers(1, most + more)) for _ in range(rank)] for more in (0, 2))
    return UnitGrid(shape, unit)


@settings(max_examples=120)
@given(grid=grids(), seeds=st.lists(st.integers(0, 99), max_size=4))
def test_a_box_touches_the_units_with_an_element_of_it(grid: UnitGrid, seeds: list[int]) -> None:
    unit_of = np.full(grid.shape, -1)
    for number in range(grid.count):
        assert (unit_of[grid.box(number)] == -1).all(), "each element is in one unit"
        unit_of[grid.box(number)] = number
    assert grid.count == math.prod(grid.counts) == unit_of.max() + 1
    # In C order, as numpy.ndindex counts.
    assert [grid.place(number) for number in range(grid.count)] == list(np.ndindex(*grid.counts))
    boxes = [random_box(np.random.default_rng(seed), grid.shape) for seed in seeds]
    ends = [[[getattr(side, end) for side in box] for box in boxes] for end in ("start", "stop")]
    starts, stops = (np.array(end, np.int64).reshape(len(boxes), len(grid.shape)) for end in ends)
    numbers, are_there = grid.touched_by_each(starts, stops)
    for box, row, there in zip(boxes, numbers, are_there, strict=True):
        touched = grid.touched(box)
        np.testing.assert_array_equal(touched, np.unique(unit_of[box]))
        assert touched.dtype == np.int64
        assert row[there].tolist() == touched.tolist()


def test_numbers_of_units_of_large_and_empty_arrays_are_right() -> None:
    assert UnitGrid((0, 5), (2, 2)).count == 0
    assert UnitGrid((3, 0), (2, 2)).counts == (2, 0)
    grid = UnitGrid((1 << 40, 1 << 20), (4, 4))
    number = int(grid.touched((slice((1 << 40) - 1, 1 << 40), slice((1 << 20) - 1, 1 << 20)))[0])
    assert number == grid.count - 1 == (1 << 56) - 1
    assert grid.place(number) == ((1 << 38) - 1, (1 << 18) - 1)


@settings(max_examples=100)
@given(grid=grids(), itemsize=st.sampled_from([1, 2, 8]), least=st.integers(1, 4000))
def test_a_grown_unit_is_of_whole_units_and_large_enough(grid: UnitGrid, itemsize: int, least: int) -> None:
    unit = grown_unit(grid.unit, grid.shape, itemsize, least)
    whole = [count * side for count, side in zip(grid.counts, grid.unit, strict=True)]
    for grown, small, most in zip(unit, grid.unit, whole, strict=True):
        assert grown % small == 0
        assert grown <= max(most, small)
    # Large enough, or all of the array.
    is_all = all(grown >= size for grown, size in zip(unit, grid.shape, strict=True))
    assert math.prod(unit) * itemsize >= least or is_all
    # And no larger than it takes: half of it along the dimension grown last would not be enough.
    if any(grown > small for grown, small in zip(unit, grid.unit, strict=True)):
        assert math.prod(unit) * itemsize < 2 * max(least, math.prod(grid.unit) * itemsize)
