"""Numbers of bytes in words."""

from __future__ import annotations

import math

__all__ = ["in_bytes"]


def in_bytes(nbytes: float) -> str:
    """A size for people.

    >>> in_bytes(999), in_bytes(524288), in_bytes(1.5 * 2**30)
    ('999 B', '512 KiB', '1.5 GiB')
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(nbytes)) // 10, len(units))
    nbytes, unit = nbytes / 1024**power, units[power - 1]
    return f"{nbytes:.0f} {unit}" if nbytes >= 99.5 else f"{nbytes:.3g} {unit}"
