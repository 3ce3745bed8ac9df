"""Mixing of samples. Each image and its label are mixed with the previous image and label of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import Shape
from fastpipe.augment.chains import BatchTransform, Columns
from fastpipe.augment.distributions import BETA_DRAWS, beta, integers
from fastpipe.augment.parameters import Float64Array
from fastpipe.errors import AugmentError


class _Mixing(BatchTransform):
    mixes = True

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, per_sample: bool = False
    ) -> None:
        if not 0 < alpha < np.inf:
            raise AugmentError(f"alpha must be above 0, got {alpha!r}")
        if num_classes is not None and num_classes < 1:
            raise AugmentError(f"num_classes must be at least 1, got {num_classes!r}")
        self.alpha, self.num_classes, self.per_sample = float(alpha), num_classes, per_sample

    def _numbers(self, u: Float64Array) -> Float64Array:
        """Return the uniform random numbers to use. Without ``per_sample``, all samples use the numbers of
        the first sample."""
        return u if self.per_sample else np.broadcast_to(u[:1], u.shape)

    def mixed_labels(self, labels: Tensor, columns: Columns) -> Tensor:
        kept = columns["kept"].view(-1, 1)
        if labels.ndim == 1:  # torch's one_hot would wait for the device
            labels = labels.unsqueeze(1) == torch.arange(self.num_classes or 0, device=labels.device)
        values = labels if labels.is_floating_point() else labels.float()
        found: Tensor = (values.roll(1, 0) * (1.0 - kept) + values * kept).to(values.dtype)
        return found

    def check_labels(self, labels: Any, count: int) -> None:
        name = type(self).__name__
        if not isinstance(labels, Tensor) or labels.ndim not in (1, 2) or len(labels) != count:
            got = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise AugmentError(
                f"{name} takes labels beside {count} images, (N,) or (N, classes), got {got}: they are the "
                f"first argument after the images"
            )
        if labels.ndim == 1 and (self.num_classes is None or labels.is_floating_point()):
            raise AugmentError(f"{name} needs num_classes= and whole numbers for labels (N,)")
        if labels.ndim == 1 and not (labels.is_cuda or torch.compiler.is_compiling()):
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= (self.num_classes or 0):
                raise AugmentError(f"{name} has num_classes={self.num_classes}, got labels of {low} … {high}")
        if labels.ndim == 2 and self.num_classes not in (None, labels.shape[1]):
            raise AugmentError(f"{name} has num_classes={self.num_classes}, got labels of {labels.shape[1]}")


class MixUp(_Mixing):
    """Blend each image with the previous image (H. Zhang et al., "mixup", 2017, arXiv:1710.09412).

    Args:
        alpha: the weight of the image itself has a Beta(alpha, alpha) distribution.  Default: 1.0.
        num_classes: the number of classes, required for integer labels (N,). Integer labels become one-hot
            floats.
        per_sample: whether to draw a weight for each image. The default draws one weight per batch, as
            torchvision does.

    Images are floats and are passed with labels, (N,) or (N, classes):
    ``MixUp(num_classes=10)(images, labels)``.  Each image is mixed with the previous image of the batch, and
    the first image with the last.  Results match ``torchvision.transforms.v2.MixUp``.

    >>> images, labels = MixUp(num_classes=10)(torch.rand(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))
    >>> labels.shape, bool(torch.allclose(labels.sum(1), torch.ones(4)))
    (torch.Size([4, 10]), True)
    """

    draws = BETA_DRAWS
    names = ("kept",)
    native_step = "mix_up"

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return beta(self._numbers(u), self.alpha)[:, None]

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.uint8:
            raise AugmentError("MixUp takes floats, got uint8: put ToDtype(torch.float32) before it")
        return dtype

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        kept = columns["kept"].view(-1, 1, 1, 1)
        return images.roll(1, 0) * (1.0 - kept) + images * kept


class CutMix(_Mixing):
    """Replace a box in each image by the previous image's (S. Yun et al., "CutMix", 2019, arXiv:1905.04899).

    Args:
        alpha: the fraction of the image that is kept has a Beta(alpha, alpha) distribution, before the box is
            clipped at the borders.
        num_classes, per_sample: see ``MixUp``.

    Images may also be uint8. All other rules are those of ``MixUp``.

    >>> images, labels = CutMix(num_classes=10)(torch.rand(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))
    >>> images.shape, labels.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([4, 10]))
    """

    draws = BETA_DRAWS + 2
    names = ("top", "left", "bottom", "right")
    applied_names = (*names, "kept")
    native_step = "cut_mix"

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        _, height, width = shape
        u = self._numbers(u)
        half = 0.5 * np.sqrt(1.0 - beta(u[:, :BETA_DRAWS], self.alpha))
        x, y = integers(u[:, -2], width), integers(u[:, -1], height)
        half_width, half_height = np.floor(half * width), np.floor(half * height)
        low = np.maximum(y - half_height, 0), np.maximum(x - half_width, 0)
        high = np.minimum(y + half_height, height), np.minimum(x + half_width, width)
        return np.stack([*low, *high], axis=1)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        (_, height, width), (top, left, bottom, right) = shape, table.T
        kept = 1.0 - (right - left) * (bottom - top) / (width * height)
        return np.concatenate([table, kept[:, None]], axis=1)

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        top, left, bottom, right = (columns[name].view(-1, 1, 1, 1) for name in self.names)
        y = torch.arange(images.shape[2], device=images.device).view(-1, 1)
        x = torch.arange(images.shape[3], device=images.device)
        inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
        return torch.where(inside, images.roll(1, 0), images)
