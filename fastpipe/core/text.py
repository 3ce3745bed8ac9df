"""Readable text for counts, sizes in bytes, short times and file names."""

from __future__ import annotations

import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterable


def counted(count: int, what: str) -> str:
    """Format a count and a noun, which gets a plural "s" if needed.

    >>> counted(1, "file"), counted(2000, "file")
    ('1 file', '2,000 files')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def in_bytes(nbytes: float) -> str:
    """Format a size in bytes with a suitable unit.

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
    """Format a short time, given in seconds, with three digits and a suitable unit.

    >>> in_duration(6.667), in_duration(0.1234), in_duration(0.0000789), in_duration(2e-9), in_duration(0)
    ('6.67 s', '123 ms', '78.9 µs', '2 ns', '0 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1e} s" if seconds else "0 s"


# Messages contain names of files.  Characters of a name must not control a terminal or start a new line.

# Unicode categories: control characters, format characters (writing direction, zero width), halves of
# surrogate pairs, and line breaks.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_JOINER = "\u200d"  # joins several emoji into one
_PARTS_OF_EMOJI = frozenset(("So", "Sk", "Mn"))
_LOGGERS = (
    "", "bad_samples", "cache", "generate", "index", "memoize", "patches", "profile", "read", "stage", "tf",
    "torch",
)  # fmt: skip


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped.

    The result is one line and contains no terminal commands.  Letters of all writing systems, spaces and
    emoji stay unchanged.

    >>> print(printable("Müller/猫 🚀.jpg"), printable("line\\nbreak"), printable("\\x1b[31m\\udcff\\u202e"))
    Müller/猫 🚀.jpg line\\nbreak \\x1b[31m\\xff\\u202e
    """
    if text.isprintable():
        return text
    return "".join(
        _escaped(one) if unicodedata.category(one) in _UNSAFE and not _joins(text, at) else one
        for at, one in enumerate(text)
    )


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message.

    >>> error_line(ValueError("no batch\\nat all")), error_line(KeyboardInterrupt())
    ('ValueError: no batch', 'KeyboardInterrupt')
    """
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _escaped(one: str) -> str:
    if "\udc80" <= one <= "\udcff":  # a byte that is not valid UTF-8
        return f"\\x{ord(one) - 0xDC00:02x}"
    return repr(one)[1:-1]


def _joins(text: str, at: int) -> bool:
    around = text[at - 1 : at + 2 : 2] if at else ""
    return (
        text[at] == _JOINER
        and len(around) == 2
        and unicodedata.category(around[0]) in _PARTS_OF_EMOJI
        and unicodedata.category(around[1]) == "So"
    )


def _print_arguments(record: logging.LogRecord) -> bool:
    """Make the arguments of a log record printable, before any handler formats the record."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            printable(str(one)) if isinstance(one, (str, os.PathLike, BaseException)) else one
            for one in record.args
        )
    return True


# A logger's filter does not get the records of child loggers, so each logger gets the filter.
for _name in _LOGGERS:
    logging.getLogger(f"fastpipe.{_name}".rstrip(".")).addFilter(_print_arguments)


_NUMBER = re.compile(r"(\d+)")


def natural_sorted(names: Iterable[str]) -> list[str]:
    """Sort names as ``tifffile.natural_sorted`` does.

    Names that differ only in leading zeros are sorted by their text.

    >>> natural_sorted(["slice_10.tif", "slice_2.tif", "slice_1.tif"])
    ['slice_1.tif', 'slice_2.tif', 'slice_10.tif']
    """
    return sorted(names, key=lambda name: (_parts(name), name))


def _parts(name: str) -> list[int | str]:
    # Strings and numbers alternate, so strings are compared only with strings, and numbers with numbers.
    return [int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(name))]
