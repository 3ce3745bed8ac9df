"""MixUp and CutMix: torchvision's, given the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.chains import on_device
from fastpipe.errors import AugmentError

Make = Callable[..., Tensor]


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_images_and_labels_are_torchvisions(kind: str, per_sample: bool, make_images: Make) -> None:
    op = getattr(augment, kind)(alpha=0.7, num_classes=5, per_sample=per_sample)
    images, labels = make_images(), torch.arange(12) % 5
    for seed in range(5):
        parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(seed))
        found, mixed = op(images, labels, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(found, op.reference(images, parameters), atol=1e-6)
        theirs: Any = getattr(v2, kind)(num_classes=5)
        if kind == "MixUp":
            kept = parameters["kept"]
        else:
            extents = (parameters[b] - parameters[a] for a, b in (("top", "bottom"), ("left", "right")))
            kept = 1 - np.prod(np.stack(list(extents)), axis=0) / (40 * 52)
        wanted = torch.stack([theirs._mixup_label(labels, lam=lam)[at] for at, lam in enumerate(kept)])
        assert mixed.dtype == torch.float32 and torch.allclose(mixed, wanted, atol=1e-6)
        assert (len(set(kept.tolist())) == 1) != per_sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_both_ways_are_the_same(kind: str, dtype: torch.dtype, make_images: Make) -> None:
    op = getattr(augment, kind)(num_classes=5, per_sample=True)
    for layout in (torch.contiguous_format, torch.channels_last):
        images = make_images(dtype).contiguous(memory_format=layout)
        parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(0))
        found = op.apply(images, parameters)
        applied = torch.from_numpy(applied_table([op], parameters.table, tuple(images.shape[1:]))).float()
        other = on_device([op], images, applied)
        assert found.dtype == dtype and found.is_contiguous(memory_format=layout)
        assert torch.allclose(found.float(), other.float(), atol=4e-3 if dtype == torch.bfloat16 else 5e-4)


def test_labels_that_are_probabilities_are_mixed(make_images: Make) -> None:
    chain = augment.Compose([augment.MixUp(num_classes=5), augment.CutMix()])
    images, labels = make_images(), torch.arange(12) % 5
    _, mixed, names = chain(images, labels, ["a"] * 12)
    assert mixed.shape == (12, 5) and torch.allclose(mixed.sum(1), torch.ones(12)) and names == ["a"] * 12
    assert ((mixed > 0).sum(1) <= 4).all() and (mixed > 0).sum(1).max() > 1


def test_cutting_takes_bytes_and_adding_does_not(make_images: Make) -> None:
    images, labels = make_images(torch.uint8), torch.zeros(12, dtype=torch.int64)
    op = augment.CutMix(num_classes=2)
    parameters = op.draw(images.shape)
    assert torch.equal(op.apply(images, parameters), op.reference(images, parameters))
    with pytest.raises(AugmentError, match="MixUp takes floats"):
        augment.MixUp(num_classes=2)(images, labels)


@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_wrong_labels_are_refused(kind: str, make_images: Make) -> None:
    images, op = make_images(), getattr(augment, kind)(num_classes=5)
    for labels, message in (
        (None, "got NoneType"), (torch.zeros(11, dtype=torch.int64), r"got \(11,\)"), ([0] * 12, "got list"),
        (torch.zeros(12, 4), "num_classes=5, got labels of 4"), (torch.arange(12), "got labels of 0 … 11"),
        (torch.arange(12) % 3 - 1, "got labels of -1 … 1"), (torch.zeros(12), "whole numbers"),
    ):  # fmt: skip
        with pytest.raises(AugmentError, match=message):
            op(images, labels)
    with pytest.raises(AugmentError, match="takes labels"):
        op(images)
    with pytest.raises(AugmentError, match="num_classes"):
        getattr(augment, kind)()(images, torch.zeros(12, dtype=torch.int64))
    with pytest.raises(AugmentError, match="alpha"):
        getattr(augment, kind)(alpha=0)


def test_mixing_inside_of_random_apply_is_refused() -> None:
    with pytest.raises(AugmentError, match="mixes all"):
        augment.RandomApply(augment.MixUp(num_classes=3))


@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_the_compiler_finds_no_graph_break(kind: str, make_images: Make) -> None:
    op, images, labels = getattr(augment, kind)(num_classes=5), make_images(), torch.arange(12) % 5
    torch.manual_seed(0)
    wanted = op(images, labels)
    torch.manual_seed(0)
    found = torch.compile(op, backend="aot_eager", fullgraph=True)(images, labels)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
