"""What all augmentations of batches have in common: checked input, parameters drawn first, applied then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.canvas import Box, Canvas, Float32Array
from fastpipe.augment.chains import Chain
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.steps import Step
from fastpipe.errors import AugmentError
from fastpipe.types import Key

__all__ = ["Augmentation", "BatchTransform", "Columns", "Moves", "Shape", "Size", "Untouched", "chosen"]

# What is applied, where the images are: name → float32 tensor (N,).
Columns = Mapping[str, Tensor]
Shape = tuple[int, ...]  # of a sample: (C, H, W) of an image
Size = tuple[int, int]  # height and width
_Own = TypeVar("_Own", bound="Augmentation")


class Moves(NamedTuple):
    """Where pixels go.

    Attributes:
        matrices: (N, 6): see ``matrices``.
        clips: (N,), whether boxes are cut off at the image's borders.
    """

    matrices: Float64Array
    clips: npt.NDArray[np.bool_]


class Augmentation:
    """An augmentation of a batch, in which each sample has parameters of its own: what all kinds have.

    Images are changed by a ``BatchTransform``; volumes and motion have classes of their own.

    Attributes:
        draws: uniform numbers that a sample needs.
        names: of its parameters.
        applied_names: of what is applied, where that is computed from the parameters first.
        kind: what it is for: ``"images"``, which spectrograms are as well, ``"volumes"`` or ``"motion"``.
        ranks: 4 for images (N, C, H, W), and 3 as well for spectrograms (N, F, T); 5 and 4 for volumes.
        mixes: whether samples depend on each other.
    """

    draws: int = 0
    names: tuple[str, ...] = ()
    applied_names: tuple[str, ...] | None = None
    kind: str
    ranks: tuple[int, ...] = (4,)
    mixes: bool = False
    _chain: Chain

    def __new__(cls: type[_Own], *args: Any, **options: Any) -> _Own:
        # Here, where the compiler does not look.
        made = super().__new__(cls)
        made._chain = Chain([made], cls.__name__)
        return made

    def __call__(
        self, images: Tensor, *others: Any, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Any:
        """Draw parameters, and apply them.

        Args:
            images: (N, C, H, W), uint8, float16, bfloat16 or float32, of any device; spectrograms are
                floats, also (N, F, T).  Volumes are (N, C, D, H, W) or (N, D, H, W), floats, or integers that
                become float32 where values change; motion is (N, T, J, C), floats.
            others: what belongs to the images.  Geometry takes along masks, boxes and keypoints, as
                ``torchvision.tv_tensors``; of volumes all tensors of as many voxels, (N, D, H, W) or
                (N, K, D, H, W), which are labels: of the nearest voxel, whatever their dtype.  Anything else,
                such as numbers of classes, is handed through.
            generator: of the CPU; gives one number to a batch.  Default: torch's global generator.
            key: where the samples stand in an epoch, in the place of a generator.

        Returns:
            The new images; where there are ``others``, a tuple of them and the others.

        Raises:
            AugmentError: images of another kind, or an empty batch.
        """
        return self._chain(images, others, generator, key)

    def draw(
        self, shape: Sequence[int], *, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Parameters:
        """The parameters for a batch of this shape; further arguments as of a call."""
        return self._chain.draw(shape, generator, key)[0]

    def apply(self, images: Tensor, parameters: Parameters, lengths: Tensor | None = None) -> Any:
        """The images changed by parameters that were drawn before; errors as of a call.

        With the ``lengths`` of motion a tuple of it and its new lengths.
        """
        return self._chain.apply(images, [parameters], lengths)

    def reference(self, images: Tensor, parameters: Parameters, lengths: Tensor | None = None) -> Any:
        """What torchvision's functions make of the images, one by one, with the same parameters.

        Of volumes and motion, what NumPy and SciPy make of them.  It is slow, and there to compare with; it
        has the shape and the dtype of what ``apply`` gives.
        """
        return self._chain.reference(images, [parameters], lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_chain"}

    def draws_for(self, channels: int) -> int:
        """Uniform numbers that a sample of so many channels needs."""
        return self.draws

    def names_for(self, channels: int) -> tuple[str, ...]:
        """Names of the parameters of a sample of so many channels."""
        return self.names

    def applied_names_for(self, channels: int) -> tuple[str, ...]:
        """Names of what is applied to a sample of so many channels."""
        return self.names_applied

    @property
    def names_applied(self) -> tuple[str, ...]:
        """``applied_names``, or the parameters' own."""
        return self.names if self.applied_names is None else self.applied_names

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        """Parameters for uniform numbers.  Default: none are drawn.

        Args:
            u: (N, draws), in [0, 1).
            shape: of a sample, (C, H, W).

        Returns:
            (N, len(names)).
        """
        return np.zeros((len(u), len(self.names)))

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        """What is applied for parameters of samples of this shape: (N, len(applied_names))."""
        return table

    def shape_after(self, shape: Shape) -> Shape:
        """The shape of a sample of this one afterwards."""
        return shape

    def size_before(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """How large volumes should be, (D, H, W), for a result of this size in which nothing is missing."""
        return size

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """How many voxels more volumes should have, on each side, for a result of a size (D, H, W), so that
        little of it is from beyond: ``margin=`` of a ``FastPatchDataset``.

        It is enough for rotation about one axis by any of the angles, for shifts, and, as in nnU-Net, for
        what is scaled by up to 1 / 0.85; several at once may need more.

        Raises:
            AugmentError: the augmentation moves voxels and does not say what ``size=`` it cuts.
        """
        return self._chain.margin(size)

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of images of this one afterwards.

        Raises:
            AugmentError: images of this dtype cannot be changed so.
        """
        return dtype

    def for_masks(self) -> Augmentation | None:
        """What does the same with masks; None where masks stay as they are."""
        return None

    def check(self, shape: Sequence[int]) -> None:
        """Raise an error for a batch of this shape that it cannot take.

        Raises:
            AugmentError: it says what was got, and what to do.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        return ""


class BatchTransform(Augmentation, ABC):
    """An augmentation of images; of spectrograms, where ``ranks`` says so.

    Attributes:
        channels: numbers of channels that it takes; empty for any.
        does_batches: whether there is ``on_batch``, where calls for each image would take too long.
    """

    kind = "images"
    channels: tuple[int, ...] = ()
    does_batches: bool = False

    def for_masks(self) -> BatchTransform | None:
        return None

    def on_canvas(self, canvas: Canvas, row: Float64Array) -> None:
        """Change one image, on the processor; not called where ``mixes``.  Default: by ``on_tensors``.

        Args:
            canvas: the image.
            row: what is applied, (len(applied_names),).
        """
        image = torch.from_numpy(canvas.image())[None]
        found = self.on_tensors(image, self.columns(row[None]), canvas.of_bytes)[0].contiguous()
        canvas.replace(found.flatten(1).numpy(), found.shape[1], found.shape[2])

    def region(self, row: Float64Array, shape: Shape) -> Box | None:
        """What it needs of an image of this shape, if it comes first; None for all.

        Then the canvas has that.
        """
        return None

    def on_pair(self, image: Tensor, other: Tensor, row: Float64Array, out: Tensor) -> None:
        """Mix two images, on the processor, where ``mixes``.  Default: by ``on_tensors``.

        Args:
            image, other: (C, H, W).
            row: what is applied, (len(applied_names),).
            out: becomes the mixed image.
        """
        pair = torch.stack([other, image]).float()  # of which the second is mixed with the first
        found = self.on_tensors(pair, self.columns(row[None].repeat(2, axis=0)), out.dtype == torch.uint8)
        out.copy_(found[1])

    def on_batch(self, batch: Float32Array, rows: Float64Array) -> None:
        """Change some images at once, on the processor, where ``does_batches``.  Default: by ``on_tensors``.

        Args:
            batch: (N, C, H, W), float32, C-contiguous.
            rows: what is applied, (N, len(applied_names)).
        """
        torch.from_numpy(batch).copy_(self.on_tensors(torch.from_numpy(batch), self.columns(rows), False))

    @abstractmethod
    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        """Changed images, by operations of torch's on the whole batch.

        Args:
            images: (N, C, H, W), float32.
            columns: what is applied, on the same device.
            of_bytes: whether they are whole numbers of 0 … 255, and have to be afterwards.
        """

    def columns(self, rows: Float64Array) -> Columns:
        """What is applied, (N, len(applied_names)), as ``on_tensors`` takes it."""
        values = torch.from_numpy(rows.astype(np.float32)).unbind(1)
        return dict(zip(self.names_applied, values, strict=True))

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        """Where pixels go, for boxes and keypoints; None where they stay.

        Args:
            table: parameters.
            shape: of an image, (C, H, W).
            of_points: whether it is for keypoints, which torchvision mirrors as indices of pixels.
        """
        return None

    def check_labels(self, labels: Any, count: int) -> None:  # not all mix
        """Raise an error for labels that it cannot mix; called where it ``mixes``.

        Args:
            labels: what came with the images, or None.
            count: of the images.

        Raises:
            AugmentError: it says what was got, and what to do.
        """

    def mixed_labels(self, labels: Tensor, columns: Columns) -> Tensor:
        """Labels mixed as the images are; called where it ``mixes``.

        Args:
            labels: (N,), numbers of classes, or (N, classes), probabilities.
            columns: what is applied, on their device.

        Returns:
            (N, classes), floats.
        """
        return labels

    def check(self, shape: Sequence[int]) -> None:
        if self.channels and shape[1] not in self.channels:
            wanted = " or ".join(map(str, self.channels))
            looks = shape[3] in self.channels
            raise AugmentError(
                f"{type(self).__name__} takes images of {wanted} channels, got shape {tuple(shape)}"
                + (": it looks like (N, H, W, C), of which images.movedim(-1, 1) makes (N, C, H, W)" * looks)
            )


class Untouched(BatchTransform):
    """Leaves images as they are; stands for an operation that others of its table come after."""

    def __init__(self, op: Augmentation) -> None:
        self._op, self.names, self.kind = op, op.names_applied, op.kind

    def applied_names_for(self, channels: int) -> tuple[str, ...]:
        return self._op.applied_names_for(channels)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return []

    def on_canvas(self, canvas: Any, row: Float64Array) -> None:
        pass

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return images


def chosen(which: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    """Changed images where ``which``, (N,), is not 0, and the others as they were."""
    return torch.where(which.bool().view(-1, 1, 1, 1), changed, images)
