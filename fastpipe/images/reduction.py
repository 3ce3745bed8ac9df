"""When to decode an image at a part of its size."""

from __future__ import annotations

from fastpipe.images import weights
from fastpipe.images.geometry import Region
from fastpipe.types import Box, Size

__all__ = ["reduction"]

# What decoding a pixel costs at 1 / factor of the size, beyond reading its bits, which is always
# done; in units of the same at full size.  Measured on photographs of 12 megapixels: libjpeg-turbo
# has no vector code for a half.
_COST = {8: 0.11, 4: 0.41, 2: 1.6}
_RESAMPLING = 0.93  # the same unit: resampling a pixel


def reduction(region: Region, mode: int, image: Size) -> int:
    """By what to divide the size of an image while it is decoded: 8, 4 or 2, or 1 for not at all.

    A part of it is used that becomes ``region.size``: dividing must leave at least that many
    pixels, so that no detail is lost that the output could show.  Decoding exactly makes the rows of
    the part, decoding reduced all rows from the top.

    Args:
        region: what is used, and what becomes of it.
        mode: the filter.
        image: size of the image.

    >>> from fastpipe.images.geometry import Crop, Resize, fold
    >>> photo = Size(3024, 4032)
    >>> for edge in (300, 1000, 2000):
    ...     crop = Crop(Box(500, 500, edge, edge))
    ...     print(reduction(fold([crop, Resize(Size(224, 224), 1)], photo), 1, photo))
    1
    4
    8
    """
    source, to = region.source, region.size
    if region.placed != Box(0, 0, *region.canvas) or mode & 15 > weights.LANCZOS or region.mode is None:
        return 1  # filled somewhere, or not antialiased: to leave out detail would show
    for factor, cost in _COST.items():
        if source.height >= factor * to.height and source.width >= factor * to.width:
            exact = source.height * (image.width + _RESAMPLING * source.width)
            return factor if cost * (source.top + source.height) * image.width < exact else 1
    return 1
