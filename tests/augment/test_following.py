"""Masks, boxes and keypoints go along with the images as torchvision takes them along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from fastpipe import augment
from fastpipe.errors import AugmentError

Make = Callable[..., Tensor]
Row = dict[str, float]
HEIGHT, WIDTH = 40, 52


def _crop(op: Any, thing: Any, p: Row) -> Any:
    box = [int(p[name]) for name in ("top", "left", "height", "width")]
    return functional.resized_crop(thing, *box, list(op.size), antialias=True)


def _affine(op: Any, thing: Any, p: Row) -> Any:
    shift, shear = [int(p["translate_x"]), int(p["translate_y"])], [p["shear_x"], p["shear_y"]]
    return functional.affine(thing, p["angle"], shift, p["scale"], shear, fill=op.fill, center=op.center)


def _rotation(op: Any, thing: Any, p: Row) -> Any:
    return functional.rotate(thing, p["angle"], center=op.center, fill=op.fill)


def _horizontal(op: Any, thing: Any, p: Row) -> Any:
    return functional.horizontal_flip(thing) if p["is_flipped"] else thing


def _vertical(op: Any, thing: Any, p: Row) -> Any:
    return functional.vertical_flip(thing) if p["is_flipped"] else thing


CASES: dict[str, tuple[augment.BatchTransform, Callable[[Any, Any, Row], Any]]] = {
    "flip": (augment.RandomHorizontalFlip(), _horizontal),
    "vertical flip": (augment.RandomVerticalFlip(), _vertical),
    "crop": (augment.RandomResizedCrop((30, 60)), _crop),
    "affine": (augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), 20, fill=3.0), _affine),
    "rotation": (augment.RandomRotation(180, center=(3, 8), fill=None), _rotation),
    "colour": (augment.ColorJitter(0.5), lambda op, thing, p: thing),
    "erasing": (augment.RandomErasing(1.0), lambda op, thing, p: thing),
}


def rows_of(parameters: augment.Parameters) -> list[Row]:
    count = len(parameters.table)
    return [{name: float(column[at]) for name, column in parameters.items()} for at in range(count)]


def boxes_of(form: str, count: int, generator: torch.Generator, clamping: str | None = "soft") -> Any:
    corners = torch.rand(count, 2, 2, generator=generator).sort(dim=1).values
    corners = (corners * torch.tensor([WIDTH, HEIGHT])).reshape(count, 4)
    boxes = tv_tensors.BoundingBoxes(
        corners, format="XYXY", canvas_size=(HEIGHT, WIDTH), clamping_mode=clamping
    )
    return functional.convert_bounding_box_format(boxes, new_format=form)


@pytest.mark.parametrize("case", CASES)
def test_masks_go_along(case: str, make_images: Make) -> None:
    op, change = CASES[case]
    images, generator = make_images(), torch.Generator().manual_seed(0)
    for dtype in (torch.uint8, torch.int64, torch.bool, torch.float32):
        high = 2 if dtype == torch.bool else 256
        values = torch.randint(0, high, (12, HEIGHT, WIDTH), generator=generator).to(dtype)
        masks, singly = tv_tensors.Mask(values), [tv_tensors.Mask(one) for one in values]
        parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(1))
        changed, found, alone = op(images, masks, singly, generator=torch.Generator().manual_seed(1))
        assert torch.equal(changed, op.apply(images, parameters))
        rows = rows_of(parameters)
        wanted = [change(op, tv_tensors.Mask(one), row) for one, row in zip(values, rows, strict=True)]
        assert isinstance(found, tv_tensors.Mask) and found.dtype == dtype
        assert torch.equal(found, torch.stack(wanted))
        assert torch.equal(torch.stack(alone), torch.stack(wanted))


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
@pytest.mark.parametrize("case", CASES)
def test_boxes_go_along(case: str, form: str, make_images: Make) -> None:
    op, change = CASES[case]
    images, generator = make_images(), torch.Generator().manual_seed(0)
    boxes = [boxes_of(form, at % 4, generator, ("soft", None)[at % 2]) for at in range(12)]
    targets = [{"boxes": one, "labels": torch.arange(len(one))} for one in boxes]
    parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(1))
    _, found, alone = op(images, targets, boxes, generator=torch.Generator().manual_seed(1))
    for at, row in enumerate(rows_of(parameters)):
        wanted = change(op, boxes[at], row)
        one = found[at]["boxes"]
        assert isinstance(one, tv_tensors.BoundingBoxes)
        assert one.format == wanted.format and one.canvas_size == wanted.canvas_size
        assert torch.allclose(one, wanted, atol=1e-4) and torch.equal(one, alone[at])
        assert torch.equal(found[at]["labels"], targets[at]["labels"])


@pytest.mark.parametrize("case", CASES)
def test_keypoints_go_along(case: str, make_images: Make) -> None:
    op, change = CASES[case]
    images, generator = make_images(), torch.Generator().manual_seed(0)
    values = torch.rand(12, 5, 2, generator=generator) * torch.tensor([WIDTH, HEIGHT])
    points = tv_tensors.KeyPoints(values, canvas_size=(HEIGHT, WIDTH))
    ragged = [
        tv_tensors.KeyPoints(one[: at % 3], canvas_size=(HEIGHT, WIDTH)) for at, one in enumerate(values)
    ]
    parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(1))
    _, found, alone = op(images, points, ragged, generator=torch.Generator().manual_seed(1))
    assert isinstance(found, tv_tensors.KeyPoints)
    for at, row in enumerate(rows_of(parameters)):
        wanted = change(op, tv_tensors.KeyPoints(values[at], canvas_size=(HEIGHT, WIDTH)), row)
        assert found.canvas_size == wanted.canvas_size == alone[at].canvas_size
        assert torch.allclose(found[at], wanted, atol=1e-4)
        assert torch.allclose(alone[at], wanted[: at % 3], atol=1e-4)


def test_a_chain_takes_them_through_all_its_geometry(make_images: Make) -> None:
    """A white pixel, its mask, a box around it and a point in its middle stay together."""
    chain = augment.Compose(
        [
            augment.RandomResizedCrop((80, 90), scale=(0.5, 1.0)),
            augment.RandomApply([augment.RandomHorizontalFlip(), augment.RandomRotation(40)]),
            augment.ColorJitter(0.1),
            augment.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 10),
        ]
    )
    images = torch.zeros(32, 3, HEIGHT, WIDTH)
    images[:, :, 18:23, 24:29] = 1.0
    masks = tv_tensors.Mask(images[:, :1] > 0)
    boxes = [
        tv_tensors.BoundingBoxes([[24.0, 18, 29, 23]], format="XYXY", canvas_size=(HEIGHT, WIDTH))
        for _ in images
    ]
    changed, moved, around = chain(images, masks, boxes, generator=torch.Generator().manual_seed(0))
    assert chain.draw(images.shape, generator=torch.Generator().manual_seed(0))[1]["0.is_flipped"].any()
    for image, mask, box in zip(changed, moved, around, strict=True):
        rows, columns = torch.nonzero(mask[0], as_tuple=True)
        left, top, right, bottom = box[0].tolist()
        # Boxes are around what is turned, so they are not smaller, and not much larger.
        assert left - 2 <= columns.min() and columns.max() < right + 2
        assert top - 2 <= rows.min() and rows.max() < bottom + 2
        assert image[0][mask[0]].mean() > 0.5


@pytest.mark.parametrize("op", [augment.RandAugment(3, 30), augment.TrivialAugmentWide()], ids=repr)
def test_a_policy_takes_them_along(op: augment.BatchTransform) -> None:
    images = torch.zeros(64, 3, HEIGHT, WIDTH)
    masks = tv_tensors.Mask(torch.randint(0, 9, (64, HEIGHT, WIDTH)))
    parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(0))
    _, found = op(images, masks, generator=torch.Generator().manual_seed(0))
    as_images = masks.as_subclass(Tensor).float().unsqueeze(1)
    for at in range(64):
        changes = [parameters[name][at] for name in op.names[::2]]
        if all(change <= 5 for change in changes):  # only geometry, or nothing
            wanted = op.apply(as_images[at : at + 1], parameters.rows(slice(at, at + 1)))
            assert torch.equal(found[at].float(), wanted[0, 0])


def test_anything_else_is_handed_through(make_images: Make) -> None:
    images, op = make_images(), augment.RandomHorizontalFlip()
    labels, names, masks = torch.arange(12), ("a",) * 3, torch.zeros(12, HEIGHT, WIDTH)
    _, *found = op(images, labels, names, masks)
    assert found[0] is labels and found[1] is names and found[2] is masks


def test_what_does_not_belong_to_the_images_is_refused(make_images: Make) -> None:
    images, op = make_images(), augment.RandomHorizontalFlip()
    box = boxes_of("XYXY", 2, torch.Generator())
    for wrong, message in (
        (tv_tensors.Mask(torch.zeros(11, HEIGHT, WIDTH)), "12 images, and Mask"),
        (tv_tensors.Mask(torch.zeros(12, 8, WIDTH)), "8 by 52 pixels"),
        ([box] * 11, "12 images, and 11 of"),
        (box, "boxes of a batch come as a list"),
        ([tv_tensors.BoundingBoxes([[0.0, 0, 1, 1, 5]], format="XYWHR", canvas_size=(HEIGHT, WIDTH))] * 12,
         "XYWHR"),
    ):  # fmt: skip
        with pytest.raises(AugmentError, match=message):
            op(images, wrong)
    mix = augment.MixUp(num_classes=3)
    with pytest.raises(AugmentError, match="do not go along with MixUp"):
        mix(images, torch.zeros(12, dtype=torch.int64), tv_tensors.Mask(torch.zeros(12, HEIGHT, WIDTH)))
