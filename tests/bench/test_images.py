"""The case ``images``: its check, its rows, and the command as a user runs it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_results import checked_result, ran

import fastpipe
from benchmarks.floor import DecodeRow
from benchmarks.studies.first import first_batch_seconds
from fastpipe.bench.check import INDEX, Check, compare, index_problems
from fastpipe.bench.data import scan
from fastpipe.bench.images import LoaderRow, LoaderSpec, check_transform, loader_specs
from fastpipe.bench.machine import describe, memory_bytes
from fastpipe.bench.runner import ContenderError
from fastpipe.core.machine import ControlGroups

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 200, (2, 4, 3, 224, 224), generator=generator, dtype=torch.uint8)
    return [(one, torch.arange(4)) for one in images]


def _level(number: int, count: int, levels: int) -> Callable[[list[Batch]], Any]:
    """Raises so many values of a batch by so many levels."""
    return lambda other: other[number][0].view(-1)[:count].add_(levels)


@pytest.mark.parametrize(("spoil", "expected", "problem"), [
    (lambda other: None, {"differing": 0, "largest": 0, "over_one": 0}, None),
    (_level(0, 602112, 1), {"differing": 602112, "largest": 1, "over_one": 0}, None),  # rounding
    (_level(1, 100, 2), {"largest": 2, "over_one": 100}, None),  # rounding, when very rare
    (_level(1, 200, 2), {"over_one": 200}, "more than"),
    (_level(1, 1, 3), {}, "pixels differ by up to 3 of 255"),
    (lambda other: other[1][1].zero_(), {}, "labels of batch 1 differ"),
    (lambda other: other.__setitem__(0, (other[0][0].float(), other[0][1])), {}, "torch.float32"),
    (lambda other: other.__setitem__(0, (other[0][0][:, :, 1:], other[0][1])), {}, ""),
], ids=["equal", "one level", "two levels", "often two levels", "three levels", "label", "type", "shape"])  # fmt: skip
def test_only_rounding_passes_the_check(
    batches: list[Batch], spoil: Callable[..., Any], expected: dict[str, int], problem: str | None
) -> None:
    other = [(images.clone(), labels.clone()) for images, labels in batches]
    spoil(other)
    check = compare(batches, other)
    assert check.ok == (problem is None) and {name: getattr(check, name) for name in expected} == expected
    if problem is None:
        assert (check.photos, check.values) == (8, 1204224)
        assert "of the values equal" in check.sentence()
    elif problem != "more than":
        assert problem in check.problems[0] and "differ" in check.sentence()


def test_the_worst_photos_are_named(batches: list[Batch]) -> None:
    other = [(images.clone(), labels.clone()) for images, labels in batches]
    photos = [(10 * number, f"{number}.jpg") for number in range(8)]
    for number, levels in ((1, 1), (2, 5), (3, 4), (4, 1), (5, 3), (6, 2)):
        other[number // 4][0][number % 4, 0, 0, 0] += levels
    check = compare(batches, other, photos=photos)
    assert check.problems == ("pixels differ by up to 5 of 255, most in '2.jpg'",)
    assert check.photos_differing == 6
    assert [(one.index, one.path, one.largest) for one in check.worst] == [
        (20, "2.jpg", 5), (30, "3.jpg", 4), (50, "5.jpg", 3), (60, "6.jpg", 2), (10, "1.jpg", 1),
    ]  # fmt: skip
    assert "jpg" not in str({**check.as_json(), "problems": [], "text": ""})


_NAN, _ENDLESS, _ONE = float("nan"), float("inf"), np.ones(4, np.float32)


@pytest.mark.parametrize(("expected", "got", "fields"), [
    (_ONE, _ONE.copy(), {"differing": 0}),
    (_ONE, np.nextafter(_ONE, np.float32(2)), {"differing": 4, "over_one": 0, "bytes_only": False}),
    ([_NAN, 1.0], [_NAN, 1.0], {"photos_differing": 0}),
    ([_NAN, 1.0], [2.0, 1.0], {"largest": _ENDLESS}),
    ([_ENDLESS], [_ENDLESS], {"photos_differing": 0}),
    ([2**62], [2**62 + 1], {"photos_differing": 1}),
    (np.uint16([1, 9]), np.uint16([5, 9]), {"largest": 4}),
    ([True, False], [True, True], {"largest": 1}),
], ids=str)  # fmt: skip
def test_values_of_all_types_are_compared(expected: Any, got: Any, fields: dict[str, Any]) -> None:
    check = Check()
    check.add([(np.asarray(expected), np.asarray(got))], 0, "")
    assert {name: getattr(check, name) for name in fields} == fields


def test_the_first_difference_of_the_index_is_said() -> None:
    def dataset(**changed: object) -> SimpleNamespace:
        return SimpleNamespace(**{**{name: [1, 2] for name in INDEX}, "class_to_idx": {"a": 0}, **changed})

    assert index_problems(dataset(), dataset()) == {}
    assert "entry 1 is 3, expected 2" in index_problems(dataset(), dataset(targets=[1, 3]))["targets"]
    assert "entry 0 is ('a', 1)" in index_problems(dataset(), dataset(class_to_idx={"a": 1}))["class_to_idx"]
    assert "1 entries, expected 2" in index_problems(dataset(), dataset(samples=[1]))["samples"]
    assert not Check(problems=("FastImageFolder.classes is not that of ImageFolder",)).as_json()["ok"]


def test_the_floor_decodes_crops_and_loaders_resample_after_it(tree: Path) -> None:
    def values() -> Any:
        folder = fastpipe.FastImageFolder(str(tree), check_transform(), cache="off")
        return next(iter(fastpipe.FastLoader(folder, 6)))[0].numpy().copy()

    before, files = values(), scan(tree, "tree").files
    for from_memory in (True, False):
        row = DecodeRow(files, threads=2, batch_size=4, from_memory=from_memory)
        assert row.measure(40) > 0
        row.close()
    assert before.any() and (values() == before).all()


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cached_row_decodes_nothing_while_it_is_measured(tree: Path, cache: str) -> None:
    spec = next(spec for spec in loader_specs(2) if spec.key == f"cached-{cache}-256")
    with closing(LoaderRow(spec, tree, range(4), 2)) as row:
        row.measure(2)  # fills it first
        maker = row.dataset._running().maker
        open_image = maker.open_image

        def open_kept(found: Any, path: str) -> Any:
            assert found.entry is not None, f"{path} is decoded again"
            return open_image(found, path)

        maker.open_image = open_kept
        assert row.measure(8) > 0


def test_the_machine_is_described_with_its_containers_limit_and_without_its_name(tmp_path: Path) -> None:
    limit = tmp_path / "sys" / "fs" / "cgroup" / "memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("1073741824\n")
    assert memory_bytes(ControlGroups(tmp_path)) == 2**30
    limit.write_text("max\n")
    assert memory_bytes(ControlGroups(tmp_path)) == memory_bytes(ControlGroups(tmp_path / "none"))
    assert describe()["cores"] >= 1 and (not platform.node() or platform.node() not in json.dumps(describe()))


def test_a_quick_run_as_a_user_runs_it(tree: Path, tmp_path: Path) -> None:
    run = ran(tmp_path, "-m", "fastpipe.bench", "images", "--quick", "--data", tree, "--batch-size", "3")
    result = checked_result(run, tree, rounds=2)
    assert "check: outputs agree with torchvision's on 6 photos" in run.said
    assert "FastImageFolder + FastLoader" in run.printed and (tmp_path / "r.png").exists()
    assert {row["group"] for row in result["rows"]} == {"replaced", "stock", "fastpipe"}
    assert result["check"]["photos"] == 6
    assert set(result["stages"]["seconds"]) >= {"read", "decode", "transform", "wait"}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["replaced", "fastpipe"])
def test_start_up_is_measured_in_new_processes(
    tree: Path, group: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = first_batch_seconds(LoaderSpec("key", "label", group), tree, batch_size=4, warm_runs=1)
    assert first["cold_s"] > 0 and first["warm_raw_s"] == [first["warm_s"]]
    assert not list(tmp_path.iterdir())  # a user's cache folder is neither used nor written
    with pytest.raises(ContenderError, match="ended with code 1: FileNotFoundError"):
        first_batch_seconds(LoaderSpec("key", "label", "replaced"), tmp_path, batch_size=4)
