"""The case ``augment``: its recipes, its rows, its check, its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import augment as full
from benchmarks.cases.augment import SINGLE
from benchmarks.cases.augment_recipes import RECIPES, ArrayBatches, ArrayRecipe, made_motion, made_volumes
from fastpipe import augment
from fastpipe.bench import augment as case
from fastpipe.bench.synthetic import mel_rows

_RECIPES = [case.Place(one, dtype) for one in RECIPES for dtype in one.dtypes]
_PLACES = {
    one.key: one for one in (*_RECIPES, *(case.Place(one, dtype) for one in SINGLE for dtype in one.dtypes))
}
_COUNT = 3


@pytest.fixture(scope="module")
def batches() -> ArrayBatches:
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 256, (_COUNT, 3, 224, 224), np.uint8)
    mels, volumes = mel_rows(rng, _COUNT, (case.BANDS, case.FRAMES)), made_volumes(rng, 2, (12, 16, 16))
    return ArrayBatches("noise", photos, mels, *volumes, *made_motion(rng, 5, (20, 25, 3)))


def test_every_operation_of_the_package_is_measured() -> None:
    kinds = [getattr(augment, name) for name in augment.__all__]
    operations = {
        kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, augment.Augmentation)
    }
    assert {one.label for one in SINGLE} == operations - {
        "Augmentation",
        "BatchTransform",
        "Compose",
        "RandomApply",
    }
    assert len(_PLACES) == sum(len(one.dtypes) for one in (*RECIPES, *SINGLE))


@pytest.mark.few(30)
@pytest.mark.parametrize("place", _PLACES.values(), ids=lambda place: place.key)
def test_both_ways_give_batches_of_one_form(place: case.Place, batches: ArrayBatches) -> None:
    given, recipe = place.given(batches), place.recipe
    takes_more = isinstance(recipe, ArrayRecipe)
    assert len(given) == 1 + (recipe.mixes is not None or takes_more)
    fast, slow = recipe.chain(place.dtype)(*given), recipe.sampled(place.dtype)(*given)
    if recipe.mixes or takes_more:
        (fast, more), (slow, others) = fast, slow
        assert more.shape == others.shape == ((_COUNT, 1000) if recipe.mixes else given[1].shape)
        assert recipe.mixes or more.dtype == given[1].dtype
    assert (fast.shape, fast.dtype) == (slow.shape, slow.dtype) and torch.isfinite(slow).all()
    if place in _RECIPES:
        assert fast.dtype == torch.float32


def test_a_row_waits_for_the_device_and_leaves_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    before = torch.get_num_threads()
    row = case.AugmentRow(
        "one", lambda: calls.append(torch.get_num_threads()) or torch.zeros(4, 3), 4, threads=1
    )
    assert row.measure(12) > 0 and calls == [1, 1, 1] and torch.get_num_threads() == before
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    case.AugmentRow("cuda", lambda: calls.append("work"), 4, "cuda").measure(8)
    assert calls[3:] == ["wait", "work", "work", "wait"]


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [False, True], ids=["some", "all"])
def test_chains_are_torchvisions(batches: ArrayBatches, every: bool) -> None:
    places = list(_PLACES.values()) if every else [*_RECIPES[:4], *list(_PLACES.values())[-3:]]
    said: list[str] = []
    found = case.check_chains(places, batches, said.append)
    assert found.ok, found.problems
    assert found.batches == sum(len(case.ways_of(place)) for place in places) == len(said)
    assert f"{found.batches - found.alike} batches agree with torchvision's functions" in found.sentence()
    assert found.as_json()["ok"] and found.as_json()["text"] == found.sentence()


@pytest.mark.parametrize("spoil", [
    lambda wanted: wanted + 1e-3, lambda wanted: wanted * torch.nan, lambda wanted: wanted.half(),
    lambda wanted: wanted[:2],
], ids=["values", "nan", "dtype", "shape"])  # fmt: skip
def test_a_wrong_batch_is_found(spoil: Callable[[Any], Any]) -> None:
    wanted, found = torch.rand(4, 3, 8, 8), case.ChainCheck()
    found.add("one", wanted + 1e-6, wanted, case.NEAR, 0.01)
    assert found.ok and 0 < found.largest < 1e-5
    found.add("other", spoil(wanted), wanted, case.NEAR, 0.01)
    assert not found.ok and "outputs differ from torchvision's functions: other: " in found.sentence()


@pytest.mark.gpu
def test_no_call_on_cuda_waits(batches: ArrayBatches) -> None:
    places = [dataclasses.replace(place, device="cuda") for place in _PLACES.values()]
    assert case.check_chains(places, batches).problems == ()
    assert full.calls_that_wait(places, batches) == []
