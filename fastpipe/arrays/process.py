"""A process among those that make batches."""

from __future__ import annotations

from typing import NamedTuple

from fastpipe.engine.pool import ThreadPool

__all__ = ["Process"]


class Process(NamedTuple):
    """What a framework knows of a process that makes batches.

    Attributes:
        pool: threads to work in; None for the calling one.
        workers: how many processes make batches side by side, for another one; 0 where they are used here.
        number: of this one among these.
    """

    pool: ThreadPool | None
    workers: int = 0
    number: int = 0
