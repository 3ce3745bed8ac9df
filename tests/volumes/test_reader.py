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
from volume_kit import boxes_equal, random_array, reader_of

from fastpipe.core.shared_chunks import UnitFile
from fastpipe.errors import OptionError
from fastpipe.volumes.raw import MemoryVolume
from fastpipe.volumes.reader import Counts, PatchReader, padded_indices
from fastpipe.volumes.volume import DamagedUnitError, UnitGrid, UnitReader, Volume

Forked = Callable[[Callable[[], object]], int]
MODES = ["constant", "edge", "reflect", "symmetric", "wrap"]


class Numbers(Volume, UnitReader):
    """An array that is read in units, of which some are damaged, or wait; it counts those that are read.

    Args:
        array: the array.
        unit: of a unit.
        along: how many units lie in a chunk.
    """

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
            part = self._array[self.grid.box(number)]
            out.view(self.dtype).reshape(self.grid.unit)[tuple(map(slice, part.shape))] = part


class Clock:
    def __init__(self) -> None:
        self.stages: dict[str, int] = {}

    def add(self, stage: str, nanoseconds: int) -> None:
        self.stages[stage] = self.stages.get(stage, 0) + nanoseconds


@settings(max_examples=200)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5), along=st.integers(1, 3),
    kind=st.sampled_from(["u1", "<u2", ">f4", "c16", "S3", "?"]), slots=st.integers(0, 6), first=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_box_is_that_of_the_array(
    sizes: list[tuple[int, int]], along: int, kind: str, slots: int, first: int, seed: int, memory_for: Any
) -> None:
    """By units of any shape, with room for any number of them: also for one, or none."""
    array = random_array([min(size, 40 // len(sizes)) for size, _ in sizes], kind, seed)
    volume = Numbers(array, [side for _, side in sizes], along)
    memory = memory_for(volume, slots, first) if slots else None
    boxes_equal(reader_of(volume, memory and memory.opened(), first), array, seed, 8)
    if memory is not None:
        memory.close()


@pytest.mark.parametrize("slots", [0, 1, 3, 100])
def test_memory_with_gaps_is_filled(slots: int, memory_for: Any) -> None:
    """A batch in which a patch's rows do not lie together, but their elements do."""
    array = np.arange(8 * 9 * 10).reshape(8, 9, 10)
    volume = Numbers(array, (3, 4, 5))
    memory = memory_for(volume, slots) if slots else None
    batch = np.full((6, 12, 2, 14), -1)
    reader_of(volume, memory and memory.opened()).read([2, 1, 3], batch[1:5, 2:10:2, 0, 3:9])
    np.testing.assert_array_equal(batch[1:5, 2:10:2, 0, 3:9], array[2:6, 1:5, 3:9])
    batch[1:5, 2:10:2, 0, 3:9] = -1
    assert (batch == -1).all()
    if memory is not None:
        memory.close()


def test_what_is_remembered_is_decoded_once(memory_for: Any) -> None:
    array = np.arange(100.0).reshape(10, 10)
    volume = Numbers(array, (3, 3), 4)
    memory = memory_for(volume, 16, 5)
    reader = reader_of(volume, memory.opened(), 5)
    for _ in range(3):
        for row in range(8):
            out = np.empty((3, 10))
            reader.read([row, 0], out)
            np.testing.assert_array_equal(out, array[row : row + 3])
    assert sorted(sum(volume.decoded, [])) == list(range(16))
    assert all(len({number // 4 for number in some}) == 1 for some in volume.decoded), "chunk by chunk"
    memory.close()


def test_two_volumes_share_one_memory() -> None:
    one, other = (Numbers(np.full((4, 4), value), (2, 2)) for value in (1, 2))
    memory = UnitFile(8, 8, one.unit_nbytes)
    readers = [reader_of(volume, memory.opened(), 4 * place) for place, volume in enumerate((one, other))]
    for value in (1, 2, 1, 2):
        out = np.zeros((3, 3), np.int64)
        readers[value - 1].read([0, 0], out)
        assert (out == value).all()
    assert [len(sum(volume.decoded, [])) for volume in (one, other)] == [4, 4]
    memory.close()


def test_it_counts_what_is_decoded_and_what_is_used(memory_for: Any) -> None:
    volume, clock, counts = Numbers(np.zeros((8, 8), np.int16), (4, 4)), Clock(), Counts()
    memory = memory_for(volume, 4)
    reader = PatchReader(volume, clock, counts, memory.opened())
    for _ in range(2):
        reader.read([0, 0], np.empty((2, 5), np.int16))
    assert counts.nbytes == (2 * 32, 2 * 20)
    assert set(clock.stages) == {"decode", "copy"}
    memory.close()


def test_a_box_without_elements_needs_nothing() -> None:
    volume = Numbers(np.zeros((4, 4)), (2, 2))
    reader_of(volume).read([1, 1], np.empty((0, 2)))
    assert not volume.decoded


def test_an_array_in_memory_is_copied_as_it_is() -> None:
    array = np.arange(60, dtype=">i2").reshape(3, 4, 5)
    for one in (array, np.asfortranarray(array), array[::-1, :, ::2]):
        boxes_equal(reader_of(MemoryVolume(one, "x")), one, 0)


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(OptionError, match="numbers has 6 dimensions, of which 5 can be read"):
        reader_of(Numbers(np.zeros((1,) * 6), (1,) * 6))


@pytest.mark.parametrize("slots", [0, 1, 9])
def test_a_damaged_unit_is_an_error_and_leaves_nothing_behind(slots: int, memory_for: Any) -> None:
    array = np.arange(81).reshape(9, 9)
    volume = Numbers(array, (3, 3))
    memory = memory_for(volume, slots) if slots else None
    units = memory and memory.opened()
    reader, out = reader_of(volume, units), np.empty((9, 9), array.dtype)
    volume.damaged = {4}
    for _ in range(2):
        with pytest.raises(DamagedUnitError, match="unit 4"):
            reader.read([0, 0], out)
    out = np.empty((9, 3), array.dtype)
    reader.read([0, 6], out)  # where all is well
    np.testing.assert_array_equal(out, array[:, 6:])
    if units is not None:
        assert not any(units.is_coming(key) for key in range(9))
    volume.damaged = set()
    out = np.empty((9, 9), array.dtype)
    reader.read([0, 0], out)
    np.testing.assert_array_equal(out, array)
    del units
    if memory is not None:
        memory.close()


def test_of_threads_that_want_the_same_unit_one_decodes_it(memory_for: Any) -> None:
    """All begin before the one that decodes is done: it goes on when it is the only one on its way."""
    array = np.arange(16)
    volume = Numbers(array, (16,))
    memory = memory_for(volume, 1)
    reader, begun, count = reader_of(volume, memory.opened()), threading.Semaphore(0), 6
    volume.before = lambda: [begun.acquire() for _ in range(count)]
    wrong = list[Any]()

    def work() -> None:
        begun.release()
        out = np.empty(10, array.dtype)
        reader.read([3], out)
        if (out != array[3:13]).any():
            wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert volume.decoded == [[0]]
    memory.close()


def read_at_random(volume: Volume, array: Any, reader: Any, seed: int, boxes: int) -> list[Any]:
    """Boxes that two threads read and that are not those of the array."""
    wrong = list[Any]()

    def work(number: int) -> None:
        random = np.random.default_rng([seed, number])
        for _ in range(boxes):
            low = [int(random.integers(0, size)) for size in array.shape]
            high = [int(random.integers(at, size)) + 1 for at, size in zip(low, array.shape, strict=True)]
            out = np.empty([stop - start for start, stop in zip(low, high, strict=True)], array.dtype)
            try:
                reader.read(low, out)
            except DamagedUnitError:
                continue
            if (out != array[tuple(map(slice, low, high))]).any():
                wrong.append((low, high))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def stressed(slots: int, forked: Forked, processes: int, boxes: int) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 40, (20, 21, 22))
    volume = Numbers(array, (7, 8, 9), 2)
    volume.damaged = {3}
    memory = UnitFile(volume.grid.count, slots, -(-volume.unit_nbytes // 16) * 16)

    def work(seed: int) -> None:
        wrong = read_at_random(volume, array, reader_of(volume, memory.opened()), seed, boxes)
        assert not wrong, wrong

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(processes)]  # type: ignore[misc]
    work(99)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    memory.close()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_threads_and_processes_with_little_memory_read_what_is_there(slots: int, forked: Forked) -> None:
    stressed(slots, forked, reader_of, 2, 60)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 20])
def test_threads_and_processes_read_what_is_there_for_long(slots: int, forked: Forked) -> None:
    stressed(slots, forked, reader_of, 4, 4000)


@settings(max_examples=400)
@given(
    start=st.integers(-60, 60),
    size=st.integers(1, 70),
    length=st.integers(1, 20),
    mode=st.sampled_from(MODES),
)
def test_padded_indices_are_those_of_numpy(start: int, size: int, length: int, mode: str) -> None:
    """However far from the array a patch begins, and ends."""
    array = np.arange(length)
    before, after = max(0, -start), max(0, start + size - length)
    if mode == "constant":
        padded = np.pad(array, (before, after), mode, constant_values=-1)
    else:
        padded = np.pad(array, (before, after), mode)  # type: ignore[call-overload]
    expected = padded[start + before : start + before + size]
    np.testing.assert_array_equal(padded_indices(start, size, length, mode), expected)


@settings(max_examples=60)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), mode=st.sampled_from(MODES), data=st.data())
def test_padded_patches_are_those_of_numpy(shape: list[int], mode: str, data: Any) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    starts = [data.draw(st.integers(-7, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(max(1, 1 - start), 12)) for start in starts]
    indices = [padded_indices(*some, mode) for some in zip(starts, sizes, shape, strict=True)]
    made = array[np.ix_(*indices)]
    if mode == "constant":
        made[np.any(np.stack(np.meshgrid(*indices, indexing="ij")) < 0, axis=0)] = 0
    pads = [
        (max(0, -at), max(0, at + size - most)) for at, size, most in zip(starts, sizes, shape, strict=True)
    ]
    padded = np.pad(array, pads, mode)  # type: ignore[call-overload]
    box = tuple(
        slice(at + pad[0], at + pad[0] + size) for at, size, pad in zip(starts, sizes, pads, strict=True)
    )
    np.testing.assert_array_equal(made, padded[box])
