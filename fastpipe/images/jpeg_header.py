"""What a JPEG file says of itself before any pixel is decoded.

The fast decoders are trusted with a file only when its header shows that they decode it as
Pillow does, and when its scans are whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from fastpipe._nvtx import ranged
from fastpipe.core.native import native

__all__ = ["JpegHeader", "read_jpeg_header", "read_many"]


class JpegHeader(NamedTuple):
    """Facts from a JPEG's header.

    Attributes:
        height, width: in pixels, before any EXIF turn.
        trusted: the fast decoders give Pillow's pixels for this kind of file, and all its
            scans are there (a file cut short or spoilt is left to Pillow to judge).
        orientation: EXIF orientation 1 … 8; 1 where there is none; 0 where Pillow has to be
            asked, as the tag is in XMP data or has an unusual form.
        frame: where the frame header's body begins in the file.
        is_progressive: rows are not sent one after the other.
    """

    height: int
    width: int
    trusted: bool
    orientation: int
    frame: int
    is_progressive: bool


def read_jpeg_header(blob: bytes) -> JpegHeader | None:
    """Walk a JPEG's segments up to its first scan.

    Args:
        blob: the encoded file.

    Returns:
        The header, or None where this is no JPEG or its structure is broken before the
        first scan.
    """
    header = JpegHeader(*native.read_jpeg_header(blob))
    return header if header.height else None


@ranged("read")
def read_many(paths: Sequence[str]) -> list[tuple[bytes, JpegHeader | None] | None]:
    """Read files, and walk the headers of those that are JPEGs.

    Args:
        paths: of regular files.

    Returns:
        Of each its content and its header, as of ``read_jpeg_header``; None where ``read_file`` has to be
        asked, which says what is wrong.
    """
    found: list[tuple[bytes, JpegHeader | None] | None] = []
    for one in native.read_files([os.fsencode(path) for path in paths]):
        if one is None:
            found.append(None)
        else:
            blob, header = one[0], JpegHeader(*one[1])
            found.append((blob, header if header.height else None))
    return found
