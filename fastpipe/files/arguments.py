"""What the commands' arguments mean; loads nothing that is large."""

from __future__ import annotations

import argparse
import os
import re

from fastpipe.core.files import is_hdf5, is_url

__all__ = ["is_volume", "sides", "size"]

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def sides(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers from 1, one for each dimension.

    >>> sides("72,136,136")
    (72, 136, 136)
    """
    try:
        found = tuple(int(side) for side in re.split(r"[,x×]", text))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1, such as 64,128,128; got {text!r}")
    return found


def size(text: str) -> int:
    """An argparse type: a number of bytes.

    >>> size("8GiB"), size("1.5M"), size("2 GB")
    (8589934592, 1572864, 2000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper().replace("IB", "") if match else "?"
    factor = _DECIMAL.get(unit) or _UNITS.get(unit)
    nbytes = int(float(match[1]) * factor) if match and factor else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, such as 8GiB; got {text!r}")
    return nbytes


def is_volume(path: str) -> bool:
    """Whether a path is to be opened as a volume, and not as an HDF5 file with all of its datasets.

    Raises:
        OSError: it is a file that cannot be read.
    """
    if is_url(path) or os.path.isdir(path):
        return True
    if os.path.isfile(path):
        return not is_hdf5(path)
    # Behind a file's path stands a name within it.
    parent = os.path.dirname(path.rstrip("/"))
    while parent and parent != os.path.dirname(parent) and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return os.path.isfile(parent)
