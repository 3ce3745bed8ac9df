"""``probe``: what ``generate`` would take, without making anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fastpipe.generation.asked import Asked
from fastpipe.generation.crews import Kind
from fastpipe.generation.first import first_row
from fastpipe.generation.form import Columns
from fastpipe.generation.probing import Probe, ProbeReport
from fastpipe.generation.work import Task

__all__ = ["probe"]


def probe(
    fn: Callable[..., Any],
    n: int,
    out: str | os.PathLike[str] = "rows.h5",
    *,
    seed: int = 0,
    workers: int | Literal["auto"] = "auto",
    executor: Kind | None = None,
    columns: Columns = None,
    seed_globals: bool = False,
) -> ProbeReport:
    """Say how long ``generate`` will take, how large the file will be, why, and what workers bring.

    Makes rows for about three seconds, and keeps none.

    Args:
        fn, n, out, seed, workers, executor, columns, seed_globals: as of :func:`fastpipe.generate`.

    Returns:
        What was measured; ``print`` it.

    Raises:
        As ``generate``.

    >>> found = probe(lambda index, rng: rng.normal(size=100), 1000, workers=1, executor="threads")
    >>> found.rows, found.row_nbytes, found.seconds > 0
    (1000, 800, True)
    """
    asked = Asked(fn, n, Path(out), seed, workers, executor, columns, seeds_globals=seed_globals)
    first = first_row(asked)
    task = Task(fn, seed, first.form, first.batch_rows, "raise", seed_globals)
    return Probe(task, n, first.row_nbytes, asked.most_workers, executor or "processes", asked.out).run()
