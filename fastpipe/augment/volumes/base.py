"""What all augmentations of volumes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from fastpipe.augment.base import FLOATS, Augmentation
from fastpipe.augment.distributions import Drawn
from fastpipe.augment.options import plain, two_numbers
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.volumes.running import VolumeChain
from fastpipe.augment.volumes.volume import Volume
from fastpipe.errors import AugmentError

__all__ = ["AXES", "FLOATS", "PerChannel", "VolumeTransform", "axes_of", "limits_of"]

AXES = ("depth", "height", "width")


class VolumeTransform(Augmentation, ABC):
    """An augmentation of volumes, (N, C, D, H, W) or (N, D, H, W).

    What is drawn is known to the host, so that nothing is done with volumes that an augmentation leaves out.
    """

    kind = "volumes"
    chain_type = VolumeChain
    ranks = (4, 5)

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in FLOATS else torch.float32

    def for_masks(self) -> VolumeTransform | None:
        return None

    @abstractmethod
    def steps(self, column: int, shape: tuple[int, ...]) -> list[Step]:
        """Return the native core's steps.

        Args:
            column: where its numbers begin in a volume's row of what is applied.
            shape: of a volume before, (C, D, H, W).
        """

    @abstractmethod
    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        """Change one volume on a device, by torch's operations.

        Args:
            canvas: the volume.
            row: what is applied, (len(applied_names),).
        """


class PerChannel(VolumeTransform):
    """Changes each channel with numbers of its own.

    Attributes:
        of_channel: names of a channel's parameters, each of a uniform number of its own.
        step: what the native core calls it.
    """

    step: str
    of_channel: tuple[str, ...]

    def draws_for(self, channels: int) -> int:
        return channels * len(self.of_channel)

    def names_for(self, channels: int) -> tuple[str, ...]:
        return tuple(f"{c}.{name}" for c in range(channels) for name in self.of_channel)

    def applied_names_for(self, channels: int) -> tuple[str, ...]:
        return self.names_for(channels)

    def drawn_as(self, channels: int) -> Sequence[Drawn]:
        return [*self.channel_drawn_as()] * channels

    def steps(self, column: int, shape: tuple[int, ...]) -> list[Step]:
        return [Step(self.step, column, self.step_options())]

    def step_options(self) -> tuple[int, ...]:
        """The options of its step."""
        return ()

    @abstractmethod
    def channel_drawn_as(self) -> Sequence[Drawn]:
        """Say how each parameter of a channel is computed from the uniform number in its place."""

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        for channel, own in enumerate(row.reshape(-1, len(self.of_channel))):
            self.on_channel(canvas, channel, own)

    @abstractmethod
    def on_channel(self, canvas: Volume, channel: int, row: Float64Array) -> None:
        """Change a channel of a ``Volume``."""


def limits_of(value: Any, name: str, least: float = 0.0) -> tuple[float, float]:
    """Two numbers that increase, or one for both.

    Raises:
        AugmentError: they do not, or are below ``least``.
    """
    given = plain(value)
    low, high = two_numbers(given if isinstance(given, Sequence) else (given, given))
    if not least <= low <= high < float("inf"):  # NaN neither
        raise AugmentError(f"{name}= is a number of at least {least:g}, or two that increase, got {value!r}")
    return low, high


def axes_of(value: int | Sequence[int], name: str = "axes") -> tuple[int, ...]:
    """Axes of (D, H, W), in order.

    Raises:
        AugmentError: there are no such axes.
    """
    given = plain(value)
    given = [given] if isinstance(given, int) else list(given)
    if not all(isinstance(axis, int) and 0 <= axis < 3 for axis in given) or len(set(given)) < len(given):
        raise AugmentError(f"{name}= is some of 0, 1 and 2, depth, height and width, got {value!r}")
    return tuple(sorted(given))
