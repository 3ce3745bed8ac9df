"""The picture of what augmentations make of a batch: it shows what they give, and says what was drawn."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import seeded
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.augment.pictures import _CHANGES, caption, fitted, heat, title
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError, MissingDependencyError, OptionError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def noise(count: int = 5, side: int = 48) -> Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=seeded())


def pixels_of(images: Tensor) -> list[Any]:
    """Pictures (H, W, 3) of bytes, or of floats in [0, 1]."""
    if images.dtype != torch.uint8:
        images = (images.clamp(0, 1) * 255).round().to(torch.uint8)
    return list(images.expand(-1, 3, -1, -1).movedim(1, -1).numpy())


def places(page: Any, picture: Any, within: int = 0) -> list[tuple[int, int]]:
    """Where a picture is on a page: rows and columns of its corners."""
    height, width, _ = picture.shape
    near = np.abs(page.astype(int) - picture[0, 0].astype(int)).max(2) <= within
    found = []
    for y, x in zip(*np.nonzero(near), strict=True):
        part = page[y : y + height, x : x + width]
        if part.shape == picture.shape and np.abs(part.astype(int) - picture).max() <= within:
            found.append((int(y), int(x)))
    return found


def check_rows(page: Any, rows: list[list[Any]], within: int = 0) -> None:
    """All pictures are there: rows from above, columns from the left."""
    found = [[places(page, one, within) for one in row] for row in rows]
    assert all(one for row in found for one in row)
    # What an augmentation leaves as it is, is there several times.
    tops = [set.intersection(*({y for y, _ in one} for one in row)) for row in found]
    lefts = [[min(x for _, x in one) for one in row] for row in found]
    assert all(left == sorted(left) and left == lefts[0] for left in lefts)
    last = -1
    for row in tops:
        last = min(y for y in row if y > last)


def test_each_row_is_what_the_chain_gives_so_far(tmp_path: Path) -> None:
    ops = [
        augment.RandomResizedCrop(48), augment.RandomHorizontalFlip(),
        augment.RandomApply(augment.ColorJitter(0.4, 0.4, 0.4, 0.1), p=0.8), augment.RandomErasing(1.0),
    ]  # fmt: skip
    images, path = noise(), tmp_path / "new" / "views.png"
    picture = augment.preview(augment.Compose(ops), images, path, count=4, generator=seeded(3), tile=48)
    with Image.open(path) as written:
        page = np.asarray(written)
    assert np.array_equal(page, np.asarray(picture)) and page.shape[2] == 3
    assert os.listdir(path.parent) == ["views.png"]
    rows = [images[:4]]
    for count in range(1, 5):
        part = augment.Compose(ops[:count])
        parameters = augment.Compose(ops).draw(images.shape, generator=seeded(3))[:count]
        rows.append(part.apply(images, parameters)[:4])
    assert torch.equal(rows[-1], augment.Compose(ops)(images, generator=seeded(3))[:4])
    check_rows(page, [pixels_of(row) for row in rows])
    assert not places(page, pixels_of(images)[4])


def test_chains_are_fused_as_they_are_used() -> None:
    ops = [augment.RandomAffine(30), augment.ColorJitter(0.4, 0.4, 0.4, 0.1), augment.RandomHorizontalFlip()]
    views, images = augment.Compose(ops, fuse=True), noise()
    found = views(images, generator=seeded())
    assert not torch.equal(found, augment.Compose(ops)(images, generator=seeded()))
    for draws in (None, 1):
        page = np.asarray(augment.preview(views, images, draws=draws, generator=seeded(), tile=48))
        check_rows(page, [pixels_of(images), pixels_of(found)])


def test_draws_are_what_the_next_calls_give_and_the_global_generator_is_left(same_generators: None) -> None:
    views = augment.Compose([augment.RandomAffine(30), augment.ColorJitter(0.5)])
    images = noise()
    page = np.asarray(augment.preview(views, images, draws=3, generator=seeded(1), tile=48))
    same = seeded(1)
    check_rows(page, [pixels_of(images), *(pixels_of(views(images, generator=same)) for _ in range(3))])
    key = Key(7, 2, np.arange(5))
    page = np.asarray(augment.preview(views, images, draws=2, key=key, tile=48))
    epochs = [views(images, key=key._replace(epoch=epoch)) for epoch in (2, 3)]
    check_rows(page, [pixels_of(one) for one in (images, *epochs)])
    before = torch.random.get_rng_state()
    page = np.asarray(augment.preview(views, images, tile=48))
    assert torch.equal(torch.random.get_rng_state(), before)
    check_rows(page, [pixels_of(images), pixels_of(views(images))])


def test_normalisation_is_undone() -> None:
    images = noise()
    ops = [augment.ToDtype(), augment.Normalize(MEAN, STD), augment.RandomVerticalFlip(1.0)]
    page = np.asarray(augment.preview(ops, images, tile=48))
    check_rows(page, [pixels_of(images), pixels_of(images.flip(2))], within=1)
    given = augment.Compose(ops[:2])(images)
    page = np.asarray(augment.preview(ops[2], given, mean=MEAN, std=STD, tile=48))
    check_rows(page, [pixels_of(images), pixels_of(images.flip(2))], within=1)
    grey = torch.rand(4, 1, 48, 48, generator=seeded())
    page = np.asarray(augment.preview(ops[2], (grey - 0.5) / 0.1, mean=[0.5], std=[0.1], tile=48))
    check_rows(page, [pixels_of(grey), pixels_of(grey.flip(2))], within=1)


def test_mixing_is_with_samples_that_are_not_shown() -> None:
    images = noise(6) / 255
    for mix in (augment.MixUp(num_classes=2), augment.CutMix(num_classes=2, per_sample=True)):
        page = np.asarray(augment.preview(mix, images, count=2, generator=seeded(), tile=48))
        found, _ = mix(images, torch.zeros(6, dtype=torch.int64), generator=seeded())
        check_rows(page, [pixels_of(images[:2]), pixels_of(found[:2])])


@pytest.mark.parametrize("shape", [(3, 32, 60), (3, 2, 16, 60)])
def test_spectrograms_are_heat_maps(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=seeded()) * 20 - 40
    values[0].view(-1)[0] = -torch.inf
    masks = augment.SpecAugment(1, 20, 1, 8, zero_masking=True)
    ops = augment.Compose([augment.TimeShift(10), masks])
    page = np.asarray(augment.preview(ops, values, generator=seeded(), tile=40))
    rows = []
    for one in (values, ops.apply(values, ops.draw(shape, generator=seeded()))):
        row = []
        for sample, original in zip(one, values, strict=True):
            finite = original[original.isfinite()]
            low, high = float(finite.min()), float(finite.max())
            upright = sample.flip(-2).reshape(-1, sample.shape[-1]).numpy()  # low frequencies at the bottom
            row.append(fitted(heat(upright, low, high), 60, 40, keeps_shape=False))
        rows.append(row)
    check_rows(page, rows)


def test_names_are_shown_as_far_as_they_fit() -> None:
    names = (None, list("abcde"), torch.arange(5), ["a very long name " * 20] * 5, ["é", "日本", "", 1, 2.5])
    pictures = [augment.preview(augment.RandomGrayscale(), noise(), names=these) for these in names]
    assert len({picture.size for picture in pictures}) == 1


class Own(augment.BatchTransform):
    draws = 1
    names = ("strength",)

    def table(self, u: Any, shape: tuple[int, ...]) -> Any:
        return u

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        changed: Tensor = images * columns["strength"].view(-1, 1, 1, 1)
        return changed


MOVED = ("angle", "translate_x", "translate_y", "scale", "shear_x", "shear_y")
SOMETIMES = augment.RandomApply(augment.RandomGain())
VIEWS3D = augment.nnunet_default()
WORDS3D = [
    ["+1.0°, +1.0°, +1.0°", "moved +1, +1, +1"], ["std 1.000"], ["sigma 1.0, 1.0, 1.0"], ["x1.00"], ["x1.00"],
    ["100% of voxels"], ["power 1.00"], ["power 1.00"], ["depth height width"],
]  # fmt: skip
CAPTIONS: list[tuple[Any, tuple[str, ...] | None, list[float], list[str]]] = [
    (augment.RandomResizedCrop(8), ("top", "left", "height", "width"), [3, 4, 50, 60], ["60 x 50 at 4, 3"]),
    (augment.RandomHorizontalFlip(), None, [1], ["mirrored"]),
    (augment.RandomVerticalFlip(), None, [0], ["-"]),
    (augment.RandomGrayscale(), None, [1], ["grey"]),
    (augment.RandomRotation(9), None, [-0.04], ["+0.0°"]),
    (augment.GaussianBlur(5), None, [0.512], ["sigma 0.51"]),
    (augment.ColorJitter(0.5, hue=0.2),
     ("brightness", "contrast", "saturation", "hue", "first", "second", "third", "fourth"),
     [1.2, 1, 1, 0.125, 3, 1, 0, 2], ["hue +0.12", "brightness x1.20"]),
    (augment.RandomAffine(9, (0.1, 0.1), (0.5, 2), 5), MOVED, [3, 2, -1, 1.5, -4, 0],
     ["+3.0°", "moved +2, -1", "x1.50", "shear -4.0°"]),
    (augment.RandomAffine(0, shear=(1, 2, 3, 4)), MOVED, [0, 0, 0, 1, 1, 3], ["shear +1.0°, +3.0°"]),
    (augment.RandomErasing(), ("top", "left", "height", "width", "noise"), [1, 2, 3, 4, 9], ["4 x 3 at 2, 1"]),
    (augment.RandomErasing(), ("top", "left", "height", "width", "noise"), [0, 0, 0, 0, 9], ["-"]),
    (augment.MixUp(num_classes=2), None, [0.7], ["30% of sample 3"]),
    (augment.CutMix(num_classes=2), ("top", "left", "bottom", "right"), [0, 0, 4, 6], ["6 x 4 of sample 3"]),
    (augment.CutMix(num_classes=2), ("top", "left", "bottom", "right"), [0, 5, 4, 5], ["-"]),
    (augment.RandomGain(), None, [2.34], ["+2.3 dB"]),
    (augment.TimeShift(9), None, [-7], ["-7 frames"]),
    (SOMETIMES, ("is_applied", "0.gain_db"), [0, 1], ["not applied"]),
    (SOMETIMES, ("is_applied", "0.gain_db"), [1, 1], ["+1.0 dB"]),
    (augment.RandAugment(1), ("0.change", "0.magnitude"), [10, 6], ["Posterize 6 bits"]),
    (augment.TrivialAugmentWide(), ("change", "magnitude"), [5, -13.5], ["Rotate -13.5°"]),
    (Own(), None, [0.25], ["strength 0.25"]),
    *[(op, None, [1.0] * len(op.names_for(1)), words) for op, words in zip(VIEWS3D.ops, WORDS3D, strict=True)],
    (augment.RandomFlip3D(), None, [0, 0, 0], ["-"]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "names", "row", "lines"), CAPTIONS, ids=[str(one[3]) for one in CAPTIONS])
def test_captions_say_what_was_drawn(
    op: Any, names: tuple[str, ...] | None, row: Any, lines: list[str]
) -> None:
    assert names is None or set(names) == set(op.names_for(1))
    assert caption(op, dict(zip(names or op.names_for(1), row, strict=True)), "sample 3") == lines


def test_policies_have_torchvisions_names_and_titles_the_main_argument() -> None:
    words = [words(1.0).split()[0] for words in _CHANGES]
    assert (
        words == list(v2.RandAugment._AUGMENTATION_SPACE) == list(v2.TrivialAugmentWide._AUGMENTATION_SPACE)
    )
    assert title(augment.RandAugment(2, 9)) == ["RandAugment", "2 of magnitude 9"]
    assert title(augment.RandomErasing(0.25)) == ["RandomErasing", "p = 0.25"]
    assert title(augment.SpecAugment(1, 5, 1, 5, p=0.5)) == ["SpecAugment"]
    assert title(VIEWS3D.ops[1]) == ["GaussianNoise3D", "p = 0.1"]
    assert title(Own()) == ["Own"]
    assert augment.preview(Own(), noise() / 255).size[0] > 0


@pytest.mark.parametrize("channels", [0, 1, 2])
def test_volumes_are_shown_by_their_middle_plane(channels: int) -> None:
    volumes = 1 + torch.rand(3, max(channels, 1), 8, 12, 12, generator=seeded())
    volumes = volumes if channels else volumes[:, 0]
    size = augment.preview(augment.nnunet_default((6, 8, 8)), volumes, tile=40).size
    bright = augment.preview(augment.Brightness3D(0.0), volumes, tile=40)
    assert size[1] > bright.size[1] > 80
    # The parameters are below each picture: black planes beside planes that are not black.
    assert (np.asarray(bright) == 0).all(axis=-1).sum() > 3 * 30 * 15


def test_wrong_arguments_and_images_are_named(tmp_path: Path) -> None:
    flip, images, path = augment.RandomHorizontalFlip(), noise(), tmp_path / "a.png"
    for arguments, options, message in (
        ((flip, images, tmp_path / "a.jpg"), {}, r"ends in \.png, got .*a\.jpg"),
        ((images, flip, path), {}, "got Tensor: they are the first argument"),
        (([], images, path), {}, "at least one augmentation"),
        (([flip, abs], images, path), {}, "takes augmentations from fastpipe.augment"),
        ((augment.MotionSpeed(), torch.zeros(1, 4, 3, 2)), {}, "got augmentations of motion"),
        ((flip, images.numpy(), path), {}, "takes a tensor"),
        ((flip, images[0], path), {}, r"image\[None\]"),
        ((flip, images[:0], path), {}, "empty batch"),
        ((flip, images.double(), path), {}, "divide them by their greatest value"),
        ((flip, images.double() / 255, path), {}, "got torch.float64"),
        ((flip, images / 255 * torch.nan, path), {}, "from nan to nan"),
        ((flip, (images / 255 - 0.5) / 0.2, path), {}, "give mean= and std="),
        ((flip, images, path), {"mean": MEAN}, "give both"),
        ((flip, images, path), {"mean": MEAN, "std": STD}, "got uint8"),
        ((flip, images / 255, path), {"mean": MEAN, "std": (0, 0, 0)}, "std above 0"),
        ((flip, images[:, :1] / 255, path), {"mean": MEAN, "std": STD}, "images of 3 channels"),
        ((flip, torch.rand(2, 4, 8, 8), path), {}, r"images\[:, :1\]"),
        ((augment.MixUp(num_classes=2), images, path), {}, "got uint8"),
        ((flip, images, path), {"count": 0}, "count must"),
        ((flip, images, path), {"draws": 0}, "draws must"),
        ((flip, images, path), {"tile": 5000}, "tile must be a number of pixels from 32 to 1024"),
        ((flip, images, path), {"names": ["one"]}, "each of the 5 samples, got 1"),
    ):
        with pytest.raises(AugmentError, match=message):
            augment.preview(*arguments, **options)
    with pytest.raises(OptionError, match="key= has 3 samples"):
        augment.preview(flip, images, path, key=Key(0, 0, np.arange(3)))
    assert not os.listdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(AugmentError, match="got the folder"):
        augment.preview(flip, images, tmp_path / "folder.png")


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "views.png"
    path.write_bytes(b"before")

    def save(self: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", save)
        with pytest.raises(OSError, match="no space"):
            augment.preview(augment.RandomGrayscale(), noise(), path)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["views.png"]
    augment.preview(augment.RandomGrayscale(), noise(), path)
    with Image.open(path) as written:
        assert written.format == "PNG"


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependencyError, match="pip install pillow"):
        augment.preview(augment.RandomGrayscale(), noise())
