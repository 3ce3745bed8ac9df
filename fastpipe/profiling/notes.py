"""What a report says of the loader that it is about."""

from __future__ import annotations

from fastpipe.profiling.findings import LoaderNote
from fastpipe.profiling.keras_fit import FitWitness
from fastpipe.profiling.stacks import Line
from fastpipe.profiling.watching import Watched

__all__ = ["note_of"]


def note_of(watched: Watched) -> LoaderNote:
    """What a report says of a loader."""
    loader = watched.loader
    dataset = getattr(loader, "dataset", None)
    kind = type(loader).__name__
    if dataset is not None:
        kind += f" over {type(dataset).__name__}"
    workers = getattr(loader, "num_workers", 0) or 0
    is_stock = watched.witness is not None and not isinstance(watched.witness, FitWitness)
    return LoaderNote(
        kind, workers, 0 if is_stock and not workers else watched.loop.ahead,
        watched.batch_size, _shown(watched.made_at), _shown(watched.used_at),
    )  # fmt: skip


def _shown(line: Line | None) -> str:
    return str(line) if line is not None and line.file else ""
