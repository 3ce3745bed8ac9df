"""Whether a part of a JPEG can be decoded on a GPU, or all of it has to be."""

from __future__ import annotations

from typing import Any

from fastpipe.types import Box

__all__ = ["decodes_regions", "region_of"]

# https://github.com/NVIDIA/nvImageCodec/issues/55: there, parts of ordinary JPEGs end in errors on some GPUs,
# and in a crash of the process on others.
_WITHOUT = ("0.9.0",)


def decodes_regions(version: str) -> bool:
    """Whether a version of nvImageCodec, which DALI decodes with as well, may be asked for parts on a GPU.

    >>> decodes_regions("0.9.0"), decodes_regions("0.9.0.20"), decodes_regions("0.9.1")
    (False, False, True)
    """
    return not any(version == bad or version.startswith(f"{bad}.") for bad in _WITHOUT)


def region_of(image: Any, box: Box) -> Any | None:
    """A part of a decoded image, a view of it; None where that does not have it.

    Args:
        image: an array (H, W, 3).
        box: inside the image.
    """
    height, width, channels = image.shape
    if channels != 3 or box.top + box.height > height or box.left + box.width > width:
        return None
    return image[box.top : box.top + box.height, box.left : box.left + box.width]
