"""A part of the command line: what ``fastpipe`` is put together from, and ``fastpipe bench`` in turn."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from fastpipe.console import Progress

__all__ = ["Command", "positive"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Command:
    """A part of the command.

    Attributes:
        about: one line of help.
        add_arguments: adds its options to a parser.
        run: does it; returns the exit code.
    """

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console, Progress], int]


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """An argparse type: a number above zero.

    Args:
        kind: ``int`` or ``float``.

    >>> positive(int)("12"), positive(float)("0.5")
    (12, 0.5)
    """
    what = "whole number from 1" if kind is int else "number above 0"

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind("0")
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be a {what}, got {text!r}")
        return value

    return parse
