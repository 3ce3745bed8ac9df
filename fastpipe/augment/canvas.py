"""One image on its way through a chain of augmentations, on the processor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Box", "Canvas", "Float32Array"]

Float32Array = npt.NDArray[np.float32]
Box = tuple[int, int, int, int]  # top, left, height and width


class Canvas:
    """Planes of an image, and memory to work in.

    Attributes:
        planes: float32 (C, H · W), C-contiguous; whole numbers of 0 … 255 while ``of_bytes``.
        height, width: in pixels.
        top, left: where they begin in the image, of which they may be a part.
        of_bytes: whether the image is of bytes at this point of the chain.
    """

    def __init__(self) -> None:
        self.planes: Float32Array = np.zeros((0, 0), np.float32)
        self.height = self.width = self.top = self.left = 0
        self.of_bytes = False
        self._memory: dict[str, Float32Array] = {}

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
        count = len(self.planes) * height * width
        begin = self._memory.get("image")
        is_first = begin is not None and np.may_share_memory(begin, self.planes)
        return self.memory("other" if is_first else "image", count).reshape(len(self.planes), -1)

    def replace(self, planes: Float32Array, height: int, width: int) -> None:
        """Go on with other planes, (C, height · width)."""
        self.planes, self.height, self.width = planes, height, width
        self.top = self.left = 0
