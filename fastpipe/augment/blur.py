"""Gaussian blur, with a width of its own for each image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from fastpipe.augment.distributions import Drawn
from fastpipe.augment.images import BatchTransform, Columns
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape
from fastpipe.errors import AugmentError

__all__ = ["GaussianBlur"]

# What counts of the sum of all weights, in 2**-30: less is not to be seen in float32, nor in bytes.
_LEAST, _LEAST_OF_FUSED = 1.0, 2.0**19


class GaussianBlur(BatchTransform):
    """Blur each image by a Gaussian, along rows and then along columns.

    Args:
        kernel_size: odd numbers of pixels across and down, as torchvision has them, or one for both.
        sigma: standard deviations are drawn from this range, in pixels; one number is that for all.

    Weights are torchvision's, whose Gaussian is of standard deviation ``sigma`` for a kernel that is
    ``sqrt(2)`` times narrower.  Images are mirrored at their borders.
    """

    draws = 1
    names = ("sigma",)

    def __init__(self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)) -> None:
        sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.kernel_size = (int(sizes[0]), int(sizes[-1]))
        if any(size < 1 or size % 2 == 0 for size in self.kernel_size):
            raise AugmentError(f"kernel_size= is odd numbers of pixels, got {kernel_size!r}")
        limits = sigma if isinstance(sigma, Sequence) else (sigma, sigma)
        self.sigma = (float(limits[0]), float(limits[-1]))
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise AugmentError(f"sigma= is numbers above 0 that increase, in pixels, got {sigma!r}")

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        if self.kernel_size[0] // 2 >= shape[3] or self.kernel_size[1] // 2 >= shape[2]:
            raise AugmentError(
                f"GaussianBlur(kernel_size={self.kernel_size}) mirrors images at their borders, and "
                f"{shape[2]}×{shape[3]} pixels are too few for it: take a smaller kernel"
            )

    def drawn_as(self, channels: int) -> Sequence[Drawn]:
        return [Drawn("between", *self.sigma)]

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [self.step(column, _LEAST)]

    def fused_step(self, column: int) -> Step:
        """The same where weights that change no byte are left out."""
        return self.step(column, _LEAST_OF_FUSED)

    def step(self, column: int, least: float) -> Step:
        return Step("blur", column, self.kernel_size, (least,))

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        count, channels, height, width = images.shape
        values = images.reshape(1, count * channels, height, width)
        half_x, half_y = self.kernel_size[0] // 2, self.kernel_size[1] // 2
        values = pad(values, [half_x, half_x, half_y, half_y], mode="reflect")
        for size, shape in ((self.kernel_size[0], (1, -1)), (self.kernel_size[1], (-1, 1))):
            weights = _weights_of(size, columns["sigma"]).repeat_interleave(channels, 0)
            values = conv2d(values, weights.view(count * channels, 1, *shape), groups=count * channels)
        return (values.round() if of_bytes else values).reshape(images.shape)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, sigma={self.sigma}"


def _weights_of(size: int, sigma: Tensor) -> Tensor:
    """The weights of each image: (N, size)."""
    limit = (size - 1) / (2 * math.sqrt(2))
    places = torch.linspace(-limit, limit, size, device=sigma.device)
    return torch.softmax(-((places / sigma.view(-1, 1)) ** 2), dim=1)
