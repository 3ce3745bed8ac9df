"""The case ``augment``: its recipes, its rows, its check, its figures, and the whole command on tiny batches."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.cases import augment as full
from benchmarks.cases import augment_recipes as data
from benchmarks.cases import scripts
from benchmarks.cases.augment import (
    ASKED,
    AUGMENT_PEERS,
    LOADED,
    SINGLE,
    AugmentChild,
    AugmentPeer,
    TaskRow,
    single_of,
    targets,
    waits_within,
    wanted_of,
)
from benchmarks.cases.augment_recipes import RECIPES, ArrayBatches, made_motion, made_volumes, with_arrays
from benchmarks.lines import markdown, single_lines
from benchmarks.peers import rows as bench_peers
from benchmarks.peers.children import serve
from benchmarks.peers.children.protocol import AugmentJob, PeerError, augment_problem, job_of
from benchmarks.run import main as measure
from fastpipe import augment
from fastpipe.bench import augment as case
from fastpipe.bench import augment as check
from fastpipe.bench import augment as rows
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
from fastpipe.bench.report import print_result
from fastpipe.bench.results import load
from fastpipe.bench.runner import ContenderError, Sample
from fastpipe.bench.synthetic import mel_rows
from fastpipe.cli import main
from fastpipe.torch.source import SplitError
from fastpipe.torch.split import SampleSpec, split_of

_PLACES = [Place(one, dtype) for one in RECIPES for dtype in one.dtypes]
_SINGLE = [Place(one, dtype) for one in SINGLE for dtype in one.dtypes]
_COUNT = 3


@pytest.fixture(scope="module")
def batches() -> ArrayBatches:
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 256, (_COUNT, 3, 224, 224), np.uint8)
    return ArrayBatches(
        "noise", photos, mel_rows(rng, _COUNT, (BANDS, FRAMES)), *made_volumes(rng, 2, (12, 16, 16)),
        *made_motion(rng, 5, (20, 25, 3)),
    )  # fmt: skip


def place_of(key: str) -> Place:
    return next(place for place in [*_PLACES, *_SINGLE] if place.key == key)


# ---- data and recipes --------------------------------------------------------------------------


def test_photos_are_scaled_and_repeated_to_a_batch(tree: Path) -> None:
    made = with_arrays(made_batches(tree, "photos", 8))
    assert len(made) == 8 and made.photos.shape == (8, 3, 224, 224) and made.photos.dtype == np.uint8
    assert np.array_equal(made.photos[0], made.photos[6])  # there are six
    assert len({image.tobytes() for image in made.photos[:6]}) == 6
    assert made.spectrograms.shape == (8, 80, 400)
    floats, levels = (made.tensor("images", dtype, "cpu") for dtype in ("float32", "uint8"))
    assert torch.equal((floats * 255).round().to(torch.uint8), levels) and floats.max() <= 1
    assert "8 photos of 224×224 (photos)" in made.text and "sequences of 250×25×3" in made.text
    assert made.volumes.shape == (2, 1, 72, 136, 136) and made.labels_of_volumes.shape == (2, 72, 136, 136)
    assert set(np.unique(made.labels_of_volumes)) == {0, 1, 2, 3} and abs(made.volumes.std() - 1) < 1e-3
    assert made.motion.shape == (64, 250, 25, 3) and 125 <= made.lengths.min() <= made.lengths.max() <= 250
    assert [made.count(one) for one in ("images", "spectrograms", "volumes", "sequences")] == [8, 8, 2, 64]
    assert floats.is_contiguous() and levels.is_contiguous(), "as a loader's batch"


def test_every_operation_of_the_package_is_measured() -> None:
    not_changing = {"Compose", "Parameters", "Augmentation", "BatchTransform", "RandomApply"}
    operations = {
        name
        for name in augment.__all__
        if isinstance(made := getattr(augment, name), type) and name not in not_changing
        and issubclass(made, augment.Augmentation)
    }  # fmt: skip
    assert {one.label for one in SINGLE} == operations
    assert len({place.key for place in [*_PLACES, *_SINGLE]}) == len(_PLACES) + len(_SINGLE)


def test_recipes_are_those_of_the_papers() -> None:
    told = str(RECIPES[0].chain("uint8"))
    for part in ("RandomResizedCrop(", "ColorJitter(", "p=0.8", "GaussianBlur(", "ToDtype(", "Normalize("):
        assert part in told
    assert "ToDtype" not in str(RECIPES[0].chain("float32"))
    names = [type(op).__name__ for op in RECIPES[1].chain("uint8").ops]
    assert names == [
        "RandomResizedCrop", "RandomHorizontalFlip", "RandAugment", "ToDtype", "Normalize", "RandomErasing",
        "MixUp",
    ]  # fmt: skip
    assert RECIPES[1].chain("uint8").ops[0].interpolation == "bicubic"
    assert repr(RECIPES[3].chain("float32")) == repr(augment.nnunet_default())
    assert RECIPES[4].chain("float32").lengths == 1
    for recipe, policy in zip(
        RECIPES[5:], (augment.RandAugment(), augment.TrivialAugmentWide()), strict=True
    ):
        ops = recipe.chain("uint8").ops
        assert [type(op).__name__ for op in ops[::2]] == ["RandomHorizontalFlip", "ToDtype"]
        assert repr(ops[1]) == repr(policy) and isinstance(ops[3], augment.Normalize) and len(ops) == 4


@pytest.mark.parametrize("place", [*_PLACES, *_SINGLE], ids=lambda place: place.key)
def test_both_ways_give_batches_of_one_form(place: Place, batches: ArrayBatches) -> None:
    given = place.given(batches)
    recipe = place.recipe
    takes_more = isinstance(recipe, data.ArrayRecipe)
    assert len(given) == 1 + (recipe.mixes is not None or takes_more)
    fast = place.recipe.chain(place.dtype)(*given)
    slow = place.recipe.sampled(place.dtype)(*given)
    if place.recipe.mixes:
        assert fast[1].shape == slow[1].shape == (_COUNT, 1000)
        fast, slow = fast[0], slow[0]
    if takes_more:
        assert (
            (fast[1].shape, fast[1].dtype)
            == (slow[1].shape, slow[1].dtype)
            == (given[1].shape, given[1].dtype)
        )
        fast, slow = fast[0], slow[0]
    assert (fast.shape, fast.dtype) == (slow.shape, slow.dtype) and torch.isfinite(slow).all()
    if place in _PLACES:
        assert fast.dtype == torch.float32


def test_transforms_of_files_are_split_at_the_crop() -> None:
    lengths = {}
    for loaded in LOADED[:5]:
        split = split_of(loaded.transform())
        lengths[loaded.key] = len(split.rest)
        assert split.like == SampleSpec(split.like.kind, (3, 224, 224), torch.float32)
    assert lengths == {
        "files-simclr": 6, "files-deit": 5, "files-randaugment": 4, "files-trivialaugmentwide": 4, "files-grey": 3,
    }  # fmt: skip
    with pytest.raises(SplitError, match="all of the transform"):
        split_of(LOADED[5].transform())


def test_what_scripts_do_with_a_spectrogram() -> None:
    random.seed(0)
    one = torch.rand(BANDS, FRAMES)
    before = one.clone()
    masked = scripts.SpecAugment(2, 30, 2, 20)(one)
    assert torch.equal(one, before) and 0 < (masked != one).sum() < one.numel() / 2
    assert (masked[masked != one] == one.mean()).all()
    factor = scripts.RandomGain(6.0)(one) / one
    assert 0.5 < factor.mean() < 2 and factor.std() < 1e-6
    shifted = scripts.TimeShift(40)(one)
    assert any(torch.equal(shifted, one.roll(by, -1)) for by in range(-40, 41))


# ---- rows --------------------------------------------------------------------------------------


def test_rows_of_a_section_and_of_a_single_operation(batches: ArrayBatches) -> None:
    found = [info for info, _ in own_rows(place_of("simclr-uint8"), batches)]
    assert [info.key for info in found] == [
        f"simclr-uint8-{kind}" for kind in ("replaced", "worker", "batch", "fused")
    ]
    assert [info.group for info in found] == ["replaced", "replaced", "fastpipe", "fastpipe"]
    assert {info.section for info in found} == {"simclr-uint8"} and {info.unit for info in found} == {
        "images"
    }
    assert f"{torch.get_num_threads()} thread" in found[0].note and found[1].note == "as in a worker process"
    spectrograms = [info for info, _ in own_rows(place_of("specaugment-float32"), batches)]
    assert {info.unit for info in spectrograms} == {"spectrograms"} and len(spectrograms) == 3
    for key, whose in (("volume-float32", "NumPy and SciPy"), ("motion-float32", "NumPy")):
        made = list(own_rows(place_of(key), batches))
        assert [info.key for info, _ in made] == [f"{key}-{kind}" for kind in ("replaced", "worker", "batch")]
        assert made[0][0].label == f"{whose}, sample by sample"
        assert {row.chunk for _, row in made} == {2 if key.startswith("volume") else 5}
        on_gpu = dataclasses.replace(place_of(key), device="cuda")
        assert on_gpu.key == f"{key}-cuda"
    single = [info.key for info, _ in own_rows(place_of("op-ColorJitter-uint8"), batches)]
    assert single == ["op-ColorJitter-uint8-replaced", "op-ColorJitter-uint8-batch"]


def test_another_way_is_one_line(batches: ArrayBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "WAYS", (*rows.WAYS, rows.Way("again", "once more")))
    place = place_of("simclr-float32")
    assert [info.key for info, _ in own_rows(place, batches)][-1] == "simclr-float32-again"
    assert check_chains([place], batches).batches == 3


def test_a_row_augments_so_many_samples_and_leaves_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", (real := torch.set_num_threads))

    def work() -> torch.Tensor:
        calls.append(torch.get_num_threads())
        return torch.zeros(4, 3)

    row = AugmentRow("one", work, 4, threads=1)
    assert row.measure(12) > 0 and calls == [1, 1, 1] and torch.get_num_threads() == before
    AugmentRow("all", work, 4).measure(4)
    assert calls[3:] == [before]
    row.close()
    assert real is torch.set_num_threads


def test_the_device_is_waited_for_around_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    # What would be looked at is not there.
    AugmentRow("cuda", lambda: said.append("work"), 4, "cuda").measure(8)
    assert said == ["wait", "work", "work", "wait"]


# ---- the check ---------------------------------------------------------------------------------


def test_all_chains_are_torchvisions(batches: ArrayBatches) -> None:
    said: list[str] = []
    found = check_chains([*_PLACES, *_SINGLE], batches, said.append)
    assert found.ok, found.problems
    ways = sum(len(ways_of(place)) for place in [*_PLACES, *_SINGLE])
    assert found.batches == ways == len(said) and found.alike == 8
    assert f"{ways - 8} batches agree with torchvision's functions, or NumPy's" in found.sentence()
    assert "8 that are fused are like them" in found.sentence()
    assert found.as_json()["ok"] and found.as_json()["text"] == found.sentence()


@pytest.mark.parametrize("spoil", ["values", "nan", "dtype", "shape"])
def test_a_wrong_batch_is_found(spoil: str) -> None:
    wanted = torch.rand(4, 3, 8, 8)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "values": lambda: wanted + 1e-3, "nan": lambda: wanted * torch.nan, "dtype": lambda: wanted.half(),
        "shape": lambda: wanted[:2],
    }  # fmt: skip
    found = ChainCheck()
    found.add("one", wanted + 1e-6, wanted, check.NEAR, 0.01)
    assert found.ok and 0 < found.largest < 1e-5
    found.add("other", made[spoil](), wanted, check.NEAR, 0.01)
    assert not found.ok and "outputs differ from torchvision's functions: other: " in found.sentence()


def test_some_values_may_be_beside_a_step_and_fused_ones_apart() -> None:
    wanted = torch.zeros(1000)
    spoilt = wanted.clone()
    spoilt[:10] = 1
    found = ChainCheck()
    found.add("steps", spoilt, wanted, check.NEAR, 0.01)
    found.add_like("fused", wanted + 0.2, wanted, 0.3)
    assert found.ok and (found.far, found.largest, found.alike) == (10, 0.0, 1)
    found.add_like("fused", wanted + 0.4, wanted, 0.3)
    assert found.problems == ("fused: values are 0.4 apart on average, at most 0.3 asked",)


def test_waits_are_those_within_the_mark() -> None:
    def event(name: str, start: int, end: int = 0) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("cudaDeviceSynchronize", 1), event("mark", 10, 20), event("cudaLaunchKernel", 12),
        event("cudaStreamSynchronize", 14), event("cudaMemcpyAsync", 15), event("cudaDeviceSynchronize", 21),
    ]  # fmt: skip
    assert waits_within(events, "mark") == ["cudaStreamSynchronize"]


@pytest.mark.gpu
def test_no_call_on_cuda_waits(batches: ArrayBatches) -> None:
    places = [dataclasses.replace(place, device="cuda") for place in [*_PLACES, *_SINGLE]]
    assert check_chains(places, batches).problems == ()
    assert full.calls_that_wait(places, batches) == []


# ---- peers -------------------------------------------------------------------------------------


def test_peers_are_asked_for_what_they_have() -> None:
    by_key = {(one.peer.key, one.device): one for one in AUGMENT_PEERS}
    keys = {key: [place.key for place in wanted_of(one, [*_PLACES, *_SINGLE])] for key, one in by_key.items()}
    assert keys["albumentations", "cpu"] == ["simclr-uint8"]
    assert keys["torchaudio", "cpu"] == ["specaugment-float32", "op-SpecAugment-float32"]
    kornia = keys["kornia", "cpu"]
    assert {"simclr-float32", "simclr-uint8", "deit-uint8", "op-MixUp-float32"} <= set(kornia)
    assert "op-ColorJitter-uint8" not in kornia and keys["kornia", "cuda"] == []
    on_gpu = [dataclasses.replace(place, device="cuda") for place in _PLACES]
    assert wanted_of(by_key["kornia", "cuda"], on_gpu) == on_gpu[:4]
    assert by_key["kornia", "cuda"].peer.is_on_gpu and not by_key["kornia", "cpu"].peer.is_on_gpu
    info = by_key["kornia", "cpu"].info(place_of("deit-uint8"))
    assert info.key == "deit-uint8-kornia" and info.section == "deit-uint8" and info.group == "peer"
    assert "made float32 first" in info.note and "same operations for the whole batch" in info.note


def test_the_gpu_is_hidden_from_those_that_are_not_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen = [bench_peers._environment(one.peer, "")["CUDA_VISIBLE_DEVICES"] for one in AUGMENT_PEERS]
    assert seen == [""] * 8 + ["0"]


def a_job(tasks: list[str]) -> AugmentJob:
    return AugmentJob("", "", "", "", tasks, 2, 8, [0.5] * 3, [0.5] * 3, 10, 1, "cpu", "", {})


def test_a_job_survives_the_pipe_and_its_batches_are_looked_at() -> None:
    job = a_job(["simclr-uint8"])
    assert job_of(json.loads(json.dumps(dataclasses.asdict(job)))) == job
    good = np.zeros((2, 3, 8, 8), np.float32)
    assert augment_problem(job, "one", good) is None and augment_problem(job, "one", good[:, 0]) is None
    assert augment_problem(job, "one", good.transpose(0, 2, 3, 1)) is None
    assert "one: a batch is uint8" in str(augment_problem(job, "one", good.astype(np.uint8)))
    assert "expected float32 of 2 samples" in str(augment_problem(job, "one", good[:1]))
    assert "expected 8×8" in str(augment_problem(job, "one", good[..., 1:]))
    assert "not finite" in str(augment_problem(job, "one", good + np.nan))
    volumes = np.zeros((3, 1, 4, 4, 4), np.float32)
    assert augment_problem(job, "one", volumes) is None
    assert "not finite" in str(augment_problem(job, "one", volumes + np.nan))


def test_one_process_does_whichever_task_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers.children.chosen import stream_of

    done: list[str] = []
    waits: list[int] = []

    def make(recipe: str, dtype: str) -> Callable[[], Any]:
        if recipe == "none":
            raise KeyError("no such recipe")
        value = torch.zeros(2 if recipe != "short" else 1, 3, 8, 8)
        return lambda: (done.append(f"{recipe} {dtype}"), (value, "labels"))[1]

    job = a_job(["a-float32", "b-uint8"])
    for wait in (None, lambda: waits.append(len(done))):
        done.clear()
        monkeypatch.setitem(
            serve.SOURCES, "own", lambda job, wait=wait: stream_of(job, make, ("torch",), wait)
        )
        asked = [("a-float32", 1), ("none-uint8", 1), ("short-uint8", 1), ("b-uint8", 2), ("a-float32", 1)]
        lines = [json.dumps({"batches": count, "task": task}) for task, count in asked]
        answers = io.StringIO()
        questions = io.StringIO("\n".join([json.dumps(dataclasses.asdict(job)), *lines, ""]))
        serve.serve("own", questions, answers, lambda s: None)
        first, *others = map(json.loads, answers.getvalue().splitlines())
        assert first["shape"] == [2, 3, 8, 8] and "torch" in first["versions"]
        assert [list(one) for one in others] == [["seconds"], ["error"], ["error"], ["seconds"], ["seconds"]]
        assert "none-uint8: KeyError" in others[1]["error"] and "2 samples" in others[2]["error"]
        # One to look at when a task is new, one for the first answer.
        assert done.count("a float32") == 2 + 1 + 1 and done.count("b uint8") == 1 + 2
    assert len(waits) == 6
    with pytest.raises(PeerError, match="none-uint8: KeyError"):
        stream_of(a_job(["none-uint8"]), make, ())


def started(one: AugmentPeer, batches: ArrayBatches, folder: Path, places: list[Place]) -> AugmentChild:
    python = bench_peers.interpreter(one.peer)
    if python is None:
        pytest.skip(f"needs {one.peer.module}: {one.peer.install}")
    return AugmentChild(one, python, batches.save(folder), places, len(batches), 1)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=pytest.mark.slow),  # all of kornia's take half a minute
        1,
        2,
        pytest.param(3, marks=pytest.mark.slow),
        4,
        pytest.param(5, marks=pytest.mark.slow),
        6,
        pytest.param(7, marks=pytest.mark.slow),
    ],
    ids=[
        "kornia",
        "albumentations",
        "torchaudio",
        "torchaudio-whole",
        "batchgenerators",
        "batchgenerators-worker",
        "monai",
        "monai-worker",
    ],
)
def test_a_peer_does_all_it_has_where_it_is_installed(
    number: int, batches: ArrayBatches, tmp_path: Path
) -> None:
    one = AUGMENT_PEERS[number]
    places = wanted_of(one, [*_PLACES, *_SINGLE])
    child = started(one, batches, tmp_path, places)
    for place in places:
        info = child.told(one.info(place))
        assert info.versions and one.peer.module in info.versions
        row = TaskRow(info.key, child, place.task, batches.count(place.recipe.unit))
        assert row.chunk == (2 if place.recipe.unit == "volumes" else _COUNT) and row.measure(row.chunk) > 0
        row.close()
    if one.peer.source == "kornia":
        with pytest.raises(ContenderError, match="strange-uint8: KeyError"):
            child.measure_task("strange-uint8", 1)
    child.close()


# ---- figures -----------------------------------------------------------------------------------


def at(*rates: float) -> list[Sample]:
    return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]


def test_what_was_asked_is_judged_against_the_faster_of_torchvisions_rows() -> None:
    samples = {
        "simclr-float32-batch": at(300, 300), "simclr-float32-replaced": at(100, 300),
        "simclr-float32-worker": at(200, 100), "simclr-float32-kornia": at(5, 10),
        "randaugment-uint8-batch": at(45), "randaugment-uint8-worker": at(10),
        "trivialaugmentwide-uint8-batch": at(30), "trivialaugmentwide-uint8-replaced": at(10),
        "specaugment-float32-batch": at(40), "specaugment-float32-torchaudio": at(10),
        "files-crop-auto": at(98), "files-crop-whole": at(100),
        "volume-float32-batch": at(80), "volume-float32-monai": at(20), "volume-float32-batchgenerators": at(10),
        "motion-float32-batch": at(150), "motion-float32-replaced": at(10), "motion-float32-worker": at(5),
    }  # fmt: skip
    kornia, stock, *_, rand, _, trivial, spec, volume, motion, _, _, _, _, _, split, _, on_gpu, waits = (
        targets(samples, None)
    )
    assert (rand["asked"], rand["got"]["median"], rand["is_met"]) == (4, 4.5, True)
    assert (trivial["asked"], trivial["got"]["median"], trivial["is_met"]) == (4, 3.0, False)
    assert (volume["got"]["median"], volume["is_met"]) == (4.0, False)  # × the fastest that was measured
    assert (motion["got"]["median"], motion["is_met"]) == (15.0, False)
    assert (kornia["asked"], kornia["is_met"], kornia["got"]["median"]) == (25, True, 45.0)
    assert stock["got"] == {"median": 1.25, "low": 1.0, "high": 1.5} and not stock["is_met"]
    assert (spec["asked"], spec["is_met"]) == (5, False)
    assert (split["asked"], split["got"]["median"], split["is_met"]) == (0.97, 0.98, True)
    assert on_gpu["is_met"] is None and waits["is_met"] is None
    assert targets({}, [])[-1]["is_met"] and not targets({}, ["one"])[-1]["is_met"]
    made = {info.key for place in _PLACES for info in place_infos(place)}
    made |= {f"{loaded.key}-{kind}" for loaded in LOADED for kind in ("replaced", "whole", "auto")}
    for one in (one for one in ASKED if "CUDA" not in one.text):
        against = one.against if isinstance(one.against, tuple) else (one.against,)
        assert {one.row, *against} <= made


def place_infos(place: Place) -> Iterator[Any]:
    """Rows of a section, without their batches."""
    for kind in ("replaced", "worker", *(way.kind for way in rows.WAYS)):
        yield place.info(kind, "", "")
    yield from (one.info(place) for one in AUGMENT_PEERS if one.does(place))


def test_single_operations_are_told_in_lines() -> None:
    place = place_of("op-ColorJitter-float32")
    kinds = {"replaced": "torchvision", "batch": "augment", "kornia": "kornia"}
    infos = {(one := place.info(kind, label, "peer")).key: one for kind, label in kinds.items()}
    samples = {
        "op-ColorJitter-float32-batch": at(1000, 2000), "op-ColorJitter-float32-replaced": at(500, 500),
    }  # fmt: skip
    told = single_of([place, place_of("op-ToDtype-uint8")], infos, samples, lambda unit: 64)
    (row,) = told["rows"]
    assert row["ms"] == {"median": 48.0, "low": 32.0, "high": 64.0}
    assert [one["label"] for one in row["against"]] == ["torchvision"]
    assert single_lines({"single": told}) == [
        "ColorJitter, float32: 64 images in 48.00 ms; 3.00× (2.00 to 4.00) torchvision"
    ]
    # As an earlier release wrote it.
    row = {name: value for name, value in told["rows"][0].items() if name != "batch_size"}
    assert "64 images in 48.00 ms" in single_lines({"single": {"batch_size": 64, "rows": [row]}})[0]
    assert single_lines({}) == []


# ---- the whole command -------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer recipes and operations, measured for an instant."""
    kept = [one for one in SINGLE if one.label in ("ToDtype", "TimeShift")]
    monkeypatch.setattr(full.Bench, "recipes", (RECIPES[0], RECIPES[2]))
    monkeypatch.setattr(full, "SINGLE", kept)
    monkeypatch.setattr(full, "LOADED", LOADED[4:5])
    monkeypatch.setattr(case.Bench, "quick_s", 0.001)
    monkeypatch.setattr(full, "SINGLE_S", 0.001)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def command(tree: Path, *more: str) -> list[str]:
    return ["augment", "--quick", "--rounds", "1", "--batch-size", "2", "--data", str(tree), *more]


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_quick_run_gives_table_json_and_picture(
    tree: Path, tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "interpreter", lambda peer: None)
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"), "--peers"]
    assert measure(command(tree, *files)) == 0
    captured = capsys.readouterr()
    printed = " ".join(captured.out.split())
    assert "agree with torchvision's functions" in captured.err
    result = load(tmp_path / "r.json")
    assert result["main"] == "simclr-float32-batch" and result["verdict"] in printed
    assert set(result["sections"]) == {"simclr-float32", "simclr-uint8", "specaugment-float32", "files-grey"}
    assert [row["key"].rsplit("-", 1)[1] for row in result["rows"]] == [
        *["replaced", "worker", "batch", "fused"] * 2, "replaced", "worker", "batch", "replaced", "whole", "auto"
    ]  # fmt: skip
    for section, best in result["best"].items():
        rates = {
            row["key"]: row[f"{row['unit']}_per_s"]["median"]
            for row in result["rows"]
            if row["section"] == section and row["group"] == "replaced"
        }
        assert best == max(rates, key=lambda key: rates[key])
    assert [one["key"] for one in result["single"]["rows"]] == ["op-ToDtype-uint8", "op-TimeShift-float32"]
    assert printed.count("asked: ") == len(result["targets"]) == len(ASKED) + 1
    assert "not measured: on CUDA: torch finds no CUDA device" in printed
    assert printed.count("not installed: pip install kornia") == 1  # that of CUDA has nothing to do
    assert "best replaced transform" in result["verdict"] and "num_workers" not in result["verdict"]
    assert 'FastLoader, augment="auto"' in printed
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "r.json").read_text()
    assert str(tmp_path) not in text and str(tree) not in text and str(Path.home()) not in text
    written = markdown(result)
    assert written.count("× best replaced transform") == 4 and "- ToDtype, uint8: 2 images in " in written
    for width in (80, 160):
        output = io.StringIO()
        print_result(result, Console(file=output, width=width))
        assert max(map(len, output.getvalue().splitlines()[:16])) <= width


@pytest.mark.slow
def test_operations_may_be_left_out(
    tree: Path, tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full.Bench, "recipes", RECIPES[:1])
    assert measure(command(tree, "--no-single", "--json", str(tmp_path / "r.json"))) == 0
    result = load(tmp_path / "r.json")
    assert result["single"]["rows"] == [] and {"--batch-size", "--no-single"} <= set(
        result["command"].split()
    )


def test_a_recipe_alone(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(case.Bench, "quick_s", 0.001)
    monkeypatch.setattr(data, "SIZE", (12, 16, 16))
    monkeypatch.setattr(full, "SINGLE_S", 0.001)
    asked = ["--recipe", "volume", "--recipe", "motion", "--json", str(tmp_path / "r.json")]
    assert measure(command(tree, *asked)) == 0
    result = load(tmp_path / "r.json")
    assert set(result["sections"]) == {"volume-float32", "motion-float32"}
    assert [row["key"] for row in result["rows"]] == [
        f"{key}-float32-{kind}" for key in ("volume", "motion") for kind in ("replaced", "worker", "batch")
    ]
    assert result["main"] == "volume-float32-batch"
    assert [one["text"].split(",")[0] for one in result["targets"]] == [
        "nnU-Net's default", "motion", "nnU-Net's default", "chains on CUDA whose call keeps the host waiting",
    ]  # fmt: skip
    single = {row["label"].split(",")[0]: row["batch_size"] for row in result["single"]["rows"]}
    assert single["GaussianBlur3D"] == 2 and single["MotionSpeed"] == 64 and "ColorJitter" not in single
    assert (
        "--recipe volume --recipe motion" in result["command"]
        and "nnU-Net's default" in capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        measure(command(tree, "--recipe", "strange"))
    assert "invalid choice: 'strange'" in capsys.readouterr().err


def test_a_wrong_batch_ends_the_command_with_1(
    tree: Path, tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply = augment.Compose.apply
    monkeypatch.setattr(augment.Compose, "apply", lambda self, *given: apply(self, *given) + 1)
    assert measure(command(tree, "--json", str(tmp_path / "never.json"))) == 1
    captured = capsys.readouterr()
    assert "SimCLR, float32: augment.Compose: 100.00% of the values differ" in captured.err
    assert captured.out == "" and not (tmp_path / "never.json").exists()


@pytest.mark.parametrize(
    "more", [["--batch-size", "0"], ["--rounds", "none"], ["--rounds", "1", "--seconds", "2"]]
)
def test_wrong_options(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "augment", *more])
    assert stopped.value.code == 2 and "usage: fastpipe" in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "augment", "--data", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_help_loads_no_framework() -> None:
    code = (
        "import sys, contextlib\n"
        f"sys.path.insert(0, {str(Path(full.__file__).parents[1])!r})\n"
        "import paths\n"
        "from benchmarks.run import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['augment', '--help'])\n"
        "heavy = {'torch', 'torchvision', 'kornia', 'albumentations', 'torchaudio'}\n"
        "assert not heavy & set(sys.modules), 'loaded too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--peers" in done.stdout and "--no-single" in done.stdout
