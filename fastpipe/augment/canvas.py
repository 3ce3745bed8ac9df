"""One image on its way through a chain of augmentations, on the processor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["LEAST_WEIGHT", "Box", "Canvas", "Float32Array"]

Float32Array = npt.NDArray[np.float32]
LEAST_WEIGHT = 2.0**-30  # less is not to be seen in float32
Box = tuple[int, int, int, int]  # top, left, height and width

_NOTHING = torch.empty(0)


class Canvas:
    """Planes of an image, and memory to work in.

    The image is read when its planes are first asked for: an operation that makes others of them may read it
    itself.  The last planes lie where the image goes, wherever that can be.

    Attributes:
        channels: how many planes the image has.
        height, width: in pixels.
        top, left: where they begin in the image, of which they may be a part.
        of_bytes: whether the image is of bytes at this point of the chain.
        least_weight: what counts of the sum of all weights of a mean.
    """

    def __init__(self) -> None:
        self.channels = self.height = self.width = self.top = self.left = 0
        self.of_bytes = False
        self.least_weight = LEAST_WEIGHT
        self._memory: dict[str, Float32Array] = {}
        self._planes: Float32Array | None = None
        self._image = self._out = _NOTHING
        self._goal: Float32Array | None = None

    def begin(self, image: Tensor, box: Box, out: Tensor) -> None:
        """Take another image.

        Args:
            image: (C, H, W).
            box: the part of it that is needed.
            out: where it goes, (C, H, W).
        """
        self.top, self.left, self.height, self.width = box
        self.channels, self.of_bytes = len(image), image.dtype == torch.uint8
        self._image, self._out, self._planes = image, out, None
        is_plain = out.dtype == torch.float32 and out.is_contiguous()
        self._goal = out.numpy().reshape(len(out), -1) if is_plain else None

    def end(self) -> None:
        """Put the image where it goes."""
        if self._goal is None or not np.may_share_memory(self.planes, self._goal):
            self._out.copy_(torch.from_numpy(self.image()))

    def let_go(self) -> None:
        """Refer to nothing of the user's any more: a thread keeps its canvas, and a batch's memory is used
        again once nobody refers to it."""
        self._image = self._out = _NOTHING
        self._planes = self._goal = None

    @property
    def planes(self) -> Float32Array:
        """float32 (C, H · W), C-contiguous; whole numbers of 0 … 255 while ``of_bytes``."""
        if self._planes is None:
            top, left, height, width = self.top, self.left, self.height, self.width
            self._planes = self._place(len(self._image), height, width, None)
            part = self._image[:, top : top + height, left : left + width]
            torch.from_numpy(self.image()).copy_(part)
        return self._planes

    def unread(self) -> Float32Array | None:
        """The planes of the whole image, (C, H · W), where it is of floats and has not been read yet."""
        image = self._image
        if self._planes is not None or image.dtype != torch.float32 or not image.is_contiguous():
            return None
        planes: Float32Array = image.numpy().reshape(len(image), -1)
        return planes

    @property
    def pitch(self) -> int:
        """Pixels from row to row of ``unread``."""
        return self._image.shape[2]

    def memory(self, purpose: str, count: int) -> Float32Array:
        """Working memory: for a purpose always the same, of which another image may have left something."""
        found = self._memory.get(purpose)
        if found is None or len(found) < count:
            found = self._memory[purpose] = np.empty(count, np.float32)
        return found[:count]

    def image(self) -> Float32Array:
        """The planes as (C, H, W): a view."""
        return self.planes.reshape(-1, self.height, self.width)

    def empty(self, height: int, width: int) -> Float32Array:
        """Memory for the planes of another size, (C, height · width), which are not this image's."""
        return self._place(len(self._image), height, width, self._planes)

    def replace(self, planes: Float32Array, height: int, width: int) -> None:
        """Go on with other planes, (C, height · width)."""
        self._planes, self.height, self.width = planes, height, width
        self.top = self.left = 0

    def _place(self, channels: int, height: int, width: int, taken: Float32Array | None) -> Float32Array:
        goal = self._goal
        fits = goal is not None and tuple(self._out.shape) == (channels, height, width)
        if goal is not None and fits and not (taken is not None and np.may_share_memory(goal, taken)):
            return goal
        count = channels * height * width
        found = self._memory.get("image")
        is_taken = found is not None and taken is not None and np.may_share_memory(found, taken)
        return self.memory("other" if is_taken else "image", count).reshape(channels, -1)
