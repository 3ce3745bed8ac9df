"""A loader that may take another's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastpipe.profiling.stacks import Line
from fastpipe.profiling.times import Spent
from fastpipe.profiling.watching import Watched

__all__ = ["GAIN", "Candidate", "in_parentheses", "place_of"]

GAIN = 1.05  # by which a step has to be faster: less is not worth a change


@dataclass(frozen=True)
class Candidate:
    """A loader in another's place.

    Attributes:
        what: is to be changed, in words.
        why: the measurement that it comes from.
        begin: makes an iterator.
        skipped: batches before its pace is that of others: the first of each worker, which opens files.
        rest: what else a batch needs that is done as before, in the same process; None for nothing.
        close: called when it is of no more use.
        is_rest_beside: whether others do that beside it, so that it costs processors only.
    """

    what: str
    why: str
    begin: Callable[[], Iterator[Any]]
    skipped: int = 2
    rest: Spent | None = None
    is_rest_beside: bool = False
    close: Callable[[], object] = lambda: None


def place_of(watched: Watched) -> str:
    """Where in the script a loader is made, or else iterated."""
    line = watched.made_at if watched.made_at is not None and watched.made_at.file else watched.used_at
    return in_parentheses(line)


def in_parentheses(line: Line) -> str:
    """A line of the script, for the end of a sentence; nothing where it is unknown."""
    return f" ({line})" if line.file else ""
