"""The comparison that comes before any timing finds what is wrong."""

from __future__ import annotations

import pytest
import torch

from fastpipe.bench.check import Check, compare

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(0, 200, (4, 3, 224, 224), generator=generator, dtype=torch.uint8)  # noqa: E731
    return [(draw(), torch.arange(4)), (draw(), torch.arange(4))]


def copied(batches: list[Batch]) -> list[Batch]:
    return [(images.clone(), labels.clone()) for images, labels in batches]


def test_equal(batches: list[Batch]) -> None:
    check = compare(batches, copied(batches))
    assert check.ok
    assert (check.photos, check.differing, check.largest) == (8, 0, 0)
    assert "100.0000% of the values equal" in check.sentence()


def test_one_level_is_rounding(batches: list[Batch]) -> None:
    other = copied(batches)
    other[0][0].add_(1)
    check = compare(batches, other)
    assert check.ok
    assert (check.largest, check.over_one, check.differing) == (1, 0, check.values // 2)


@pytest.mark.parametrize(("count", "ok"), [(100, True), (200, False)])
def test_two_levels_are_rounding_only_when_very_rare(batches: list[Batch], count: int, ok: bool) -> None:
    other = copied(batches)
    other[1][0].view(-1)[:count] += 2
    check = compare(batches, other)
    assert check.values == 1204224
    assert check.ok is ok
    assert check.over_one == count


def test_three_levels_once_are_too_much(batches: list[Batch]) -> None:
    other = copied(batches)
    other[1][0].view(-1)[7] += 3
    check = compare(batches, other)
    assert check.problems == ("pixels differ by up to 3 of 255",)
    assert "differ" in check.sentence()


def test_labels(batches: list[Batch]) -> None:
    other = copied(batches)
    other[1][1][2] = 0
    assert compare(batches, other).problems == ("labels of batch 1 differ",)


def test_shape_and_type(batches: list[Batch]) -> None:
    other = [(images.float(), labels) for images, labels in batches]
    assert "torch.float32" in compare(batches, other).problems[0]
    assert not compare(batches, [(images[:, :, 1:], labels) for images, labels in batches]).ok


def test_nothing_compared_is_said_without_figures() -> None:
    check = Check(problems=("FastImageFolder.classes is not that of ImageFolder",))
    assert "classes" in check.sentence()
    assert check.as_json()["ok"] is False
