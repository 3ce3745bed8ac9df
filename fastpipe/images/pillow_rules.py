"""Tests that find out how the installed Pillow and torchvision decode, resize and convert images to grey.

Versions of Pillow and its fork Pillow-SIMD differ in the last bit:

* When Pillow resizes images, its weights have 22 bits. Pillow-SIMD's weights have as many bits as fit into
  16, like torch's.
* A resize has two passes, along rows and along columns, and each pass rounds.  Most versions resample rows
  first.  Pillow 13 resamples columns first if that needs less work.  Some earlier versions resample columns
  first if the image is more than a hundred times as tall as wide.
* Pillow-SIMD rounds some grey values down that Pillow rounds up.

torchvision may resize uint8 tensors as floats and then round. This happens if torch has no fast code for
bytes on this processor, or if torchvision does not use that code.  These results differ in the last bit, too.
"""

from __future__ import annotations

import functools
import io
import logging
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.types import UInt8Array
from fastpipe.images import kernels
from fastpipe.images.kernels import noise, resized

_log = logging.getLogger("fastpipe.read")

# The keys are the lower-case names of Pillow's ``Resampling``, which are also those of torchvision's
# ``InterpolationMode``.
FILTERS = {
    "nearest": kernels.NEAREST, "box": kernels.BOX, "bilinear": kernels.BILINEAR,
    "hamming": kernels.HAMMING, "bicubic": kernels.BICUBIC, "lanczos": kernels.LANCZOS,
}  # fmt: skip


class _Rules(NamedTuple):
    flag: int | None  # added to a filter's constant; None if Pillow's arithmetic is unknown
    by_size: bool
    by_shape: bool
    grey: bool


def pillow_filter(mode: int) -> tuple[int, int] | None:
    """Return the kernels' filter that gives the installed Pillow's results, and the order of its two passes.

    The order is a ``PassOrder`` of fastpipe/native/geometry.h. Return None if no filter does.
    """
    rules = _rules()
    if mode == kernels.NEAREST:
        return mode, 0
    if rules.flag is None:
        return None
    return mode | rules.flag, 1 if rules.by_size else 2 if rules.by_shape else 0


def grey_is_known() -> bool:
    """Return whether the kernels convert colours to grey exactly as the installed Pillow does."""
    return _rules().grey


@functools.cache
def _rules() -> _Rules:
    # ``by_size`` is tested with a tall image, and ``by_shape`` with an extremely tall image.
    by_size, by_shape = (
        _resizes_columns_first((192, 24), (36, 30)),
        _resizes_columns_first((404, 4), (5, 3)),
    )
    return _Rules(_flag(), by_size, by_shape, _grey_is_equal())


def _resizes_columns_first(size: tuple[int, int], to: tuple[int, int]) -> bool:
    """Return whether Pillow resamples columns before rows for an image of this size."""
    image, mode = noise(size), kernels.BILINEAR
    at_once = _by_pillow(image, to, mode)
    return np.array_equal(at_once, _by_pillow(_by_pillow(image, (to[0], size[1]), mode), to, mode))


def _flag() -> int | None:
    """Return the flag with which the kernels' filters equal the installed Pillow's; None if none does."""
    weighted = [mode for mode in FILTERS.values() if mode != kernels.NEAREST]
    image, to = noise((48, 52)), (37, 31)
    expected = [_by_pillow(image, to, mode) for mode in weighted]
    for flag in (0, kernels.NARROW):
        made = [resized(image, to, mode | flag) for mode in weighted]
        if all(map(np.array_equal, made, expected)):
            return flag
    return None


def _grey_is_equal() -> bool:
    image = noise((256, 256))
    made = np.empty(256 * 256, np.uint8)
    whole = kernels.axis(kernels.NEAREST_FLOOR, 256, 256)
    how = native.conversion(0, 1, True, 1, True, [], [], b"")
    kernels.resample(image, kernels.NEAREST_FLOOR, whole, whole, False, 1, how, made)
    expected = np.asarray(require("PIL.Image", extra="image").fromarray(image).convert("L"))
    return np.array_equal(made, expected.reshape(-1))


def _by_pillow(image: UInt8Array, to: tuple[int, int], mode: int) -> UInt8Array:
    pillow = require("PIL.Image", extra="image")
    name = next(name for name, constant in FILTERS.items() if constant == mode)
    return np.asarray(pillow.fromarray(image).resize((to[1], to[0]), pillow.Resampling[name.upper()]))


_KINDS: tuple[dict[str, Any], ...] = (  # the kinds of JPEGs that are trusted
    {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"subsampling": 2, "progressive": True}, {},
)  # fmt: skip


@functools.cache
def decodes_as_pillow() -> bool:
    """Return whether the native core decodes small JPEGs as Pillow does, for each kind that is trusted."""
    pillow = require("PIL.Image", extra="image")
    # Use Pillow's JPEG class, and a file name instead of a format. Otherwise Pillow loads plugins of other
    # formats.
    jpegs = require("PIL.JpegImagePlugin", extra="image")
    pixels = noise((37, 45))
    for kind in _KINDS:
        image = pillow.fromarray(pixels if kind else pixels[:, :, 0])
        file = io.BytesIO()
        file.name = "x.jpg"
        image.save(file, quality=90, **kind)
        file.seek(0)
        expected = np.asarray(jpegs.JpegImageFile(file).convert("RGB"))
        for top, left, height, width in ((0, 0, 37, 45), (9, 14, 19, 23)):
            found = native.decode(file.getvalue(), top, left, height, width)
            if found is None or not np.array_equal(found, expected[top : top + height, left : left + width]):
                _log.warning(
                    "Pillow %s decodes JPEGs differently from libjpeg-turbo %s, with which fastpipe was "
                    "compiled; so Pillow decodes all images, which is slower",
                    pillow.__version__, native.jpeg_version(),
                )  # fmt: skip
                return False
    return True


# The keys are the filter's name and whether the filter antialiases.
_TORCH_MODES = {
    ("bilinear", True): kernels.TORCH_BILINEAR, ("bicubic", True): kernels.TORCH_BICUBIC,
    ("bilinear", False): kernels.SHARP_BILINEAR, ("bicubic", False): kernels.SHARP_BICUBIC,
}  # fmt: skip


def torch_filter(interpolation: Any, antialias: bool) -> int | None:
    """Return the kernels' filter that gives the results of ``torchvision.transforms.v2`` for uint8 tensors.
    Return None if no filter does."""
    if (interpolation, antialias) not in _TORCH_MODES or not _torch_is_equal(interpolation, antialias):
        return None
    return _TORCH_MODES[interpolation, antialias]


@functools.cache
def _torch_is_equal(interpolation: str, antialias: bool) -> bool:
    """Return whether a kernel gives torchvision's pixels, both when shrinking and when enlarging an image."""
    torch = require("torch", extra="torch")
    resize = require("torchvision.transforms.v2.functional", extra="torch").resize
    mode = require("torchvision.transforms", extra="torch").InterpolationMode(interpolation)
    for size in ((48, 52), (23, 19)):
        image, to = noise(size), (37, 31)
        found = resize(torch.from_numpy(image).permute(2, 0, 1), list(to), mode, antialias=antialias)
        if not np.array_equal(
            resized(image, to, _TORCH_MODES[interpolation, antialias]), found.permute(1, 2, 0)
        ):
            return False
    return True
