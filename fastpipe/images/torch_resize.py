"""What the installed torchvision does when it resizes tensors of bytes, found by asking it.

Where torch has no fast code for bytes on this processor, or torchvision does not know that it has,
they are resized as floats and rounded, which differs in the last bit.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.images import kernels
from fastpipe.images.geometry import Resize
from fastpipe.images.kernels import noise, resized
from fastpipe.types import Size

__all__ = ["torch_filter", "torch_resize"]

# By name and whether it is with antialiasing.
_MODES = {
    ("bilinear", True): kernels.TORCH_BILINEAR, ("bicubic", True): kernels.TORCH_BICUBIC,
    ("bilinear", False): kernels.SHARP_BILINEAR, ("bicubic", False): kernels.SHARP_BICUBIC,
}  # fmt: skip


def torch_resize(interpolation: Any, antialias: bool, to: Size) -> Resize | None:
    """The operation that equals what ``torchvision.transforms.v2`` does with a uint8 tensor.

    Args:
        interpolation: the value of an ``InterpolationMode``.
        antialias: as the transform's.
        to: size of the result.

    Returns:
        The operation; None where no kernel does the same, and torchvision has to be asked.
    """
    mode = torch_filter(interpolation, antialias)
    return None if mode is None else Resize(to, mode)


def torch_filter(interpolation: Any, antialias: bool) -> int | None:
    """The filter of ``torch_resize``; None where no kernel does the same."""
    if (interpolation, antialias) not in _MODES or not _is_equal(interpolation, antialias):
        return None
    return _MODES[interpolation, antialias]


@functools.cache
def _is_equal(interpolation: str, antialias: bool) -> bool:
    """Whether a kernel makes the same of images that become smaller, and larger."""
    torch = require("torch", extra="torch")
    resize = require("torchvision.transforms.v2.functional", extra="torch").resize
    mode = require("torchvision.transforms", extra="torch").InterpolationMode(interpolation)
    for size in ((48, 52), (23, 19)):
        image, to = noise(size), (37, 31)
        found = resize(torch.from_numpy(image).permute(2, 0, 1), list(to), mode, antialias=antialias)
        if not np.array_equal(resized(image, to, _MODES[interpolation, antialias]), found.permute(1, 2, 0)):
            return False
    return True
