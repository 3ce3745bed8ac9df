"""Labels of MixUp and CutMix are torchvision's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmentations import seeded, smooth_images
from torchvision.transforms import v2

from fastpipe import augment


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_labels_are_torchvisions(kind: str, per_sample: bool) -> None:
    op = getattr(augment, kind)(alpha=0.7, num_classes=5, per_sample=per_sample)
    images, labels = smooth_images(), torch.arange(12) % 5
    theirs: Any = getattr(v2, kind)(num_classes=5)
    for seed in range(3):
        parameters = op.draw(images.shape, generator=seeded(seed))
        found, mixed = op(images, labels, generator=seeded(seed))
        assert torch.allclose(found, op.reference(images, parameters), atol=1e-6)
        if kind == "MixUp":
            kept = parameters["kept"]
        else:
            extents = (parameters[b] - parameters[a] for a, b in (("top", "bottom"), ("left", "right")))
            kept = 1 - np.prod(np.stack(list(extents)), axis=0) / (40 * 52)
        wanted = torch.stack([theirs._mixup_label(labels, lam=lam)[at] for at, lam in enumerate(kept)])
        assert mixed.dtype == torch.float32 and torch.allclose(mixed, wanted, atol=1e-6)
        assert (len(set(kept.tolist())) == 1) != per_sample


def test_labels_that_are_probabilities_are_mixed() -> None:
    chain = augment.Compose([augment.MixUp(num_classes=5), augment.CutMix()])
    images, labels = smooth_images(), torch.arange(12) % 5
    _, mixed, names = chain(images, labels, ["a"] * 12)
    assert mixed.shape == (12, 5) and torch.allclose(mixed.sum(1), torch.ones(12)) and names == ["a"] * 12
    assert ((mixed > 0).sum(1) <= 4).all() and (mixed > 0).sum(1).max() > 1
