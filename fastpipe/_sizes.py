"""Numbers of bytes or things, and short times, in words."""

from __future__ import annotations

import math

__all__ = ["counted", "in_bytes", "in_duration"]


def counted(count: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "file"), counted(2000, "file")
    ('1 file', '2,000 files')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


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


def in_duration(seconds: float) -> str:
    """A short time for people, of three digits.

    >>> in_duration(6.667), in_duration(0.1234), in_duration(0.0000789), in_duration(2e-9), in_duration(0)
    ('6.67 s', '123 ms', '78.9 µs', '2 ns', '0 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1e} s" if seconds else "0 s"
