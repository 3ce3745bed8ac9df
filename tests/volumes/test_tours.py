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

from fastpipe.core.order import interleaved
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches
from fastpipe.volumes.tours import Geometry, planned, tour_of


def geometry_of(shapes: Any, units: Any, patch: Any) -> Geometry:
    space = PatchSpace(shapes, patch, [str(number) for number in range(len(shapes))], True)
    return Geometry(space, np.array(units, np.int64), max(math.prod(unit) for unit in units))


def random_places(geometry: Geometry, count: int, seed: int = 0) -> Places:
    numbers = np.random.default_rng(seed).random((count, 1 + len(geometry.space.patch)))
    return UniformPatches(geometry.space, count, True, lambda *_: numbers).places(0, 0, np.arange(count))


@st.composite
def cases(draw: Any) -> tuple[Geometry, Places]:
    dims, volumes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    side, unit = st.integers(1, 20), st.integers(1, 6)
    geometry = geometry_of(
        [[draw(side) for _ in range(dims)] for _ in range(volumes)],
        [[draw(unit) for _ in range(dims)] for _ in range(volumes)],
        [draw(unit) for _ in range(dims)],
    )
    return geometry, random_places(geometry, draw(st.integers(0, 40)), draw(st.integers(0, 9)))


def decoded(geometry: Geometry, places: Places, order: Any, held: int) -> int:
    """Counts units that are decoded, where those are forgotten first that are not used again, and then those
    that were not used for the longest time."""
    touched: list[Any] = []
    for volume, start in zip(places.volumes[order].tolist(), places.starts[order].tolist(), strict=True):
        shape, unit, patch = geometry.space.shapes[volume], geometry.units[volume], geometry.space.patch
        lows = np.maximum(start, 0) // unit
        highs = (np.minimum(start + patch, shape) - 1) // unit
        touched += itertools.product([volume], *map(range, lows.tolist(), (highs + 1).tolist()))
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
    # From some place of the tour on, round as a circle, it is cut into equal parts; each round has one of each.
    found, fronts = ranks[order], min(fronts, count)
    shortest = count // fronts if count else 0
    rounds = [found[step * fronts : (step + 1) * fronts] for step in range(shortest)]
    for before, after in itertools.pairwise(rounds):
        assert sorted((before + 1) % count) == sorted(after.tolist()), "each goes on where it was"


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
    planned_fronts, stripes, times = planned(geometry, places, held * geometry.unit_nbytes)
    assert times > 0
    ranks = tour_of(geometry, places, stripes, seed=5, epoch=1)
    uniform = decoded(geometry, places, np.random.default_rng(1).permutation(600), held)
    for fronts in (planned_fronts, 1):
        order = interleaved(ranks, fronts, seed=5, epoch=1)
        assert decoded(geometry, places, order, held) < 0.7 * uniform


def test_more_room_is_never_used_for_fewer_fronts() -> None:
    geometry = geometry_of([(128, 128, 128)], [(32, 32, 32)], (32, 32, 32))
    places = random_places(geometry, 400)
    found = [planned(geometry, places, units * geometry.unit_nbytes)[0] for units in (16, 64, 200)]
    assert found == sorted(found)
    assert found[-1] == 64, "with room for all of it"
    # Where nothing can be remembered, places cost nothing.
    alone = planned(geometry, places, geometry.unit_nbytes, 1)[2]
    fronts, _, times = planned(geometry, places, geometry.unit_nbytes)
    assert fronts > 1 and times <= 1.15 * alone


@settings(max_examples=50)
@given(
    case=cases(), room=st.floats(0, 1e5), fronts=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(-(1 << 70), 1 << 70), epoch=st.integers(0, 1 << 63),
)  # fmt: skip
def test_any_volumes_can_be_planned_and_toured(
    case: Any, room: float, fronts: int | None, seed: int, epoch: int
) -> None:
    """A plan and a tour are pure functions, and a tour is a permutation."""
    geometry, places = case
    found, stripes, times = plan = planned(geometry, places, room, fronts)
    assert found == fronts if fronts else found >= 1
    assert len(stripes.widths) == geometry.units.shape[1]
    assert times > 0 or not len(places.volumes)
    assert planned(geometry, places, room, fronts) == plan
    ranks = tour_of(geometry, places, stripes, seed=seed, epoch=epoch)
    assert ranks.dtype == np.int64
    assert sorted(ranks.tolist()) == list(range(len(places.volumes)))
    np.testing.assert_array_equal(ranks, tour_of(geometry, places, stripes, seed=seed, epoch=epoch))
