"""The case ``augment``: its recipes, its rows, its check, its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_results import rated

from benchmarks.cases import augment as full
from benchmarks.cases.augment import ASKED, AUGMENT_PEERS, LOADED, SINGLE, targets, waits_within
from benchmarks.cases.augment_recipes import (
    RECIPES,
    ArrayBatches,
    ArrayRecipe,
    made_motion,
    made_volumes,
    with_arrays,
)
from fastpipe import augment
from fastpipe.bench import augment as case
from fastpipe.bench.augment import (
    BANDS,
    FRAMES,
    AugmentRow,
    ChainCheck,
    Place,
    check_chains,
    made_batches,
    own_rows,
    ways_of,
)
from fastpipe.bench.synthetic import mel_rows

_RECIPES = [Place(one, dtype) for one in RECIPES for dtype in one.dtypes]
_PLACES = {
    place.key: place for place in (*_RECIPES, *(Place(one, dtype) for one in SINGLE for dtype in one.dtypes))
}
_COUNT = 3


@pytest.fixture(scope="module")
def batches() -> ArrayBatches:
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 256, (_COUNT, 3, 224, 224), np.uint8)
    mels, volumes = mel_rows(rng, _COUNT, (BANDS, FRAMES)), made_volumes(rng, 2, (12, 16, 16))
    return ArrayBatches("noise", photos, mels, *volumes, *made_motion(rng, 5, (20, 25, 3)))


def test_photos_are_scaled_and_repeated_to_a_batch(tree: Path) -> None:
    made = with_arrays(made_batches(tree, "photos", 8))
    assert len(made) == 8 and made.photos.shape == (8, 3, 224, 224) and made.photos.dtype == np.uint8
    assert np.array_equal(made.photos[0], made.photos[6])  # there are six
    assert len({image.tobytes() for image in made.photos[:6]}) == 6
    floats, levels = (made.tensor("images", dtype, "cpu") for dtype in ("float32", "uint8"))
    assert torch.equal((floats * 255).round().to(torch.uint8), levels) and floats.max() <= 1
    assert floats.is_contiguous() and levels.is_contiguous(), "as a loader's batch"
    assert "8 photos of 224×224 (photos)" in made.text and "sequences of 250×25×3" in made.text
    assert made.volumes.shape == (2, 1, 72, 136, 136) and set(np.unique(made.labels_of_volumes)) == {
        0,
        1,
        2,
        3,
    }
    assert made.motion.shape == (64, 250, 25, 3) and 125 <= made.lengths.min() <= made.lengths.max() <= 250
    assert [made.count(one) for one in ("images", "spectrograms", "volumes", "sequences")] == [8, 8, 2, 64]


def test_every_operation_of_the_package_is_measured() -> None:
    others = {"Compose", "Parameters", "Augmentation", "BatchTransform", "RandomApply"}
    kinds = {name: getattr(augment, name) for name in augment.__all__ if name not in others}
    operations = {
        name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, augment.Augmentation)
    }  # fmt: skip
    assert {one.label for one in SINGLE} == operations
    assert len(_PLACES) == sum(len(one.dtypes) for one in (*RECIPES, *SINGLE))


@pytest.mark.few(30)
@pytest.mark.parametrize("place", _PLACES.values(), ids=lambda place: place.key)
def test_both_ways_give_batches_of_one_form(place: Place, batches: ArrayBatches) -> None:
    given, recipe = place.given(batches), place.recipe
    takes_more = isinstance(recipe, ArrayRecipe)
    assert len(given) == 1 + (recipe.mixes is not None or takes_more)
    fast, slow = recipe.chain(place.dtype)(*given), recipe.sampled(place.dtype)(*given)
    if recipe.mixes:
        assert fast[1].shape == slow[1].shape == (_COUNT, 1000)
    elif takes_more:
        assert fast[1].shape == slow[1].shape == given[1].shape and fast[1].dtype == given[1].dtype
    if recipe.mixes or takes_more:
        fast, slow = fast[0], slow[0]
    assert (fast.shape, fast.dtype) == (slow.shape, slow.dtype) and torch.isfinite(slow).all()
    if place in _RECIPES:
        assert fast.dtype == torch.float32


def test_rows_of_a_section_are_both_scripts_and_all_ways(
    batches: ArrayBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [info for info, _ in own_rows(_PLACES["simclr-uint8"], batches)]
    kinds = ("replaced", "worker", "batch", "fused")
    assert [info.key for info in found] == [f"simclr-uint8-{kind}" for kind in kinds]
    assert [info.group for info in found] == ["replaced", "replaced", "fastpipe", "fastpipe"]
    assert f"{torch.get_num_threads()} thread" in found[0].note and found[1].note == "as in a worker process"
    for key, who in (("volume-float32", "NumPy and SciPy"), ("motion-float32", "NumPy")):
        made = list(own_rows(_PLACES[key], batches))
        assert [info.key for info, _ in made] == [f"{key}-{kind}" for kind in kinds[:3]]
        assert made[0][0].label == f"{who}, sample by sample"
        assert dataclasses.replace(_PLACES[key], device="cuda").key == f"{key}-cuda"
    monkeypatch.setattr(case, "WAYS", (*case.WAYS, case.Way("again", "once more")))
    place = _PLACES["simclr-float32"]
    assert [info.key for info, _ in own_rows(place, batches)][-1] == "simclr-float32-again"
    assert check_chains([place], batches).batches == 3


def test_a_row_waits_for_the_device_and_leaves_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    before = torch.get_num_threads()
    row = AugmentRow("one", lambda: calls.append(torch.get_num_threads()), 4, threads=1)
    assert row.measure(12) > 0 and calls == [1, 1, 1] and torch.get_num_threads() == before
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    AugmentRow("cuda", lambda: calls.append("work"), 4, "cuda").measure(8)
    assert calls[3:] == ["wait", "work", "work", "wait"]


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [False, True], ids=["some", "all"])
def test_chains_are_torchvisions(batches: ArrayBatches, every: bool) -> None:
    places = list(_PLACES.values()) if every else [*_RECIPES[:4], *list(_PLACES.values())[-3:]]
    said: list[str] = []
    found = check_chains(places, batches, said.append)
    assert found.ok, found.problems
    assert found.batches == sum(len(ways_of(place)) for place in places) == len(said)
    assert f"{found.batches - found.alike} batches agree with torchvision's functions" in found.sentence()
    assert found.as_json()["ok"] and found.as_json()["text"] == found.sentence()


_SPOIL: dict[str, Callable[[Any], Any]] = {
    "values": lambda wanted: wanted + 1e-3, "nan": lambda wanted: wanted * torch.nan,
    "dtype": lambda wanted: wanted.half(), "shape": lambda wanted: wanted[:2],
}  # fmt: skip


@pytest.mark.parametrize("spoil", list(_SPOIL))
def test_a_wrong_batch_is_found(spoil: str) -> None:
    wanted, found = torch.rand(4, 3, 8, 8), ChainCheck()
    found.add("one", wanted + 1e-6, wanted, case.NEAR, 0.01)
    assert found.ok and 0 < found.largest < 1e-5
    found.add("other", _SPOIL[spoil](wanted), wanted, case.NEAR, 0.01)
    assert not found.ok and "outputs differ from torchvision's functions: other: " in found.sentence()


def test_waits_are_those_within_the_mark() -> None:
    times = [
        ("cudaDeviceSynchronize", 1, 1), ("mark", 10, 20), ("cudaLaunchKernel", 12, 12),
        ("cudaStreamSynchronize", 14, 14), ("cudaMemcpyAsync", 15, 15), ("cudaDeviceSynchronize", 21, 21),
    ]  # fmt: skip
    events: list[Any] = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end)) for name, start, end in times
    ]  # fmt: skip
    assert waits_within(events, "mark") == ["cudaStreamSynchronize"]


@pytest.mark.gpu
def test_no_call_on_cuda_waits(batches: ArrayBatches) -> None:
    places = [dataclasses.replace(place, device="cuda") for place in _PLACES.values()]
    assert check_chains(places, batches).problems == ()
    assert full.calls_that_wait(places, batches) == []


def test_targets_are_judged_against_the_faster_of_torchvisions_rows() -> None:
    rates = {
        "simclr-float32-batch": (300, 300), "simclr-float32-replaced": (100, 300),
        "simclr-float32-worker": (200, 100), "simclr-float32-kornia": (5, 10),
        "randaugment-uint8-batch": (45,), "randaugment-uint8-worker": (10,),
        "volume-float32-batch": (80,), "volume-float32-monai": (20,), "volume-float32-batchgenerators": (10,),
        "files-crop-auto": (98,), "files-crop-whole": (100,),
    }  # fmt: skip
    found = targets({key: rated(*pair) for key, pair in rates.items()}, None)
    measured = [(one["asked"], one["got"]["median"], one["is_met"]) for one in found if one["got"]]
    assert (25, 45.0, True) in measured  # kornia
    assert found[1]["got"] == {"median": 1.25, "low": 1.0, "high": 1.5} and not found[1]["is_met"]
    assert {(4, 4.5, True), (0.97, 0.98, True)} <= set(measured)
    assert any(
        median == 4.0 and not is_met for _, median, is_met in measured
    )  # × the fastest peer of volumes
    assert targets({}, [])[-1]["is_met"] and not targets({}, ["one"])[-1]["is_met"]
    made = {f"{loaded.key}-{kind}" for loaded in LOADED for kind in ("replaced", "whole", "auto")}
    for place in _RECIPES:
        made |= {
            place.info(kind, "", "").key for kind in ("replaced", "worker", *(way.kind for way in case.WAYS))
        }
        made |= {one.info(place).key for one in AUGMENT_PEERS if one.does(place)}
    for one in (one for one in ASKED if "CUDA" not in one.text):
        assert {one.row, *(one.against if isinstance(one.against, tuple) else (one.against,))} <= made
