"""Reading many files at once, where Python's lock is what threads wait for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fastpipe._nvtx import ranged
from fastpipe.core.native import native
from fastpipe.images.jpeg_header import JpegHeader

__all__ = ["read_many"]


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
