"""The comparison: it passes where all is equal, and fails where anything is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from odd_images import odd_images
from torchvision import transforms
from torchvision.datasets import ImageFolder

import fastpipe
from fastpipe.errors import OptionError
from fastpipe.tools.comparison import NAMED, Chain, Outcome, chain_of, chosen, compare_folder
from fastpipe.torch.batches import Items
from fastpipe.torch.image_folder import FastImageFolder

SMALL = transforms.Compose([transforms.Resize(20), transforms.CenterCrop(16), transforms.ToTensor()])


def compared(folder: Path, chain: Chain | str = "eval", count: int | None = None, seed: int = 0) -> Outcome:
    return compare_folder(
        ImageFolder(folder), chain_of(chain) if isinstance(chain, str) else chain, count, seed
    )


def own(transform: Any, batch: int = 4) -> Chain:
    return Chain("mine:transform", "", transform, batch, is_own=True)


@given(st.integers(1, 400), st.integers(1, 500), st.integers(0, 9))
def test_chosen_images_are_spread_evenly(total: int, count: int, seed: int) -> None:
    found = chosen(total, count, seed)
    assert len(found) == len(set(found)) == min(total, count)
    assert found == sorted(found) == chosen(total, count, seed)
    for part, index in enumerate(found):
        assert part * total // len(found) <= index < (part + 1) * total // len(found)


def test_the_seed_chooses() -> None:
    assert chosen(1000, 10, 0) != chosen(1000, 10, 1)


@pytest.mark.parametrize("name", NAMED)
def test_photographs_are_equal(photos: Path, name: str) -> None:
    outcome = compared(photos, name, count=40)
    assert outcome.equal
    assert outcome.check.photos == outcome.seen == outcome.chosen == min(40, outcome.total)
    assert outcome.check.values > 0
    assert (outcome.check.largest, outcome.check.differing) == (0, 0)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency")
def test_odd_files_are_equal_or_unreadable_for_both(tmp_path: Path, name: str) -> None:
    cases = {str(case.path): case.expect for case in odd_images(tmp_path / "odd")}
    outcome = compared(tmp_path, name)
    assert outcome.equal
    assert outcome.check.photos + len(outcome.unreadable) == outcome.total > 120
    assert len(outcome.unreadable) > 20
    for failure in outcome.unreadable:
        assert cases.get(failure.path, "bad") == "bad"
        assert failure.stock and failure.fast


@pytest.mark.parametrize("name", NAMED)
def test_other_pixels_of_one_file_are_found_and_named(
    tree: Path, name: str, spoil_decoder: Callable[[Path, int], None]
) -> None:
    spoil_decoder(tree / "class_001" / "0001.jpg", 3)
    outcome = compared(tree, name)
    assert not outcome.equal
    assert outcome.check.photos_differing == 1
    (worst,) = outcome.check.worst
    assert (worst.index, worst.path) == (4, str(tree / "class_001" / "0001.jpg"))
    assert worst.largest == outcome.check.largest == 3
    assert 0 < outcome.check.over_one <= outcome.check.differing < outcome.check.values


def test_training_compares_augmented_images(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = transforms.functional.resized_crop
    monkeypatch.setattr(
        transforms.functional, "resized_crop", lambda *a, **k: seen.append(a[1:5]) or real(*a, **k)
    )
    assert compared(tree, "train").equal
    first = list(seen)
    assert len(set(first)) == 6  # each image has a crop of its own
    seen.clear()
    assert compared(tree, "train", seed=1).equal
    assert not set(seen) & set(first)


def test_a_file_that_is_cut_short(tree: Path) -> None:
    path = tree / "class_000" / "0002.jpg"
    path.write_bytes(path.read_bytes()[:200])
    outcome = compared(tree)
    assert outcome.equal  # neither reads it
    assert (len(outcome.unreadable), outcome.check.photos) == (1, 5)
    failure = outcome.unreadable[0]
    assert (failure.index, failure.path) == (2, str(path))
    assert failure.stock == failure.fast
    assert "truncated" in str(failure.stock).lower()


@pytest.mark.parametrize("who", ["fast", "stock"])
def test_a_failure_of_one_only_is_a_difference(
    tree: Path, who: str, monkeypatch: pytest.MonkeyPatch, left_to_python: Callable[[Path], None]
) -> None:
    path = tree / "class_001" / "0000.jpg"
    left_to_python(path)

    def fails(where: type, method: str) -> None:
        real = getattr(where, method)

        def call(self: Any, *arguments: Any) -> Any:
            if (path.read_bytes() if who == "fast" else 3) in arguments:
                raise OSError("no such pixels")
            return real(self, *arguments)

        monkeypatch.setattr(where, method, call)

    if who == "fast":
        fails(fastpipe.images.reader.ImageReader, "open")  # type: ignore[attr-defined]
    else:
        fails(ImageFolder, "__getitem__")
    outcome = compared(tree)
    assert not outcome.equal
    assert (len(outcome.one_sided), len(outcome.unreadable), outcome.check.photos) == (1, 0, 5)
    failure = outcome.one_sided[0]
    assert (failure.index, failure.path) == (3, str(path))
    assert getattr(failure, who) == "OSError: no such pixels"


def test_another_order_of_labels_ends_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(FastImageFolder):
        def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
            classes = super().find_classes(directory)[0][::-1]
            return classes, {name: number for number, name in enumerate(classes)}

    monkeypatch.setattr(fastpipe, "FastImageFolder", Reversed)
    outcome = compared(tree)
    assert not outcome.equal
    assert set(outcome.index_problems) == {"classes", "class_to_idx", "samples", "targets"}
    assert "expected 'class_000'" in outcome.index_problems["classes"]
    assert outcome.seen == 0


def test_a_wrong_label_of_a_sample_is_found(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Items.targets

    def targets(self: Items, numbers: Sequence[int]) -> list[Any]:
        return [
            target + (position == 5)
            for target, position in zip(
                [int(target) for target in real(self, numbers)],
                self.positions[list(numbers)].tolist(),
                strict=True,
            )
        ]

    monkeypatch.setattr(Items, "targets", targets)
    outcome = compared(tree)
    assert not outcome.equal
    assert [(one.index, one.note) for one in outcome.check.worst] == [(5, "label 2 instead of 1")]


@pytest.mark.parametrize(
    "transform",
    [
        SMALL,
        lambda image: image.resize((9, 8)),
        lambda image: {"image": transforms.functional.to_tensor(image), "width": image.width},
        transforms.Compose([transforms.RandomCrop(30), transforms.ToTensor(), lambda tensor: tensor * 2]),
    ],
    ids=["compose", "PIL", "dict", "random crop, then own code"],
)
def test_transforms_of_the_user(photos: Path, transform: Any) -> None:
    assert compared(photos, own(transform), count=12).equal


def test_a_difference_of_floats_is_found(tree: Path, spoil_decoder: Callable[[Path, int], None]) -> None:
    spoil_decoder(tree / "class_000" / "0000.jpg", 3)
    outcome = compared(tree, own(SMALL))
    assert not outcome.equal
    assert not outcome.check.bytes_only
    assert outcome.check.largest == pytest.approx(3 / 255, rel=0.01)


def random_rotation(image: Any) -> Any:
    return image.rotate(random.random() * 90)


@pytest.mark.parametrize(
    "transform", [random_rotation, transforms.Compose([SMALL, lambda tensor: tensor + torch.rand(())])]
)
def test_random_transforms_of_the_user_are_refused(tree: Path, transform: Any) -> None:
    with pytest.raises(OptionError, match="another result when it is called again"):
        compared(tree, own(transform))


def test_a_transform_that_always_fails_is_no_success(tree: Path) -> None:
    with pytest.raises(OptionError, match=r"fails on all: .*0000\.jpg': KeyError: 'size'"):
        compared(tree, own(lambda image: {}["size"]))


def test_trouble_of_the_machine_is_not_a_bad_file(tree: Path) -> None:
    def no_memory(image: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        compared(tree, own(no_memory))
