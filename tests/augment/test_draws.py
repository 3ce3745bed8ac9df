"""Parameters are distributed as torchvision's; where random numbers come from; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.errors import AugmentError, OptionError
from fastpipe.types import Key

Make = Callable[..., Tensor]
COUNT = 4000
# Of Kolmogorov and Smirnov's statistic of two samples of this size, exceeded once in 10,000 times.
_LIMIT = 2.23 * np.sqrt(2 / COUNT)


def distance(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """Kolmogorov and Smirnov's."""
    a, b = np.sort(np.asarray(one, np.float64)), np.sort(np.asarray(other, np.float64))
    grid = np.concatenate([a, b])
    below = [np.searchsorted(values, grid, side="right") / len(values) for values in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def theirs_of(transform: Any, height: int, width: int) -> list[dict[str, Any]]:
    image = torch.empty(3, height, width)
    torch.manual_seed(0)
    return [transform.make_params([image]) for _ in range(COUNT)]


def ours_of(op: augment.BatchTransform, height: int, width: int) -> augment.Parameters:
    return op.draw((COUNT, 3, height, width), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(200, 300), (40, 400), (64, 20), (7, 5)])
def test_boxes_of_crops(size: tuple[int, int]) -> None:
    ours = ours_of(augment.RandomResizedCrop(8), *size)
    theirs = theirs_of(v2.RandomResizedCrop(8), *size)
    for name in ("top", "left", "height", "width"):
        assert distance(ours[name], [one[name] for one in theirs]) < _LIMIT
    assert (ours["top"] + ours["height"]).max() <= size[0] and (ours["left"] + ours["width"]).max() <= size[1]
    assert (
        min(ours["height"].min(), ours["width"].min()) >= 1
        and min(ours["top"].min(), ours["left"].min()) >= 0
    )


@pytest.mark.parametrize("size", [(200, 300), (40, 400), (7, 5)])
def test_boxes_of_erasing(size: tuple[int, int]) -> None:
    ours = ours_of(augment.RandomErasing(1.0), *size)
    theirs = [
        dict.fromkeys("ijhw", 0) if one["v"] is None else one
        for one in theirs_of(v2.RandomErasing(1.0), *size)
    ]
    for name, their_name in (("top", "i"), ("left", "j"), ("height", "h"), ("width", "w")):
        assert distance(ours[name], [one[their_name] for one in theirs]) < _LIMIT


def test_affine_maps() -> None:
    arguments: Any = (30, (0.1, 0.3), (0.5, 2.0), (-10, 20, 5, 15))
    ours = ours_of(augment.RandomAffine(*arguments), 60, 80)
    theirs = theirs_of(v2.RandomAffine(*arguments), 60, 80)
    assert distance(ours["angle"], [one["angle"] for one in theirs]) < _LIMIT
    assert distance(ours["scale"], [one["scale"] for one in theirs]) < _LIMIT
    for at, axis in enumerate("xy"):
        assert distance(ours[f"translate_{axis}"], [one["translate"][at] for one in theirs]) < _LIMIT
        assert distance(ours[f"shear_{axis}"], [one["shear"][at] for one in theirs]) < _LIMIT
    angles = ours_of(augment.RandomRotation((-5, 90)), 60, 80)["angle"]
    assert distance(angles, [one["angle"] for one in theirs_of(v2.RandomRotation((-5, 90)), 60, 80)]) < _LIMIT


def test_colours() -> None:
    ours = ours_of(augment.ColorJitter(0.8, (0.5, 3.0), 1.5, 0.2), 8, 8)
    theirs = theirs_of(v2.ColorJitter(0.8, (0.5, 3.0), 1.5, 0.2), 8, 8)
    for kind in ("brightness", "contrast", "saturation", "hue"):
        assert distance(ours[kind], [one[f"{kind}_factor"] for one in theirs]) < _LIMIT
    orders = np.stack([ours[place] for place in ("first", "second", "third", "fourth")], axis=1)
    assert (np.sort(orders, axis=1) == np.arange(4)).all()
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24 and ((counts - COUNT / 24) ** 2).sum() / (COUNT / 24) < 58  # χ², 1 in 10,000
    sigma = ours_of(augment.GaussianBlur(5, (0.3, 1.5)), 8, 8)["sigma"]
    assert (
        distance(sigma, [one["sigma"][0] for one in theirs_of(v2.GaussianBlur(5, (0.3, 1.5)), 8, 8)]) < _LIMIT
    )


def test_a_policy_takes_all_changes_equally_often_and_signs_too() -> None:
    op = augment.RandAugment(2, 12)
    table = op.draw((14_000, 3, 331, 662), generator=torch.Generator().manual_seed(0))
    theirs = v2.RandAugment(2, 12)
    for at in range(2):
        change, magnitude = table[f"{at}.change"].astype(int), table[f"{at}.magnitude"]
        counts = np.bincount(change, minlength=14)
        assert ((counts - 1000) ** 2).sum() / 1000 < 43  # χ², 1 in 10,000
        for number, (name, (make, is_signed)) in enumerate(theirs._AUGMENTATION_SPACE.items()):
            own, made = magnitude[change == number], make(31, 331, 662)
            wanted = 0.0 if made is None else float(made[12])
            assert set(np.abs(own)) == {wanted}, name
            assert (0.4 < (own < 0).mean() < 0.6) if is_signed else (own >= 0).all()
    assert (table["0.change"] == table["1.change"]).mean() < 0.1


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_probabilities(p: float) -> None:
    for op, name in (
        (augment.RandomHorizontalFlip(p), "is_flipped"), (augment.RandomVerticalFlip(p), "is_flipped"),
        (augment.RandomGrayscale(p), "is_grey"), (augment.RandomErasing(p), "height"),
        (augment.RandomApply(augment.RandomGrayscale(1.0), p), "is_applied"),
    ):  # fmt: skip
        part = (ours_of(op, 64, 64)[name] > 0).mean()
        assert part == p if p in (0.0, 1.0) else abs(part - p) < 5 * np.sqrt(p * (1 - p) / COUNT)


def test_numbers_of_one_operation_are_not_those_of_another() -> None:
    chain = augment.Compose([augment.RandomHorizontalFlip(), augment.RandomVerticalFlip()])
    one, other = chain.draw((COUNT, 3, 8, 8), key=Key(0, 0, np.arange(COUNT)))
    assert abs((one["is_flipped"] == other["is_flipped"]).mean() - 0.5) < 0.05


def test_numbers_of_batches_are_not_those_that_a_key_gives_to_samples() -> None:
    from fastpipe.transform.keys import uniforms

    draws = np.arange(COUNT)
    ours = augment.MixUp(num_classes=2).draw((COUNT, 3, 8, 8), key=Key(0, 0, draws))
    flips = augment.RandomHorizontalFlip().draw((COUNT, 3, 8, 8), key=Key(0, 0, draws))["is_flipped"]
    assert len(ours.table) == COUNT
    assert abs((flips == (uniforms(0, 0, draws, 1)[:, 0] < 0.5)).mean() - 0.5) < 0.05


# ---- what is refused -----------------------------------------------------------------------------


def test_wrong_images_are_refused(make_images: Make) -> None:
    images, op = make_images(), augment.ColorJitter(0.4)
    for given, message in (
        (images[0], r"got shape \(3, 40, 52\): give one image as image\[None\]"),
        (images[None], r"got shape \(1, 12, 3, 40, 52\)"),
        (images[:0], r"empty batch, of shape \(0, 3, 40, 52\)"),
        (images[..., :0], "empty batch"),
        (
            images.movedim(1, -1),
            r"3 or 1 channels, got shape \(12, 40, 52, 3\): it looks like \(N, H, W, C\)",
        ),
        (images[:, :2], "3 or 1 channels"),
        (images.double(), "float64"),
        (images.long(), "int64"),
        (images.numpy(), "takes a tensor .* got ndarray"),
        ([images], "got list"),
    ):
        for call in (op, augment.Compose([op]), augment.RandomApply(op)):
            with pytest.raises(AugmentError, match=message):
                call(given)
    with pytest.raises(AugmentError, match="empty"):
        op.draw((0, 3, 8, 8))


def test_wrong_arguments_are_refused() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: augment.RandomHorizontalFlip(1.5), "p= is a probability"),
        (lambda: augment.RandomHorizontalFlip(float("nan")), "p= is a probability"),
        (lambda: augment.RandomGrayscale(-0.1), "p= is a probability"),
        (lambda: augment.RandomApply([], 2.0), "p= is a probability"),
        (lambda: augment.RandomErasing(-1), "p= is a probability"),
        (lambda: augment.RandomErasing(value="noise"), "value= is a number"),  # type: ignore[arg-type]
        (lambda: augment.RandomErasing(scale=(0.5, 2.0)), "scale="),
        (lambda: augment.RandomResizedCrop(0), "size="),
        (lambda: augment.RandomResizedCrop((1, 2, 3)), "size="),
        (lambda: augment.RandomResizedCrop(8, scale=(0.5, 0.1)), "scale="),
        (lambda: augment.RandomResizedCrop(8, ratio=(0, 1)), "ratio="),
        (lambda: augment.RandomResizedCrop(8, interpolation="lanczos"), "interpolation="),
        (lambda: augment.RandomRotation(10, "bicubic"), "interpolation="),
        (lambda: augment.RandomRotation(-10), "degrees="),
        (lambda: augment.RandomRotation((10, -10)), "degrees="),
        (lambda: augment.RandomAffine(0, (0.1, 1.1)), "translate="),
        (lambda: augment.RandomAffine(0, fill="black"), "fill="),
        (lambda: augment.RandomAffine(0, center=(1,)), "center="),
        (lambda: augment.ColorJitter(-1), "brightness="),
        (lambda: augment.ColorJitter(hue=0.6), "hue="),
        (lambda: augment.ColorJitter(contrast=(2, 1)), "contrast="),
        (lambda: augment.GaussianBlur(4), "kernel_size="),
        (lambda: augment.GaussianBlur(3, 0.0), "sigma="),
        (lambda: augment.Normalize([0.5], [0.0]), "std"),
        (lambda: augment.Normalize([0.5, 0.5], [1.0]), "std"),
        (lambda: augment.Normalize([float("nan")], [1.0]), "mean"),
        (lambda: augment.ToDtype(torch.int64), "dtype="),
        (lambda: augment.RandAugment(magnitude=31), "magnitude="),
        (lambda: augment.RandAugment(-1), "num_ops="),
        (lambda: augment.Compose([v2.RandomHorizontalFlip()]), "augmentations of batches"),  # type: ignore[list-item]
        (lambda: augment.RandomApply(augment.RandomResizedCrop(8))(torch.zeros(1, 3, 9, 9)), "resizes"),
        (lambda: augment.RandomApply(augment.ToDtype())(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)), "converts"),
        (lambda: augment.GaussianBlur(23)(torch.zeros(1, 3, 9, 90)), "kernel_size|9"),
        (lambda: augment.RandomAffine(0, fill=(1, 2))(torch.zeros(1, 3, 9, 9)), "fill= has 2"),
        (lambda: augment.RandomErasing(value=(1, 2))(torch.zeros(1, 3, 9, 9)), "value= has 2"),
        (lambda: augment.RandomErasing(value="random")(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)), "bytes"),
        (lambda: augment.Normalize([0.5], [0.2])(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)), "got uint8"),
    ]  # fmt: skip
    for number, (make, message) in enumerate(cases):
        with pytest.raises(AugmentError, match=message):
            make()
            pytest.fail(f"case {number}, {message}, was taken")


def test_parameters_of_something_else_are_refused(make_images: Make) -> None:
    images, op = make_images(), augment.RandomGrayscale()
    with pytest.raises(AugmentError, match=r"of 12 samples, got Parameters\(3 samples"):
        op.apply(images, op.draw((3, 3, 8, 8)))
    with pytest.raises(AugmentError, match="is_flipped"):
        op.apply(images, augment.RandomHorizontalFlip().draw(images.shape))
    with pytest.raises(AugmentError, match="1 operations, got 2"):
        augment.Compose([op]).apply(images, [op.draw(images.shape)] * 2)


def test_keys_and_generators_that_do_not_fit_are_refused(make_images: Make) -> None:
    images, op = make_images(), augment.RandomGrayscale()
    with pytest.raises(OptionError, match="3 samples, and the batch 12"):
        op(images, key=Key(0, 0, np.arange(3)))
    with pytest.raises(OptionError, match="not both"):
        op(images, key=Key(0, 0, np.arange(12)), generator=torch.Generator())


def test_torchvisions_names_of_interpolations_are_taken() -> None:
    mode = v2.InterpolationMode
    assert repr(augment.RandomResizedCrop(8, interpolation=mode.BICUBIC)) == repr(
        augment.RandomResizedCrop(8, interpolation="bicubic")
    )
    assert augment.RandomRotation(5, mode.BILINEAR).interpolation == "bilinear"
    assert augment.RandomRotation(5, 2).interpolation == "bilinear"
