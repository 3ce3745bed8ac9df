"""Other settings of a loader, and other loaders in its place, each ready to be measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fastpipe
from fastpipe.errors import FastpipeError
from fastpipe.profiling.costs import LoaderCosts
from fastpipe.profiling.watching import Watched

__all__ = ["Candidate", "candidates"]

_WAITS = 0.3  # from this part of a batch's time on, waiting is worth doing something about
_MOST_WORKERS = 32


@dataclass(frozen=True)
class Candidate:
    """A loader in another's place.

    Attributes:
        what: is to be changed, in words.
        why: the measurement that it comes from.
        begin: makes an iterator.
        skipped: batches that it may have ready when it begins.
        is_serial: whether it makes a batch only when that is asked for.
    """

    what: str
    why: str
    begin: Callable[[], Iterator[Any]]
    skipped: int = 2
    is_serial: bool = False


def candidates(watched: Watched, costs: LoaderCosts, cores: int) -> list[Candidate]:
    """What may be faster than a loader of torch's, for what is known of its costs.

    Args:
        watched: the loader.
        costs: of its batches.
        cores: that this process may use.
    """
    if not hasattr(watched.loader, "num_workers"):
        return []
    found = [] if type(watched.loader).__module__.startswith("fastpipe") else _swaps(watched, costs)
    return [*found, *_workers(watched, costs, cores)]


def _place(watched: Watched) -> str:
    line = watched.made_at if watched.made_at is not None and watched.made_at.file else watched.used_at
    return f" ({line})" if line.file else ""


def _swaps(watched: Watched, costs: LoaderCosts) -> Iterator[Candidate]:
    """fastpipe's loader over the same dataset, where it makes the batches itself."""
    place, dataset = _place(watched), type(watched.loader.dataset).__name__
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in list(costs.shares().items())[:3])
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("fastpipe.accelerate(loader), or FastImageFolder and FastLoader", "", {}),
        (
            'fastpipe.accelerate(loader, augment="auto")',
            "; other draws of the same augmentation",
            {"augment": "split"},
        ),
    ]
    for way, note, options in ways:
        try:
            fast = fastpipe.accelerate(watched.loader, **options)
            fast.clock  # there is one where fastpipe makes the batches  # noqa: B018
        except (FastpipeError, AttributeError, TypeError):
            return
        yield Candidate(
            f"let fastpipe make the batches of {dataset}: {way}{place}",
            f"measured on batches of yours, of whose time goes now: {shares}{note}",
            fast.__iter__,
        )


def _workers(watched: Watched, costs: LoaderCosts, cores: int) -> Iterator[Candidate]:
    """More worker processes, or fewer."""
    loader = watched.loader
    workers, idle = loader.num_workers, costs.read_idle_s / max(costs.wall_s, 1e-9)
    if loader.timeout and not workers:
        return
    if costs.delay_share > _WAITS and workers > cores:
        wanted, why = (
            cores,
            f"of a batch's time workers wait {costs.delay_share:.0%} for one of {cores} cores",
        )
    elif idle > _WAITS and workers < _MOST_WORKERS:
        wanted, why = (
            min(_MOST_WORKERS, 4 * max(workers, cores)),
            f"a batch waits {idle:.0%} of its time for storage",
        )
    elif workers < cores:
        busy = (
            f"{workers} workers keep {workers} of {cores} cores busy"
            if workers
            else "the step and the loader take turns"
        )
        wanted, why = cores, busy
    else:
        return
    view = copy.copy(loader)
    view.__dict__.update(num_workers=wanted, prefetch_factor=loader.prefetch_factor or 2, _iterator=None)
    if loader.multiprocessing_context is None and not workers:
        view.__dict__["persistent_workers"] = False
    yield Candidate(
        f"num_workers={wanted} in the place of {workers}{_place(watched)}",
        why,
        view.__iter__,
        2 * wanted + wanted,
    )
