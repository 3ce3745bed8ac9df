"""The comparison that comes before any timing finds what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastpipe.bench.check import INDEX, Check, compare, index_problems

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


def test_the_worst_photos_are_named(batches: list[Batch]) -> None:
    other = copied(batches)
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


def gap_of(expected: object, got: object) -> Check:
    check = Check()
    check.add([(np.asarray(expected), np.asarray(got))], 0, "")
    return check


def test_floats_are_compared_to_the_last_bit() -> None:
    one = np.ones(4, np.float32)
    assert gap_of(one, one.copy()).differing == 0
    next_one = gap_of(one, np.nextafter(one, np.float32(2)))
    assert (next_one.differing, next_one.over_one, next_one.bytes_only) == (4, 0, False)
    assert next_one.largest == pytest.approx(2**-23)


def test_what_is_not_a_number_equals_itself_only() -> None:
    nan = float("nan")
    assert gap_of([nan, 1.0], [nan, 1.0]).photos_differing == 0
    assert gap_of([nan, 1.0], [2.0, 1.0]).largest == float("inf")
    assert gap_of([float("inf")], [float("inf")]).photos_differing == 0


def test_whole_numbers_of_any_size() -> None:
    assert gap_of([2**62], [2**62 + 1]).photos_differing == 1
    assert gap_of(np.uint16([1, 9]), np.uint16([5, 9])).largest == 4
    assert gap_of([True, False], [True, True]).largest == 1


def test_the_first_difference_of_the_index_is_said() -> None:
    def dataset(**changed: object) -> SimpleNamespace:
        return SimpleNamespace(**{**{name: [1, 2] for name in INDEX}, "class_to_idx": {"a": 0}, **changed})

    assert index_problems(dataset(), dataset()) == {}
    assert "entry 1 is 3, expected 2" in index_problems(dataset(), dataset(targets=[1, 3]))["targets"]
    assert "entry 0 is ('a', 1)" in index_problems(dataset(), dataset(class_to_idx={"a": 1}))["class_to_idx"]
    assert "1 entries, expected 2" in index_problems(dataset(), dataset(samples=[1]))["samples"]


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
