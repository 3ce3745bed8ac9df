"""What the makers of odd files share: a case, and encoding with Pillow."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require

__all__ = ["Case", "image_of", "jpeg", "saved"]


class Case(NamedTuple):
    """One odd file before it is written: its case's name, its file name, its bytes, a note."""

    name: str
    file: str
    data: bytes
    note: str


def image_of(pixels: npt.NDArray[Any]) -> Any:
    """A Pillow image from an array."""
    return require("PIL.Image", extra="image").fromarray(pixels)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    """The file Pillow writes for an image or an array."""
    file = io.BytesIO()
    (image_of(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def jpeg(photo: npt.NDArray[np.uint8], **options: Any) -> bytes:
    """The JPEG file Pillow writes: quality 85 and 4:2:0 chroma unless told otherwise."""
    return saved(photo, "JPEG", **{"quality": 85, "subsampling": "4:2:0"} | options)
