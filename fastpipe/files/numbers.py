"""Numbers on the command line."""

from __future__ import annotations

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """An argparse type: a whole number from 1.

    >>> positive("12")
    12
    """
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
