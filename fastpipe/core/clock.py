"""Time by stage, summed over threads, and ranges for Nsight Systems."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar


class StageClock:
    """Measures the seconds spent in each stage of loading, summed over all threads.

    The stage ``"read"`` reads files.  ``"decode"`` decodes pixels or chunks.  ``"transform"`` resamples and
    converts.  ``"copy"`` copies samples out of decoded chunks.  In ``"wait"``, the training loop waits for a
    batch.

    >>> clock = StageClock()
    >>> clock.add("read", 1_500_000_000)
    >>> clock.totals()
    {'read': 1.5}
    """

    def __init__(self) -> None:
        # Each thread adds to its own dictionary, so that adding needs no lock: ``add`` is called per sample.
        self._local = threading.local()
        self._all: list[dict[str, int]] = []

    def add(self, stage: str, nanoseconds: int) -> None:
        try:
            mine: dict[str, int] = self._local.nanoseconds
        except AttributeError:
            mine = self._local.nanoseconds = {}
            self._all.append(mine)
        mine[stage] = mine.get(stage, 0) + nanoseconds

    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for one in list(self._all):
            for stage, nanoseconds in list(one.items()):
                totals[stage] = totals.get(stage, 0.0) + nanoseconds / 1e9
        return totals

    def reset(self) -> None:
        for one in list(self._all):
            one.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return (StageClock, ())


# NVTX ranges show the work of fastpipe's threads in Nsight Systems, if ``FASTPIPE_NVTX=1`` is set.

_log = logging.getLogger("fastpipe")
_F = TypeVar("_F", bound=Callable[..., Any])
_VARIABLE = "FASTPIPE_NVTX"


def ranged(name: str) -> Callable[[_F], _F]:
    """Decorate a function so that Nsight Systems shows each call as an NVTX range ``fastpipe.NAME``.

    If the environment does not enable ranges when fastpipe is imported, the function stays unchanged.  Torch
    makes the ranges if torch has a GPU.  Otherwise the package ``nvtx`` makes the ranges.  So far, ranges
    were tested only with modules that imitate torch and ``nvtx``, without a GPU.
    """
    if os.environ.get(_VARIABLE, "") in ("", "0"):
        return lambda function: function
    return _range(f"fastpipe.{name}")


@contextmanager
def _range(text: str) -> Iterator[None]:
    push, pop = _marks()
    push(text)
    try:
        yield
    finally:
        pop()


@functools.cache
def _marks() -> tuple[Callable[[str], object], Callable[[], object]]:
    """Return the functions that begin and end a range of the calling thread.

    The functions are looked up at the first range, because the user's script has then imported torch.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_available():
        return cuda.nvtx.range_push, cuda.nvtx.range_pop
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        _log.warning(
            "%s is set, but no ranges can be made: torch finds no GPU, and the package nvtx is not installed"
            " (pip install nvtx)", _VARIABLE,
        )  # fmt: skip
        return lambda _: None, lambda: None
    return nvtx.push_range, nvtx.pop_range
