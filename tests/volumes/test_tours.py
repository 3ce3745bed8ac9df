"""Orders that visit patches near to each other soon after each other."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.native import native
from fastpipe.core.order import interleaved
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches
from fastpipe.volumes.tours import (
    Geometry,
    Stripes,
    TourTrial,
    UnitArray,
    planned,
    tour_of,
    unit_visits,
    units_used,
)


def geometry_of(shapes: Any, units: Any, patch: Any, itemsize: int = 1) -> Geometry:
    space = PatchSpace(shapes, patch, [str(number) for number in range(len(shapes))], True)
    largest = max(math.prod(unit) for unit in units)
    return Geometry(space, np.array(units, np.int64), largest * itemsize)


def random_places(geometry: Geometry, count: int, seed: int = 0) -> Places:
    def draw(seed: int, epoch: int, indices: Any, columns: int) -> Any:
        return np.random.default_rng(seed).random((len(indices), columns))

    return UniformPatches(geometry.space, count, True, draw).places(seed, 0, np.arange(count))


@st.composite
def cases(draw: Any) -> tuple[Geometry, Places, Stripes]:
    dims, volumes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    side, unit = st.integers(1, 20), st.integers(1, 6)
    geometry = geometry_of(
        [[draw(side) for _ in range(dims)] for _ in range(volumes)],
        [[draw(unit) for _ in range(dims)] for _ in range(volumes)],
        [draw(unit) for _ in range(dims)],
    )
    places = random_places(geometry, draw(st.integers(0, 40)), draw(st.integers(0, 9)))
    stripes = Stripes(draw(st.integers(0, dims - 1)), tuple(draw(st.integers(1, 4)) for _ in range(dims)))
    return geometry, places, stripes


def decoded(geometry: Geometry, places: Places, order: Any, held: int) -> int:
    """Counts units that are decoded, where those are forgotten first that are not used again, and then those
    that were not used for the longest time."""
    touched = []
    for volume, start in zip(places.volumes[order].tolist(), places.starts[order].tolist(), strict=True):
        shape, unit = geometry.space.shapes[volume], geometry.units[volume]
        ends = [
            range(max(at, 0) // side, (min(at + patch, most) - 1) // side + 1)
            for at, side, patch, most in zip(start, unit, geometry.space.patch, shape, strict=True)
        ]
        touched += itertools.product([volume], *ends)
    remembered: OrderedDict[Any, None] = OrderedDict()
    left, count = Counter(touched), 0
    for one in touched:
        count += one not in remembered
        left[one] -= 1
        remembered[one] = None
        remembered.move_to_end(one)
        if not left[one]:
            del remembered[one]
        elif len(remembered) > held:
            remembered.popitem(last=False)
    return count


@settings(max_examples=100)
@given(case=cases(), seed=st.integers(-(1 << 70), 1 << 70), epoch=st.integers(0, 1 << 63))
def test_a_tour_goes_through_volumes_and_along_their_stripes(case: Any, seed: int, epoch: int) -> None:
    """It is a permutation and a pure function.  Of the patches of one stripe, the places along the axis only
    rise, or only fall."""
    geometry, places, stripes = case
    ranks = tour_of(geometry, places, stripes, seed=seed, epoch=epoch)
    assert ranks.dtype == np.int64
    assert sorted(ranks.tolist()) == list(range(len(places.volumes)))
    np.testing.assert_array_equal(ranks, tour_of(geometry, places, stripes, seed=seed, epoch=epoch))
    tour = np.argsort(ranks)
    volumes = [key for key, _ in itertools.groupby(places.volumes[tour].tolist())]
    assert len(volumes) == len(set(volumes))
    for volume in volumes:
        along = places.starts[tour[places.volumes[tour] == volume], stripes.axis]
        turns = np.sign(np.diff(along))
        changes = len([key for key, _ in itertools.groupby(turns[turns != 0].tolist())])
        others = [dim for dim in range(geometry.units.shape[1]) if dim != stripes.axis]
        cells = -(-geometry.space.counts[volume] // geometry.units[volume])
        most = math.prod(-(-int(cells[dim]) // stripes.widths[dim]) + 1 for dim in others)
        # Once along each stripe, and from the end of one to where the next begins.
        assert changes <= 2 * most


def test_another_epoch_has_another_tour() -> None:
    geometry = geometry_of([(64, 64), (64, 64)], [(8, 8), (8, 8)], (8, 8))
    places, stripes = random_places(geometry, 200), Stripes(0, (1, 2))
    tours = {
        tuple(tour_of(geometry, places, stripes, seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(tours) == 9


@settings(max_examples=100)
@given(
    count=st.integers(0, 200), fronts=st.integers(1, 70), seed=st.integers(0, 99), epoch=st.integers(0, 99)
)
def test_an_interleaved_order_is_a_permutation_of_parts_in_turn(
    count: int, fronts: int, seed: int, epoch: int
) -> None:
    ranks = np.random.default_rng(seed).permutation(count)
    order = interleaved(ranks, fronts, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    np.testing.assert_array_equal(order, interleaved(ranks, fronts, seed=seed, epoch=epoch))
    fronts = min(fronts, count)
    if not count:
        return
    # From some place of the tour on, round as a circle, it is cut into equal parts; each round has one of each.
    found = ranks[order]
    lengths = np.diff(np.arange(fronts + 1) * count // fronts)
    assert lengths.max() - lengths.min() <= 1
    shortest = int(lengths.min())
    rounds = [found[step * fronts : (step + 1) * fronts] for step in range(shortest)]
    for before, after in itertools.pairwise(rounds):
        assert sorted((before + 1) % count) == sorted(after.tolist()), "each goes on where it was"


def test_fronts_take_turns_in_another_order_in_each_round_and_begin_elsewhere_in_each_epoch() -> None:
    order = interleaved(np.arange(800), 8, seed=0, epoch=0)
    rounds = [tuple(np.argsort(some)) for some in order.reshape(100, 8)[:90]]
    assert len(set(rounds)) > 60
    firsts = {int(interleaved(np.arange(1000), 1, seed=0, epoch=epoch)[0]) for epoch in range(20)}
    assert len(firsts) > 15


@pytest.mark.parametrize(
    ("shapes", "unit", "patch", "held"),
    [
        ([(160, 160, 160)], (32, 32, 32), (24, 24, 24), 60),
        ([(160, 160, 160)], (8, 160, 160), (32, 32, 32), 8), ([(400, 400)], (32, 32), (48, 48), 20),
        ([(100, 90, 80), (60, 120, 70)], (16, 16, 16), (20, 20, 20), 50), ([(20_000,)], (64,), (100,), 8),
    ],
)  # fmt: skip
def test_a_tour_decodes_less_than_a_uniform_order(shapes: Any, unit: Any, patch: Any, held: int) -> None:
    geometry = geometry_of(shapes, [unit] * len(shapes), patch)
    places = random_places(geometry, 600)
    fronts, stripes, times = planned(geometry, places, held * geometry.unit_nbytes)
    assert times > 0
    ranks = tour_of(geometry, places, stripes, seed=5, epoch=1)
    order = interleaved(ranks, fronts, seed=5, epoch=1)
    uniform = decoded(geometry, places, np.random.default_rng(1).permutation(600), held)
    assert decoded(geometry, places, order, held) < 0.7 * uniform
    one = decoded(geometry, places, interleaved(ranks, 1, seed=5, epoch=1), held)
    assert one < 0.7 * uniform


def test_more_room_is_never_used_for_fewer_fronts() -> None:
    geometry = geometry_of([(128, 128, 128)], [(32, 32, 32)], (32, 32, 32))
    places = random_places(geometry, 400)
    found = [planned(geometry, places, units * geometry.unit_nbytes)[0] for units in (16, 64, 200)]
    assert found == sorted(found)
    assert found[-1] == 64, "with room for all of it"


def test_where_nothing_can_be_remembered_places_cost_nothing() -> None:
    geometry = geometry_of([(128, 128, 128)], [(32, 32, 32)], (32, 32, 32))
    places = random_places(geometry, 400)
    alone = planned(geometry, places, geometry.unit_nbytes, 1)[2]
    fronts, _, times = planned(geometry, places, geometry.unit_nbytes)
    assert fronts > 1 and times <= 1.15 * alone


@settings(max_examples=60)
@given(case=cases(), held=st.integers(1, 60), most=st.integers(0, 100))
def test_decoded_units_are_counted_as_by_hand(case: Any, held: int, most: int) -> None:
    geometry, places, _ = case
    if not len(places.volumes):
        return
    for stripes, order in TourTrial(geometry, places).tours:
        ranks = tour_of(geometry, places, stripes, seed=0, epoch=0)
        expected = decoded(geometry, places, np.argsort(ranks), held)
        assert native.decoded_units(*order, held, 1 << 40) == expected
        early = native.decoded_units(*order, held, most)
        assert early == expected if expected <= most else most < early <= expected


@settings(max_examples=25)
@given(case=cases(), room=st.floats(0, 1e5), fronts=st.one_of(st.none(), st.integers(1, 9)))
def test_any_volumes_can_be_planned(case: Any, room: float, fronts: int | None) -> None:
    geometry, places, _ = case
    found, stripes, times = plan = planned(geometry, places, room, fronts)
    assert found == fronts if fronts else found >= 1
    assert len(stripes.widths) == geometry.units.shape[1]
    assert times > 0 or not len(places.volumes)
    assert planned(geometry, places, room, fronts) == plan


@settings(max_examples=60)
@given(case=cases())
def test_visits_are_counted_as_by_hand(case: Any) -> None:
    geometry, places, _ = case
    space = geometry.space
    for volume, shape in enumerate(space.shapes.tolist()):
        unit = geometry.units[volume].tolist()
        starts = places.starts[places.volumes == volume]
        found = unit_visits(shape, unit, space.patch.tolist(), starts)
        expected = np.zeros([-(-size // side) for size, side in zip(shape, unit, strict=True)], np.int32)
        for start in starts.tolist():
            box = [
                slice(max(at, 0) // side, (min(at + patch, size) - 1) // side + 1)
                for at, side, patch, size in zip(start, unit, space.patch.tolist(), shape, strict=True)
            ]
            expected[tuple(box)] += 1
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=50)
@given(case=cases(), boxes=st.integers(1, 3))
def test_units_of_patches_are_listed_patch_by_patch(case: Any, boxes: int) -> None:
    """Of volumes with several arrays, of some more than of others."""
    geometry, places, _ = case
    space, arrays, first = geometry.space, [], 5
    for volume, shape in enumerate(space.shapes.tolist()):
        unit = geometry.units[volume].tolist()
        for _ in range(boxes + volume % 2):
            arrays.append(UnitArray(volume, first, shape, unit))
            first += math.prod(-(-size // side) for size, side in zip(shape, unit, strict=True))
    patch = space.patch.tolist()
    found = units_used(arrays, places, patch)
    one_by_one = [
        units_used(arrays, Places(places.volumes[row : row + 1], places.starts[row : row + 1]), patch)
        for row in range(len(places.volumes))
    ]
    assert found.dtype == np.int64
    assert np.array_equal(found, np.concatenate([np.zeros(0, np.int64), *one_by_one]))
    expected = [np.zeros(5, np.int32)]
    for volume, _, shape, unit in arrays:
        visits = unit_visits(shape, unit, patch, places.starts[places.volumes == volume])
        expected.append(visits.ravel())
    np.testing.assert_array_equal(np.bincount(found, minlength=first), np.concatenate(expected))
