"""Units of an array, and those that a box touches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.volumes.raw import MemoryVolume
from fastpipe.volumes.volume import UnitGrid, grown_unit, in_worthwhile_units


@st.composite
def grids(draw: Any) -> UnitGrid:
    rank = draw(st.integers(0, 5))
    most = {0: 1, 1: 30, 2: 12, 3: 7, 4: 5, 5: 4}[rank]
    return UnitGrid(
        [draw(st.integers(1, most)) for _ in range(rank)],
        [draw(st.integers(1, most + 2)) for _ in range(rank)],
    )


def box_of(grid: UnitGrid, data: Any) -> tuple[list[int], list[int]]:
    ends = [
        sorted((data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size)))) for size in grid.shape
    ]
    return [low if low < high else low - 1 for low, high in ends], [high for _, high in ends]


@settings(max_examples=200)
@given(grid=grids(), data=st.data())
def test_the_units_that_a_box_touches_are_those_with_an_element_of_it(grid: UnitGrid, data: Any) -> None:
    start, stop = box_of(grid, data)
    unit_of = np.zeros(grid.shape, np.int64)
    for number in range(grid.count):
        unit_of[grid.box(number)] = number
    expected = np.unique(unit_of[tuple(map(slice, start, stop))])
    touched = grid.touched(tuple(map(slice, start, stop)))
    np.testing.assert_array_equal(touched, expected)
    assert touched.dtype == np.int64


@settings(max_examples=100)
@given(grid=grids())
def test_units_cover_each_element_once(grid: UnitGrid) -> None:
    covered = np.zeros(grid.shape, np.int64)
    for number in range(grid.count):
        covered[grid.box(number)] += 1
    assert (covered == 1).all()
    assert grid.count == math.prod(grid.counts)
    # In C order, as numpy.ndindex counts.
    assert [grid.place(number) for number in range(grid.count)] == list(np.ndindex(*grid.counts))


@settings(max_examples=50)
@given(grid=grids(), data=st.data())
def test_a_box_that_is_a_unit_touches_that_one(grid: UnitGrid, data: Any) -> None:
    number = data.draw(st.integers(0, grid.count - 1))
    assert grid.touched(grid.box(number)).tolist() == [number]


def test_an_array_without_elements_has_no_units() -> None:
    assert UnitGrid((0, 5), (2, 2)).count == 0
    assert UnitGrid((3, 0), (2, 2)).counts == (2, 0)


def test_numbers_of_large_arrays_do_not_wrap() -> None:
    grid = UnitGrid((1 << 40, 1 << 20), (4, 4))
    number = int(grid.touched((slice((1 << 40) - 1, 1 << 40), slice((1 << 20) - 1, 1 << 20)))[0])
    assert number == grid.count - 1 == (1 << 56) - 1
    assert grid.place(number) == ((1 << 38) - 1, (1 << 18) - 1)


@settings(max_examples=150)
@given(grid=grids(), itemsize=st.sampled_from([1, 2, 8]), least=st.integers(1, 4000))
def test_a_grown_unit_is_of_whole_units_and_large_enough(grid: UnitGrid, itemsize: int, least: int) -> None:
    unit = grown_unit(grid.unit, grid.shape, itemsize, least)
    whole = [count * side for count, side in zip(grid.counts, grid.unit, strict=True)]
    for grown, small, most in zip(unit, grid.unit, whole, strict=True):
        assert grown % small == 0
        assert grown <= max(most, small)
    # Large enough, or all of the array.
    assert math.prod(unit) * itemsize >= least or all(
        grown >= size for grown, size in zip(unit, grid.shape, strict=True)
    )
    # And no larger than it takes: half of it along the dimension grown last would do no more.
    if any(grown > small for grown, small in zip(unit, grid.unit, strict=True)):
        assert math.prod(unit) * itemsize < 2 * max(least, math.prod(grid.unit) * itemsize)


def test_arrays_in_memory_stay_as_they_are() -> None:
    volume = MemoryVolume(np.zeros((3, 3)), "x")
    assert in_worthwhile_units(volume) is volume


@settings(max_examples=40)
@given(shape=st.lists(st.integers(1, 70), min_size=1, max_size=3), kind=st.sampled_from(["u1", ">f4", "c8"]))
def test_the_units_of_an_array_in_memory_are_its_parts(shape: list[int], kind: str) -> None:
    array = np.arange(math.prod(shape)).astype(kind).reshape(shape)
    for made in (array, np.asfortranarray(array), array[::-1]):
        volume = MemoryVolume(made, "x")
        numbers = np.arange(volume.grid.count)
        outs = [np.zeros(volume.unit_nbytes, np.uint8) for _ in numbers]
        volume.open().read(numbers, outs)
        for number, out in zip(numbers.tolist(), outs, strict=True):
            part = made[volume.grid.box(number)]
            unit = out.view(volume.dtype).reshape(volume.grid.unit)
            np.testing.assert_array_equal(unit[tuple(map(slice, part.shape))], part)
        assert volume.stored_in(numbers).tolist() == numbers.tolist()


def test_nobody_knows_the_state_of_an_array_in_memory() -> None:
    """So nothing is kept of it."""
    assert MemoryVolume(np.zeros(3), "x").state() == ("", "")


@settings(max_examples=100)
@given(grid=grids(), data=st.data())
def test_the_units_of_several_boxes_are_those_of_each(grid: UnitGrid, data: Any) -> None:
    boxes = [box_of(grid, data) for _ in range(data.draw(st.integers(0, 4)))]
    starts, stops = (
        np.array([box[end] for box in boxes], np.int64).reshape(len(boxes), len(grid.shape)) for end in (0, 1)
    )
    numbers, are_there = grid.touched_by_each(starts, stops)
    assert numbers.shape == are_there.shape and len(numbers) == len(boxes)
    for box, row, there in zip(boxes, numbers, are_there, strict=True):
        assert row[there].tolist() == grid.touched(tuple(map(slice, *box))).tolist()
