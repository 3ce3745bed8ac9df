"""A part of the command line: what ``fastpipe`` is put together from, and ``fastpipe bench`` in turn."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from fastpipe.console import Progress

__all__ = ["Command"]



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
