"""Whether the native core decodes JPEGs as the installed Pillow does, found by asking both."""

from __future__ import annotations

import functools
import io
import logging
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.core.native import native

__all__ = ["decodes_as_pillow"]

_log = logging.getLogger("fastpipe.read")

_KINDS: tuple[dict[str, Any], ...] = (  # of the files that are trusted
    {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"subsampling": 2, "progressive": True}, {},
)  # fmt: skip


@functools.cache
def decodes_as_pillow() -> bool:
    """Whether a few small images come out the same, of each kind of file that the core is trusted with."""
    pillow = require("PIL.Image", extra="image")
    # With its class for JPEGs, and a name instead of a format: else it would load plugins of other formats.
    jpegs = require("PIL.JpegImagePlugin", extra="image")
    noise = np.random.Generator(np.random.PCG64(3)).integers(0, 256, (37, 45, 3), np.uint8)
    for kind in _KINDS:
        image = pillow.fromarray(noise if kind else noise[:, :, 0])
        file = io.BytesIO()
        file.name = "x.jpg"
        image.save(file, quality=90, **kind)
        file.seek(0)
        expected = np.asarray(jpegs.JpegImageFile(file).convert("RGB"))
        for top, left, height, width in ((0, 0, 37, 45), (9, 14, 19, 23)):
            found = native.decode(file.getvalue(), top, left, height, width)
            if found is None or not np.array_equal(found, expected[top : top + height, left : left + width]):
                _log.warning(
                    "Pillow %s decodes JPEGs otherwise than libjpeg-turbo %s, with which fastpipe was "
                    "compiled; so Pillow decodes all images, which is slower",
                    pillow.__version__, native.jpeg_version(),
                )  # fmt: skip
                return False
    return True
