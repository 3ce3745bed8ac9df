"""Masks, boxes and keypoints go along with the images as torchvision takes them along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from augmentations import seeded, smooth_images
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from fastpipe import augment
from fastpipe.errors import AugmentError

Row = dict[str, float]
Change = Callable[[Any, Any, Row], Any]
HEIGHT, WIDTH = 40, 52
IMAGES = smooth_images()


def crop(op: Any, thing: Any, p: Row) -> Any:
    box = [int(p[name]) for name in ("top", "left", "height", "width")]
    return functional.resized_crop(thing, *box, list(op.size), antialias=True)


def affine(op: Any, thing: Any, p: Row) -> Any:
    shift, shear = [int(p["translate_x"]), int(p["translate_y"])], [p["shear_x"], p["shear_y"]]
    return functional.affine(thing, p["angle"], shift, p["scale"], shear, fill=op.fill, center=op.center)


def rotation(op: Any, thing: Any, p: Row) -> Any:
    return functional.rotate(thing, p["angle"], center=op.center, fill=op.fill)


def flip(by: Callable[[Any], Any]) -> Change:
    return lambda op, thing, p: by(thing) if p["is_flipped"] else thing


def nothing(op: Any, thing: Any, p: Row) -> Any:
    return thing


CASES: dict[str, tuple[augment.BatchTransform, Change]] = {
    "flip": (augment.RandomHorizontalFlip(), flip(functional.horizontal_flip)),
    "vertical flip": (augment.RandomVerticalFlip(), flip(functional.vertical_flip)),
    "crop": (augment.RandomResizedCrop((30, 60)), crop),
    "affine": (augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), 20, fill=3.0), affine),
    "rotation": (augment.RandomRotation(180, center=(3, 8), fill=None), rotation),
    "colour": (augment.ColorJitter(0.5), nothing),
    "erasing": (augment.RandomErasing(1.0), nothing),
}


def changed(op: Any, *others: Any) -> tuple[list[Row], Any]:
    """The parameters of each image, and the images with what goes along with them."""
    parameters = op.draw(IMAGES.shape, generator=seeded(1))
    rows = [{name: float(column[at]) for name, column in parameters.items()} for at in range(12)]
    return rows, op(IMAGES, *others, generator=seeded(1))


def boxes_of(form: str, count: int, generator: torch.Generator, clamping: str | None = "soft") -> Any:
    corners = torch.rand(count, 2, 2, generator=generator).sort(dim=1).values
    corners = (corners * torch.tensor([WIDTH, HEIGHT])).reshape(count, 4)
    size: Any = {"canvas_size": (HEIGHT, WIDTH), "clamping_mode": clamping}
    boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", **size)
    return functional.convert_bounding_box_format(boxes, new_format=form)


@pytest.mark.parametrize("case", CASES)
def test_masks_go_along(case: str) -> None:
    op, change = CASES[case]
    for dtype in (torch.uint8, torch.int64, torch.bool, torch.float32):
        high = 2 if dtype == torch.bool else 256
        values = torch.randint(0, high, (12, HEIGHT, WIDTH), generator=seeded()).to(dtype)
        singly = [tv_tensors.Mask(one) for one in values]
        rows, (images, found, alone) = changed(op, tv_tensors.Mask(values), singly)
        assert torch.equal(images, op(IMAGES, generator=seeded(1)))
        wanted = torch.stack([change(op, one, row) for one, row in zip(singly, rows, strict=True)])
        assert isinstance(found, tv_tensors.Mask) and found.dtype == dtype
        assert torch.equal(found, wanted) and torch.equal(torch.stack(alone), wanted)


@pytest.mark.parametrize("case", CASES)
def test_boxes_go_along(case: str) -> None:
    op, change = CASES[case]
    for form in ("XYXY", "XYWH", "CXCYWH"):
        generator = seeded()
        boxes = [boxes_of(form, at % 4, generator, ("soft", None)[at % 2]) for at in range(12)]
        targets = [{"boxes": one, "labels": torch.arange(len(one))} for one in boxes]
        rows, (_, found, alone) = changed(op, targets, boxes)
        for at, row in enumerate(rows):
            wanted, one = change(op, boxes[at], row), found[at]["boxes"]
            assert isinstance(one, tv_tensors.BoundingBoxes)
            assert one.format == wanted.format and one.canvas_size == wanted.canvas_size
            assert torch.allclose(one, wanted, atol=1e-4) and torch.equal(one, alone[at])
            assert torch.equal(found[at]["labels"], targets[at]["labels"])


@pytest.mark.parametrize("case", CASES)
def test_keypoints_go_along(case: str) -> None:
    op, change = CASES[case]
    values = torch.rand(12, 5, 2, generator=seeded()) * torch.tensor([WIDTH, HEIGHT])
    singly = [tv_tensors.KeyPoints(one, canvas_size=(HEIGHT, WIDTH)) for one in values]
    ragged = [
        tv_tensors.KeyPoints(one[: at % 3], canvas_size=(HEIGHT, WIDTH)) for at, one in enumerate(values)
    ]
    rows, (_, found, alone) = changed(op, tv_tensors.KeyPoints(values, canvas_size=(HEIGHT, WIDTH)), ragged)
    assert isinstance(found, tv_tensors.KeyPoints)
    for at, row in enumerate(rows):
        wanted = change(op, singly[at], row)
        assert found.canvas_size == wanted.canvas_size == alone[at].canvas_size
        assert torch.allclose(found[at], wanted, atol=1e-4)
        assert torch.allclose(alone[at], wanted[: at % 3], atol=1e-4)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_chain_takes_them_through_all_its_geometry(fuse: bool) -> None:
    """A white square, its mask, a box around it and a point in its middle stay together."""
    chain = augment.Compose([
        augment.RandomResizedCrop((80, 90), scale=(0.5, 1.0)),
        augment.RandomApply([augment.RandomHorizontalFlip(), augment.RandomRotation(40)]),
        augment.ColorJitter(0.1), augment.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 10),
    ], fuse=fuse)  # fmt: skip
    images = torch.zeros(32, 3, HEIGHT, WIDTH)
    images[:, :, 18:23, 24:29] = 1.0
    size: Any = {"canvas_size": (HEIGHT, WIDTH)}
    boxes = [tv_tensors.BoundingBoxes([[24.0, 18, 29, 23]], format="XYXY", **size)] * 32
    points = tv_tensors.KeyPoints(torch.tensor([26.0, 20.5]).expand(32, 1, 2), **size)
    found = chain(images, tv_tensors.Mask(images[:, :1] > 0), boxes, points, generator=seeded())
    assert chain.draw(images.shape, generator=seeded())[1]["0.is_flipped"].any()
    seen = 0
    for image, mask, box, point in zip(*found, strict=True):
        rows, columns = torch.nonzero(mask[0], as_tuple=True)
        if len(rows) < 30:  # nearly all of it has left the image
            continue
        seen += 1
        left, top, right, bottom = box[0].tolist()
        # Boxes are around what is turned, so they are not smaller, and not much larger.
        assert left - 2 <= columns.min() and columns.max() < right + 2
        assert top - 2 <= rows.min() and rows.max() < bottom + 2
        assert image[0][mask[0]].mean() > 0.5
        if left > 0 and right < 90 and top > 0 and bottom < 80:
            middle = torch.stack([columns.float().mean(), rows.float().mean()])
            assert (point[0] - middle).abs().max() < 2
    assert seen > 20


@pytest.mark.parametrize("op", [augment.RandAugment(3, 30), augment.TrivialAugmentWide()], ids=repr)
def test_a_policy_takes_them_along(op: augment.BatchTransform) -> None:
    images = torch.zeros(64, 3, HEIGHT, WIDTH)
    masks = tv_tensors.Mask(torch.randint(0, 9, (64, HEIGHT, WIDTH)))
    parameters = op.draw(images.shape, generator=seeded())
    _, found = op(images, masks, generator=seeded())
    as_images = masks.as_subclass(Tensor).float().unsqueeze(1)
    for at in range(64):
        if all(parameters[name][at] <= 5 for name in op.names[::2]):  # only geometry, or nothing
            wanted = op.apply(as_images[at : at + 1], parameters.rows(slice(at, at + 1)))
            assert torch.equal(found[at].float(), wanted[0, 0])


def test_annotations_of_other_images_are_refused_and_anything_else_is_handed_through() -> None:
    labels, names, masks = torch.arange(12), ("a",) * 3, torch.zeros(12, HEIGHT, WIDTH)
    _, *found = augment.RandomHorizontalFlip()(IMAGES, labels, names, masks)
    assert found[0] is labels and found[1] is names and found[2] is masks
    box, mask = boxes_of("XYXY", 2, seeded()), tv_tensors.Mask(torch.zeros(12, HEIGHT, WIDTH))
    turned = tv_tensors.BoundingBoxes([[0.0, 0, 1, 1, 5]], format="XYWHR", canvas_size=(HEIGHT, WIDTH))
    for wrong, message in (
        (tv_tensors.Mask(mask[1:]), "12 images, and Mask"), (tv_tensors.Mask(mask[:, :8]), "8 by 52 pixels"),
        ([box] * 11, "12 images, and 11 of"), (box, "boxes of a batch come as a list"), ([turned] * 12, "XYWHR"),
    ):  # fmt: skip
        with pytest.raises(AugmentError, match=message):
            augment.RandomHorizontalFlip()(IMAGES, wrong)
    with pytest.raises(AugmentError, match=r"MixUp.* cannot transform masks, boxes and keypoints"):
        augment.MixUp(num_classes=3)(IMAGES, torch.zeros(12, dtype=torch.int64), mask)
