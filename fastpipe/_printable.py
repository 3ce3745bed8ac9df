"""Text with names from files in it: nothing in a name may act on a terminal, or look like another line."""

from __future__ import annotations

import logging
import os
import unicodedata

__all__ = ["printable", "printable_lines"]

# Controls, formats (writing direction, zero width), halves of surrogate pairs, and breaks of lines.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_JOINER = "\u200d"  # makes one emoji of several
_PARTS_OF_EMOJI = frozenset(("So", "Sk", "Mn"))
_LOGGERS = (
    "", "bad_samples", "cache", "generate", "index", "memoize", "patches", "profile", "read", "stage", "tf",
    "torch",
)  # fmt: skip


def printable(text: str) -> str:
    """Return the text with all characters escaped that do more than show: it is one line, without commands.

    Letters of all scripts, spaces and emoji stay as they are.

    >>> print(printable("Müller/猫 🚀.jpg"), printable("line\\nbreak"), printable("\\x1b[31m\\udcff\\u202e"))
    Müller/猫 🚀.jpg line\\nbreak \\x1b[31m\\xff\\u202e
    """
    if text.isprintable():
        return text
    return "".join(
        _escaped(one) if unicodedata.category(one) in _UNSAFE and not _joins(text, at) else one
        for at, one in enumerate(text)
    )


def printable_lines(text: str) -> str:
    """Return the text with each of its lines made printable."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(one: str) -> str:
    if "\udc80" <= one <= "\udcff":  # a byte that is no UTF-8
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
    """Make what a record's message is filled with printable, for all handlers."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            printable(str(one)) if isinstance(one, (str, os.PathLike, BaseException)) else one
            for one in record.args
        )
    return True


# A filter of a logger does not see the records of its children.
for _name in _LOGGERS:
    logging.getLogger(f"fastpipe.{_name}".rstrip(".")).addFilter(_print_arguments)
