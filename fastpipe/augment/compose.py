"""Several augmentations as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpipe.augment.applying import chain_type_of, checked_ops, kind_of
from fastpipe.augment.base import Augmentation
from fastpipe.augment.fusing import fused
from fastpipe.augment.parameters import Parameters
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

__all__ = ["Compose"]


class Compose:
    """Augmentations one after the other: images are what torchvision's transforms in this order make of them.

    On the processor each image goes through all of them before the next, in as many threads as torch uses.

    Args:
        ops: the augmentations.
        fuse: read and write each image once: all geometry before a blur becomes one resampling, all changes
            of colours one matrix, and blurs come last.  Parameters are the same.  What differs then:

            * colours are cut off and rounded once, in the end, and not after each change; hue is turned by a
              rotation of colours about the greys, which is the same at thirds of a turn;
            * blurs leave out weights below 1/2000 of their sum;
            * contrast is about the mean before colours are cut off;
            * rotated images are bilinear, whatever the interpolation, and show what was around the box of a
              ``RandomResizedCrop`` before them, not the fill.

            Crops and flips alone are the same as without.

        lengths: of motion, which part of a batch has the lengths of its sequences, whole numbers (N,) of
            frames: 1 is what comes right behind the motion.  They become what they are afterwards.

    >>> import torch
    >>> from fastpipe import augment
    >>> views = augment.Compose([augment.RandomResizedCrop(32), augment.RandomHorizontalFlip()])
    >>> views(torch.rand(4, 3, 64, 64)).shape
    torch.Size([4, 3, 32, 32])
    """

    def __init__(
        self, ops: Sequence[Augmentation], fuse: bool = False, *, lengths: int | None = None
    ) -> None:
        self.ops, self.fuse = checked_ops(ops, "Compose"), fuse
        if fuse and kind_of(self.ops) != "images":
            raise AugmentError(f"fuse=True is for images, got augmentations of {kind_of(self.ops)}")
        if lengths is not None and (
            kind_of(self.ops) != "motion" or not isinstance(lengths, int) or lengths < 1
        ):
            raise AugmentError(
                f"lengths= is of motion, the number of a part of its batches from 1, got {lengths!r} for "
                f"augmentations of {kind_of(self.ops)}"
            )
        self.lengths = lengths
        chain_type, steps = chain_type_of(self.ops), fused(self.ops) if fuse else None
        self._chain = chain_type(self.ops, "Compose", steps, lengths)

    def __call__(
        self, images: Tensor, *others: Any, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Any:
        """Draw parameters, and apply them: as of a single augmentation."""
        return self._chain(images, others, generator, key)

    def draw(
        self, shape: Sequence[int], *, generator: torch.Generator | None = None, key: Key | None = None
    ) -> list[Parameters]:
        """The parameters of each augmentation, for images of a shape (N, C, H, W)."""
        return self._chain.draw(shape, generator, key)

    def apply(self, images: Tensor, parameters: Sequence[Parameters], lengths: Tensor | None = None) -> Any:
        """The images changed by parameters that were drawn before: as of a single augmentation."""
        return self._chain.apply(images, parameters, lengths)

    def reference(
        self, images: Tensor, parameters: Sequence[Parameters], lengths: Tensor | None = None
    ) -> Any:
        """What torchvision's functions make of the images with the same parameters, or NumPy and SciPy of
        volumes and motion: to compare with."""
        return self._chain.reference(images, parameters, lengths)

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """How many voxels more volumes should have, on each side: as of a single augmentation."""
        return self._chain.margin(size)

    def __repr__(self) -> str:
        end = "], fuse=True)" if self.fuse else "])"
        end = end if self.lengths is None else f"], lengths={self.lengths})"
        return "\n".join(["Compose([", *(f"    {op}," for op in self.ops), end])
