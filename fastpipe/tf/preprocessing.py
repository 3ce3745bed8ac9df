"""The script's own code for the images of a column."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import PIL.Image

from fastpipe.core.casting import unheld
from fastpipe.core.types import UInt8Array
from fastpipe.errors import OptionError
from fastpipe.tf.options import ImageSpec

__all__ = ["Preprocessing"]


class _Row(Protocol):
    @property
    def seed(self) -> int: ...

    @property
    def index(self) -> int: ...


class Preprocessing:
    """A function of the script's, called with the part of an image that is used.

    Args:
        function: called with a PIL image; and with ``rng=``, a ``numpy.random.Generator`` that depends on
            seed, epoch and row, where it has such an argument.
        name: of the modality, for errors.
        spec: what becomes of the image afterwards.
        output: the type of the dataset's images.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, spec: ImageSpec, output: np.dtype[Any]
    ) -> None:
        self._function, self._name, self._spec, self._output = function, name, spec, output
        try:
            self._takes_rng = "rng" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # built-in functions have none
            self._takes_rng = False

    def run(self, pixels: UInt8Array, row: _Row) -> npt.NDArray[Any]:
        """What the function makes of an image.

        Args:
            pixels: uint8 (h, w, C).
            row: of it.

        Returns:
            uint8 (h, w, C), which is still to be resampled; or float32 (H, W, C).

        Raises:
            OptionError: it returned something else, or floats that the dataset's type cannot hold.
        """
        image = PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        more = {"rng": np.random.default_rng(row.seed)} if self._takes_rng else {}
        made = np.asarray(self._function(image, **more))
        if made.ndim == 2:
            made = made[:, :, None]
        size, channels = self._spec.size, self._spec.channels
        if made.dtype == np.uint8 and made.ndim == 3 and made.shape[2] == channels and made.size:
            return np.ascontiguousarray(made)
        of = f" of {self._name!r}" if self._name else ""
        if made.dtype.kind == "f" and made.shape == (*size, channels):
            if self._output.kind == "u" or unheld(made, self._output).any():
                raise OptionError(
                    f"row {row.index}: preprocess{of} returned {made.dtype} of {made.min()} to {made.max()}, "
                    f"which output={self._output.name!r} cannot hold: return uint8, or take output='float32'"
                )
            return made.astype(np.float32)
        raise OptionError(
            f"row {row.index}: preprocess{of} returned {made.dtype} of shape {made.shape}: it must return an "
            f"image with {channels} channels, or uint8 (h, w, {channels}), which are resized afterwards, or "
            f"floats of shape {(*size, channels)}, which are taken as they are"
        )
